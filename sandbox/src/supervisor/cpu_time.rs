//! The processor time of a machine's process: its guest's and that of serving it.

use std::time::Duration;

use crate::clock::nanos;

/// Ticks of `/proc/PID/stat` in a second (`USER_HZ`, 100 on x86-64).
const TICKS_PER_S: u64 = 100;

/// Shortest wait between two looks.
const MIN_LOOK_NS: u64 = 20_000_000;

/// Where the fields behind the process's name begin: the third, its state. User and system time are the 14th and 15th
/// (proc_pid_stat(5)).
const USER_TIME: usize = 14 - 3;

/// A bound, and when it is looked at next: not before it can have been met.
#[derive(Debug)]
pub(super) struct CpuTime {
    pid: u32,
    limit: Duration,
    threads: u32,
    next_look_ns: u64,
}

impl CpuTime {
    /// At most `limit` for the process, of which `threads` threads run at one time.
    pub(super) fn new(pid: u32, limit: Duration, threads: u32) -> Self {
        Self {
            pid,
            limit,
            threads: threads.max(1),
            next_look_ns: 0,
        }
    }

    pub(super) fn next_look_ns(&self) -> u64 {
        self.next_look_ns
    }

    /// Whether it is used up, as far as that is known now.
    pub(super) fn is_over(&mut self, now_ns: u64) -> bool {
        if now_ns < self.next_look_ns {
            return false;
        }
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid));
        // A process that is gone uses nothing more, and is seen to be gone elsewhere.
        let used = stat.ok().and_then(|stat| used(&stat)).unwrap_or_default();
        let left = self.limit.saturating_sub(used);
        let wait_ns = nanos(left / self.threads).max(MIN_LOOK_NS);
        self.next_look_ns = now_ns.saturating_add(wait_ns);
        left.is_zero()
    }
}

fn used(stat: &str) -> Option<Duration> {
    // The name may have blanks and brackets in it.
    let (_, fields) = stat.rsplit_once(')')?;
    let mut times = fields.split_whitespace().skip(USER_TIME);
    let (user, system): (u64, u64) = (times.next()?.parse().ok()?, times.next()?.parse().ok()?);
    let ticks = user.saturating_add(system);
    Some(Duration::from_millis(
        ticks.saturating_mul(1000 / TICKS_PER_S),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_found_behind_any_name() {
        let stat = "12 (a) b) (c) S 1 2 3 4 5 6 7 8 9 10 150 25 0 0 20";
        assert_eq!(used(stat), Some(Duration::from_millis(1750)));
        assert_eq!(used("12 (a) S 1"), None);
        assert_eq!(used(""), None);
    }

    #[test]
    fn a_process_that_works_is_over_in_time_and_one_that_is_gone_is_not() {
        let mut own = CpuTime::new(std::process::id(), Duration::from_millis(1), 1);
        let start = std::time::Instant::now();
        // Ten ticks at least.
        while start.elapsed() < Duration::from_millis(100) {}
        assert!(own.is_over(1));
        let mut gone = CpuTime::new(u32::MAX, Duration::from_secs(1), 4);
        assert!(!gone.is_over(1));
        assert_eq!(gone.next_look_ns(), 250_000_001);
        assert!(
            !own.is_over(2),
            "it is looked at no sooner than its next look"
        );
    }
}
