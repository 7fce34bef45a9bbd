//! The commands of a sandbox, as its users' threads see them: registered, asked for, waited for, forgotten.

use std::ffi::{OsStr, OsString};
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use protocol::message::{SpawnFailure, ToAgent};

use super::{ANSWER_LIMIT, Shared, frame_of};
use crate::child::Detached;
use crate::clock::CommandClocks;
use crate::crash::CrashKind;
use crate::limit::Limit;
use crate::meter::Meter;
use crate::outcome::{Completion, Outcome, Usage};
use crate::state::{CommandEntry, CommandState, Over, Phase, Refused, Request, State};

/// Most commands of a sandbox that run, or whose [`crate::Child`] is kept.
pub(crate) const MAX_COMMANDS: usize = 1024;

/// A command of a sandbox, as [`crate::Sandbox::commands`] lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CommandInfo {
    /// Its number, as [`crate::Child::id`] gives it.
    pub id: u32,
    /// Its program, as it was asked for.
    pub program: OsString,
    /// When it was started, counted as in [`Clocks`](crate::Clocks).
    pub started: Duration,
    /// Whether it has not ended.
    pub is_running: bool,
    /// Whether [`crate::Sandbox::attach`] can have it.
    pub is_detached: bool,
}

/// What came of a request to start a command.
#[derive(Debug)]
pub(crate) enum Started {
    Running,
    Failed(SpawnFailure, String),
    Over(Over),
}

impl Shared {
    /// Registers a command, whose number the caller gives its streams and its request.
    pub(crate) fn register_command(&self, program: &OsStr) -> Result<u32, Refused> {
        let mut state = self.lock();
        if let Some(over) = state.no_new_commands() {
            return Err(Refused::Over(over));
        }
        if state.commands.len() >= MAX_COMMANDS {
            return Err(Refused::TooManyCommands);
        }
        let id = state.next_command_id();
        state.commands.insert(
            id,
            CommandEntry {
                state: CommandState::Starting,
                program: program.to_owned(),
                exceeded: None,
                warm: false,
                forgotten: false,
                streams: None,
            },
        );
        Ok(id)
    }

    /// Asks for a registered command and its streams at once; when refused, nothing is asked for and the
    /// command is forgotten.
    pub(crate) fn request_command(
        &self,
        id: u32,
        frame: Vec<u8>,
        streams: Vec<Request>,
    ) -> Result<(), Refused> {
        let mut state = self.lock();
        let refused = match state.no_new_commands() {
            Some(over) => Some(Refused::Over(over)),
            None => state.push(Request::ToAgent(frame)).err(),
        };
        if let Some(refused) = refused {
            state.commands.remove(&id);
            return Err(refused);
        }
        state.requests.extend(streams);
        drop(state);
        self.wake();
        Ok(())
    }

