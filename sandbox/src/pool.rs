//! Machines that were made before anybody asked for one.

use std::collections::VecDeque;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::builder::SandboxBuilder;
use crate::clock::now_ns;
use crate::error::StartError;
use crate::sandbox::Sandbox;
use crate::template::Template;

/// Machines that wait in a pool unless told otherwise.
const DEFAULT_READY: usize = 2;

/// Machines that a pool has in all unless told otherwise, for each that waits.
const DEFAULT_CEILING_PER_READY: usize = 8;

/// The options of each fork: what is done to its builder.
type Options = Box<dyn Fn(SandboxBuilder) -> SandboxBuilder + Send + Sync>;

/// Why there is no machine of a pool.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// As many machines are in use as there may be.
    #[error("All {ceiling} machines of the pool are in use: give one back, or raise its ceiling")]
    Full {
        /// How many there may be.
        ceiling: usize,
    },
    /// The next machine could not be made.
    #[error("The pool's next machine did not start")]
    Start(#[source] StartError),
    /// The numbers make no pool.
    #[error(
        "A pool of {ready} waiting machines and {ceiling} in all is none: 1 or more wait, and as many as that or more are in all"
    )]
    Size {
        /// How many are to wait.
        ready: usize,
        /// How many there may be.
        ceiling: usize,
    },
}

/// What a pool is made of; all but the template has defaults.
pub struct PoolBuilder {
    template: Template,
    ready: usize,
    ceiling: Option<usize>,
    timeout: Option<Duration>,
    options: Options,
}

impl std::fmt::Debug for PoolBuilder {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("PoolBuilder")
            .field("ready", &self.ready)
            .field("ceiling", &self.ceiling)
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}

impl PoolBuilder {
    /// How many machines shall wait. Default: 2.
    #[must_use]
    pub fn ready(mut self, count: usize) -> Self {
        self.ready = count;
        self
    }

    /// The most machines that there are at any time, waiting, being made and in use. Default: 8 times as many as wait.
    #[must_use]
    pub fn ceiling(mut self, count: usize) -> Self {
        self.ceiling = Some(count);
        self
    }

    /// The time of each machine, counted from [`Pool::take`]. Default: `None`, no end.
    #[must_use]
    pub fn timeout(mut self, timeout: Option<Duration>) -> Self {
        self.timeout = timeout;
        self
    }

    /// Other options of each fork: a host name, a part of the cell. A time that is set here does not count.
    #[must_use]
    pub fn options(
        mut self,
        options: impl Fn(SandboxBuilder) -> SandboxBuilder + Send + Sync + 'static,
    ) -> Self {
        self.options = Box::new(options);
        self
    }

    /// Makes the pool, which begins to fill itself.
    ///
    /// # Errors
    /// [`PoolError::Size`], and [`PoolError::Start`] where the system gives no thread.
    pub fn build(self) -> Result<Pool, PoolError> {
        let ready = self.ready;
        let ceiling = self
            .ceiling
            .unwrap_or_else(|| ready.saturating_mul(DEFAULT_CEILING_PER_READY));
        if ready == 0 || ceiling < ready {
            return Err(PoolError::Size { ready, ceiling });
        }
        let shelf = Arc::new(Shelf {
            ready,
            ceiling,
            timeout: self.timeout,
            stock: Mutex::default(),
            changed: Condvar::new(),
        });
        let filled = Arc::clone(&shelf);
        let (template, options) = (self.template, self.options);
        let thread = thread::Builder::new()
            .name("sandvmm-pool".to_owned())
            .spawn(move || filled.keep_filled(|| options(template.sandbox()).timeout(None).start()))
            .map_err(|source| {
                PoolError::Start(StartError::System {
                    action: "Starting a thread",
                    source: jailer::name_limit(source),
                })
            })?;
        Ok(Pool {
            shelf,
            thread: Some(thread),
        })
    }
}

/// Forks of one template that were restored before anybody asked, and wait, ready for commands. Taking one has another made in the
/// background.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// sandvmm::init();
/// let template = sandvmm::Template::open("default")?;
/// let pool = sandvmm::Pool::builder(&template).ready(4).ceiling(64).build()?;
/// let sandbox = pool.take()?;
/// let output = sandbox.command("python3").args(["-c", "print(6 * 7)"]).output()?;
/// assert_eq!(output.stdout, b"42\n");
/// # Ok(()) }
/// ```
///
/// Dropping the pool ends those that wait; those that were taken go on.
#[derive(Debug)]
pub struct Pool {
    shelf: Arc<Shelf>,
    thread: Option<JoinHandle<()>>,
}

