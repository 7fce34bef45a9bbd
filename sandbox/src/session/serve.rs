//! A session's supervisor: owns the sandbox, and does for its clients what they ask for.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, Scope};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use protocol::message::ToAgent;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::sockopt::socket_peercred;
use rustix::time::Timespec;

use super::folder::{self, Claimed, SessionInfo};
use super::log::Log;
use super::wire::{Connection, Copy, Listed, NewCommand, Reply, Request, ToCommand, WireError};
use super::{SessionError, sentence};
use crate::child::Child;
use crate::command::Stdio;
use crate::files::CopyLimits;
use crate::outcome::{Completion, Outcome};
use crate::sandbox::Sandbox;
use crate::shared::frame_of;

/// Most clients at once: each command that somebody waits for is one. More are sent away.
pub const MAX_CLIENTS: usize = 128;

/// Most detached commands at once: each has three threads.
pub const MAX_DETACHED: usize = 64;

/// Most bytes of a command's words that the list has; what comes after is left out.
const MAX_LISTED_BYTES: usize = 4096;

/// Pause after a client that could not be taken for want of descriptors or threads.
const RECOVERY: Duration = Duration::from_millis(100);

/// A name that is taken, for a session that is still to be made. Dropping it frees the name.
#[derive(Debug)]
pub struct SessionClaim {
    claimed: Claimed,
    info: SessionInfo,
}

/// A session that takes clients once it is served.
#[derive(Debug)]
pub struct SessionServer {
    claimed: Claimed,
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
struct Served<'a> {
    sandbox: &'a Sandbox,
    log: &'a Log,
    table: Mutex<Table>,
}

#[derive(Debug)]
struct Table {
    commands: BTreeMap<u32, Known>,
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
struct Known {
    words: Vec<Vec<u8>>,
    started: Instant,
    is_detached: bool,
}

impl SessionClaim {
    /// Takes a name for a session of this process; [`Self::listen`] goes on once there is a sandbox.
    ///
    /// # Errors
    /// See [`SessionError`].
    pub fn new(name: &str) -> Result<Self, SessionError> {
        let started = SystemTime::now().duration_since(UNIX_EPOCH);
        let info = SessionInfo {
            name: name.to_owned(),
            pid: rustix::process::getpid().as_raw_nonzero().get(),
            started_unix_s: started.unwrap_or_default().as_secs(),
            ..SessionInfo::default()
        };
        let claimed = folder::claim(&folder::root(), &info)?;
        Ok(Self { claimed, info })
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
    /// been there for the time that was set. Nothing of the session is left then.
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
    fn lock(&self) -> MutexGuard<'_, Table> {
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

    fn answer<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>, connection: &Connection) {
        let reply = match connection.receive() {
            Ok((Request::Command(command), _)) => return self.command(scope, connection, &command),
            Ok((Request::Commands, _)) => Reply::Commands(self.commands()),
            Ok((Request::Signal { id, signal }, _)) => self.signal(id, signal),
            Ok((Request::Copy(copy), descriptors)) => self.copy(&copy, &descriptors),
            Ok((Request::Stop, _)) => {
                let sent = connection.send(&Reply::Done, &[]);
                self.sandbox.end();
                return drop(sent);
            }
            Ok((Request::Pause { name }, _)) => match self.sandbox.pause(&name) {
                Ok(()) => Reply::Done,
                Err(error) => Reply::Failed(sentence(&error)),
            },
            Err(WireError::Closed) => return,
            // Also to another version, which learns this one by it.
            Err(error) => Reply::Failed(error.to_string()),
        };
        // A client that has left needs no answer.
        let _ = connection.send(&reply, &[]);
    }

    fn commands(&self) -> Vec<Listed> {
        self.lock()
            .commands
            .iter()
            .map(|(id, known)| Listed {
                id: *id,
                words: known.words.clone(),
                age: known.started.elapsed(),
                is_detached: known.is_detached,
            })
            .collect()
    }

    fn signal(&self, id: u32, signal: Option<i32>) -> Reply {
        if !self.lock().commands.contains_key(&id) {
            return Reply::Failed(format!("There is no command {id} in the session"));
        }
        let message = match signal {
            Some(signal @ 1..=64) => ToAgent::Signal {
                command_id: id,
                signal,
            },
            Some(signal) => return Reply::Failed(format!("{signal} is no signal: 1 to 64 are")),
            None => ToAgent::Kill { command_id: id },
        };
        let told = frame_of(&message).map(|frame| self.sandbox.shared().tell(id, frame));
        match told {
            Some(Ok(())) => Reply::Done,
            _ => Reply::Failed("The guest has not taken what it was told before".into()),
        }
    }

