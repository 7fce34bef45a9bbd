//! Commands to run in a sandbox.

use std::ffi::OsStr;
use std::path::Path;

use crate::child::Child;
use crate::error::SpawnError;
use crate::outcome::Completion;

/// Where a stream of a command goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stdio {
    pub(crate) piped: bool,
}

impl Stdio {
    /// Nowhere: reads end at once, writes vanish.
    #[must_use]
    pub fn null() -> Self {
        Self { piped: false }
    }

    /// To the host: see [`Child`]'s fields.
    #[must_use]
    pub fn piped() -> Self {
        Self { piped: true }
    }
}

/// A command to run in a sandbox, built as [`std::process::Command`] is. Standard input is null unless said
/// otherwise, standard output and error are piped.
#[derive(Debug, Clone)]
pub struct Command {}

impl Command {
    /// Adds an argument.
    pub fn arg(&mut self, arg: impl AsRef<OsStr>) -> &mut Self {
        let _ = arg;
        todo!()
    }

    /// Adds arguments.
    pub fn args(&mut self, args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> &mut Self {
        let _ = args;
        todo!()
    }

    /// Sets a variable, over the guest's defaults (`PATH`, `HOME`, `USER`, `LOGNAME`, `SHELL`, `LANG`, and `TERM`
    /// with a terminal). Nothing of the host's environment is given to the guest.
    pub fn env(&mut self, key: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> &mut Self {
        let _ = (key, value);
        todo!()
    }

    /// Sets variables.
    pub fn envs(
        &mut self,
        variables: impl IntoIterator<Item = (impl AsRef<OsStr>, impl AsRef<OsStr>)>,
    ) -> &mut Self {
        let _ = variables;
        todo!()
    }

    /// The working folder in the guest. Default: the user's home.
    pub fn current_dir(&mut self, folder: impl AsRef<Path>) -> &mut Self {
        let _ = folder;
        todo!()
    }

    /// Who runs it: `USER[:GROUP]`, by name or number. Default: the image's unprivileged user.
    pub fn user(&mut self, user: impl Into<String>) -> &mut Self {
        let _ = user.into();
        todo!()
    }

    /// Standard input. Default: null.
    pub fn stdin(&mut self, stdio: Stdio) -> &mut Self {
        let _ = stdio;
        todo!()
    }

    /// Standard output. Default: piped.
    pub fn stdout(&mut self, stdio: Stdio) -> &mut Self {
        let _ = stdio;
        todo!()
    }

    /// Standard error. Default: piped.
    pub fn stderr(&mut self, stdio: Stdio) -> &mut Self {
        let _ = stdio;
        todo!()
    }

    /// Gives the command a terminal of this size instead of the three streams: [`Child::terminal`].
    pub fn pty(&mut self, columns: u16, rows: u16) -> &mut Self {
        let _ = (columns, rows);
        todo!()
    }

    /// The most bytes that [`Self::output`] keeps of each stream; what comes after is read and dropped, and
    /// flagged in [`Output`]. Default: [`DEFAULT_OUTPUT_LIMIT_BYTES`].
    pub fn output_limit(&mut self, bytes: usize) -> &mut Self {
        let _ = bytes;
        todo!()
    }

    /// Starts the command and returns once the guest says that it runs.
    ///
    /// # Errors
    /// See [`SpawnError`].
    pub fn spawn(&mut self) -> Result<Child, SpawnError> {
        todo!()
    }

    /// Runs the command to its end and returns what it wrote.
    ///
    /// # Errors
    /// See [`SpawnError`].
    pub fn output(&mut self) -> Result<Output, SpawnError> {
        todo!()
    }
}

/// Bytes that [`Command::output`] keeps of each stream unless told otherwise: 64 MiB.
pub const DEFAULT_OUTPUT_LIMIT_BYTES: usize = 64 << 20;

/// What a command wrote, and how it ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Output {
    /// How it ended.
    pub completion: Completion,
    /// What it wrote to standard output, or showed on its terminal.
    pub stdout: Vec<u8>,
    /// What it wrote to standard error.
    pub stderr: Vec<u8>,
    /// Whether `stdout` lacks what came after [`Command::output_limit`].
    pub stdout_truncated: bool,
    /// Whether `stderr` lacks what came after [`Command::output_limit`].
    pub stderr_truncated: bool,
}
