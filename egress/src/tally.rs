//! What became of a sandbox's attempts: each is told, as long as they are few, and all are counted.

use std::fmt;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::audit::{Record, Verdict};

/// Is told of each attempt, on the thread of its connection.
pub type Sink = dyn Fn(&Record) + Send + Sync;

/// Records of attempts above the rate: one in this time, the rest is counted.
const SUPPRESSED_PERIOD: Duration = Duration::from_secs(1);

/// What has left so far. The guest's own side says how many it has refused, so that these counts are the guest's word too.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Totals {
    /// Attempts that were carried and are over.
    pub allowed: u64,
    /// Attempts that were denied, those above a bound included.
    pub denied: u64,
    /// Attempts that the network failed.
    pub failed: u64,
    /// Of those that were denied, how many have no record of their own: there were too many at once.
    pub unrecorded: u64,
    /// Bytes to servers.
    pub bytes_out: u64,
    /// Bytes from servers.
    pub bytes_in: u64,
}

/// One sandbox's.
pub(crate) struct Tally {
    per_second: f64,
    sink: Option<Arc<Sink>>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    totals: Totals,
    /// Attempts that may be told now: a bucket that fills with time.
    room: f64,
    filled_at: Instant,
    /// When an attempt above the rate was last told of.
    suppressed_at: Option<Instant>,
    /// Those that were counted since the last record.
    counted: u64,
    /// The last of them, if it is known where to it was.
    last: Option<Record>,
}

impl fmt::Debug for Tally {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Tally")
            .field("per_second", &self.per_second)
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

impl Tally {
    /// One of nothing, for so many attempts in a second, over some seconds.
    pub(crate) fn new(attempts_per_second: u32, sink: Option<Arc<Sink>>) -> Self {
        let per_second = f64::from(attempts_per_second);
        Self {
            per_second,
            sink,
            state: Mutex::new(State {
                totals: Totals::default(),
                room: per_second * 2.0,
                filled_at: Instant::now(),
                suppressed_at: None,
                counted: 0,
                last: None,
            }),
        }
    }

    pub(crate) fn totals(&self) -> Totals {
        self.lock().totals
    }

    /// Whether one attempt more is within the rate. If not it is denied: one in [`SUPPRESSED_PERIOD`] is told, the rest is counted.
    pub(crate) fn admits(&self, record: &Record) -> bool {
        let now = Instant::now();
        let mut state = self.lock();
        let passed = now.saturating_duration_since(state.filled_at).as_secs_f64();
        state.filled_at = now;
        state.room = (state.room + passed * self.per_second).min(self.per_second * 2.0);
        if state.room >= 1.0 {
            state.room -= 1.0;
            return true;
        }
        let reason = format!(
            "more than {} attempts a second; further ones are counted and not told",
            self.per_second
        );
        let record = record.clone().because(Verdict::Limited, &reason);
        let is_told = state
            .suppressed_at
            .is_some_and(|at| now.saturating_duration_since(at) < SUPPRESSED_PERIOD);
        if is_told {
            state.count(1);
            state.last = Some(record);
        } else {
            state.suppressed_at = Some(now);
            drop(state);
            self.tell(record);
        }
        false
    }

    /// Counts attempts that are denied and have no record.
    pub(crate) fn count(&self, attempts: u64) {
        self.lock().count(attempts);
    }

    /// Tells of an attempt that is over, and of how many were counted before it.
    pub(crate) fn tell(&self, mut record: Record) {
        {
            let mut state = self.lock();
            let totals = &mut state.totals;
            match record.verdict {
                Verdict::Allowed => totals.allowed += 1,
                Verdict::Denied | Verdict::Limited => {
                    totals.denied = totals.denied.saturating_add(1);
                }
                Verdict::Failed => totals.failed += 1,
            }
            totals.bytes_out += record.bytes_out;
            totals.bytes_in += record.bytes_in;
            record.unrecorded = mem::take(&mut state.counted);
            state.last = None;
        }
        self.send(&record);
    }

    /// Tells of those that were counted since the last record, by the last of them.
    pub(crate) fn tell_rest(&self) {
        let mut state = self.lock();
        let Some(mut record) = state.last.take() else {
            return;
        };
        record.unrecorded = mem::take(&mut state.counted).saturating_sub(1);
        state.totals.unrecorded = state.totals.unrecorded.saturating_sub(1);
        drop(state);
        self.send(&record);
    }

    fn send(&self, record: &Record) {
        if let Some(sink) = &self.sink {
            sink(record);
        }
    }

    /// A panic while it was held has left numbers, each of them whole.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn count(&mut self, attempts: u64) {
        self.counted = self.counted.saturating_add(attempts);
        let totals = &mut self.totals;
        totals.denied = totals.denied.saturating_add(attempts);
        totals.unrecorded = totals.unrecorded.saturating_add(attempts);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;
    use crate::name::HostName;
    use crate::policy::Target;

    /// Attempts that are all denied: how many are told, and how many with those that each record counts.
    fn told(attempts: usize, others: u64) -> (usize, u64, Totals) {
        let (sender, records) = channel();
        let sink = move |record: &Record| sender.send(record.clone()).unwrap();
        let tally = Tally::new(5, Some(Arc::new(sink)));
        for number in 0..attempts {
            let host = HostName::parse(&format!("h{number}.example")).unwrap();
            let record = Record::new("test", &Target::Name(host), 443);
            tally.count(others);
            if tally.admits(&record) {
                tally.tell(record);
            }
        }
        tally.tell_rest();
        tally.tell_rest();
        let records: Vec<Record> = records.try_iter().collect();
        let last = records.last().unwrap();
        assert_eq!(last.host, format!("h{}.example", attempts - 1));
        let all = records.iter().map(|record| 1 + record.unrecorded).sum();
        (records.len(), all, tally.totals())
    }

    #[test]
    fn each_attempt_is_told_or_counted_by_one_that_is() {
        let (records, all, totals) = told(200, 0);
        assert!((12..40).contains(&records), "{records}");
        assert_eq!((all, totals.denied), (200, 200));
        assert_eq!(totals.unrecorded, 200 - records as u64);
    }

    #[test]
    fn what_was_counted_elsewhere_is_told_with_the_next() {
        let (records, all, totals) = told(3, 4);
        assert_eq!((records, all), (3, 15));
        assert_eq!((totals.denied, totals.unrecorded), (15, 12));
        let (_, all, totals) = told(50, u64::from(u32::MAX));
        assert_eq!(all, totals.denied);
    }

    #[test]
    fn counts_stay_at_their_most() {
        let tally = Tally::new(5, None);
        tally.count(u64::MAX);
        tally.count(1);
        assert_eq!(tally.totals().denied, u64::MAX);
        assert_eq!(tally.totals().unrecorded, u64::MAX);
    }
}
