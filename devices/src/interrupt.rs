//! Raising an interrupt line.

use std::fmt::Debug;
use std::io;

use vmm_sys_util::eventfd::EventFd;

/// A line to the guest's interrupt controller.
///
/// The machine hands devices an [`EventFd`] that the hypervisor turns into an edge (an irqfd).
pub trait Interrupt: Debug + Send + Sync {
    /// Raises the line once.
    ///
    /// # Errors
    ///
    /// The error of the system, when the line can't be raised. The guest then misses one interrupt.
    fn trigger(&self) -> io::Result<()>;
}

impl Interrupt for EventFd {
    fn trigger(&self) -> io::Result<()> {
        self.write(1)
    }
}
