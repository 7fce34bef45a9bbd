//! A command that runs in a sandbox.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use protocol::message::{TerminalSize, ToAgent};

use crate::capture::{Capture, capture};
use crate::command::Output;
use crate::error::SignalError;
use crate::meter::Meter;
use crate::outcome::Completion;
use crate::shared::{Shared, frame_of};
use crate::stream::{ChildStderr, ChildStdin, ChildStdout, ChildTerminal};

/// The signals that Linux has (`signal(7)`).
const SIGNALS: std::ops::RangeInclusive<i32> = 1..=64;

/// A command that runs in a sandbox, or did. Dropping it kills the command, with all that it started; [`Self::detach`] lets it
/// go on.
///
/// ```no_run
/// use std::io::{BufRead, BufReader, Write};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # sandvmm::init();
/// # let sandbox = sandvmm::Sandbox::builder().start()?;
/// let mut child = sandbox.command("cat").stdin(sandvmm::Stdio::piped()).spawn()?;
/// let mut stdin = child.stdin.take().ok_or("It was piped")?;
/// let mut lines = BufReader::new(child.stdout.take().ok_or("It is, unless told otherwise")?).lines();
/// stdin.write_all(b"to and fro\n")?;
/// assert_eq!(lines.next().transpose()?.as_deref(), Some("to and fro"));
/// drop(stdin);
/// assert!(child.wait().outcome.success());
/// # Ok(()) }
/// ```
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
    shared: Arc<Shared>,
    id: u32,
    meter: Arc<Meter>,
    has_terminal: bool,
    output_limit_bytes: usize,
    is_detached: bool,
}

/// What a handle leaves behind for the next one.
#[derive(Debug)]
pub(crate) struct Detached {
    stdin: Option<ChildStdin>,
    stdout: Option<ChildStdout>,
    stderr: Option<ChildStderr>,
    terminal: Option<ChildTerminal>,
    meter: Arc<Meter>,
    has_terminal: bool,
    output_limit_bytes: usize,
}

impl Child {
    pub(crate) fn new(
        shared: &Arc<Shared>,
        id: u32,
        meter: Arc<Meter>,
        has_terminal: bool,
        output_limit_bytes: usize,
    ) -> Self {
        Self {
            stdin: None,
            stdout: None,
            stderr: None,
            terminal: None,
            shared: Arc::clone(shared),
            id,
            meter,
            has_terminal,
            output_limit_bytes,
            is_detached: false,
        }
    }

    pub(crate) fn shared(&self) -> &Shared {
        &self.shared
    }

    pub(crate) fn meter(&self) -> Arc<Meter> {
        Arc::clone(&self.meter)
    }

    /// Lets the command go on without a handle, and gives its number: [`crate::Sandbox::attach`] makes a handle of it again, with the
    /// streams that were here. Nobody reads them meanwhile: a command that has filled one waits.
    #[must_use]
    pub fn detach(mut self) -> u32 {
        let streams = Detached {
            stdin: self.stdin.take(),
            stdout: self.stdout.take(),
            stderr: self.stderr.take(),
            terminal: self.terminal.take(),
            meter: Arc::clone(&self.meter),
            has_terminal: self.has_terminal,
            output_limit_bytes: self.output_limit_bytes,
        };
        self.shared.keep(self.id, streams);
        self.is_detached = true;
        self.id
    }

    pub(crate) fn attached(shared: &Arc<Shared>, id: u32, streams: Detached) -> Self {
        let mut child = Self::new(
            shared,
            id,
            streams.meter,
            streams.has_terminal,
            streams.output_limit_bytes,
        );
        child.stdin = streams.stdin;
        child.stdout = streams.stdout;
        child.stderr = streams.stderr;
        child.terminal = streams.terminal;
        child
    }