    fn copy(&self, copy: &Copy, descriptors: &[OwnedFd]) -> Reply {
        let [folder] = descriptors else {
            return Reply::Failed("A copy needs one folder of the host".into());
        };
        let name = Path::new(OsStr::from_bytes(&copy.host_name));
        if name.components().count() != 1 || name.file_name() != Some(name.as_os_str()) {
            return Reply::Failed("A copy's name on the host is one name".into());
        }
        let _busy = self.busy();
        // The client's own folder, wherever it is.
        let folder = format!("/proc/self/fd/{}/", folder.as_raw_fd());
        let host = PathBuf::from(&folder).join(name);
        let guest = Path::new(OsStr::from_bytes(&copy.guest_path));
        let files = match &copy.user {
            Some(user) => self.sandbox.files().user(user),
            None => self.sandbox.files(),
        };
        let copied = if copy.is_out {
            files
                .copy_out(guest, &host, CopyLimits::default())
                .map(|copied| (copied.left_out_count, copied.left_out.into_iter().next()))
        } else {
            files.copy_in(&host, guest).map(|copied| {
                let count = copied.left_out.len() as u64;
                (count, copied.left_out.into_iter().next())
            })
        };
        match copied {
            Ok((left_out, first)) => Reply::Copied {
                left_out,
                first: first.map_or_else(Vec::new, |path| path.as_os_str().as_bytes().to_vec()),
            },
            // The client knows its folder by another name.
            Err(error) => Reply::Failed(sentence(&error).replace(&folder, "")),
        }
    }

    fn command<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        connection: &Connection,
        request: &NewCommand,
    ) {
        let busy = self.busy();
        if request.is_detached && self.detached() >= MAX_DETACHED {
            let full = format!("The session has {MAX_DETACHED} detached commands already");
            let _ = connection.send(&Reply::Failed(full), &[]);
            return;
        }
        let mut child = match self.build(request).spawn() {
            Ok(child) => child,
            Err(error) => {
                // Who asked may be gone.
                let _ = connection.send(&Reply::NotStarted(error.into()), &[]);
                return;
            }
        };
        let id = child.id();
        let listed = self.list(&child, request);
        let streams: Vec<OwnedFd> = if request.is_detached {
            Vec::new()
        } else {
            let terminal = child.terminal.take().map(OwnedFd::from);
            let stdin = child.stdin.take().map(OwnedFd::from);
            let stdout = child.stdout.take().map(OwnedFd::from);
            let stderr = child.stderr.take().map(OwnedFd::from);
            [terminal, stdin, stdout, stderr]
                .into_iter()
                .flatten()
                .collect()
        };
        let lent: Vec<BorrowedFd<'_>> = streams.iter().map(AsFd::as_fd).collect();
        // A client that is not there to take them takes its command along: it is dropped.
        if connection.send(&Reply::Started { id }, &lent).is_err() {
            return;
        }
        drop(lent);
        // The client's are the only ones from here on: what it closes is closed.
        drop(streams);
        if request.is_detached {
            self.detach(scope, child, (busy, listed));
            return;
        }
        thread::scope(|waiting| {
            let told = thread::Builder::new()
                .name("command".into())
                .spawn_scoped(waiting, || {
                    let completion = self.wait(&child);
                    // Who waits may be gone.
                    let _ = connection.send(&Reply::Ended(Box::new(completion)), &[]);
                    connection.stop_hearing();
                });
            if told.is_err() {
                let _ =
                    connection.send(&Reply::Failed("There is no room for a thread".into()), &[]);
                return;
            }
            while let Ok((message, _)) = connection.receive() {
                // A guest that does not take it is ended by its time.
                let _ = match message {
                    ToCommand::Signal(signal) => child.signal(signal),
                    ToCommand::Kill => child.kill(),
                    ToCommand::Resize { columns, rows } => child.resize(columns, rows),
                };
            }
            // The client is gone, or the command: with the one goes the other.
            let _ = child.kill();
        });
    }

