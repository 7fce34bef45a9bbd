//! How a command, and how a sandbox, ended.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::clock::{Clocks, CommandClocks};
use crate::crash::Crash;
use crate::limit::Limit;

/// How a command ended, what it used, and when.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Completion {
    /// How it ended.
    pub outcome: Outcome,
    /// What it used; zeros where the machine ended before it could say.
    pub usage: Usage,
    /// When it started and ended.
    pub clocks: CommandClocks,
    /// Whether it was forked from a warm interpreter ([`crate::Sandbox::warm_up`]) and not started anew.
    pub warm: bool,
    /// The ceilings that it met, whether they ended it or not.
    pub limits_hit: Vec<Limit>,
}

/// How a command ended. Only [`Outcome::Exited`] with 0 is success.
///
/// ```
/// use sandvmm::Outcome;
///
/// fn told(outcome: &Outcome) -> String {
///     match outcome {
///         Outcome::Exited(code) => format!("The program ended with {code}"),
///         Outcome::Signaled(signal) => format!("Signal {signal} ended it"),
///         Outcome::OutOfMemory { .. } | Outcome::TimedOut | Outcome::LimitExceeded(_) => "It asked for too much".to_owned(),
///         _ => "It was ended from outside".to_owned(),
///     }
/// }
/// assert_eq!(told(&Outcome::Exited(3)), "The program ended with 3");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Outcome {
    /// It exited with this code, 0 to 255.
    Exited(i32),
    /// A signal of this number, 1 to 64, ended it.
    Signaled(i32),
    /// The sandbox's time was over; everything in it was killed.
    TimedOut,
    /// The guest had no more memory: it killed a process of the command, and the command did not
    /// succeed.
    OutOfMemory {
        /// What the command's first process ended with all the same.
        status: ExitStatus,
    },
    /// The machine ended under the command.
    MachineCrashed(Crash),
    /// The sandbox was ended, by [`crate::Sandbox::end`] or by dropping it, while the command ran.
    SandboxEnded,
    /// It, or the sandbox, used up something other than time and memory, and was killed for that.
    LimitExceeded(Limit),
    /// A policy ended it: a sentence that names the policy.
    Policy(String),
    /// It ended, and not all that was written by then is on the workspace's disk: the host's file system is full, or its disk fails.
    NotKept {
        /// What the command's first process ended with.
        status: ExitStatus,
    },
}

impl Outcome {
    /// Whether the command exited with 0.
    #[must_use]
    pub fn success(&self) -> bool {
        matches!(self, Self::Exited(0))
    }
}

/// The status of a process that ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExitStatus {
    /// It exited with this code, 0 to 255.
    Code(i32),
    /// A signal of this number, 1 to 64, ended it.
    Signal(i32),
}

/// What a command, with all the processes that it started, used in the guest. As the guest says: a
/// guest whose kernel was taken over can say anything.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Usage {
    /// Processor time of all processes together.
    pub cpu_time: Duration,
    /// Most memory held at one time, in bytes, page cache included.
    pub peak_memory_bytes: u64,
    /// How often the guest killed one of the processes for lack of memory.
    pub oom_kills: u32,
    /// Most processes and threads that there were at one time; where their ceiling was met, one that could not be started may be among them.
    pub peak_processes: u32,
    /// From its start to its end, as seen from the host.
    pub wall: Duration,
    /// How long the threads of the machine's process waited meanwhile, one beside the other, since its share of the processors
    /// ([`crate::SandboxBuilder::cpu_quota_percent`]) was used up. As the host's kernel counts it.
    pub throttled: Duration,
    /// Bytes written to its standard input or terminal from here. What went through a bare descriptor is not counted.
    pub bytes_in: u64,
    /// Bytes of its output that were read here, likewise.
    pub bytes_out: u64,
    /// Bytes that all that was written in the sandbox took at its end.
    pub disk_bytes: u64,
}

/// What is left of a sandbox after its end: nothing but this.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Ended {
    /// The phases of the machine's life; [`Clocks::all_gone`] is set.
    pub clocks: Clocks,
    /// Why the machine ended, if it did so before it was told to.
    pub crash: Option<Crash>,
}
