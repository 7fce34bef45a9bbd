//! The clocks of a user's wait. All of them are `CLOCK_MONOTONIC` and count from the user's call.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// When the phases of a sandbox's life were reached, counted from the user's call: from
/// [`crate::SandboxBuilder::called_at`], else from [`crate::SandboxBuilder::start`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Clocks {
    /// The `main` of the machine's process began.
    pub process_started: Option<Duration>,
    /// The first vCPU entered the guest.
    pub vcpu_running: Option<Duration>,
    /// The first program in the guest began. As the guest says, but never before `vcpu_running` nor
    /// after `agent_ready`.
    pub guest_init: Option<Duration>,
    /// The agent was ready to take commands.
    pub agent_ready: Option<Duration>,
    /// A command ran for the first time.
    pub command_started: Option<Duration>,
    /// The first byte of any command's output was read.
    pub first_output: Option<Duration>,
    /// The last command that ended did so.
    pub exited: Option<Duration>,
    /// The machine's process was reaped.
    pub all_gone: Option<Duration>,
}

/// When a command's phases were reached, counted as in [`Clocks`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CommandClocks {
    /// The guest said that the command runs.
    pub started: Option<Duration>,
    /// The first byte of its output was read; `None` while none was.
    pub first_output: Option<Duration>,
    /// The guest said that it ended.
    pub exited: Option<Duration>,
}

/// When the first byte of output was read, shared between the streams that may read it.
#[derive(Debug, Default)]
pub(crate) struct FirstOutput {
    /// Nanoseconds of `CLOCK_MONOTONIC`; 0 while nothing was read.
    at_ns: AtomicU64,
    /// The clock of the whole sandbox, recorded along.
    whole: Option<Arc<FirstOutput>>,
}

impl FirstOutput {
    /// A command's clock that records the sandbox's along.
    pub(crate) fn of_command(sandbox: &Arc<Self>) -> Self {
        Self {
            at_ns: AtomicU64::new(0),
            whole: Some(Arc::clone(sandbox)),
        }
    }

    /// Output was read just now. Only the first call counts.
    pub(crate) fn record(&self) {
        if self.at_ns().is_none() {
            let now_ns = now_ns();
            self.record_at(now_ns);
            if let Some(whole) = &self.whole {
                whole.record_at(now_ns);
            }
        }
    }

    fn record_at(&self, now_ns: u64) {
        let _ = self
            .at_ns
            .compare_exchange(0, now_ns, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// When, in nanoseconds of `CLOCK_MONOTONIC`.
    pub(crate) fn at_ns(&self) -> Option<u64> {
        Some(self.at_ns.load(Ordering::Relaxed)).filter(|at_ns| *at_ns != 0)
    }
}

/// Now, in nanoseconds of `CLOCK_MONOTONIC`.
pub(crate) fn now_ns() -> u64 {
    timespec_ns(clock_gettime(ClockId::Monotonic))
}

/// Now, in nanoseconds since the Unix epoch.
pub(crate) fn realtime_ns() -> u64 {
    timespec_ns(clock_gettime(ClockId::Realtime))
}

/// An earlier instant, in nanoseconds of `CLOCK_MONOTONIC`; one in the future counts as now.
pub(crate) fn instant_ns(instant: Instant) -> u64 {
    now_ns().saturating_sub(nanos(instant.elapsed()))
}

/// A duration in nanoseconds; one above 584 years counts as that.
pub(crate) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// When the guest's first program began, on the host's clock.
///
/// The guest's clock says only how long before its greeting that was, and it may say anything: the result
/// stays between the entry of the first vCPU and the greeting's arrival.
pub(crate) fn guest_init_ns(
    hello_received_ns: u64,
    vcpu_running_ns: u64,
    hello: &protocol::message::Hello,
) -> u64 {
    let agents_share_ns = hello.sent_ns.saturating_sub(hello.init_started_ns);
    hello_received_ns
        .saturating_sub(agents_share_ns)
        .max(vcpu_running_ns.min(hello_received_ns))
}

fn timespec_ns(time: rustix::time::Timespec) -> u64 {
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let nanoseconds = u64::try_from(time.tv_nsec).unwrap_or(0);
    seconds
        .saturating_mul(1_000_000_000)
        .saturating_add(nanoseconds)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use protocol::message::Hello;

    use super::*;

    fn hello(init_started_ns: u64, sent_ns: u64) -> Hello {
        Hello {
            version: protocol::VERSION,
            init_started_ns,
            sent_ns,
        }
    }

    #[test]
    fn guest_init_is_the_agents_share_before_its_greeting() {
        assert_eq!(guest_init_ns(1_000, 100, &hello(40, 340)), 700);
    }

    #[test]
    fn an_instant_of_the_past_is_as_far_back_in_nanoseconds() {
        let earlier = Instant::now();
        std::thread::sleep(Duration::from_millis(5));

        let ago_ns = now_ns() - instant_ns(earlier);

        assert!((5_000_000..5_000_000_000).contains(&ago_ns), "{ago_ns}");
    }

    proptest! {
        #[test]
        fn whatever_a_guest_says_its_start_stays_between_its_bounds(
            received in any::<u64>(), running in any::<u64>(), started in any::<u64>(), sent in any::<u64>(),
        ) {
            let init = guest_init_ns(received, running, &hello(started, sent));
            prop_assert!(init <= received);
            prop_assert!(init >= running.min(received));
        }
    }
}
