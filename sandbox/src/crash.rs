//! Why a machine ended by itself, as one sentence.

use std::fmt;

/// A machine that ended without being told to. Its `Display` is one sentence that says what was seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Crash {
    kind: CrashKind,
    sentence: String,
    console_tail: Vec<u8>,
}

/// What kind of end it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum CrashKind {
    /// The guest's kernel panicked.
    KernelPanic,
    /// The guest's kernel had no memory left and nothing to kill but its first program.
    OutOfMemory,
    /// The guest asked for a reset and left no reason on its console.
    Reset,
    /// A vCPU shut down after a triple fault.
    TripleFault,
    /// A vCPU could not go on.
    VcpuFailed,
    /// The agent in the guest closed its control stream.
    AgentGone,
    /// The agent, or something in its place, broke the protocol or did not answer in time.
    AgentMisbehaved,
    /// The machine's process was killed by a signal from outside.
    ProcessKilled,
    /// The machine's process failed: the fault of the host or of this library.
    HostFailed,
}

impl Crash {
    pub(crate) fn new(kind: CrashKind, sentence: String) -> Self {
        Self {
            kind,
            sentence,
            console_tail: Vec::new(),
        }
    }

    pub(crate) fn with_console_tail(mut self, console_tail: Vec<u8>) -> Self {
        self.console_tail = console_tail;
        self
    }

    /// What kind of end it was.
    #[must_use]
    pub fn kind(&self) -> CrashKind {
        self.kind
    }

    /// The last bytes that the guest wrote to its console, 8 KiB at most, exactly as it wrote them: do not
    /// print them to a terminal unescaped.
    #[must_use]
    pub fn console_tail(&self) -> &[u8] {
        &self.console_tail
    }
}

impl fmt::Display for Crash {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.sentence)
    }
}

impl std::error::Error for Crash {}
