//! Commands in a session, from outside of its supervisor.

use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::wire::{Connection, Listed, NewCommand, Reply, Request, ToCommand};
use super::{Session, SessionError};
use crate::outcome::Completion;

/// A command to run in a session: [`crate::Command`] for a sandbox that another process owns.
#[derive(Debug, Clone)]
pub struct SessionCommand<'a> {
    session: &'a Session,
    request: NewCommand,
}

/// A command that runs in a session, or did. Dropping it kills the command with all that it started, and so does the end of this process.
#[derive(Debug)]
#[non_exhaustive]
pub struct SessionChild {
    /// Standard input, if it was asked for.
    pub stdin: Option<UnixStream>,
    /// Standard output, where there is no terminal.
    pub stdout: Option<UnixStream>,
    /// Standard error, likewise.
    pub stderr: Option<UnixStream>,
    /// The terminal, if one was asked for: what is typed is written, what is shown is read.
    pub terminal: Option<UnixStream>,
    id: u32,
    connection: Connection,
    completion: Mutex<Option<Completion>>,
}

/// A command of a session's list.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SessionCommandInfo {
    /// Its number in the session.
    pub id: u32,
    /// The program and its arguments; the last may be left out where they are long.
    pub words: Vec<OsString>,
    /// How long ago it was started.
    pub age: Duration,
    /// Whether it goes on without a client.
    pub is_detached: bool,
}

impl From<Listed> for SessionCommandInfo {
    fn from(listed: Listed) -> Self {
        Self {
            id: listed.id,
            words: listed.words.into_iter().map(OsString::from_vec).collect(),
            age: listed.age,
            is_detached: listed.is_detached,
        }
    }
}

impl<'a> SessionCommand<'a> {
    pub(super) fn new(session: &'a Session, program: &OsStr) -> Self {
        Self {
            session,
            request: NewCommand {
                program: program.as_bytes().to_vec(),
                ..NewCommand::default()
            },
        }
    }

    /// Adds an argument.
    pub fn arg(&mut self, arg: impl AsRef<OsStr>) -> &mut Self {
        self.request.args.push(arg.as_ref().as_bytes().to_vec());
        self
    }

    /// Adds arguments.
    pub fn args(&mut self, args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> &mut Self {
        for arg in args {
            self.arg(arg);
        }
        self
    }

    /// Sets a variable.
    pub fn env(&mut self, key: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> &mut Self {
        let bytes = |text: &OsStr| text.as_bytes().to_vec();
        self.request
            .env
            .push((bytes(key.as_ref()), bytes(value.as_ref())));
        self
    }

    /// Sets the working folder.
    pub fn current_dir(&mut self, folder: impl AsRef<Path>) -> &mut Self {
        self.request.current_dir = Some(folder.as_ref().as_os_str().as_bytes().to_vec());
        self
    }

    /// Who runs it: `USER[:GROUP]`.
    pub fn user(&mut self, user: &str) -> &mut Self {
        self.request.user = Some(user.to_owned());
        self
    }

    /// Gives it standard input: [`SessionChild::stdin`]. It is empty otherwise.
    pub fn piped_stdin(&mut self) -> &mut Self {
        self.request.has_stdin = true;
        self
    }

    /// Gives it a terminal of this size instead of the three streams.
    pub fn pty(&mut self, columns: u16, rows: u16) -> &mut Self {
        self.request.terminal = Some((columns, rows));
        self
    }

    /// Starts it.
    ///
    /// # Errors
    /// See [`SessionError`].
    pub fn spawn(&self) -> Result<SessionChild, SessionError> {
        let (connection, reply, streams) = self.ask(false)?;
        let id = match reply {
            Reply::Started { id } => id,
            other => return Err(self.session.unexpected(other)),
        };
        let mut streams = streams.into_iter().map(UnixStream::from);
        let mut child = SessionChild {
            stdin: None,
            stdout: None,
            stderr: None,
            terminal: None,
            id,
            connection,
            completion: Mutex::new(None),
        };
        if self.request.terminal.is_some() {
            child.terminal = streams.next();
        } else {
            child.stdin = self.request.has_stdin.then(|| streams.next()).flatten();
            child.stdout = streams.next();
            child.stderr = streams.next();
        }
        Ok(child)
    }

    /// Starts it without a handle, and gives its number: it goes on when this process ends, and what it prints is in the
    /// session's log. Standard input is empty, and there is no terminal.
    ///
    /// # Errors
    /// See [`SessionError`].
    pub fn spawn_detached(&self) -> Result<u32, SessionError> {
        match self.ask(true)?.1 {
            Reply::Started { id } => Ok(id),
            other => Err(self.session.unexpected(other)),
        }
    }

    fn ask(&self, is_detached: bool) -> Result<(Connection, Reply, Vec<OwnedFd>), SessionError> {
        let request = NewCommand {
            is_detached,
            ..self.request.clone()
        };
        self.session.ask(&Request::Command(request), &[])
    }
}

impl SessionChild {
    /// The command's number in the session.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Sends a signal, by its Linux number, to the command's process group.
    ///
    /// # Errors
    /// See [`SessionError`].
    pub fn signal(&self, signal: i32) -> Result<(), SessionError> {
        self.tell(&ToCommand::Signal(signal))
    }

    /// Kills the command and all that it started.
    ///
    /// # Errors
    /// See [`SessionError`].
    pub fn kill(&self) -> Result<(), SessionError> {
        self.tell(&ToCommand::Kill)
    }

    /// Tells the command that its terminal has a new size.
    ///
    /// # Errors
    /// See [`SessionError`].
    pub fn resize(&self, columns: u16, rows: u16) -> Result<(), SessionError> {
        self.tell(&ToCommand::Resize { columns, rows })
    }

    /// Waits until the command ended. Calling it again returns the same. The usage counts no bytes of the streams: these do not pass the supervisor.
    ///
    /// # Errors
    /// [`SessionError::Gone`] when the session's supervisor was killed, and its machine with it.
    pub fn wait(&self) -> Result<Completion, SessionError> {
        let mut known = self
            .completion
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(completion) = &*known {
            return Ok(completion.clone());
        }
        match self.connection.receive() {
            Ok((Reply::Ended(completion), _)) => Ok(known.insert(*completion).clone()),
            Ok((Reply::Failed(sentence), _)) => Err(SessionError::Refused(sentence)),
            Ok(_) | Err(_) => Err(SessionError::Gone),
        }
    }

    fn tell(&self, message: &ToCommand) -> Result<(), SessionError> {
        match self.connection.send(message, &[]) {
            // It has ended: there is nothing left to tell.
            Ok(()) | Err(super::wire::WireError::Closed) => Ok(()),
            Err(_) => Err(SessionError::Gone),
        }
    }
}
