//! What a sandbox's supervisor thread and its users' threads share: the state, the way to ask the thread for
//! something, and the ways to wait for it.

use std::collections::{HashMap, VecDeque};
use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use protocol::frame;
use protocol::message::{SpawnFailure, ToAgent};
use rustix::event::{EventfdFlags, eventfd};

use crate::calls::Calls;
use crate::child::Detached;
use crate::clock::{Clocks, CommandClocks, FirstOutput, nanos};
use crate::crash::CrashKind;
use crate::egress::Egress;
use crate::error::StartError;
use crate::event::{EventKind, Events};
use crate::freeze::Standstill;
use crate::limit::Limit;
use crate::meter::Meter;
use crate::outcome::{Completion, Ended, Outcome, Usage};
use crate::save::Saving;
use crate::state::{ClocksNs, CommandEntry, CommandState, Over, Phase, Refused, Request, State};

/// Most commands of a sandbox that run, or whose [`crate::Child`] is kept.
pub(crate) const MAX_COMMANDS: usize = 1024;

/// How long the agent may take to answer a request, on a host where all is slow. One that takes longer has been
/// stopped or taken over.
pub(crate) const ANSWER_LIMIT: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(crate) struct Shared {
    state: Mutex<State>,
    pub(crate) changed: Condvar,
    /// The same for tasks that wait.
    #[cfg(feature = "tokio")]
    pub(crate) async_changed: tokio::sync::Notify,
    /// Wakes the supervisor thread.
    pub(crate) wake: OwnedFd,
    /// What all clocks count from.
    called_ns: AtomicU64,
    pub(crate) first_output: Arc<FirstOutput>,
    /// The functions of this process that the guest may call.
    pub(crate) calls: Calls,
    /// Where the sandbox's events go.
    pub(crate) events: Events,
    /// Where connections leave and enter, if they may.
    pub(crate) egress: Option<Arc<Egress>>,
}

