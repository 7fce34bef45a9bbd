//! The interrupt status register and the device status register: what a device tells its driver.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use virtio_bindings::virtio_config::VIRTIO_CONFIG_S_NEEDS_RESET;
use virtio_bindings::virtio_mmio::{VIRTIO_MMIO_INT_CONFIG, VIRTIO_MMIO_INT_VRING};

use crate::interrupt::Interrupt;

/// A virtio device's voice: its interrupt line with the two registers that explain an interrupt.
///
/// Clones share one state. The registers are atomics, so that a processor that acknowledges an interrupt
/// never waits for the device, which may be in the middle of a disk read.
#[derive(Clone, Debug)]
pub struct VirtioInterrupt {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    interrupt_status: AtomicU32,
    device_status: AtomicU32,
    line: Box<dyn Interrupt>,
}

impl VirtioInterrupt {
    /// Nothing pending, device status 0.
    #[must_use]
    pub fn new(line: Box<dyn Interrupt>) -> Self {
        Self {
            shared: Arc::new(Shared {
                interrupt_status: AtomicU32::new(0),
                device_status: AtomicU32::new(0),
                line,
            }),
        }
    }

    /// Tells the driver that buffers were used. Whether it wants to know is the queue's to ask:
    /// [`ActiveQueue::signal_used`](super::ActiveQueue::signal_used) honours EVENT_IDX and calls this.
    ///
    /// # Errors
    ///
    /// As [`Interrupt::trigger`].
    pub fn signal_used_queue(&self) -> io::Result<()> {
        self.raise(VIRTIO_MMIO_INT_VRING)
    }

    /// Tells the driver that the configuration space or the device status changed.
    ///
    /// # Errors
    ///
    /// As [`Interrupt::trigger`].
    pub fn signal_config_change(&self) -> io::Result<()> {
        self.raise(VIRTIO_MMIO_INT_CONFIG)
    }

    /// Sets DEVICE_NEEDS_RESET and tells the driver (virtio 1.2 §2.1.2).
    ///
    /// # Errors
    ///
    /// As [`Interrupt::trigger`]; the bit is set all the same.
    pub fn set_needs_reset(&self) -> io::Result<()> {
        self.add_device_status(VIRTIO_CONFIG_S_NEEDS_RESET);
        self.signal_config_change()
    }

    /// Whether [`Self::set_needs_reset`] was called since the last reset.
    #[must_use]
    pub fn needs_reset(&self) -> bool {
        self.device_status() & VIRTIO_CONFIG_S_NEEDS_RESET != 0
    }

    /// The InterruptStatus register.
    #[must_use]
    pub fn interrupt_status(&self) -> u32 {
        self.shared.interrupt_status.load(Ordering::SeqCst)
    }

    /// The Status register.
    #[must_use]
    pub fn device_status(&self) -> u32 {
        self.shared.device_status.load(Ordering::SeqCst)
    }

    /// Clears the bits that the driver acknowledged.
    pub(super) fn acknowledge(&self, bits: u32) {
        self.shared
            .interrupt_status
            .fetch_and(!bits, Ordering::SeqCst);
    }

    /// Adds bits to the Status register: none is ever cleared but by a reset.
    pub(super) fn add_device_status(&self, bits: u32) {
        self.shared.device_status.fetch_or(bits, Ordering::SeqCst);
    }

    /// Sets both registers as a snapshot has them. Nobody is told: see [`Self::repeat`].
    pub(super) fn restore(&self, device_status: u32, interrupt_status: u32) {
        self.shared
            .interrupt_status
            .store(interrupt_status, Ordering::SeqCst);
        self.shared
            .device_status
            .store(device_status, Ordering::SeqCst);
    }

    /// Raises the line again where a reason is pending: an interrupt that was on its way to the interrupt controller when a
    /// snapshot was taken may be in neither. One too many finds a driver that reads the same reason, or none.
    pub(super) fn repeat(&self) {
        if self.interrupt_status() != 0 {
            // A line that can't be raised costs an interrupt, as everywhere.
            let _ = self.shared.line.trigger();
        }
    }

    /// Back to the state after power-on. Called when the device has stopped.
    pub(super) fn reset(&self) {
        self.shared.interrupt_status.store(0, Ordering::SeqCst);
        self.shared.device_status.store(0, Ordering::SeqCst);
    }

    fn raise(&self, bits: u32) -> io::Result<()> {
        // The reason before the interrupt: the driver's handler reads it at once.
        self.shared
            .interrupt_status
            .fetch_or(bits, Ordering::SeqCst);
        self.shared.line.trigger()
    }
}