    /// Waits until the guest says whether a command runs. One that does not is forgotten.
    pub(crate) fn wait_started(&self, id: u32) -> Started {
        let mut deadline = None;
        let mut reported = false;
        let mut state = self.lock();
        loop {
            if let Some(started) = state.started(id) {
                return started;
            }
            state = if matches!(state.phase, Phase::Booting) {
                // The guest has not been asked yet. The supervisor thread bounds this wait.
                self.changed
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner)
            } else {
                let deadline = *deadline.get_or_insert_with(|| Instant::now() + ANSWER_LIMIT);
                self.wait_for_answer(state, deadline, &mut reported)
            };
        }
    }

    /// Whether a command runs, or does not; `None` while that is open.
    #[cfg(feature = "tokio")]
    pub(crate) fn try_started(&self, id: u32) -> Option<Started> {
        self.lock().started(id)
    }

    /// How a command ended, if it has.
    pub(crate) fn try_done(&self, id: u32, meter: &Meter) -> Option<Completion> {
        self.completion(&self.lock(), id, meter)
    }

    /// Waits until a command ended or the machine is gone; `None` when neither is so after `limit`.
    pub(crate) fn wait_done(
        &self,
        id: u32,
        limit: Option<Duration>,
        meter: &Meter,
    ) -> Option<Completion> {
        // A limit beyond what the clock can count is none.
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        let mut state = self.lock();
        loop {
            if let Some(completion) = self.completion(&state, id, meter) {
                return Some(completion);
            }
            state = match deadline {
                None => self
                    .changed
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return None;
                    }
                    self.changed
                        .wait_timeout(state, left)
                        .unwrap_or_else(PoisonError::into_inner)
                        .0
                }
            };
        }
    }

    /// Tells the agent something about a command, if it still runs.
    pub(crate) fn tell(&self, id: u32, frame: Vec<u8>) -> Result<(), Refused> {
        let runs = matches!(
            self.lock().commands.get(&id).map(|entry| &entry.state),
            Some(CommandState::Running { .. })
        );
        if !runs {
            return Ok(());
        }
        match self.request(Request::ToAgent(frame)) {
            Err(Refused::Over(_)) => Ok(()),
            other => other,
        }
    }

    /// A command has met a ceiling that is kept here: it is killed.
    pub(crate) fn exceeded(&self, id: u32, limit: Limit) {
        let runs = match self.lock().commands.get_mut(&id) {
            Some(entry) if matches!(entry.state, CommandState::Running { .. }) => {
                entry.exceeded.get_or_insert(limit);
                true
            }
            _ => false,
        };
        if let (true, Some(frame)) = (runs, frame_of(&ToAgent::Kill { command_id: id })) {
            // A guest that takes nothing more is ended by its time.
            let _ = self.tell(id, frame);
        }
    }

    /// Nobody will ask for a command's end any more.
    pub(crate) fn forget(&self, id: u32) {
        let mut state = self.lock();
        match state.commands.get_mut(&id) {
            Some(entry)
                if matches!(
                    entry.state,
                    CommandState::Starting | CommandState::Running { .. }
                ) =>
            {
                entry.forgotten = true;
            }
            _ => {
                state.commands.remove(&id);
            }
        }
    }

    /// Keeps the streams of a command whose handle goes, for the next one.
    pub(crate) fn keep(&self, id: u32, streams: Detached) {
        if let Some(entry) = self.lock().commands.get_mut(&id) {
            entry.streams = Some(streams);
        }
    }

    /// Takes what a handle has left.
    pub(crate) fn take_kept(&self, id: u32) -> Option<Detached> {
        self.lock().commands.get_mut(&id)?.streams.take()
    }

    /// All commands that run, or whose end can still be asked for, in the order in which they were asked for.
    pub(crate) fn command_infos(&self) -> Vec<CommandInfo> {
        let state = self.lock();
        let is_over = state.over().is_some();
        let mut infos: Vec<CommandInfo> = state
            .commands
            .iter()
            .filter_map(|(id, entry)| {
                let (started_ns, is_running) = match entry.state {
                    CommandState::Running { started_ns, .. } => (started_ns, !is_over),
                    CommandState::Done { started_ns, .. } => (started_ns, false),
                    CommandState::Starting | CommandState::Failed(..) => return None,
                };
                Some(CommandInfo {
                    id: *id,
                    program: entry.program.clone(),
                    started: self.since_call(Some(started_ns)).unwrap_or_default(),
                    is_running,
                    is_detached: entry.streams.is_some(),
                })
            })
            .collect();
        infos.sort_by_key(|info| info.started);
        infos
    }

    fn completion(&self, state: &State, id: u32, meter: &Meter) -> Option<Completion> {
        let entry = state.commands.get(&id);
        let warm = entry.is_some_and(|entry| entry.warm);
        let command = entry.map(|entry| &entry.state);
        let started_ns = match command {
            Some(
                CommandState::Running { started_ns, .. } | CommandState::Done { started_ns, .. },
            ) => Some(*started_ns),
            _ => None,
        };
        let mut clocks = CommandClocks {
            started: self.since_call(started_ns),
            first_output: self.since_call(meter.first_output_ns()),
            exited: None,
        };
        if let Some(CommandState::Done {
            exited_ns,
            outcome,
            usage,
            limits_hit,
            ..
        }) = command
        {
            clocks.exited = self.since_call(Some(*exited_ns));
            return Some(Completion {
                outcome: outcome.clone(),
                usage: Usage {
                    bytes_in: meter.bytes_in(),
                    bytes_out: meter.bytes_out(),
                    ..*usage
                },
                clocks,
                warm,
                limits_hit: limits_hit.clone(),
            });
        }
        let outcome = match state.over()? {
            Over::Ended => Outcome::SandboxEnded,
            Over::Limit(Limit::WallTime) => Outcome::TimedOut,
            Over::Limit(limit) => Outcome::LimitExceeded(*limit),
            Over::Crashed(crash) if crash.kind() == CrashKind::ForbiddenCall => {
                Outcome::Policy(crash.to_string())
            }
            Over::Crashed(crash) => Outcome::MachineCrashed(crash.clone()),
        };
        let ended_ns = state.clocks.all_gone.or(started_ns).unwrap_or_default();
        Some(Completion {
            outcome,
            usage: Usage {
                wall: Duration::from_nanos(ended_ns.saturating_sub(started_ns.unwrap_or(ended_ns))),
                bytes_in: meter.bytes_in(),
                bytes_out: meter.bytes_out(),
                ..Usage::default()
            },
            clocks,
            warm,
            limits_hit: match state.over() {
                Some(Over::Limit(limit)) => vec![*limit],
                _ => Vec::new(),
            },
        })
    }
}
