//! The share of the host's processors that a machine may have, and how it was held to that.

use std::time::Duration;

use crate::cell::Bounds;

/// The period of `cpu.max` in microseconds, the kernel's default.
pub(crate) const CPU_PERIOD_US: u64 = 100_000;

/// The quota of `cpu.max` for each period, in microseconds.
pub(crate) fn cpu_quota_us(bounds: Bounds, percent: Option<u32>) -> u64 {
    // The main loop's work is for the guest, and no more than that of one processor.
    let all = (u64::from(bounds.vcpus) + 1) * CPU_PERIOD_US;
    percent.map_or(all, |percent| {
        all.min(u64::from(percent) * CPU_PERIOD_US / 100)
    })
}

/// How often, and for how long in all, a machine's control group was kept from running since it had used up its share of the
/// processors (`cpu.stat`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Throttled {
    /// Periods of 100 ms in which the share was used up.
    pub periods: u64,
    /// The time that its threads waited, one beside the other.
    pub time: Duration,
}

impl Throttled {
    /// What came since `before`.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self {
            periods: self.periods.saturating_sub(before.periods),
            time: self.time.saturating_sub(before.time),
        }
    }

    /// From the text of `cpu.stat`.
    pub(crate) fn read(stat: &str) -> Self {
        let value = |key: &str| {
            let mut lines = stat.lines().filter_map(|line| line.split_once(' '));
            let found = lines.find(|(name, _)| *name == key);
            found.and_then(|(_, value)| value.parse().ok())
        };
        Self {
            periods: value("nr_throttled").unwrap_or_default(),
            time: Duration::from_micros(value("throttled_usec").unwrap_or_default()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_may_use_a_processor_more_than_it_has_or_the_share_that_was_asked_for() {
        let bounds = Bounds {
            memory_mib: 256,
            vcpus: 2,
            max_file_bytes: 0,
        };
        for (percent, quota_us) in [
            (None, 300_000),
            (Some(1), 1_000),
            (Some(50), 50_000),
            (Some(250), 250_000),
            (Some(u32::MAX), 300_000),
        ] {
            assert_eq!(cpu_quota_us(bounds, percent), quota_us);
        }
    }

    #[test]
    fn what_a_group_was_kept_from_is_read_from_the_kernels_words() {
        let stat = "usage_usec 5\nnr_periods 9\nnr_throttled 3\nthrottled_usec 1500\nnr_bursts 0\n";

        let throttled = Throttled::read(stat);

        let time = Duration::from_micros(1500);
        assert_eq!(throttled, Throttled { periods: 3, time });
        assert_eq!(throttled.since(throttled), Throttled::default());
        assert_eq!(Throttled::read("usage_usec 5\n"), Throttled::default());
    }
}