impl Pool {
    /// What a pool of this template's forks is made of.
    #[must_use]
    pub fn builder(template: &Template) -> PoolBuilder {
        PoolBuilder {
            template: template.clone(),
            ready: DEFAULT_READY,
            ceiling: None,
            timeout: None,
            options: Box::new(|builder| builder),
        }
    }

    /// Takes a machine that waits; where none does, the next that is made. Its clocks and its time begin now. Where all that there may
    /// be are in use, it does not wait.
    ///
    /// # Errors
    /// See [`PoolError`]; a failed start is told once, and the next call has it tried again.
    pub fn take(&self) -> Result<Pooled, PoolError> {
        self.shelf.take(Duration::ZERO)
    }

    /// As [`Self::take`], but waits until one of those in use was given back, for so long.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub fn take_within(&self, limit: Duration) -> Result<Pooled, PoolError> {
        self.shelf.take(limit)
    }

    /// How many wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.shelf.lock().waiting.len()
    }

    /// Waits until as many machines wait as shall, or as the ceiling leaves room for.
    ///
    /// # Errors
    /// [`PoolError::Start`].
    pub fn wait_filled(&self) -> Result<(), PoolError> {
        let mut stock = self.shelf.lock();
        loop {
            if let Some(error) = stock.failure.take() {
                self.shelf.changed.notify_all();
                return Err(PoolError::Start(error));
            }
            if self.shelf.is_full(&stock) && !stock.is_making {
                return Ok(());
            }
            stock = self.shelf.wait(stock);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shelf.lock().is_over = true;
        self.shelf.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic there has left no machine that waits.
            let _ = thread.join();
        }
        let waiting = std::mem::take(&mut self.shelf.lock().waiting);
        drop(waiting);
    }
}

/// A machine of a pool. Dropping it ends it, and makes room for another.
#[derive(Debug)]
pub struct Pooled {
    // First, so that it is gone when there is room.
    sandbox: Sandbox,
    _place: Place,
}

impl Deref for Pooled {
    type Target = Sandbox;

    fn deref(&self) -> &Sandbox {
        &self.sandbox
    }
}

/// The place of a machine among those that there may be.
#[derive(Debug)]
struct Place(Arc<Shelf>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.lock().in_use -= 1;
        self.0.changed.notify_all();
    }
}

