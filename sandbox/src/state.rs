//! The state of a machine and its commands: what may follow what.

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::time::Duration;

use protocol::frame;
use protocol::message::{Exited, SpawnFailure};
use vmm::control::Then;

use crate::crash::Crash;
use crate::error::StartError;
use crate::freeze::Standstill;
use crate::outcome::{ExitStatus, Outcome, Usage};
use crate::save::Saving;

/// Most bytes that wait for the agent to take them. What does not fit is refused.
const MAX_QUEUED_TO_AGENT_BYTES: usize = 4 * frame::MAX_TO_AGENT_BYTES;

/// What the supervisor thread is asked to do.
#[derive(Debug)]
pub(crate) enum Request {
    /// Send a frame on the control stream.
    ToAgent(Vec<u8>),
    /// Hand the machine's end of a socket pair over, as a data stream into the guest.
    Connect(OwnedFd),
    /// Have the machine write itself into files.
    Save(Then, Vec<OwnedFd>),
    /// Read a stream to its end for nobody.
    Discard(OwnedFd),
    /// The agent has not answered in [`ANSWER_LIMIT`].
    Unanswered,
    /// End the machine.
    End,
}

/// Where the machine stands.
#[derive(Debug)]
pub(crate) enum Phase {
    /// The guest is not ready yet.
    Booting,
    /// Commands can run.
    Ready,
    /// The time is over: what runs was killed, and the machine will be in a moment.
    Closing,
    /// The machine is gone.
    Over(Over),
}

/// Why there is no machine any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Over {
    /// It was ended, or never started.
    Ended,
    /// Its time was over.
    TimedOut,
    /// It ended by itself.
    Crashed(Crash),
}

/// Where a command stands.
#[derive(Debug)]
pub(crate) enum CommandState {
    /// The agent was asked.
    Starting,
    /// It runs, since this time.
    Running { started_ns: u64 },
    /// It was not started.
    Failed(SpawnFailure, String),
    /// It ended.
    Done {
        started_ns: u64,
        exited_ns: u64,
        outcome: Outcome,
        usage: Usage,
    },
}

#[derive(Debug)]
pub(crate) struct CommandEntry {
    pub(crate) state: CommandState,
    /// Whether it was forked from a warm interpreter.
    pub(crate) warm: bool,
    /// Whether nobody will ask for its end.
    pub(crate) detached: bool,
}

/// Times of `CLOCK_MONOTONIC` in nanoseconds.
#[derive(Debug, Default)]
pub(crate) struct ClocksNs {
    pub(crate) process_started: Option<u64>,
    pub(crate) vcpu_running: Option<u64>,
    pub(crate) guest_init: Option<u64>,
    pub(crate) agent_ready: Option<u64>,
    pub(crate) command_started: Option<u64>,
    pub(crate) exited: Option<u64>,
    pub(crate) all_gone: Option<u64>,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) phase: Phase,
    /// Why the start failed, until [`Shared::wait_ready`] takes it.
    pub(crate) start_error: Option<StartError>,
    pub(crate) clocks: ClocksNs,
    /// What is on of the cell around the machine's process, once that is known.
    pub(crate) cell: Option<jailer::Cell>,
    pub(crate) standstill: Standstill,
    pub(crate) saving: Saving,
    pub(crate) commands: HashMap<u32, CommandEntry>,
    pub(crate) last_command_id: u32,
    pub(crate) requests: VecDeque<Request>,
    /// Bytes in `requests` and in the supervisor's hands.
    pub(crate) queued_to_agent_bytes: usize,
}

/// Why a command could not even be asked for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    Over(Over),
    TooManyCommands,
    QueueFull,
}

impl State {
    pub(crate) fn over(&self) -> Option<&Over> {
        match &self.phase {
            Phase::Over(over) => Some(over),
            _ => None,
        }
    }

    /// Why no command may be started, if so.
    pub(crate) fn no_new_commands(&self) -> Option<Over> {
        match &self.phase {
            Phase::Booting | Phase::Ready => None,
            Phase::Closing => Some(Over::TimedOut),
            Phase::Over(over) => Some(over.clone()),
        }
    }

    pub(crate) fn next_command_id(&mut self) -> u32 {
        loop {
            self.last_command_id = self.last_command_id.wrapping_add(1);
            // After 2³² commands some old one may still run under its number.
            if !self.commands.contains_key(&self.last_command_id) {
                return self.last_command_id;
            }
        }
    }

