//! Raising an interrupt line.

use std::fmt::Debug;
use std::io;

/// A line to the guest's interrupt controller.
///
/// The machine hands devices a pin of the hypervisor's interrupt controller, which it raises and lowers: an edge.
pub trait Interrupt: Debug + Send + Sync {
    /// Raises the line once.
    ///
    /// # Errors
    ///
    /// The error of the system, when the line can't be raised. The guest then misses one interrupt.
    fn trigger(&self) -> io::Result<()>;
}
