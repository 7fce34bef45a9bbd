//! What goes through a command's streams: when it began, how much it was, and when it is too much.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use crate::clock::FirstOutput;
use crate::limit::Limit;
use crate::shared::Shared;

/// Shared by the streams of one command.
#[derive(Debug)]
pub(crate) struct Meter {
    shared: Weak<Shared>,
    command_id: u32,
    max_output_bytes: u64,
    first_output: FirstOutput,
    bytes_in: AtomicU64,
    bytes_out: AtomicU64,
}

impl Meter {
    pub(crate) fn new(shared: &Arc<Shared>, command_id: u32, max_output_bytes: u64) -> Self {
        Self {
            shared: Arc::downgrade(shared),
            command_id,
            max_output_bytes,
            first_output: FirstOutput::of_command(&shared.first_output),
            bytes_in: AtomicU64::new(0),
            bytes_out: AtomicU64::new(0),
        }
    }

    /// So many bytes were written to the command.
    pub(crate) fn wrote(&self, count: usize) {
        self.bytes_in.fetch_add(count as u64, Ordering::Relaxed);
    }

    /// So many bytes of its output were read. Above the bound, the command is killed.
    pub(crate) fn read(&self, count: usize) {
        if count == 0 {
            return;
        }
        self.first_output.record();
        let before = self.bytes_out.fetch_add(count as u64, Ordering::Relaxed);
        let is_first_above = before <= self.max_output_bytes
            && before.saturating_add(count as u64) > self.max_output_bytes;
        if is_first_above && let Some(shared) = self.shared.upgrade() {
            shared.exceeded(self.command_id, Limit::OutputBytes);
        }
    }

    pub(crate) fn first_output_ns(&self) -> Option<u64> {
        self.first_output.at_ns()
    }

    pub(crate) fn bytes_in(&self) -> u64 {
        self.bytes_in.load(Ordering::Relaxed)
    }

    pub(crate) fn bytes_out(&self) -> u64 {
        self.bytes_out.load(Ordering::Relaxed)
    }
}