    pub(crate) fn push(&mut self, request: Request) -> Result<(), Refused> {
        if let Some(over) = self.over() {
            return Err(Refused::Over(over.clone()));
        }
        if let Request::ToAgent(frame) = &request {
            let queued = self.queued_to_agent_bytes + frame.len();
            if queued > MAX_QUEUED_TO_AGENT_BYTES {
                return Err(Refused::QueueFull);
            }
            self.queued_to_agent_bytes = queued;
        }
        self.requests.push_back(request);
        Ok(())
    }

    /// The agent's stream has taken bytes that were queued.
    pub(crate) fn taken_by_agent(&mut self, bytes: usize) {
        self.queued_to_agent_bytes = self.queued_to_agent_bytes.saturating_sub(bytes);
    }

    /// The numbers of the commands that may be running.
    pub(crate) fn live_commands(&self) -> Vec<u32> {
        self.commands
            .iter()
            .filter(|(_, entry)| {
                matches!(
                    entry.state,
                    CommandState::Starting | CommandState::Running { .. }
                )
            })
            .map(|(id, _)| *id)
            .collect()
    }

    /// The agent says that a command runs. False if it was not asked to start it.
    pub(crate) fn command_runs(&mut self, id: u32, warm: bool, now_ns: u64) -> bool {
        match self.commands.get_mut(&id) {
            Some(entry) if matches!(entry.state, CommandState::Starting) => {
                entry.state = CommandState::Running { started_ns: now_ns };
                entry.warm = warm;
                self.clocks.command_started.get_or_insert(now_ns);
                true
            }
            _ => false,
        }
    }

    /// The agent says that a command did not start. False if it was not asked to start it.
    pub(crate) fn command_failed(&mut self, id: u32, kind: SpawnFailure, message: String) -> bool {
        let time_is_over = matches!(self.phase, Phase::Closing);
        match self.commands.get_mut(&id) {
            Some(entry) if matches!(entry.state, CommandState::Starting) => {
                entry.state = CommandState::Failed(kind, message);
                // At the end of the time the failure is our own doing: it was killed before it ran.
                if entry.detached || time_is_over {
                    self.commands.remove(&id);
                }
                true
            }
            _ => false,
        }
    }

    /// The agent says that a command ended. False if it did not run, or the status is none.
    pub(crate) fn command_exited(&mut self, exited: &Exited, now_ns: u64) -> bool {
        let time_is_over = matches!(self.phase, Phase::Closing);
        let Some(status) = checked_status(exited.status) else {
            return false;
        };
        let Some(entry) = self.commands.get_mut(&exited.command_id) else {
            return false;
        };
        let CommandState::Running { started_ns } = entry.state else {
            return false;
        };
        entry.state = CommandState::Done {
            started_ns,
            exited_ns: now_ns,
            outcome: outcome(status, exited.oom_kills, time_is_over),
            usage: Usage {
                cpu_time: Duration::from_micros(exited.cpu_time_us),
                peak_memory_bytes: exited.peak_memory_bytes,
                oom_kills: exited.oom_kills,
            },
        };
        if entry.detached {
            self.commands.remove(&exited.command_id);
        }
        self.clocks.exited = Some(now_ns);
        true
    }
}

/// A guest's status, if it is one that a process can end with.
fn checked_status(status: protocol::message::ExitStatus) -> Option<ExitStatus> {
    match status {
        protocol::message::ExitStatus::Code(code) if (0..=255).contains(&code) => {
            Some(ExitStatus::Code(code))
        }
        protocol::message::ExitStatus::Signal(signal) if (1..=64).contains(&signal) => {
            Some(ExitStatus::Signal(signal))
        }
        _ => None,
    }
}

fn outcome(status: ExitStatus, oom_kills: u32, time_is_over: bool) -> Outcome {
    match status {
        _ if time_is_over => Outcome::TimedOut,
        ExitStatus::Code(0) => Outcome::Exited(0),
        status if oom_kills > 0 => Outcome::OutOfMemory { status },
        ExitStatus::Code(code) => Outcome::Exited(code),
        ExitStatus::Signal(signal) => Outcome::Signaled(signal),
    }
}