    /// The command's number, unique within its sandbox. It is no process id.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Sends a signal, by its Linux number, to the command's process group.
    ///
    /// # Errors
    /// See [`SignalError`].
    pub fn signal(&self, signal: i32) -> Result<(), SignalError> {
        if !SIGNALS.contains(&signal) {
            return Err(SignalError::InvalidSignal(signal));
        }
        self.tell(&ToAgent::Signal {
            command_id: self.id,
            signal,
        })
    }

    /// Kills the command and all that it started.
    ///
    /// # Errors
    /// See [`SignalError`].
    pub fn kill(&self) -> Result<(), SignalError> {
        self.tell(&ToAgent::Kill {
            command_id: self.id,
        })
    }

    /// Tells the command that its terminal has a new size.
    ///
    /// # Errors
    /// See [`SignalError`].
    pub fn resize(&self, columns: u16, rows: u16) -> Result<(), SignalError> {
        if !self.has_terminal {
            return Err(SignalError::NoTerminal);
        }
        self.tell(&ToAgent::Resize {
            command_id: self.id,
            size: TerminalSize { columns, rows },
        })
    }

    /// Closes standard input if it is still here, then waits until the command ended, the sandbox's time is over
    /// or the machine is gone. Calling it again returns the same, with the clock of the first output as it
    /// stands then.
    pub fn wait(&mut self) -> Completion {
        self.stdin = None;
        loop {
            // Without a limit there is always an end.
            if let Some(completion) = self.shared.wait_done(self.id, None, &self.meter) {
                return completion;
            }
        }
    }

    /// Like [`Self::wait`], but leaves standard input alone, and returns `None` when the command still runs
    /// after `limit`.
    pub fn wait_timeout(&mut self, limit: Duration) -> Option<Completion> {
        self.shared.wait_done(self.id, Some(limit), &self.meter)
    }

    /// How it ended, if it has: does not wait.
    #[must_use]
    pub fn try_wait(&self) -> Option<Completion> {
        self.shared.try_done(self.id, &self.meter)
    }

    /// Closes standard input if it is still here, reads the streams that are still here to their ends, each as its bytes come, and waits.
    /// [`Command::output_limit`](crate::Command::output_limit) bounds what is kept of each.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # sandvmm::init();
    /// # let sandbox = sandvmm::Sandbox::builder().start()?;
    /// let child = sandbox.command("uname").spawn()?;
    /// assert_eq!(child.wait_with_output()?.stdout, b"Linux\n");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When a stream can't be read. The command is killed then.
    pub fn wait_with_output(self) -> io::Result<Output> {
        let limit_bytes = self.output_limit_bytes;
        self.finish(limit_bytes)
    }

    /// Likewise, within another limit.
    pub(crate) fn finish(mut self, limit_bytes: usize) -> io::Result<Output> {
        self.stdin = None;
        let mut terminal = Capture::new(self.terminal.take(), limit_bytes);
        let mut stdout = Capture::new(self.stdout.take(), limit_bytes);
        let mut stderr = Capture::new(self.stderr.take(), limit_bytes);
        capture(&mut [&mut terminal, &mut stdout, &mut stderr])?;
        // There is one of both at most.
        let shown = if self.has_terminal {
            (terminal.bytes, terminal.truncated)
        } else {
            (stdout.bytes, stdout.truncated)
        };
        Ok(Output {
            completion: self.wait(),
            stdout: shown.0,
            stderr: stderr.bytes,
            stdout_truncated: shown.1,
            stderr_truncated: stderr.truncated,
        })
    }

    #[cfg(feature = "tokio")]
    pub(crate) fn output_limit_bytes(&self) -> usize {
        self.output_limit_bytes
    }

    fn tell(&self, message: &ToAgent) -> Result<(), SignalError> {
        let frame = frame_of(message).ok_or(SignalError::Busy)?;
        self.shared
            .tell(self.id, frame)
            .map_err(|_| SignalError::Busy)
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if self.is_detached {
            return;
        }
        // One that has ended needs no end; a guest that does not take it is ended by the sandbox's.
        let _ = self.kill();
        self.shared.forget(self.id);
    }
}
