//! How many streams there may be.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::MAX_SANDBOX_STREAMS;

/// The streams of all of a sandbox's connections.
#[derive(Debug, Default)]
pub(in super::super) struct Places(Arc<AtomicUsize>);

/// A stream's place; dropping it gives it back.
#[derive(Debug)]
pub(super) struct Place(Arc<AtomicUsize>);

impl Places {
    /// One more, if there may be.
    pub(super) fn take(&self) -> Option<Place> {
        let taken = self.0.fetch_add(1, Ordering::Relaxed);
        let place = Place(Arc::clone(&self.0));
        (taken < MAX_SANDBOX_STREAMS).then_some(place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
