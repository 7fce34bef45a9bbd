//! Runs the streams of one connection on the connection's own thread: each is polled when something has woken it, or when the time has
//! come that it waits for. No runtime is needed: sockets are waited for by whoever calls.

use std::cell::Cell;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Instant;

/// Whether something was woken.
#[derive(Debug, Default)]
pub(super) struct Flag(AtomicBool);

impl Flag {
    pub(super) fn set(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether it was set; it is not any more.
    pub(super) fn take(&self) -> bool {
        self.0.swap(false, Ordering::AcqRel)
    }
}

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.set();
    }
}

/// When a task wants to be polled though nothing has woken it.
#[derive(Debug, Clone, Default)]
pub(super) struct Timer(Rc<Cell<Option<Instant>>>);

impl Timer {
    pub(super) fn set(&self, at: Option<Instant>) {
        self.0.set(at);
    }

    pub(super) fn at(&self) -> Option<Instant> {
        self.0.get()
    }
}

/// What is run.
pub(super) trait Task {
    /// What comes of it.
    type Output;

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Self::Output>;

    fn timer(&self) -> &Timer;
}

/// Tasks that are not over.
#[derive(Debug)]
pub(super) struct Tasks<T>(Vec<(Pin<Box<T>>, Arc<Flag>)>);

impl<T> Default for Tasks<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T: Task + Unpin> Tasks<T> {
    /// One more, which is polled in the next run.
    pub(super) fn add(&mut self, task: T) {
        let flag = Arc::new(Flag::default());
        flag.set();
        self.0.push((Box::pin(task), flag));
    }

    /// Polls those that were woken, each once, and appends to `over` what has come of some; whether there were any.
    pub(super) fn run(&mut self, over: &mut Vec<T::Output>) -> bool {
        let now = Instant::now();
        let mut has_run = false;
        self.0.retain_mut(|(task, flag)| {
            let is_due = task.timer().at().is_some_and(|at| at <= now);
            if !flag.take() && !is_due {
                return true;
            }
            has_run = true;
            let waker = Waker::from(Arc::clone(flag));
            match task.poll(&mut Context::from_waker(&waker)) {
                Poll::Pending => true,
                Poll::Ready(output) => {
                    over.push(output);
                    false
                }
            }
        });
        has_run
    }

    /// When the first of them wants to be polled in any case.
    pub(super) fn next_at(&self) -> Option<Instant> {
        self.0
            .iter()
            .filter_map(|(task, _)| task.timer().at())
            .min()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}
