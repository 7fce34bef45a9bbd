//! The state of a machine and its commands: what may follow what.

use std::collections::{HashMap, VecDeque};
use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::time::Duration;

use jailer::Throttled;
use protocol::frame;
use protocol::message::{Exited, SpawnFailure};
use vmm::control::Then;

use crate::child::Detached;
use crate::crash::Crash;
use crate::error::StartError;
use crate::event::EventKind;
use crate::freeze::Standstill;
use crate::limit::Limit;
use crate::outcome::{ExitStatus, Outcome, Usage};
use crate::save::Saving;
use crate::shared::Started;

/// Most bytes that wait for the agent to take them. What does not fit is refused.
const MAX_QUEUED_TO_AGENT_BYTES: usize = 4 * frame::MAX_TO_AGENT_BYTES;

/// `SIGKILL`.
const KILL: i32 = 9;

/// What the supervisor thread is asked to do.
#[derive(Debug)]
pub(crate) enum Request {
    /// Send a frame on the control stream.
    ToAgent(Vec<u8>),
    /// Hand the machine's end of a socket pair over, as a data stream into the guest.
    Connect(OwnedFd),
    /// Likewise, as a stream to the gate.
    ConnectGate(OwnedFd),
    /// The guest has no way out: why.
    GateFailed(String),
    /// Have the machine write itself into files.
    Save(Then, Vec<OwnedFd>),
    /// Read a stream to its end for nobody.
    Discard(OwnedFd),
    /// The agent has not answered in [`ANSWER_LIMIT`](crate::shared::ANSWER_LIMIT).
    Unanswered,
    /// The sandbox's time begins: its end on `CLOCK_MONOTONIC`, and how long it is.
    EndAt(u64, Duration),
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
    /// The time is over, or another ceiling was met: what runs was killed, and the machine will be in a moment.
    Closing(Limit),
    /// The machine is gone.
    Over(Over),
}

/// Why there is no machine any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Over {
    /// It was ended, or never started.
    Ended,
    /// Its time was over, or it met another ceiling.
    Limit(Limit),
    /// It ended by itself.
    Crashed(Crash),
}

/// Where a command stands.
#[derive(Debug)]
pub(crate) enum CommandState {
    /// The agent was asked.
    Starting,
    /// It runs, since this time, before which the machine had waited so for its share of the processors.
    Running {
        started_ns: u64,
        throttled_before: Throttled,
    },
    /// It was not started.
    Failed(SpawnFailure, String),
    /// It ended.
    Done {
        started_ns: u64,
        exited_ns: u64,
        outcome: Outcome,
        usage: Usage,
        limits_hit: Vec<Limit>,
    },
}

#[derive(Debug)]
pub(crate) struct CommandEntry {
    pub(crate) state: CommandState,
    /// What was asked for.
    pub(crate) program: OsString,
    /// The ceiling that it was killed for.
    pub(crate) exceeded: Option<Limit>,
    /// Whether it was forked from a warm interpreter.
    pub(crate) warm: bool,
    /// Whether nobody will ask for its end.
    pub(crate) forgotten: bool,
    /// What its handle has left for the next one.
    pub(crate) streams: Option<Detached>,
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
    /// Why the start failed, until [`Shared::wait_ready`](crate::shared::Shared::wait_ready) takes it.
    pub(crate) start_error: Option<StartError>,
    pub(crate) clocks: ClocksNs,
    /// What is on of the cell around the machine's process, once that is known.
    pub(crate) cell: Option<jailer::Cell>,
    /// The guest's host name, once it was told.
    pub(crate) hostname: Option<String>,
    /// Whether the guest is ready but for its gate.
    pub(crate) awaits_gate: bool,
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
            Phase::Closing(limit) => Some(Over::Limit(*limit)),
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

    /// Whether the guest is ready, or why it will never be, which is told once; `None` while that is open.
    pub(crate) fn ready(&mut self) -> Option<Result<(), StartError>> {
        match self.start_error.take() {
            Some(error) => Some(Err(error)),
            None => (!matches!(self.phase, Phase::Booting)).then_some(Ok(())),
        }
    }

    /// What came of the request to start a command; `None` while that is open. One that does not run is forgotten.
    pub(crate) fn started(&mut self, id: u32) -> Option<Started> {
        match self.commands.get(&id).map(|entry| &entry.state) {
            Some(CommandState::Running { .. } | CommandState::Done { .. }) => {
                return Some(Started::Running);
            }
            Some(CommandState::Failed(kind, message)) => {
                let failed = Started::Failed(*kind, message.clone());
                self.commands.remove(&id);
                return Some(failed);
            }
            Some(CommandState::Starting) => {}
            // It was killed before it ran, since the time is over.
            None => {
                if let Phase::Closing(limit) = self.phase {
                    return Some(Started::Over(Over::Limit(limit)));
                }
            }
        }
        let over = self.over().cloned()?;
        self.commands.remove(&id);
        Some(Started::Over(over))
    }

