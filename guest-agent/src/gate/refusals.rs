//! What is told of attempts that were refused here: one by one as long as they are few, and how many there were.

use std::mem;
use std::net::SocketAddr;
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::lock;

/// Refusals of one address and port within this time are told once: clients try again.
const REPEAT_PERIOD: Duration = Duration::from_secs(1);

/// Refusals within this time that are told one by one; further ones are counted.
const MAX_TOLD: usize = 50;

/// How long those that were counted are kept, for one word on all of them.
const COUNT_PERIOD: Duration = Duration::from_millis(100);

/// Something that was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Trial {
    pub(super) kind: Kind,
    /// Where to, as the program has it.
    pub(super) to: SocketAddr,
}

/// By whom it was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A connection, by the kernel: nothing listens.
    Connection,
    /// A datagram, by the kernel.
    Datagram,
    /// A connection that the gate has taken and has no room for.
    Taken,
}

/// Those of a guest, of all kinds together.
#[derive(Debug, Default)]
pub(super) struct Refusals {
    state: Mutex<State>,
    has_counted: Condvar,
}

#[derive(Debug, Default)]
struct State {
    told: Vec<(Trial, Instant)>,
    /// The last one that was not told, if there is one, and how many.
    counted: Option<(Trial, u32)>,
}

impl Refusals {
    /// If this one is to be told, with how many others that were not; else it is counted.
    pub(super) fn take(&self, trial: Trial, now: Instant) -> Option<u32> {
        let mut state = lock(&self.state);
        state
            .told
            .retain(|(_, at)| now.saturating_duration_since(*at) < REPEAT_PERIOD);
        let is_known = state.told.iter().any(|(told, _)| *told == trial);
        if is_known || state.told.len() >= MAX_TOLD {
            let count = state.counted.map_or(0, |(_, count)| count);
            state.counted = Some((trial, count.saturating_add(1)));
            drop(state);
            self.has_counted.notify_one();
            return None;
        }
        state.told.push((trial, now));
        let counted = mem::take(&mut state.counted);
        Some(counted.map_or(0, |(_, count)| count))
    }

    /// Waits until some were counted that nothing has told of: the last of them, and how many others there are.
    pub(super) fn wait(&self) -> (Trial, u32) {
        loop {
            let state = lock(&self.state);
            let waited = self
                .has_counted
                .wait_while(state, |state| state.counted.is_none());
            drop(waited.unwrap_or_else(PoisonError::into_inner));
            thread::sleep(COUNT_PERIOD);
            // A word on another one may have told of them meanwhile.
            if let Some((trial, count)) = mem::take(&mut lock(&self.state).counted) {
                return (trial, count.saturating_sub(1));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trial(port: u16) -> Trial {
        Trial {
            kind: Kind::Connection,
            to: SocketAddr::new([1, 1, 1, 1].into(), port),
        }
    }

    #[test]
    fn what_repeats_is_told_once_in_a_while_and_counted() {
        let (refusals, now) = (Refusals::default(), Instant::now());
        assert_eq!(refusals.take(trial(443), now), Some(0));
        assert_eq!(refusals.take(trial(443), now), None);
        assert_eq!(refusals.take(trial(443), now), None);
        let datagram = Trial {
            kind: Kind::Datagram,
            ..trial(443)
        };
        assert_eq!(refusals.take(datagram, now), Some(2));
        assert_eq!(refusals.take(trial(443), now + REPEAT_PERIOD), Some(0));
    }

    #[test]
    fn a_flood_is_told_of_within_its_bound_and_each_of_it_is_counted_once() {
        let (refusals, mut now) = (Refusals::default(), Instant::now());
        let (mut told, mut total) = (0, 0);
        let mut take = |now| {
            for port in 0..1000 {
                if let Some(others) = refusals.take(trial(port), now) {
                    told += 1;
                    total += 1 + others;
                }
            }
        };
        take(now);
        now += REPEAT_PERIOD;
        take(now);
        let (last, others) = refusals.wait();

        assert_eq!(last, trial(999));
        assert_eq!(total + 1 + others, 2000);
        assert_eq!(told, 2 * MAX_TOLD);
    }

    #[test]
    fn those_that_were_counted_are_waited_for() {
        let refusals = Refusals::default();
        let (last, others) = thread::scope(|scope| {
            let waiting = scope.spawn(|| refusals.wait());
            for _ in 0..4 {
                refusals.take(trial(80), Instant::now());
            }
            waiting.join().unwrap()
        });
        assert_eq!((last, others), (trial(80), 2));
    }
}
