//! Sandboxes that outlive the program that started them, and are reached by name.
//!
//! A session is one process, its supervisor, that owns a sandbox and listens on a socket: no daemon is above it. [`SessionClaim`] makes a session of
//! a process; [`Session`] is how others find and use it. Only processes of the same user can.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use sandvmm::session::Session;
//!
//! let session = Session::open("dev")?; // sandvmm start --name dev
//! let child = session.command("make").arg("test").spawn()?;
//! let log = std::io::read_to_string(child.stdout.as_ref().expect("it is piped"))?;
//! println!("{log}{:?}", child.wait()?.outcome);
//! # Ok(()) }
//! ```

mod answers;
mod command;
mod folder;
mod follow;
mod log;
mod root;
mod serve;
mod wire;

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::OFlags;
use rustix::process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::error::SpawnError;
use folder::{Alive, Found};
use wire::{Connection, Copy, Reply, Request, WireError};

pub use answers::MAX_DETACHED;
pub use command::{SessionChild, SessionCommand, SessionCommandInfo};
pub use folder::SessionInfo;
pub use follow::LogFollower;
pub use log::MAX_LOG_FILE_BYTES;
#[cfg(test)]
pub(crate) use serve::Pace;
pub use serve::{MAX_CLIENTS, SessionClaim, SessionEnd, SessionKeep, SessionServer};

/// How long a supervisor may take to end when it is asked to. Then it is killed.
const STOP_LIMIT: Duration = Duration::from_secs(10);

/// How long a supervisor may take to tell where its log ends.
const LOG_END_LIMIT: Duration = Duration::from_secs(2);

/// How long the system may take to take down a process that was killed.
const KILL_LIMIT: Duration = Duration::from_secs(30);

