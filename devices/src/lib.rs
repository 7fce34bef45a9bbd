//! Everything that a guest can touch: the first code that a hostile guest's bytes reach.
//!
//! ```text
//!  vCPU threads                                    event-loop thread
//!  ────────────                                    ─────────────────
//!  exits ─► bus ─┬─► serial   (16550, port I/O)
//!                ├─► reset    (i8042, port I/O)
//!                └─► virtio::mmio  ── activates ──► block, vsock
//!                     registers        queues         ▲      │
//!                                      kick EventFds ─┘      └─► interrupt
//! ```
//!
//! * [`bus`] finds the device behind an address. It is never locked: it does not change after it is built.
//! * [`virtio`] is the virtio-mmio transport and what its devices share: [`virtio::mmio`] is the register
//!   file, [`virtio::queue`] a ring that passed its checks, [`virtio::device`] the contract between the two.
//! * [`block`] is virtio-block over a [`block::Disk`]; [`vsock`] is virtio-vsock over descriptors.
//! * [`serial`] keeps the tail of what the guest prints, [`reset`] hears a guest that wants to end.
//! * [`interrupt`] is the one thing that a device can do to a processor.
//!
//! Nothing here knows KVM, opens a file or holds policy, and nothing here is `unsafe`: all of it runs under
//! plain tests. Bytes from the guest are read once and checked at the edge into types that can't be wrong
//! afterwards; see [`virtio::queue`] for how far a broken ring gets.
#![forbid(unsafe_code)]

pub mod block;
pub mod bus;
pub mod interrupt;
pub mod reset;
pub mod serial;
pub mod virtio;
pub mod vsock;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks, also after another thread panicked while it held the lock.
///
/// A release build aborts on a panic; in a test build the first panic is the one to report.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
