//! The states of a command: gathering its streams, being started, running. What the loop has to do about it is
//! its return values, so that the order of events can be tested without processes.

use std::os::fd::OwnedFd;
use std::time::Instant;

use protocol::message::{ExitStatus, Spawn, Stdio, StreamKind};
use rustix::process::{Pid, Signal};

use crate::cgroup::Cgroup;
use crate::limits::{MAX_EARLY_SIGNALS, STREAM_WAIT};
use crate::spawn::{Ends, Stage};

/// The data streams of a command, as they arrive.
#[derive(Debug, Default)]
pub struct Streams {
    /// Standard input.
    pub input: Option<OwnedFd>,
    /// Standard output.
    pub output: Option<OwnedFd>,
    /// Standard error.
    pub error: Option<OwnedFd>,
    /// Terminal.
    pub terminal: Option<OwnedFd>,
}

impl Streams {
    /// Takes a stream if a command with `stdio` has that one and does not have it yet; else drops it, which
    /// closes it.
    pub fn put(&mut self, stdio: Stdio, kind: &StreamKind, descriptor: OwnedFd) {
        let slot = match (stdio, kind) {
            (Stdio::Pipes { stdin: true }, StreamKind::Stdin) => &mut self.input,
            (Stdio::Pipes { .. }, StreamKind::Stdout) => &mut self.output,
            (Stdio::Pipes { .. }, StreamKind::Stderr) => &mut self.error,
            (Stdio::Terminal(_), StreamKind::Terminal) => &mut self.terminal,
            _ => return,
        };
        if slot.is_none() {
            *slot = Some(descriptor);
        }
    }

    /// Whether all that `stdio` names are there.
    #[must_use]
    pub fn complete(&self, stdio: Stdio) -> bool {
        match stdio {
            Stdio::Pipes { stdin } => {
                self.output.is_some() && self.error.is_some() && (!stdin || self.input.is_some())
            }
            Stdio::Terminal(_) => self.terminal.is_some(),
            _ => false,
        }
    }
}

/// A command that the host has asked for and that has not been answered for with its end.
#[derive(Debug)]
#[non_exhaustive]
pub enum Command {
    /// Its streams are not all there.
    Gathering {
        /// The request.
        spawn: Box<Spawn>,
        /// Those that are.
        streams: Streams,
        /// When the agent gives up on the others.
        deadline: Instant,
    },
    /// Its stage prepares.
    Starting(Box<Starting>),
    /// Its program runs.
    Running {
        /// Its first process, leader of its process group.
        pid: Pid,
        /// All its processes.
        cgroup: Cgroup,
        /// The terminal's relay, to resize it.
        terminal_relay: Option<u32>,
    },
}

/// What there is while a stage prepares.
#[derive(Debug)]
pub struct Starting {
    /// The process.
    pub stage: Stage,
    /// Its cgroup.
    pub cgroup: Cgroup,
    /// The command's ends of the streams.
    pub streams: Streams,
    /// The agent's ends of pipes or terminal.
    pub ends: Ends,
    /// When the agent gives up on the process; behind that, when it waits for its end no longer.
    pub deadline: Instant,
    /// Signals to send once it runs.
    pub signals: Vec<Signal>,
    /// How the process ended, if it did already.
    pub exit: Option<ExitStatus>,
    /// What is started anew if a process of the warm interpreter can't become it.
    pub anew: Option<Box<Spawn>>,
}

impl Command {
    /// A command that was just asked for.
    #[must_use]
    pub fn new(spawn: Spawn, now: Instant) -> Self {
        Self::Gathering {
            spawn: Box::new(spawn),
            streams: Streams::default(),
            deadline: now + STREAM_WAIT,
        }
    }

    /// Its first process.
    #[must_use]
    pub fn pid(&self) -> Option<Pid> {
        match self {
            Self::Gathering { .. } => None,
            Self::Starting(starting) => Some(starting.stage.pid),
            Self::Running { pid, .. } => Some(*pid),
        }
    }

    /// When the agent gives up on what it waits for.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        match self {
            Self::Gathering { deadline, .. } => Some(*deadline),
            Self::Starting(starting) => Some(starting.deadline),
            Self::Running { .. } => None,
        }
    }

    /// Its cgroup, once it has one.
    #[must_use]
    pub fn cgroup(&self) -> Option<&Cgroup> {
        match self {
            Self::Gathering { .. } => None,
            Self::Starting(starting) => Some(&starting.cgroup),
            Self::Running { cgroup, .. } => Some(cgroup),
        }
    }

    /// Sends a signal to its process group. The group exists once the program runs; a signal that comes before is
    /// kept until then.
    pub fn signal(&mut self, signal: Signal) {
        match self {
            Self::Gathering { .. } => {}
            Self::Starting(starting) => {
                if starting.signals.len() < MAX_EARLY_SIGNALS {
                    starting.signals.push(signal);
                }
            }
            Self::Running { pid, .. } => {
                // A group that has just ended gets nothing, and its end is on its way.
                let _ = rustix::process::kill_process_group(*pid, signal);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use protocol::message::TerminalSize;

    use super::*;

    fn descriptor() -> OwnedFd {
        std::fs::File::open("/dev/null").unwrap().into()
    }

    #[test]
    fn a_command_is_complete_with_exactly_its_own_streams() {
        let pipes = Stdio::Pipes { stdin: true };
        let mut streams = Streams::default();
        for kind in [StreamKind::Stdout, StreamKind::Terminal, StreamKind::Stderr] {
            streams.put(pipes, &kind, descriptor());
        }

        assert!(!streams.complete(pipes) && streams.terminal.is_none());
        assert!(streams.complete(Stdio::Pipes { stdin: false }));
        streams.put(pipes, &StreamKind::Stdin, descriptor());
        assert!(streams.complete(pipes));
    }

    #[test]
    fn a_terminal_needs_one_stream_and_input_may_be_unwanted() {
        let terminal = Stdio::Terminal(TerminalSize {
            columns: 80,
            rows: 24,
        });
        let mut streams = Streams::default();

        streams.put(terminal, &StreamKind::Stdout, descriptor());
        streams.put(
            Stdio::Pipes { stdin: false },
            &StreamKind::Stdin,
            descriptor(),
        );
        assert!(streams.output.is_none() && streams.input.is_none());
        streams.put(terminal, &StreamKind::Terminal, descriptor());
        assert!(streams.complete(terminal));
    }

    #[test]
    fn a_second_stream_of_a_kind_does_not_replace_the_first() {
        use std::os::fd::AsRawFd;
        let stdio = Stdio::Pipes { stdin: false };
        let mut streams = Streams::default();
        let first = descriptor();
        let number = first.as_raw_fd();

        streams.put(stdio, &StreamKind::Stdout, first);
        streams.put(stdio, &StreamKind::Stdout, descriptor());

        assert_eq!(streams.output.unwrap().as_raw_fd(), number);
    }
}
