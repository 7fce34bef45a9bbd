//! The system calls that a machine's threads may make (`seccomp(2)`).
//!
//! There is a filter for each kind of thread, in `filters/`, with a reason beside each call. They are compiled with this
//! crate: nothing is parsed when a machine starts. A call that is not in its thread's filter is not made; the process says
//! which it was and ends (`SECCOMP_RET_TRAP`, and a handler of this crate's; without the handler the signal kills).

use seccompiler::sock_filter;

use crate::enter::Inside;

include!(concat!(env!("OUT_DIR"), "/filters.rs"));

/// A kind of thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Thread {
    /// The event loop: control socket, disks, streams.
    Main,
    /// A virtual processor.
    Vcpu,
}

/// Why a thread's system calls could not be filtered.
#[derive(Debug, thiserror::Error)]
#[error("The system calls of a machine's thread could not be filtered")]
pub struct FilterError(#[source] seccompiler::Error);

impl Inside {
    /// Closes what is left of the cell around the calling thread, for good: to be called by each thread of the machine
    /// before the guest's first instruction.
    ///
    /// # Errors
    /// See [`FilterError`]; the process must end then.
    pub fn close(self, thread: Thread) -> Result<(), FilterError> {
        if !self.is_filtered {
            return Ok(());
        }
        let filter: &[sock_filter] = match thread {
            Thread::Main => &MAIN,
            Thread::Vcpu => &VCPU,
        };
        seccompiler::apply_filter(filter).map_err(FilterError)
    }
}
