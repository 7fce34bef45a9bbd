//! A session's supervisor: lets clients in, and sees to the session's end.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Scope};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::sockopt::socket_peercred;
use rustix::time::Timespec;

use super::SessionError;
use super::folder::{self, Claimed, SessionInfo};
use super::log::Log;
use super::root::root;
use super::wire::{Connection, Reply};
use crate::sandbox::Sandbox;

/// Most clients at once: each command that somebody waits for is one. More are sent away.
pub const MAX_CLIENTS: usize = 128;

/// Pause after a client that could not be taken for want of descriptors or threads.
const RECOVERY: Duration = Duration::from_millis(100);

/// A name that is taken, for a session that is still to be made. Dropping it frees the name.
#[derive(Debug)]
pub struct SessionClaim {
    claimed: Arc<Claimed>,
    info: SessionInfo,
}

/// Keeps a session's name taken, also when the session is over: who has asked for its end waits until this is dropped.
#[derive(Debug)]
#[must_use = "the name is free again as soon as this is dropped"]
pub struct SessionKeep {
    _claimed: Arc<Claimed>,
}

/// A session that takes clients once it is served.
#[derive(Debug)]
pub struct SessionServer {
    claimed: Arc<Claimed>,
    listener: UnixListener,
    log: Log,
    idle: Option<Duration>,
}

/// Why a session ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SessionEnd {
    /// Its sandbox ended: it was told to, its time was over, its machine crashed ([`Sandbox::end`] says which).
    Sandbox,
    /// Nothing ran in it for the time that was set.
    Idle,
}

/// What a supervisor's threads know.
#[derive(Debug)]
pub(super) struct Served<'a> {
    pub(super) sandbox: &'a Sandbox,
    pub(super) log: &'a Log,
    table: Mutex<Table>,
}

#[derive(Debug)]
pub(super) struct Table {
    pub(super) commands: BTreeMap<u32, Known>,
    /// Clients whose connection is open, by number.
    clients: BTreeMap<u64, UnixStream>,
    next_client: u64,
    /// Commands and copies.
    busy: usize,
    idle_since: Instant,
    is_over: bool,
    is_idle_end: bool,
}

#[derive(Debug)]
pub(super) struct Known {
    pub(super) words: Vec<Vec<u8>>,
    pub(super) started: Instant,
    pub(super) is_detached: bool,
}

impl SessionClaim {
    /// Takes a name for a session of this process; [`Self::listen`] goes on once there is a sandbox.
    ///
    /// # Errors
    /// See [`SessionError`].
    pub fn new(name: &str) -> Result<Self, SessionError> {
        Self::below(&root(), name)
    }

    /// In this folder of sessions.
    pub(crate) fn below(root: &Path, name: &str) -> Result<Self, SessionError> {
        let started = SystemTime::now().duration_since(UNIX_EPOCH);
        let info = SessionInfo {
            name: name.to_owned(),
            pid: rustix::process::getpid().as_raw_nonzero().get(),
            started_unix_s: started.unwrap_or_default().as_secs(),
            ..SessionInfo::default()
        };
        let claimed = Arc::new(folder::claim(root, &info)?);
        Ok(Self { claimed, info })
    }

    /// For a process that has more to take down than the sandbox: [`crate::session::Session::stop`] returns when what this gives is dropped, too.
    pub fn keep(&self) -> SessionKeep {
        SessionKeep {
            _claimed: Arc::clone(&self.claimed),
        }
    }

    /// Makes the session's socket: from now on clients may come, and are served by [`SessionServer::run`]. `timeout` is what the sandbox was
    /// given, for the record; `idle` ends the session when nothing ran in it for so long.
    ///
    /// # Errors
    /// See [`SessionError`].
    pub fn listen(
        self,
        sandbox: &Sandbox,
        timeout: Option<Duration>,
        idle: Option<Duration>,
    ) -> Result<SessionServer, SessionError> {
        let origin = sandbox.origin();
        let info = SessionInfo {
            cpus: origin.cpus,
            memory_mib: origin.memory_mib,
            idle,
            timeout,
            ..self.info
        };
        self.claimed.record(&info)?;
        let log = Log::new(&self.claimed.path).map_err(|source| SessionError::File {
            done: "written",
            path: self.claimed.path.clone(),
            source,
        })?;
        let listener = self.claimed.listen()?;
        Ok(SessionServer {
            claimed: self.claimed,
            listener,
            log,
            idle,
        })
    }
}

