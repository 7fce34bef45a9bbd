//! The contract between the transport and a virtio device.
//!
//! ```text
//!            activate                        reset
//!  idle ───────────────► serving queues ───────────────► idle
//!                          │ a ring is broken               ▲
//!                          ▼                                │
//!                        queue retired, DEVICE_NEEDS_RESET ─┘
//! ```
//!
//! The transport calls [`VirtioDevice::activate`] and [`VirtioDevice::reset`] on a processor's thread, with the
//! device's lock held; the device serves its queues on the event-loop thread, under the same lock. So a reset waits for
//! the round of requests that is being served, and when it returns nothing of the device touches guest memory.

use std::fmt::Debug;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use event_manager::{EventOps, EventSet, Events};
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::interrupt::VirtioInterrupt;
use super::queue::ActiveQueue;
use super::state::QueuePosition;

/// A device without its transport.
pub trait VirtioDevice: Debug + Send {
    /// The device type of virtio 1.2 §5: 2 is a block device, 19 a socket device.
    fn device_type(&self) -> u32;

    /// The largest size of each queue, in descriptors: powers of two. Its length is the number of queues.
    fn queue_max_sizes(&self) -> &[u16];

    /// The device's own features. The transport adds VIRTIO_F_VERSION_1 and VIRTIO_F_RING_EVENT_IDX,
    /// which every device here supports through [`ActiveQueue`].
    fn features(&self) -> u64;

    /// One event descriptor for each queue, kicked by the driver.
    fn queue_events(&self) -> &QueueEvents;

    /// Fills `data` with the configuration space from `offset` bytes on; zeros past its end. Writes to the
    /// configuration space never reach the device.
    fn read_config(&self, offset: u64, data: &mut [u8]);

    /// The driver is ready: takes the queues into service.
    ///
    /// The transport kicks every queue once after this returned, so the work begins on the event loop.
    ///
    /// # Errors
    ///
    /// [`ActivationError`] where the device can't serve; the driver sees DEVICE_NEEDS_RESET and no DRIVER_OK.
    fn activate(&mut self, activation: Activation) -> Result<(), ActivationError>;

    /// Drops queues, work in flight and connections: back to the state before `activate`. May be called when idle.
    fn reset(&mut self);

    /// How far the queues in service are, in their order; none when idle. With the registers this is all that a snapshot needs: a
    /// device gives every chain back in the round in which it took it, so between two rounds none is in its hands.
    fn positions(&self) -> Vec<QueuePosition>;
}

/// What a device gets when the driver is ready.
#[derive(Debug)]
pub struct Activation {
    /// The guest's memory.
    pub memory: GuestMemoryMmap,
    /// The queues, one for each of [`VirtioDevice::queue_max_sizes`], in that order.
    pub queues: Vec<ActiveQueue>,
    /// The way to reach the driver. The queues hold it too.
    pub interrupt: VirtioInterrupt,
    /// The features that both sides agreed on.
    pub features: u64,
}

impl Activation {
    /// The queues, as many as the device has.
    ///
    /// # Errors
    ///
    /// [`ActivationError::QueueCount`].
    pub fn into_queues<const N: usize>(self) -> Result<[ActiveQueue; N], ActivationError> {
        <[ActiveQueue; N]>::try_from(self.queues).map_err(|queues| ActivationError::QueueCount {
            expected: N,
            given: queues.len(),
        })
    }
}

/// Fills `data` from `config`, a configuration space, from `offset` bytes on; zeros past its end.
pub fn read_config_bytes(config: &[u8], offset: u64, data: &mut [u8]) {
    let rest = usize::try_from(offset)
        .ok()
        .and_then(|offset| config.get(offset..))
        .unwrap_or_default();
    data.fill(0);
    data.iter_mut()
        .zip(rest)
        .for_each(|(byte, value)| *byte = *value);
}

/// Why a device can't be taken into service.
#[derive(Debug, thiserror::Error)]
pub enum ActivationError {
    /// The driver did not make all queues ready.
    #[error("Queue {index} was not made ready before DRIVER_OK")]
    QueueNotReady {
        /// Which queue.
        index: usize,
    },
    /// Two rings share bytes of memory.
    #[error("Two rings overlap in guest memory near {address:#x}")]
    RingsOverlap {
        /// Where the second ring begins.
        address: u64,
    },
    /// The queue library refused a size or an address that the checks let through.
    #[error("Queue {index} could not be set up")]
    Queue {
        /// Which queue.
        index: usize,
        /// The library's reason.
        source: virtio_queue::Error,
    },
    /// The device got another number of queues than it asked for.
    #[error("The device needs {expected} queues and was given {given}")]
    QueueCount {
        /// What the device asked for.
        expected: usize,
        /// What it got.
        given: usize,
    },
    /// The system refused something that the device needs.
    #[error("The device could not get what it needs from the system")]
    Io(#[from] io::Error),
}

/// The event descriptors of a device's queues.
///
/// They are made with the device and live as long as it does. That is why they are registered with the event loop once, in
/// `init`, and never removed: no activation or reset can leave the loop with a descriptor that it
/// does not know (the event manager panics at one). A kick while the device is idle is taken and ignored.
///
/// Clones share the descriptors.
#[derive(Clone, Debug)]
pub struct QueueEvents {
    events: Arc<[EventFd]>,
}

impl QueueEvents {
    /// Makes `count` descriptors.
    ///
    /// # Errors
    ///
    /// The system's, when it is out of descriptors.
    pub fn new(count: usize) -> io::Result<Self> {
        let events = (0..count)
            .map(|_| EventFd::new(EFD_NONBLOCK))
            .collect::<io::Result<Vec<_>>>()?;
        Ok(Self {
            events: events.into(),
        })
    }

    /// How many queues there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.events.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// The descriptors in the order of the queues, to be registered as ioeventfds.
    pub fn iter(&self) -> std::slice::Iter<'_, EventFd> {
        self.events.iter()
    }

    /// Registers all of them with the event loop: called from the subscriber's `init`, once, while the machine is built.
    ///
    /// A failure (the system's limit on watched descriptors) is logged: `init` has no other way to say it, and the
    /// guest will wait for its device until the machine's deadline.
    pub fn register(&self, ops: &mut EventOps<'_>) {
        for event in self.iter() {
            if let Err(error) = ops.add(Events::new(event, EventSet::IN)) {
                tracing::error!(%error, "A queue's event could not be added to the event loop");
            }
        }
    }

    /// Which queue an event of the loop belongs to, with the kick taken; `None` where it belongs to no queue.
    #[must_use]
    pub fn take(&self, fd: RawFd) -> Option<usize> {
        let index = self
            .events
            .iter()
            .position(|event| event.as_raw_fd() == fd)?;
        // Several kicks are one event. Reading fails only where there is none, and serving an idle queue is harmless.
        if let Some(event) = self.events.get(index) {
            let _ = event.read();
        }
        Some(index)
    }

    /// Kicks a queue, as the driver does. A queue that does not exist is ignored.
    ///
    /// A device also kicks itself where it has more to do than one round allows, so that others have their turn.
    pub fn kick(&self, index: usize) {
        if let Some(event) = self.events.get(index) {
            // Fails only where 2⁶⁴ − 1 kicks are pending; one is enough.
            let _ = event.write(1);
        }
    }
}