    fn build(&self, request: &NewCommand) -> crate::command::Command {
        let mut command = self.sandbox.command(OsStr::from_bytes(&request.program));
        command.args(request.args.iter().map(|arg| OsStr::from_bytes(arg)));
        for (key, value) in &request.env {
            command.env(OsStr::from_bytes(key), OsStr::from_bytes(value));
        }
        if let Some(folder) = &request.current_dir {
            command.current_dir(Path::new(OsStr::from_bytes(folder)));
        }
        if let Some(user) = &request.user {
            command.user(user);
        }
        match request.terminal {
            Some((columns, rows)) if !request.is_detached => {
                command.pty(columns, rows);
            }
            _ if request.has_stdin && !request.is_detached => {
                command.stdin(Stdio::piped());
            }
            _ => {}
        }
        command
    }

    /// Waits for a command's end, as [`Child::wait`] does, for a thread that does not own it.
    fn wait(&self, child: &Child) -> Completion {
        loop {
            let meter = child.meter();
            // Without a limit there is always an end.
            if let Some(completion) = child.shared().wait_done(child.id(), None, &meter) {
                return completion;
            }
        }
    }

    fn detached(&self) -> usize {
        let table = self.lock();
        let detached = table.commands.values().filter(|known| known.is_detached);
        detached.count()
    }

    /// Lets a command go on without its client, what it prints into the log.
    fn detach<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        mut child: Child,
        guards: (Busy<'scope, 'a>, InList<'scope, 'a>),
    ) {
        let whose = child.id().to_string();
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let errors = whose.clone();
        let started = thread::Builder::new()
            .name("log".into())
            .spawn_scoped(scope, move || {
                if let Some(stream) = stderr {
                    self.log.copy(&errors, stream);
                }
            })
            .and_then(|stderr_over| {
                thread::Builder::new()
                    .name("detached".into())
                    .spawn_scoped(scope, move || {
                        if let Some(stream) = stdout {
                            self.log.copy(&whose, stream);
                        }
                        let completion = self.wait(&child);
                        // Its panic would end everything.
                        let _ = stderr_over.join();
                        self.log.line(OWN, &said(child.id(), &completion.outcome));
                        drop(guards);
                    })
            });
        if let Err(error) = started {
            self.log.line(OWN, error.to_string().as_bytes());
        }
    }

    fn list<'scope>(&'scope self, child: &Child, request: &NewCommand) -> InList<'scope, 'a> {
        let mut left = MAX_LISTED_BYTES;
        let words = std::iter::once(&request.program).chain(&request.args);
        let words = words.map_while(|word| {
            left = left.checked_sub(word.len())?;
            Some(word.clone())
        });
        let known = Known {
            words: words.collect(),
            started: Instant::now(),
            is_detached: request.is_detached,
        };
        let id = child.id();
        self.lock().commands.insert(id, known);
        InList(self, id)
    }

    fn busy(&self) -> Busy<'_, 'a> {
        self.lock().busy += 1;
        Busy(self)
    }
}

/// The longest wait at once: for who must look again now and then, and finds nothing.
const LONG_NAP: Duration = Duration::from_secs(3600);

/// Whose the supervisor's own lines of the log are.
const OWN: &str = "session";

fn said(id: u32, outcome: &Outcome) -> Vec<u8> {
    let how = match outcome {
        Outcome::Exited(code) => format!("exited with {code}"),
        Outcome::Signaled(signal) => format!("was ended by signal {signal}"),
        Outcome::OutOfMemory { .. } => "ran out of memory".to_owned(),
        other => format!("was ended: {other:?}"),
    };
    format!("Command {id} {how}").into_bytes()
}

/// As long as it lives the session is not idle.
#[derive(Debug)]
struct Busy<'scope, 'a>(&'scope Served<'a>);

impl Drop for Busy<'_, '_> {
    fn drop(&mut self) {
        let mut table = self.0.lock();
        table.busy = table.busy.saturating_sub(1);
        table.idle_since = Instant::now();
    }
}

/// As long as it lives the command is in the list.
#[derive(Debug)]
struct InList<'scope, 'a>(&'scope Served<'a>, u32);

impl Drop for InList<'_, '_> {
    fn drop(&mut self) {
        self.0.lock().commands.remove(&self.1);
    }
}
