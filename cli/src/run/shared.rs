//! What the main thread, the run and its streams know of each other.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use sandvmm::Sandbox;

use super::functions::Programs;
use super::verdict::Verdict;

/// All of it; clones are the same.
#[derive(Debug, Clone, Default)]
pub(super) struct Shared {
    /// The machine, from the beginning of its start on.
    pub(super) sandbox: Arc<OnceLock<Sandbox>>,
    /// Whether the program has been started: from then on the machine keeps the time.
    pub(super) running: Arc<AtomicBool>,
    /// Why the main thread has ended the run: a signal to sandvmm, or the time.
    pub(super) ended_early: Arc<OnceLock<Verdict>>,
    /// Why the run can't go on at our own side: its input can't be read, its output can't be written.
    pub(super) broken: Arc<OnceLock<Verdict>>,
    /// The programs that serve calls of the host's functions.
    pub(super) programs: Programs,
    /// Whether someone has said, or is about to say, how the run ended.
    announced: Arc<AtomicBool>,
}

impl Shared {
    /// Whether the caller is the first to say how the run ended: it is said once.
    pub(super) fn may_announce(&self) -> bool {
        !self.announced.swap(true, Ordering::SeqCst)
    }

    /// Ends the machine, since our own side can't go on.
    pub(super) fn give_up(&self, verdict: Verdict) {
        // The first reason is the one that counts.
        let _ = self.broken.set(verdict);
        if let Some(sandbox) = self.sandbox.get() {
            sandbox.end();
        }
    }

    pub(super) fn interruption(&self) -> Option<Verdict> {
        self.ended_early.get().cloned()
    }
}
