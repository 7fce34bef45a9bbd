//! A session's supervisor: lets clients in, and sees to the session's end.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Scope};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::sockopt::socket_peercred;
use rustix::time::Timespec;

use super::SessionError;
use super::answers::MAX_DETACHED;
use super::folder::{self, Claimed, SessionInfo};
use super::log::Log;
use super::root::root;
use super::wire::{Connection, Reply};
use crate::sandbox::Sandbox;
use crate::shared::ANSWER_LIMIT;
use crate::template;

/// Most clients at once: each command that somebody waits for is one. More are sent away.
pub const MAX_CLIENTS: usize = 128;

/// Pause after a client that could not be taken for want of descriptors or threads, and shortest one between two looks at what runs.
const RECOVERY: Duration = Duration::from_millis(100);

/// How long whoever has killed a command is kept waiting for its end: a guest that is well needs a moment.
pub(super) const KILLED_LIMIT: Duration = Duration::from_secs(10);

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
    pace: Pace,
}

/// How long a supervisor waits for what may not come.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace {
    /// Between two looks whether its folder is still there.
    pub(crate) look_period: Duration,
    /// For the end of a command that was killed. Then its client and its place are free: a guest that does not tell the end must not be able to
    /// use them up, or to keep the session from being idle.
    pub(crate) end_limit: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            look_period: Duration::from_secs(60),
            end_limit: ANSWER_LIMIT,
        }
    }
}

/// Why a session ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SessionEnd {
    /// Its sandbox ended: it was told to, its time was over, its machine crashed ([`Sandbox::end`] says which).
    Sandbox,
    /// Nothing ran in it for the time that was set.
    Idle,
    /// Its folder was removed: nobody could have reached it any more.
    Unreachable,
}

/// What a supervisor's threads know.
#[derive(Debug)]
pub(super) struct Served<'a> {
    pub(super) sandbox: &'a Sandbox,
    pub(super) log: &'a Log,
    pub(super) pace: Pace,
    claimed: &'a Claimed,
    table: Mutex<Table>,
    /// A command has left the list.
    unlisted: Condvar,
}

#[derive(Debug)]
pub(super) struct Table {
    pub(super) commands: BTreeMap<u32, Known>,
    /// Clients whose connection is open, by number.
    clients: BTreeMap<u64, UnixStream>,
    next_client: u64,
    /// Commands and copies.
    busy: usize,
    /// Those of them that are detached commands, also ones that are being started.
    detached: usize,
    idle_since: Instant,
    is_over: bool,
    end: SessionEnd,
}

#[derive(Debug)]
pub(super) struct Known {
    pub(super) words: Vec<Vec<u8>>,
    pub(super) started: Instant,
    pub(super) is_detached: bool,
    /// When it was killed first.
    pub(super) killed: Option<Instant>,
}

impl SessionClaim {
    /// Takes a name for a session of this process; [`Self::listen`] goes on once there is a sandbox.
    ///
    /// # Errors
    /// See [`SessionError`]; [`SessionError::Paused`] where a sandbox of this name is paused, which could not go on or be paused again beside it.
    pub fn new(name: &str) -> Result<Self, SessionError> {
        let claim = Self::below(&root(), name)?;
        // Whoever has the name is the only one that could be paused under it by name.
        if template::is_paused(name) {
            return Err(SessionError::Paused {
                name: name.to_owned(),
            });
        }
        Ok(claim)
    }

    /// The same for a session that goes on with the paused sandbox of this name ([`Sandbox::begin_resume`]).
    ///
    /// # Errors
    /// See [`SessionError`].
    pub fn to_resume(name: &str) -> Result<Self, SessionError> {
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
            published: sandbox.published(),
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
            pace: Pace::default(),
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
            pace: self.pace,
            claimed: &self.claimed,
            table: Mutex::new(Table {
                commands: BTreeMap::new(),
                clients: BTreeMap::new(),
                next_client: 0,
                busy: 0,
                detached: 0,
                idle_since: Instant::now(),
                is_over: false,
                end: SessionEnd::Sandbox,
            }),
            unlisted: Condvar::new(),
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
        let end = served.lock().end;
        self.log.settle();
        // Its folder goes with the claim.
        result.map(|()| end)
    }

