//! What a sandbox's supervisor thread and its users' threads share: the state, the way to ask the thread for
//! something, and the ways to wait for it.

mod commands;

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use protocol::frame;
use protocol::message::ToAgent;
use rustix::event::{EventfdFlags, eventfd};

use crate::calls::Calls;
use crate::clock::{Clocks, FirstOutput, nanos};
use crate::egress::Egress;
use crate::error::StartError;
use crate::event::{EventKind, Events};
use crate::freeze::Standstill;
use crate::outcome::Ended;
use crate::publish::PublishedPort;
use crate::save::Saving;
use crate::state::{ClocksNs, Over, Phase, Refused, Request, State};
pub use commands::CommandInfo;
pub(crate) use commands::{MAX_COMMANDS, Started};

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
    /// The ports of this host that lead in.
    published: Mutex<Vec<PublishedPort>>,
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
            published: Mutex::default(),
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

    /// A port of this host leads to the guest now.
    pub(crate) fn is_published(&self, port: PublishedPort) {
        let mut published = self
            .published
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        published.push(port);
    }

    /// The ports of this host that lead to the guest.
    pub(crate) fn published(&self) -> Vec<PublishedPort> {
        let published = self
            .published
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        published.clone()
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

    pub(crate) fn wake(&self) {
        // It fails only when the counter is full, and then the thread is awake.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }
}

/// A message to the agent as a frame; `None` when it is above the bound.
pub(crate) fn frame_of(message: &ToAgent) -> Option<Vec<u8>> {
    frame::encode(message, frame::MAX_TO_AGENT_BYTES).ok()
}