/// Why something could not be done with a session.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// The name is none.
    #[error(
        "{name:?} is no name of a session: 1 to 64 letters, digits, `.`, `_` and `-`, the first of them a letter or digit"
    )]
    Name {
        /// What was asked for.
        name: String,
    },
    /// A session of this name lives.
    #[error("There is a session {name:?} already: stop it first, or take another name")]
    Exists {
        /// Its name.
        name: String,
    },
    /// A sandbox of this name is paused.
    #[error(
        "There is a paused sandbox {name:?}: go on with it (`sandvmm resume {name}`), remove it (`sandvmm stop {name}`), or take another name"
    )]
    Paused {
        /// Its name.
        name: String,
    },
    /// None of this name does.
    #[error("There is no session {name:?}: `sandvmm ls` lists those that there are")]
    Missing {
        /// Its name.
        name: String,
    },
    /// It is being started.
    #[error("The session {name:?} is still being started")]
    NotReady {
        /// Its name.
        name: String,
    },
    /// Its supervisor is of another version of this library.
    #[error(
        "The session {name:?} was started by another version of sandvmm: stop it, and start it anew"
    )]
    Version {
        /// Its name.
        name: String,
    },
    /// It went away meanwhile.
    #[error("The session's supervisor is gone, and its machine with it")]
    Gone,
    /// It did not end, although it was killed.
    #[error("The session {name:?} does not end: its process {pid} can't be killed")]
    Stuck {
        /// Its name.
        name: String,
        /// Its supervisor's process.
        pid: i32,
    },
    /// It was put on disk, and its supervisor has not ended since.
    #[error(
        "The session {name:?} is paused, but its supervisor has not ended for {} s: stop it, which leaves what is on disk as it is",
        STOP_LIMIT.as_secs()
    )]
    Lingers {
        /// Its name.
        name: String,
    },
    /// The command could not be started.
    #[error(transparent)]
    Spawn(#[from] SpawnError),
    /// The supervisor says why not.
    #[error("{0}")]
    Refused(String),
    /// The folder of the sessions is not this user's alone.
    #[error("'{}' must be a folder of yours that nobody else may look into (mode 0700)", path.display())]
    NotPrivate {
        /// Which.
        path: PathBuf,
    },
    /// A file or folder could not be used.
    #[error("'{}' could not be {done}", path.display())]
    File {
        /// What was tried.
        done: &'static str,
        /// Which.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// The connection to the supervisor failed.
    #[error("The session {name:?} can't be talked to")]
    Connection {
        /// Its name.
        name: String,
        /// Why.
        source: io::Error,
    },
}

/// An error with its sources, as one sentence.
fn sentence(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

/// A session that is there, whoever started it.
#[derive(Debug)]
pub struct Session {
    alive: Alive,
}

/// What a copy left out.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SessionCopied {
    /// How many links, devices, pipes and sockets were not copied.
    pub left_out: u64,
    /// The first of them.
    pub first: PathBuf,
}

impl Session {
    /// Finds a session by name.
    ///
    /// # Errors
    /// See [`SessionError`].
    pub fn open(name: &str) -> Result<Self, SessionError> {
        Self::open_below(&root::root(), name)
    }

    /// In this folder of sessions.
    pub(crate) fn open_below(root: &Path, name: &str) -> Result<Self, SessionError> {
        match folder::look(root, name)? {
            Found::Alive(alive) => Ok(Self { alive }),
            Found::Nothing => Err(SessionError::Missing {
                name: name.to_owned(),
            }),
        }
    }

    /// All sessions of this user, by name, and for each folder beside theirs that is none's why not. What is left of those that were killed is
    /// swept.
    ///
    /// # Errors
    /// When the folder of all sessions can't be read, or is not this user's alone; see [`SessionError`].
    pub fn list() -> Result<Vec<Result<SessionInfo, SessionError>>, SessionError> {
        Self::list_in(&root::root())
    }

    fn list_in(root: &Path) -> Result<Vec<Result<SessionInfo, SessionError>>, SessionError> {
        let mut found = Vec::new();
        for name in folder::names(root)? {
            match folder::look(root, &name) {
                Ok(Found::Alive(alive)) => found.push(Ok(alive.info)),
                Ok(Found::Nothing) => {}
                Err(odd) => found.push(Err(odd)),
            }
        }
        Ok(found)
    }

    /// What is on record of it.
    #[must_use]
    pub fn info(&self) -> &SessionInfo {
        &self.alive.info
    }

    /// A command to run in it.
    #[must_use]
    pub fn command(&self, program: impl AsRef<OsStr>) -> SessionCommand<'_> {
        SessionCommand::new(self, program.as_ref())
    }

    /// The commands that run in it, oldest first.
    ///
    /// # Errors
    /// See [`SessionError`].
    pub fn commands(&self) -> Result<Vec<SessionCommandInfo>, SessionError> {
        match self.ask(&Request::Commands, &[])?.1 {
            Reply::Commands(listed) => Ok(listed.into_iter().map(Into::into).collect()),
            other => Err(self.unexpected(other)),
        }
    }

    /// Sends a signal to a command; without one, kills it with all that it started, and waits until it is not among [`Self::commands`] any more,
    /// for 10 s at most.
    ///
    /// # Errors
    /// See [`SessionError`].
    pub fn signal(&self, id: u32, signal: Option<i32>) -> Result<(), SessionError> {
        self.done(&Request::Signal { id, signal })
    }

    /// Copies a file or folder of this host into the sandbox, as [`crate::Files::copy_in`] does. Its supervisor is given the folder that it is in.
    ///
    /// # Errors
    /// See [`SessionError`].
    pub fn copy_in(
        &self,
        from: &Path,
        to: &Path,
        user: Option<&str>,
    ) -> Result<SessionCopied, SessionError> {
        self.copy(from, to, false, user)
    }

    /// Copies a file or folder out of the sandbox, as [`crate::Files::copy_out`] does, likewise.
    ///
    /// # Errors
    /// See [`SessionError`].
    pub fn copy_out(
        &self,
        from: &Path,
        to: &Path,
        user: Option<&str>,
    ) -> Result<SessionCopied, SessionError> {
        self.copy(to, from, true, user)
    }

    fn copy(
        &self,
        host: &Path,
        guest: &Path,
        is_out: bool,
        user: Option<&str>,
    ) -> Result<SessionCopied, SessionError> {
        let failed = |source| SessionError::File {
            done: "opened",
            path: host.to_owned(),
            source,
        };
        // `.` and `..` have no name of their own.
        let host = match host.file_name() {
            Some(_) => host.to_owned(),
            None => host.canonicalize().map_err(failed)?,
        };
        let Some(name) = host.file_name() else {
            return Err(SessionError::Refused(
                "The root folder can't be copied as a whole: name what is in it".into(),
            ));
        };
        let parent = match host.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        let mut options = File::options();
        options.read(true);
        std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, flags.bits().cast_signed());
        let folder = options.open(parent).map_err(failed)?;
        let copy = Copy {
            host_name: name.as_bytes().to_vec(),
            guest_path: guest.as_os_str().as_bytes().to_vec(),
            is_out,
            user: user.map(str::to_owned),
        };
        match self.ask(&Request::Copy(copy), &[folder.as_fd()])?.1 {
            Reply::Copied { left_out, first } => Ok(SessionCopied {
                left_out,
                first: std::ffi::OsString::from_vec(first).into(),
            }),
            other => Err(self.unexpected(other)),
        }
    }

    /// What its detached commands have printed, the last 4 to 8 MiB of it ([`MAX_LOG_FILE_BYTES`]): lines with the command's number in front, as in
    /// `[3] text`. What a command has printed of a line that it has not ended comes last, as if it had; it is left out where the supervisor does not
    /// tell it within 2 s.
    ///
    /// # Errors
    /// See [`SessionError`].
    pub fn log(&self) -> Result<Vec<u8>, SessionError> {
        let end = match self.ask_within(&Request::LogEnd, &[], Some(LOG_END_LIMIT)) {
            Ok((_, Reply::LogEnd(end), _)) => Some(end),
            // One that is not ready, is over or stands still: what is on disk is there all the same.
            _ => None,
        };
        log::read(&self.alive.path, end.as_ref()).map_err(|source| SessionError::File {
            done: "read",
            path: self.alive.path.clone(),
            source,
        })
    }

    /// The same as it grows, until the session is over: a line when it has its end, or its command has ended.
    ///
    /// # Errors
    /// See [`SessionError`].
    pub fn follow_log(self) -> Result<LogFollower, SessionError> {
        let path = self.alive.path.clone();
        LogFollower::new(self.alive).map_err(|source| SessionError::File {
            done: "read",
            path,
            source,
        })
    }

    /// Puts the sandbox on disk under this name ([`crate::Sandbox::pause`]), and ends the session: waits 10 s for that.
    ///
    /// # Errors
    /// See [`SessionError`].
    pub fn pause(self, name: &str) -> Result<(), SessionError> {
        let name = name.to_owned();
        self.done(&Request::Pause { name })?;
        if self.alive.wait_gone(STOP_LIMIT)? {
            return Ok(());
        }
        Err(SessionError::Lingers {
            name: self.alive.info.name,
        })
    }

    /// Ends it, and waits until nothing is left. A supervisor that does not end is told once more after 10 s, by a signal, and killed after 20 s; its
    /// machine dies with it.
    ///
    /// # Errors
    /// See [`SessionError`].
    pub fn stop(self) -> Result<(), SessionError> {
        let mut pid = self.alive.info.pid;
        let answer = self.ask_within(&Request::Stop, &[], Some(STOP_LIMIT));
        // A supervisor that was faster with its end than with its answer has been asked, too.
        if !matches!(
            answer,
            Err(SessionError::NotReady { .. } | SessionError::Connection { .. })
        ) && self.alive.wait_gone(STOP_LIMIT)?
        {
            return Ok(());
        }
        for (signal, limit) in [(Signal::TERM, STOP_LIMIT), (Signal::KILL, KILL_LIMIT)] {
            let supervisor = self.alive.supervisor();
            let process = supervisor.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
            pid = supervisor.map_or(pid, rustix::process::Pid::as_raw_pid);
            // Whoever has the lock now is the process that was opened: the number was not given away in between.
            if let (Some(process), true) = (process, self.alive.is_held()) {
                let _ = pidfd_send_signal(&process, signal);
            }
            if self.alive.wait_gone(limit)? {
                return Ok(());
            }
        }
        Err(SessionError::Stuck {
            name: self.alive.info.name,
            pid,
        })
    }

    fn done(&self, request: &Request) -> Result<(), SessionError> {
        match self.ask(request, &[])?.1 {
            Reply::Done => Ok(()),
            other => Err(self.unexpected(other)),
        }
    }

    fn ask(
        &self,
        request: &Request,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(Connection, Reply, Vec<OwnedFd>), SessionError> {
        self.ask_within(request, descriptors, None)
    }

    fn ask_within(
        &self,
        request: &Request,
        descriptors: &[BorrowedFd<'_>],
        limit: Option<Duration>,
    ) -> Result<(Connection, Reply, Vec<OwnedFd>), SessionError> {
        let name = || self.alive.info.name.clone();
        if !self.alive.info.is_ready {
            return Err(SessionError::NotReady { name: name() });
        }
        let failed = |source| SessionError::Connection {
            name: name(),
            source,
        };
        let connection = self
            .alive
            .connect()
            .and_then(Connection::new)
            .map_err(|source| match source.kind() {
                // It is there no more, only what it takes down.
                io::ErrorKind::ConnectionRefused => SessionError::Gone,
                _ => failed(source),
            })?;
        if let Some(limit) = limit {
            connection.answers_within(limit).map_err(failed)?;
        }
        let answered = match connection.send(request, descriptors) {
            // One that sends clients away does not hear them out, and says why.
            Ok(()) | Err(WireError::Closed) => connection.receive(),
            Err(error) => Err(error),
        };
        match answered {
            Ok((reply, streams)) => Ok((connection, reply, streams)),
            Err(WireError::Version(_)) => Err(SessionError::Version { name: name() }),
            Err(WireError::Closed) => Err(SessionError::Gone),
            Err(WireError::Io(source)) => Err(failed(source)),
            Err(error) => Err(failed(io::Error::other(error))),
        }
    }

    /// What an answer comes to that is not the one that was hoped for.
    fn unexpected(&self, reply: Reply) -> SessionError {
        match reply {
            Reply::NotStarted(error) => SessionError::Spawn(error.into()),
            Reply::Failed(sentence) => SessionError::Refused(sentence),
            _ => SessionError::Connection {
                name: self.alive.info.name.clone(),
                source: io::ErrorKind::InvalidData.into(),
            },
        }
    }
}
