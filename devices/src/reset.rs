//! The reset port: as much of an i8042 keyboard controller as a guest needs to end itself.
//!
//! Linux with `reboot=k` waits until the controller's status says that it takes a command, and writes the command that
//! pulls the processor's reset line. Status always reads 0 here, so the wait is over at once. There is no
//! keyboard: a guest's kernel has no driver for one.

use std::fmt;
use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use vm_superio::{I8042Device, Trigger};
use vmm_sys_util::eventfd::EventFd;

use crate::bus::BusDevice;
use crate::lock;

/// First port.
pub const RESET_BASE: u64 = 0x60;

/// Number of ports: data is the first, status and command the last.
pub const RESET_LEN: u64 = 5;

/// The reset port, to be put on the port bus at [`RESET_BASE`].
pub struct ResetPort {
    controller: Mutex<I8042Device<ResetEvent>>,
}

struct ResetEvent {
    event: EventFd,
    requested: AtomicBool,
}

impl Trigger for ResetEvent {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.requested.store(true, Ordering::SeqCst);
        self.event.write(1)
    }
}

impl fmt::Debug for ResetPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResetPort")
            .field("requested", &self.requested())
            .finish_non_exhaustive()
    }
}

impl ResetPort {
    /// A port that writes to `event` (which must be non-blocking) when the guest asks for a reset.
    #[must_use]
    pub fn new(event: EventFd) -> Self {
        Self {
            controller: Mutex::new(I8042Device::new(ResetEvent {
                event,
                requested: AtomicBool::new(false),
            })),
        }
    }

    /// Whether the guest has asked for a reset.
    #[must_use]
    pub fn requested(&self) -> bool {
        lock(&self.controller)
            .reset_evt()
            .requested
            .load(Ordering::SeqCst)
    }
}

impl BusDevice for ResetPort {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let ([byte], Ok(offset)) = (data, u8::try_from(offset)) {
            // Fails only where 2⁶⁴ − 1 requests are pending.
            let _ = lock(&self.controller).write(offset, *byte);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_sys_util::eventfd::EFD_NONBLOCK;

    fn port() -> (ResetPort, EventFd) {
        let event = EventFd::new(EFD_NONBLOCK).unwrap();
        (ResetPort::new(event.try_clone().unwrap()), event)
    }

    #[test]
    fn test_reset_command_signals() {
        let (port, event) = port();

        port.write(4, &[0xfe]);

        assert!(port.requested());
        assert_eq!(event.read().unwrap(), 1);
    }

    #[test]
    fn test_any_other_write_does_not_signal() {
        let (port, event) = port();
        for offset in 0..RESET_LEN {
            for value in 0..=u8::MAX {
                if (offset, value) != (4, 0xfe) {
                    port.write(offset, &[value]);
                }
            }
            port.write(offset, &[0xfe, 0xfe]);
            port.write(offset, &[0xfe, 0xfe, 0xfe, 0xfe]);
        }
        assert!(!port.requested());
        assert_eq!(event.read().unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn test_status_says_that_a_command_is_taken() {
        let (port, _event) = port();
        let mut status = [0xff];
        port.read(4, &mut status);
        assert_eq!(status, [0]);
    }
}
