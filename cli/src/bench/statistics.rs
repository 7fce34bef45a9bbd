//! Percentiles of a few durations.

use std::time::Duration;

use serde::Serialize;

/// Fewest samples that have a 99th percentile: with fewer it is the largest.
const MIN_P99_SAMPLES: usize = 100;

/// What is said about many durations, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Summary {
    /// Smallest.
    pub(crate) min: u64,
    /// Median.
    pub(crate) p50: u64,
    /// 95th percentile.
    pub(crate) p95: u64,
    /// 99th percentile; none with fewer than 100 samples.
    pub(crate) p99: Option<u64>,
    /// Largest.
    pub(crate) max: u64,
}

impl Summary {
    /// Sums up; `None` without samples. Percentiles are nearest ranks: each is one of the samples.
    pub(crate) fn of(samples: &[Duration]) -> Option<Self> {
        let mut sorted: Vec<u64> = samples
            .iter()
            .map(|sample| u64::try_from(sample.as_micros()).unwrap_or(u64::MAX))
            .collect();
        sorted.sort_unstable();
        let percentile = |percent: usize| {
            let rank = (sorted.len() * percent).div_ceil(100).max(1);
            sorted.get(rank - 1).copied()
        };
        Some(Self {
            min: *sorted.first()?,
            p50: percentile(50)?,
            p95: percentile(95)?,
            p99: percentile(99).filter(|_| sorted.len() >= MIN_P99_SAMPLES),
            max: *sorted.last()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn micros(values: impl IntoIterator<Item = u64>) -> Vec<Duration> {
        values.into_iter().map(Duration::from_micros).collect()
    }

    #[test]
    fn percentiles_are_nearest_ranks() {
        let summary = Summary::of(&micros((1..=100).rev())).unwrap();

        assert_eq!(
            summary,
            Summary {
                min: 1,
                p50: 50,
                p95: 95,
                p99: Some(99),
                max: 100
            }
        );
    }

    #[test]
    fn there_is_no_p99_of_few_samples_and_nothing_of_none() {
        let summary = Summary::of(&micros(1..=99)).unwrap();

        assert_eq!(summary.p99, None);
        assert_eq!(Summary::of(&[]), None);
        assert_eq!(Summary::of(&micros([7])).unwrap().p50, 7);
    }

    proptest! {
        #[test]
        fn the_figures_are_in_order(values in proptest::collection::vec(any::<u32>(), 1..300)) {
            let summary = Summary::of(&micros(values.into_iter().map(u64::from))).unwrap();
            prop_assert!(summary.min <= summary.p50 && summary.p50 <= summary.p95);
            let p99 = summary.p99.unwrap_or(summary.p95);
            prop_assert!(summary.p95 <= p99 && p99 <= summary.max);
        }
    }
}
