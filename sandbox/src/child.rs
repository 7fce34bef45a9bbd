//! A command that runs in a sandbox.

use std::time::Duration;

use crate::error::SignalError;
use crate::outcome::Completion;
use crate::stream::{ChildStderr, ChildStdin, ChildStdout, ChildTerminal};

/// A command that runs in a sandbox, or did. Dropping it does not end the command: the sandbox's end does.
#[derive(Debug)]
#[non_exhaustive]
pub struct Child {
    /// Standard input, if piped.
    pub stdin: Option<ChildStdin>,
    /// Standard output, if piped.
    pub stdout: Option<ChildStdout>,
    /// Standard error, if piped.
    pub stderr: Option<ChildStderr>,
    /// The terminal, if [`crate::Command::pty`] asked for one; the three others are `None` then.
    pub terminal: Option<ChildTerminal>,
}

impl Child {
    /// The command's number, unique within its sandbox. It is no process id.
    #[must_use]
    pub fn id(&self) -> u32 {
        todo!()
    }

    /// Sends a signal, by its Linux number, to the command's process group.
    ///
    /// # Errors
    /// See [`SignalError`].
    pub fn signal(&self, signal: i32) -> Result<(), SignalError> {
        let _ = signal;
        todo!()
    }

    /// Kills the command and all that it started.
    ///
    /// # Errors
    /// See [`SignalError`].
    pub fn kill(&self) -> Result<(), SignalError> {
        todo!()
    }

    /// Tells the command that its terminal has a new size.
    ///
    /// # Errors
    /// See [`SignalError`].
    pub fn resize(&self, columns: u16, rows: u16) -> Result<(), SignalError> {
        let _ = (columns, rows);
        todo!()
    }

    /// Closes standard input if it is still here, then waits until the command ended, the sandbox's time is over
    /// or the machine is gone. Calling it again returns the same.
    pub fn wait(&mut self) -> Completion {
        todo!()
    }

    /// Like [`Self::wait`], but leaves standard input alone, and returns `None` when the command still runs
    /// after `limit`.
    pub fn wait_timeout(&mut self, limit: Duration) -> Option<Completion> {
        let _ = limit;
        todo!()
    }
}
