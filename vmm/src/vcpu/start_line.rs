//! Where the threads of a machine's processors wait for each other before the first of them enters the guest.

use std::sync::{Condvar, Mutex, PoisonError};

/// Passed by all threads together, once each of them is closed in: a guest that has broken out of one processor's thread would find
/// another one, in the same memory, that may still make every system call.
#[derive(Debug)]
pub struct StartLine {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// Threads that are still to come.
    missing: usize,
    /// Whether one has ended before it came, so that nobody passes.
    is_given_up: bool,
}

impl StartLine {
    /// For so many threads.
    #[must_use]
    pub fn new(threads: usize) -> Self {
        Self {
            state: Mutex::new(State {
                missing: threads,
                is_given_up: false,
            }),
            changed: Condvar::new(),
        }
    }

    /// Comes to the line, and waits for the others; false where one of them will not come. Each thread comes once.
    pub(super) fn pass(&self) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.missing = state.missing.saturating_sub(1);
        if state.missing == 0 {
            self.changed.notify_all();
        }
        while state.missing > 0 && !state.is_given_up {
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        state.missing == 0
    }

    /// The thread ends. Those that wait do not wait any longer.
    pub(super) fn give_up(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.is_given_up = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn nobody_passes_before_all_have_come() {
        let line = StartLine::new(3);
        let passed = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    assert!(line.pass());
                    passed.fetch_add(1, Ordering::SeqCst);
                });
            }
            thread::sleep(Duration::from_millis(50));
            assert_eq!(passed.load(Ordering::SeqCst), 0);
            assert!(line.pass());
        });
        assert_eq!(passed.into_inner(), 2);
    }

    #[test]
    fn one_that_ends_lets_nobody_pass_and_nobody_wait() {
        let line = StartLine::new(2);
        thread::scope(|scope| {
            let waits = scope.spawn(|| line.pass());
            line.give_up();
            assert!(!waits.join().unwrap());
        });
        assert!(!{
            let late = StartLine::new(2);
            late.give_up();
            late.pass()
        });
    }

    #[test]
    fn ends_after_the_start_are_nobodys_trouble() {
        let line = StartLine::new(1);
        assert!(line.pass());
        line.give_up();
    }
}