/// What the pool, its thread and its machines share.
#[derive(Debug)]
struct Shelf {
    ready: usize,
    ceiling: usize,
    timeout: Option<Duration>,
    stock: Mutex<Stock>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Stock {
    waiting: VecDeque<Sandbox>,
    in_use: usize,
    is_making: bool,
    /// Why the last one was not made, until somebody was told.
    failure: Option<StartError>,
    is_over: bool,
}

impl Shelf {
    fn lock(&self) -> MutexGuard<'_, Stock> {
        self.stock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, stock: MutexGuard<'a, Stock>) -> MutexGuard<'a, Stock> {
        self.changed
            .wait(stock)
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether no more are to be made now, beside the one that may just be.
    fn is_full(&self, stock: &Stock) -> bool {
        let waiting = stock.waiting.len();
        waiting >= self.ready || waiting + stock.in_use >= self.ceiling
    }

    /// Makes machines one after another until the pool is over.
    fn keep_filled(&self, make: impl Fn() -> Result<Sandbox, StartError>) {
        loop {
            let mut stock = self.lock();
            while !stock.is_over && (self.is_full(&stock) || stock.failure.is_some()) {
                stock = self.wait(stock);
            }
            if stock.is_over {
                return;
            }
            stock.is_making = true;
            drop(stock);
            // A panic in the application's options is told as a failure, once for each try as any other.
            let made = catch_unwind(AssertUnwindSafe(&make)).unwrap_or_else(|_| {
                Err(StartError::InvalidOption {
                    sentence: "The options of the pool's machines panicked".to_owned(),
                })
            });
            let mut stock = self.lock();
            stock.is_making = false;
            match made {
                Ok(sandbox) => stock.waiting.push_back(sandbox),
                Err(error) => stock.failure = Some(error),
            }
            drop(stock);
            self.changed.notify_all();
        }
    }

    fn take(self: &Arc<Self>, limit: Duration) -> Result<Pooled, PoolError> {
        let called_ns = now_ns();
        // A limit beyond what the clock can count is none.
        let deadline = Instant::now().checked_add(limit);
        let mut stock = self.lock();
        loop {
            if let Some(sandbox) = stock.waiting.pop_front() {
                stock.in_use += 1;
                drop(stock);
                self.changed.notify_all();
                let pooled = Pooled {
                    sandbox,
                    _place: Place(Arc::clone(self)),
                };
                if pooled.sandbox.shared().begin_anew(called_ns, self.timeout) {
                    return Ok(pooled);
                }
                // It has ended while it waited.
                drop(pooled);
                stock = self.lock();
                continue;
            }
            if let Some(error) = stock.failure.take() {
                self.changed.notify_all();
                return Err(PoolError::Start(error));
            }
            if stock.in_use < self.ceiling {
                stock = self.wait(stock);
                continue;
            }
            let left = match deadline {
                Some(at) => at.saturating_duration_since(Instant::now()),
                None => limit,
            };
            if left.is_zero() {
                return Err(PoolError::Full {
                    ceiling: self.ceiling,
                });
            }
            stock = self
                .changed
                .wait_timeout(stock, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shelf(ready: usize, ceiling: usize) -> Arc<Shelf> {
        Arc::new(Shelf {
            ready,
            ceiling,
            timeout: None,
            stock: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    fn no_machine() -> Result<Sandbox, StartError> {
        Err(StartError::InvalidOption {
            sentence: "None".to_owned(),
        })
    }

    #[test]
    fn a_failure_is_told_once_for_each_try_and_nothing_is_tried_in_between() {
        let shelf = shelf(1, 1);
        let tries = std::sync::atomic::AtomicUsize::new(0);
        thread::scope(|scope| {
            scope.spawn(|| {
                shelf.keep_filled(|| {
                    tries.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                    no_machine()
                });
            });
            for _ in 0..3 {
                let error = shelf.take(Duration::ZERO).unwrap_err();
                assert!(matches!(error, PoolError::Start(_)), "{error:?}");
            }
            shelf.lock().is_over = true;
            shelf.changed.notify_all();
        });
        assert!((3..=4).contains(&tries.into_inner()));
    }

    #[test]
    fn options_that_panic_are_a_failure_that_every_taker_is_told() {
        let shelf = shelf(1, 1);
        let takers: Vec<_> = (0..3)
            .map(|_| {
                let shelf = Arc::clone(&shelf);
                let (told, tell) = std::sync::mpsc::channel();
                thread::spawn(move || told.send(shelf.take(Duration::ZERO).map(drop)));
                tell
            })
            .collect();
        let filled = Arc::clone(&shelf);
        let filler = thread::spawn(move || filled.keep_filled(|| panic!("in the options")));

        for taker in takers {
            let error = taker.recv_timeout(Duration::from_secs(20)).unwrap();
            let PoolError::Start(error) = error.unwrap_err() else {
                panic!("a failed start");
            };
            assert!(error.to_string().contains("options"), "{error}");
        }
        shelf.lock().is_over = true;
        shelf.changed.notify_all();
        filler.join().unwrap();
    }

    #[test]
    fn where_all_are_in_use_a_caller_waits_as_long_as_it_likes_and_a_place_is_given_back() {
        let shelf = shelf(1, 1);
        shelf.lock().in_use = 1;
        let place = Place(Arc::clone(&shelf));
        let begun = Instant::now();

        let error = shelf.take(Duration::from_millis(20)).unwrap_err();

        assert!(matches!(error, PoolError::Full { ceiling: 1 }), "{error:?}");
        assert!(begun.elapsed() >= Duration::from_millis(20));
        drop(place);
        assert_eq!(shelf.lock().in_use, 0);
    }

    #[test]
    fn a_pool_makes_no_more_than_shall_wait_or_may_be() {
        let shelf = shelf(2, 3);
        let is_full = |in_use| {
            let mut stock = shelf.lock();
            stock.in_use = in_use;
            shelf.is_full(&stock)
        };
        assert!(!is_full(0) && !is_full(2));
        assert!(is_full(3));
    }
}