/// A command of a sandbox, as [`crate::Sandbox::commands`] lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CommandInfo {
    /// Its number, as [`crate::Child::id`] gives it.
    pub id: u32,
    /// Its program, as it was asked for.
    pub program: OsString,
    /// When it was started, counted as in [`Clocks`].
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
    pub(crate) fn new(called_ns: u64, events: Events) -> std::io::Result<Self> {
        Ok(Self {
            state: Mutex::new(State {
                phase: Phase::Booting,
                start_error: None,
                clocks: ClocksNs::default(),
                cell: None,
                hostname: None,
                awaits_gate: false,
                standstill: Standstill::default(),
                saving: Saving::default(),
                commands: HashMap::new(),
                last_command_id: 0,
                requests: VecDeque::new(),
                queued_to_agent_bytes: 0,
            }),
            changed: Condvar::new(),
            #[cfg(feature = "tokio")]
            async_changed: tokio::sync::Notify::new(),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            called_ns: AtomicU64::new(called_ns),
            first_output: Arc::new(FirstOutput::default()),
            calls: Calls::default(),
            events,
            egress: None,
        })
    }

    /// What all clocks count from, in nanoseconds of `CLOCK_MONOTONIC`.
    pub(crate) fn called_ns(&self) -> u64 {
        self.called_ns.load(Ordering::Relaxed)
    }

    /// Has the clocks of a machine that was made in advance count from `called_ns`, and its time begin then. False where there is no
    /// machine any more.
    pub(crate) fn begin_anew(&self, called_ns: u64, timeout: Option<Duration>) -> bool {
        self.called_ns.store(called_ns, Ordering::Relaxed);
        match timeout {
            Some(limit) => {
                let at_ns = called_ns.saturating_add(nanos(limit));
                self.request(Request::EndAt(at_ns, limit)).is_ok()
            }
            None => self.lock().over().is_none(),
        }
    }

    /// With a way out.
    pub(crate) fn with_egress(mut self, egress: Option<Arc<Egress>>) -> Self {
        self.egress = egress;
        self
    }

    /// The state. A user's thread that panicked cannot have left it half changed: nothing here panics.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells all waiting threads that the state has changed.
    pub(crate) fn notify(&self) {
        self.changed.notify_all();
        #[cfg(feature = "tokio")]
        self.async_changed.notify_waiters();
    }

    /// Waits until the guest is ready. The supervisor thread bounds the wait.
    pub(crate) fn wait_ready(&self) -> Result<(), StartError> {
        let mut state = self.lock();
        loop {
            if let Some(ready) = state.ready() {
                return ready;
            }
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The guest is ready for commands.
    pub(crate) fn is_ready(&self, state: &mut State, now_ns: u64) {
        state.clocks.agent_ready = Some(now_ns);
        state.phase = Phase::Ready;
        self.events.emit(EventKind::Ready);
    }

    /// Whether the guest is ready, or will never be; `None` while that is open.
    #[cfg(feature = "tokio")]
    pub(crate) fn try_ready(&self) -> Option<Result<(), StartError>> {
        self.lock().ready()
    }

    /// Asks for something, while there is a machine.
    pub(crate) fn request(&self, request: Request) -> Result<(), Refused> {
        let mut state = self.lock();
        state.push(request)?;
        drop(state);
        self.wake();
        Ok(())
    }

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

    /// Waits until something has changed. An answer that is not there by `deadline` is reported as missing, once: the supervisor
    /// ends the machine then, which ends the wait.
    pub(crate) fn wait_for_answer<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        deadline: Instant,
        reported: &mut bool,
    ) -> MutexGuard<'a, State> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() && !*reported {
            *reported = state.push(Request::Unanswered).is_ok();
            self.wake();
        }
        // After the report there is nothing to count down to but the machine's end.
        let nap = if left.is_zero() { ANSWER_LIMIT } else { left };
        self.changed
            .wait_timeout(state, nap)
            .unwrap_or_else(PoisonError::into_inner)
            .0
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

    /// Waits at most `limit` for the machine's end.
    pub(crate) fn wait_over(&self, limit: Duration) -> Option<Over> {
        let (state, _) = self
            .changed
            .wait_timeout_while(self.lock(), limit, |state| {
                !matches!(state.phase, Phase::Over(_))
            })
            .unwrap_or_else(PoisonError::into_inner);
        state.over().cloned()
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
                    CommandState::Running { started_ns } => (started_ns, !is_over),
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

    pub(crate) fn clocks(&self) -> Clocks {
        let state = self.lock();
        let since = |at_ns: Option<u64>| self.since_call(at_ns);
        Clocks {
            process_started: since(state.clocks.process_started),
            vcpu_running: since(state.clocks.vcpu_running),
            guest_init: since(state.clocks.guest_init),
            agent_ready: since(state.clocks.agent_ready),
            command_started: since(state.clocks.command_started),
            first_output: since(self.first_output.at_ns()),
            exited: since(state.clocks.exited),
            all_gone: since(state.clocks.all_gone),
        }
    }

    pub(crate) fn ended(&self) -> Ended {
        let crash = match self.lock().over() {
            Some(Over::Crashed(crash)) => Some(crash.clone()),
            _ => None,
        };
        Ended {
            clocks: self.clocks(),
            crash,
        }
    }

    fn since_call(&self, at_ns: Option<u64>) -> Option<Duration> {
        at_ns.map(|at_ns| Duration::from_nanos(at_ns.saturating_sub(self.called_ns())))
    }

    fn completion(&self, state: &State, id: u32, meter: &Meter) -> Option<Completion> {
        let entry = state.commands.get(&id);
        let warm = entry.is_some_and(|entry| entry.warm);
        let command = entry.map(|entry| &entry.state);
        let started_ns = match command {
            Some(CommandState::Running { started_ns } | CommandState::Done { started_ns, .. }) => {
                Some(*started_ns)
            }
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

    pub(crate) fn wake(&self) {
        // It fails only when the counter is full, and then the thread is awake.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }
}

/// A message to the agent as a frame; `None` when it is above the bound.
pub(crate) fn frame_of(message: &ToAgent) -> Option<Vec<u8>> {
    frame::encode(message, frame::MAX_TO_AGENT_BYTES).ok()
}
