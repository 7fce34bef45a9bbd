//! The deadlines that a supervisor keeps: the start's, the sandbox's own, that of its processor time, and what follows when one has
//! passed.

use std::sync::Arc;
use std::time::Duration;

use protocol::message::ToAgent;

use super::cpu_time::CpuTime;
use super::{Reason, Supervisor};
use crate::clock::nanos;
use crate::crash::{Crash, CrashKind};
use crate::event::EventKind;
use crate::limit::Limit;
use crate::shared::frame_of;
use crate::state::{Phase, State};

/// How long a boot may take, or less where the sandbox's own time is over before: a second on metal, some
/// tens where the processor is emulated and shared.
pub(super) const BOOT_LIMIT: Duration = Duration::from_secs(120);

/// How long the agent has, after the sandbox's time is over, to kill what runs and to send its last output.
/// Then the machine is killed: whatever the guest does, it does not live longer.
pub(super) const CLOSING_GRACE: Duration = Duration::from_secs(1);

impl Supervisor {
    pub(super) fn keep_deadlines(&mut self, now_ns: u64) -> Result<(), Reason> {
        let passed = |deadline_ns: Option<u64>| deadline_ns.is_some_and(|at| at <= now_ns);
        if passed(self.agent_end_deadline_ns) {
            return Err(Reason::Crashed(Crash::new(
                CrashKind::AgentGone,
                "The agent closed its control stream".to_owned(),
            )));
        }
        let cpu_time_is_over = self
            .cpu_time
            .as_mut()
            .is_some_and(|cpu_time| cpu_time.is_over(now_ns));
        let (boot_end_ns, boot_limit) = self.boot_end();
        let shared = Arc::clone(&self.shared);
        let mut state = shared.lock();
        match (&state.phase, self.deadline) {
            (Phase::Booting, _) if cpu_time_is_over => Err(Reason::CpuTimeIsOver),
            (Phase::Booting, _) if boot_end_ns <= now_ns => Err(Reason::TimeIsOver(boot_limit)),
            (Phase::Ready, Some((at_ns, limit))) if at_ns <= now_ns => self.begin_closing(
                &mut state,
                at_ns,
                Limit::WallTime,
                Reason::TimeIsOver(limit),
            ),
            (Phase::Ready, _) if cpu_time_is_over => {
                self.begin_closing(&mut state, now_ns, Limit::CpuTime, Reason::CpuTimeIsOver)
            }
            (Phase::Closing(Limit::CpuTime), _) if passed(self.closing_deadline_ns) => {
                Err(Reason::CpuTimeIsOver)
            }
            (Phase::Closing(_), Some((_, limit))) if passed(self.closing_deadline_ns) => {
                Err(Reason::TimeIsOver(limit))
            }
            _ => Ok(()),
        }
    }

    /// When a boot has to be done, and how long it had: [`BOOT_LIMIT`], or the sandbox's own time where that is over before.
    fn boot_end(&self) -> (u64, Duration) {
        self.deadline
            .filter(|(at_ns, _)| *at_ns <= self.boot_deadline_ns)
            .unwrap_or((self.boot_deadline_ns, BOOT_LIMIT))
    }

    /// The time is over, or a ceiling was met: all that runs is killed, and the machine a grace later.
    fn begin_closing(
        &mut self,
        state: &mut State,
        deadline_ns: u64,
        limit: Limit,
        reason: Reason,
    ) -> Result<(), Reason> {
        let command = None;
        self.shared
            .events
            .emit(EventKind::LimitHit { limit, command });
        let live = state.live_commands();
        if live.is_empty() {
            return Err(reason);
        }
        state.phase = Phase::Closing(limit);
        self.closing_deadline_ns = Some(deadline_ns.saturating_add(nanos(CLOSING_GRACE)));
        for command_id in live {
            if let (Some(agent), Some(frame)) =
                (&mut self.agent, frame_of(&ToAgent::Kill { command_id }))
            {
                state.queued_to_agent_bytes += frame.len();
                agent.queue(&frame);
            }
        }
        Ok(())
    }

    pub(super) fn next_deadline_ns(&self) -> Option<u64> {
        let phase_deadline_ns = match self.shared.lock().phase {
            Phase::Booting => Some(self.boot_end().0),
            Phase::Ready => self.deadline.map(|(at_ns, _)| at_ns),
            Phase::Closing(_) | Phase::Over(_) => self.closing_deadline_ns,
        };
        let cpu_time_look_ns = self.cpu_time.as_ref().map(CpuTime::next_look_ns);
        [
            phase_deadline_ns,
            self.agent_end_deadline_ns,
            cpu_time_look_ns,
        ]
        .into_iter()
        .flatten()
        .min()
    }
}