    #[cfg(test)]
    pub(crate) fn at_pace(self, pace: Pace) -> Self {
        Self { pace, ..self }
    }
}

impl<'a> Served<'a> {
    pub(super) fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the sandbox's end, ends it itself when it was idle for too long or can't be reached any more, and wakes who waits for clients
    /// by dropping `wake`'s writing side.
    fn watch(&self, idle: Option<Duration>, wake: &UnixStream) {
        let mut looked = Instant::now();
        loop {
            if looked.elapsed() >= self.pace.look_period {
                looked = Instant::now();
                if !self.claimed.refresh() {
                    self.end_by(SessionEnd::Unreachable);
                }
            }
            let left = idle.map(|idle| self.idle_left(idle));
            if left.is_some_and(|left| left.is_zero()) {
                self.end_by(SessionEnd::Idle);
            }
            let look_left = self.pace.look_period.saturating_sub(looked.elapsed());
            let nap = left.map_or(look_left, |left| left.min(look_left));
            if self.sandbox.shared().wait_over(nap).is_some() {
                break;
            }
        }
        self.lock().is_over = true;
        // Its reader sees the end.
        let _ = wake.shutdown(std::net::Shutdown::Both);
    }

    /// How much of the time is left in which nothing may run.
    fn idle_left(&self, idle: Duration) -> Duration {
        let table = self.lock();
        match table.busy {
            0 => idle.saturating_sub(table.idle_since.elapsed()),
            // Whatever runs may end at once, and is then idle for all of it. That is some time, whatever was asked for.
            _ => idle.max(RECOVERY),
        }
    }

    fn end_by(&self, end: SessionEnd) {
        let mut table = self.lock();
        // The first reason is the one.
        if table.end == SessionEnd::Sandbox {
            table.end = end;
        }
        drop(table);
        self.sandbox.end();
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
        Busy {
            served: self,
            is_detached: false,
        }
    }

    /// For a detached command; `None` where there are [`MAX_DETACHED`] already.
    pub(super) fn busy_detached(&self) -> Option<Busy<'_, 'a>> {
        let mut table = self.lock();
        if table.detached >= MAX_DETACHED {
            return None;
        }
        table.detached += 1;
        table.busy += 1;
        Some(Busy {
            served: self,
            is_detached: true,
        })
    }

    /// Waits until a command is not in the list any more, for [`KILLED_LIMIT`] at most. Says whether it is not.
    pub(super) fn wait_unlisted(&self, id: u32) -> bool {
        let limit = KILLED_LIMIT.min(self.pace.end_limit);
        let listed = |table: &mut Table| table.commands.contains_key(&id);
        let waited = self
            .unlisted
            .wait_timeout_while(self.lock(), limit, listed)
            .unwrap_or_else(PoisonError::into_inner);
        !waited.1.timed_out()
    }

    /// Notes that a command is being killed.
    pub(super) fn kills(&self, id: u32) {
        if let Some(known) = self.lock().commands.get_mut(&id) {
            known.killed.get_or_insert_with(Instant::now);
        }
    }

    /// Whether a command was killed so long ago that its end is not waited for any longer.
    pub(super) fn is_given_up(&self, id: u32) -> bool {
        let killed = self.lock().commands.get(&id).and_then(|known| known.killed);
        killed.is_some_and(|at| at.elapsed() >= self.pace.end_limit)
    }
}

/// As long as it lives the session is not idle.
#[derive(Debug)]
pub(super) struct Busy<'scope, 'a> {
    served: &'scope Served<'a>,
    /// Whether it is for a detached command, which is counted as such.
    is_detached: bool,
}

impl Drop for Busy<'_, '_> {
    fn drop(&mut self) {
        let mut table = self.served.lock();
        table.busy = table.busy.saturating_sub(1);
        table.detached = table.detached.saturating_sub(usize::from(self.is_detached));
        table.idle_since = Instant::now();
    }
}

/// As long as it lives the command is in the list.
#[derive(Debug)]
pub(super) struct InList<'scope, 'a>(pub(super) &'scope Served<'a>, pub(super) u32);

impl Drop for InList<'_, '_> {
    fn drop(&mut self) {
        self.0.lock().commands.remove(&self.1);
        self.0.unlisted.notify_all();
    }
}
