//! The end of a machine, as its own parts report it.

use std::io;
use std::sync::{Mutex, PoisonError};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::control::EndReason;

/// Where any part says that the machine has ended; the event loop listens. The first reason counts: others follow from it.
#[derive(Debug)]
pub struct EndSignal {
    reason: Mutex<Option<EndReason>>,
    event: EventFd,
}

impl EndSignal {
    /// A machine that has not ended.
    ///
    /// # Errors
    /// When the process is out of descriptors.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            reason: Mutex::new(None),
            event: EventFd::new(EFD_NONBLOCK)?,
        })
    }

    /// Ends the machine.
    pub fn raise(&self, reason: EndReason) {
        self.reason
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get_or_insert(reason);
        // Fails only where the event is pending 2⁶⁴ − 1 times: it is heard all the same.
        let _ = self.event.write(1);
    }

    /// Why the machine has ended; `None` while it has not.
    #[must_use]
    pub fn reason(&self) -> Option<EndReason> {
        self.reason
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Readable once the machine has ended.
    #[must_use]
    pub fn event(&self) -> &EventFd {
        &self.event
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_reason_counts() {
        let end = EndSignal::new().unwrap();
        assert_eq!(end.reason(), None);

        end.raise(EndReason::TripleFault);
        end.raise(EndReason::Reset);

        assert_eq!(end.reason(), Some(EndReason::TripleFault));
        assert_eq!(end.event().read().unwrap(), 2);
    }
}
