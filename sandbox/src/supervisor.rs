//! The one thread that a sandbox has: it starts the machine's process, speaks with it and with the agent,
//! keeps the deadlines, and leaves nothing behind.
//!
//! It waits in one `poll` for all of: a request from a user's thread, a message from the machine's process, one
//! from the agent, the process's end, its last words, the streams that nobody reads, and the next deadline.
//! Users' threads wait for the state in [`Shared`] that it changes.

mod agent;
mod cpu_time;
mod deadlines;
mod machine;
mod reason;
mod requests;
#[cfg(feature = "fuzzing")]
pub(crate) mod scripted;
mod start;
mod wait;

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use jailer::{MachineProcess, Throttled};
use vmm::control::{ControlSocket, ToMachine};

use crate::clock::{nanos, now_ns};
use crate::control_stream::ControlStream;
use crate::shared::Shared;
use crate::state::{Over, Phase, Request};
use cpu_time::CpuTime;
use deadlines::BOOT_LIMIT;
use reason::{Reason, supervisor_failed};
pub(crate) use start::{GuestOptions, Plan};

/// Most pieces read from the agent, or from the process's standard error, after the process is gone: more than
/// a socket or pipe can hold.
const MAX_LAST_PIECES: usize = 256;

/// How long what is left to tell of connections may take when the machine is gone: the event that it is gone is the last one.
const LAST_CONNECTIONS_LIMIT: Duration = Duration::from_millis(100);

#[derive(Debug)]
struct Supervisor {
    shared: Arc<Shared>,
    socket: ControlSocket,
    process: MachineProcess,
    to_machine: VecDeque<(ToMachine, Vec<OwnedFd>)>,
    /// What users have asked of a guest that has not greeted yet: it goes out right behind the answer to its greeting. Bounded as
    /// commands are, and by [`State::push`](crate::state::State::push).
    early: Vec<Request>,
    agent: Option<ControlStream>,
    agent_has_ended: bool,
    discarded: Vec<OwnedFd>,
    guest: GuestOptions,
    /// Whether a restored guest was told what is new, and has not said yet that it took that.
    resuming: bool,
    deadline: Option<(u64, Duration)>,
    boot_deadline_ns: u64,
    closing_deadline_ns: Option<u64>,
    cpu_time: Option<CpuTime>,
    /// Whether the machine's share of the processors was chosen.
    has_cpu_quota: bool,
    /// How it was held to that, once its process and control group are gone.
    throttled_at_end: Option<Throttled>,
    agent_end_deadline_ns: Option<u64>,
}

/// The thread: starts a machine's process and stays with it until it is gone.
pub(crate) fn run(shared: &Arc<Shared>, plan: Plan) {
    // Users' threads wait for this one: also if it fails, they must hear of it.
    let reason = catch_unwind(AssertUnwindSafe(|| match Supervisor::start(shared, plan) {
        Ok(supervisor) => supervisor.supervise(),
        Err(error) => Reason::NotStarted(error),
    }));
    finish(
        shared,
        reason.unwrap_or_else(|_| supervisor_failed("it panicked")),
    );
}

/// The machine is gone, and its users hear of it.
fn finish(shared: &Shared, reason: Reason) {
    let mut state = shared.lock();
    state.clocks.all_gone = Some(now_ns());
    state.requests.clear();
    let ended = reason.event();
    if matches!(state.phase, Phase::Booting) {
        state.start_error = Some(reason.start_error());
        state.phase = Phase::Over(Over::Ended);
    } else {
        state.phase = Phase::Over(reason.over());
    }
    drop(state);
    if let Some(egress) = &shared.egress {
        egress.settle(LAST_CONNECTIONS_LIMIT);
    }
    shared.events.emit(ended);
    shared.notify();
}

impl Supervisor {
    fn new(
        shared: &Arc<Shared>,
        socket: ControlSocket,
        process: MachineProcess,
        guest: GuestOptions,
        deadline: Option<(u64, Duration)>,
    ) -> Self {
        Self {
            shared: Arc::clone(shared),
            socket,
            process,
            to_machine: VecDeque::new(),
            early: Vec::new(),
            agent: None,
            agent_has_ended: false,
            discarded: Vec::new(),
            guest,
            resuming: false,
            deadline,
            boot_deadline_ns: now_ns().saturating_add(nanos(BOOT_LIMIT)),
            closing_deadline_ns: None,
            cpu_time: None,
            has_cpu_quota: false,
            throttled_at_end: None,
            agent_end_deadline_ns: None,
        }
    }

    /// Keeps the machine until it is over, then ends its process and reads what was said last.
    fn supervise(mut self) -> Reason {
        let mut reason = loop {
            if let Err(reason) = self.turn() {
                break reason;
            }
        };
        self.throttled_at_end = Some(self.throttled());
        self.process.end();
        // What the machine passed on before its end is in our socket: a command that has ended has ended, and a
        // guest that could not be used said why before its kernel panicked over it.
        for _ in 0..MAX_LAST_PIECES {
            if self.agent_has_ended {
                break;
            }
            if let Err(last) = self.take_from_agent() {
                if matches!(
                    (&reason, &last),
                    (Reason::Crashed(_), Reason::NotStarted(_))
                ) {
                    reason = last;
                }
                break;
            }
        }
        reason
    }

    /// One round: deadlines, `poll`, and all that it found.
    fn turn(&mut self) -> Result<(), Reason> {
        self.keep_deadlines(now_ns())?;
        self.send_to_machine()?;
        self.send_to_agent();
        let ready = self
            .wait()
            .map_err(|source| supervisor_failed(&format!("it could not wait: {source}")))?;
        self.take_requests()?;
        if ready.agent {
            self.take_from_agent()?;
        }
        if ready.stderr {
            self.process.read_stderr();
        }
        if ready.machine || ready.process {
            self.take_from_machine()?;
        }
        if ready.process {
            return Err(self.process_is_gone());
        }
        self.discard(&ready.discarded);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