impl SessionServer {
    /// Serves clients on this thread until the sandbox ends, by whatever ends it, and ends it when a client asks for that or nobody has
    /// been there for the time that was set. Nothing of the session is left then, if nobody has a [`SessionKeep`] of it; who still asks for
    /// something is told that it is over.
    ///
    /// # Errors
    /// When the system refuses the first thread, or waiting; the sandbox is ended then.
    pub fn run(self, sandbox: &Sandbox) -> io::Result<SessionEnd> {
        let served = Served {
            sandbox,
            log: &self.log,
            table: Mutex::new(Table {
                commands: BTreeMap::new(),
                clients: BTreeMap::new(),
                next_client: 0,
                busy: 0,
                idle_since: Instant::now(),
                is_over: false,
                is_idle_end: false,
            }),
        };
        let (wake, woken) = UnixStream::pair()?;
        let result = thread::scope(|scope| {
            let watching = thread::Builder::new()
                .name("end".into())
                .spawn_scoped(scope, || served.watch(self.idle, &wake));
            let done = match watching {
                Ok(_) => served.accept(scope, &self.listener, &woken),
                Err(error) => Err(error),
            };
            served.finish();
            done
        });
        // Its folder goes with the claim.
        drop(self.claimed);
        let is_idle_end = served.lock().is_idle_end;
        result.map(|()| match is_idle_end {
            true => SessionEnd::Idle,
            false => SessionEnd::Sandbox,
        })
    }
}

impl<'a> Served<'a> {
    pub(super) fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the sandbox's end, ends it itself when it was idle for too long, and wakes who waits for clients by dropping `wake`'s
    /// writing side.
    fn watch(&self, idle: Option<Duration>, wake: &UnixStream) {
        loop {
            let nap = match idle {
                None => LONG_NAP,
                Some(idle) => {
                    let mut table = self.lock();
                    let left = match table.busy {
                        0 => idle.saturating_sub(table.idle_since.elapsed()),
                        // Whatever runs may end at once, and is then idle for all of it.
                        _ => idle,
                    };
                    table.is_idle_end = table.busy == 0 && left.is_zero();
                    if table.is_idle_end {
                        drop(table);
                        self.sandbox.end();
                    }
                    left
                }
            };
            if self.sandbox.shared().wait_over(nap.min(LONG_NAP)).is_some() {
                break;
            }
        }
        self.lock().is_over = true;
        // Its reader sees the end.
        let _ = wake.shutdown(std::net::Shutdown::Both);
    }

    /// Takes clients until the sandbox has ended.
    fn accept<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        listener: &UnixListener,
        woken: &UnixStream,
    ) -> io::Result<()> {
        listener.set_nonblocking(true)?;
        loop {
            let mut watched = [
                PollFd::new(listener, PollFlags::IN),
                PollFd::new(woken, PollFlags::IN),
            ];
            match poll(&mut watched, None::<&Timespec>) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            if self.lock().is_over {
                return Ok(());
            }
            match listener.accept() {
                Ok((stream, _)) => self.take(scope, stream),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // Out of descriptors, or a client that has left already.
                Err(_) => thread::sleep(RECOVERY),
            }
        }
    }

    /// Serves a client on a thread of its own, if it is of this user.
    fn take<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>, stream: UnixStream) {
        let uid = rustix::process::geteuid();
        if !socket_peercred(&stream).is_ok_and(|peer| peer.uid == uid) {
            return;
        }
        let prepared = stream
            .set_nonblocking(false)
            .and_then(|()| Ok((stream.try_clone()?, Connection::new(stream)?)));
        let Ok((kept, connection)) = prepared else {
            return;
        };
        let number = {
            let mut table = self.lock();
            if table.clients.len() >= MAX_CLIENTS {
                drop(table);
                let full =
                    format!("The session has {MAX_CLIENTS} clients already: try again later");
                // Who does not take it is sent away all the same.
                let _ = connection.send(&Reply::Failed(full), &[]);
                return;
            }
            let number = table.next_client;
            table.next_client += 1;
            table.clients.insert(number, kept);
            number
        };
        let serving = thread::Builder::new()
            .name("client".into())
            .spawn_scoped(scope, move || {
                self.answer(scope, &connection);
                self.lock().clients.remove(&number);
            });
        if serving.is_err() {
            self.lock().clients.remove(&number);
            thread::sleep(RECOVERY);
        }
    }

    /// The sandbox has ended: clients that are silent are left alone no longer; those that wait for a command are told of its end by the
    /// threads that are theirs.
    fn finish(&self) {
        self.sandbox.end();
        let mut table = self.lock();
        table.is_over = true;
        for client in table.clients.values() {
            let _ = client.shutdown(std::net::Shutdown::Read);
        }
    }

    pub(super) fn busy(&self) -> Busy<'_, 'a> {
        self.lock().busy += 1;
        Busy(self)
    }
}

/// The longest wait at once: for who must look again now and then, and finds nothing.
const LONG_NAP: Duration = Duration::from_secs(3600);

/// As long as it lives the session is not idle.
#[derive(Debug)]
pub(super) struct Busy<'scope, 'a>(&'scope Served<'a>);

impl Drop for Busy<'_, '_> {
    fn drop(&mut self) {
        let mut table = self.0.lock();
        table.busy = table.busy.saturating_sub(1);
        table.idle_since = Instant::now();
    }
}

/// As long as it lives the command is in the list.
#[derive(Debug)]
pub(super) struct InList<'scope, 'a>(pub(super) &'scope Served<'a>, pub(super) u32);

impl Drop for InList<'_, '_> {
    fn drop(&mut self) {
        self.0.lock().commands.remove(&self.1);
    }
}