    /// The agent says that a command runs. False if it was not asked to start it.
    pub(crate) fn command_runs(
        &mut self,
        id: u32,
        warm: bool,
        now_ns: u64,
        throttled: Throttled,
    ) -> bool {
        match self.commands.get_mut(&id) {
            Some(entry) if matches!(entry.state, CommandState::Starting) => {
                entry.state = CommandState::Running {
                    started_ns: now_ns,
                    throttled_before: throttled,
                };
                entry.warm = warm;
                self.clocks.command_started.get_or_insert(now_ns);
                true
            }
            _ => false,
        }
    }

    /// The agent says that a command did not start. False if it was not asked to start it.
    pub(crate) fn command_failed(&mut self, id: u32, kind: SpawnFailure, message: String) -> bool {
        let time_is_over = matches!(self.phase, Phase::Closing(_));
        match self.commands.get_mut(&id) {
            Some(entry) if matches!(entry.state, CommandState::Starting) => {
                entry.state = CommandState::Failed(kind, message);
                // At the end of the time the failure is our own doing: it was killed before it ran.
                if entry.forgotten || time_is_over {
                    self.commands.remove(&id);
                }
                true
            }
            _ => false,
        }
    }

    /// What a command was asked to run.
    pub(crate) fn program(&self, id: u32) -> OsString {
        let entry = self.commands.get(&id);
        entry.map_or_else(OsString::new, |entry| entry.program.clone())
    }

    /// The agent says that a command ended: what is to be told of that. `None` if it did not run, or the status is none.
    pub(crate) fn command_exited(
        &mut self,
        exited: &Exited,
        now_ns: u64,
        throttled: Throttled,
    ) -> Option<Vec<EventKind>> {
        let closing = match self.phase {
            Phase::Closing(limit) => Some(limit),
            _ => None,
        };
        let status = checked_status(exited.status)?;
        let entry = self.commands.get_mut(&exited.command_id)?;
        let CommandState::Running {
            started_ns,
            throttled_before,
        } = entry.state
        else {
            return None;
        };
        let throttled = throttled.since(throttled_before);
        let killed_for = closing.or(entry.exceeded);
        let command = exited.command_id;
        let limits_hit = limits_hit(exited, throttled, killed_for);
        let outcome = match outcome(status, exited.oom_kills, killed_for) {
            Outcome::Exited(_) | Outcome::Signaled(_) if !exited.is_kept => {
                Outcome::NotKept { status }
            }
            outcome => outcome,
        };
        let usage = Usage {
            cpu_time: Duration::from_micros(exited.cpu_time_us),
            peak_memory_bytes: exited.peak_memory_bytes,
            oom_kills: exited.oom_kills,
            peak_processes: exited.peak_processes,
            throttled: throttled.time,
            wall: Duration::from_nanos(now_ns.saturating_sub(started_ns)),
            disk_bytes: exited.disk_used_bytes,
            ..Usage::default()
        };
        let mut events: Vec<EventKind> = limits_hit
            .iter()
            // That of the whole sandbox is told of once.
            .filter(|limit| closing != Some(**limit))
            .map(|limit| EventKind::LimitHit {
                limit: *limit,
                command: Some(command),
            })
            .collect();
        events.push(EventKind::CommandEnded {
            command,
            outcome: outcome.clone(),
            usage,
        });
        entry.state = CommandState::Done {
            started_ns,
            exited_ns: now_ns,
            outcome,
            usage,
            limits_hit,
        };
        if entry.forgotten {
            self.commands.remove(&exited.command_id);
        }
        self.clocks.exited = Some(now_ns);
        Some(events)
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

/// Bytes of room for files below which the disk counts as full: less than a page and what a file system keeps for itself.
const DISK_IS_FULL_BYTES: u64 = 64 << 10;

/// All ceilings that a command met, by the guest's word where that is all there is.
fn limits_hit(exited: &Exited, throttled: Throttled, killed_for: Option<Limit>) -> Vec<Limit> {
    let hit = [
        (throttled.periods > 0, Limit::CpuQuota),
        (exited.oom_kills > 0, Limit::Memory),
        (exited.process_limit_hits > 0, Limit::Processes),
        (exited.disk_free_bytes < DISK_IS_FULL_BYTES, Limit::Disk),
    ];
    let hit = hit.into_iter().filter(|(is_hit, _)| *is_hit);
    killed_for
        .into_iter()
        .chain(hit.map(|(_, limit)| limit))
        .collect()
}

fn outcome(status: ExitStatus, oom_kills: u32, killed_for: Option<Limit>) -> Outcome {
    match status {
        _ if killed_for == Some(Limit::WallTime) => Outcome::TimedOut,
        // One that had ended by itself before it could be killed has ended.
        ExitStatus::Signal(KILL) if let Some(limit) = killed_for => Outcome::LimitExceeded(limit),
        ExitStatus::Code(0) => Outcome::Exited(0),
        status if oom_kills > 0 => Outcome::OutOfMemory { status },
        ExitStatus::Code(code) => Outcome::Exited(code),
        ExitStatus::Signal(signal) => Outcome::Signaled(signal),
    }
}
