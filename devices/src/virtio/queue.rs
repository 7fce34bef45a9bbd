//! A queue in service: a ring that passed its checks, until the driver breaks it.
//!
//! What the driver can do wrong falls into two kinds. A *request* that makes no sense (an address outside
//! memory, a length that is too small) is the device's to fail, and the queue goes on: [`BufferError`](super::chain::BufferError). A
//! *ring* that makes no sense (an index that ran ahead, a loop) leaves nothing to trust: [`QueueError`]. The queue
//! retires itself, sets DEVICE_NEEDS_RESET, and never reads the ring again until the driver resets the device.
//!
//! VIRTIO_F_RING_INDIRECT_DESC is not offered. Requests are served in order and at once, so a deeper queue would gain nothing, a
//! ring of 256 descriptors holds the largest request of either device, the driver saves an allocation for each request,
//! and a guest has one table less to lie about.

use std::fmt;

use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::GuestMemoryMmap;

use super::chain::Chain;
use super::interrupt::VirtioInterrupt;
use super::registers::QueueLayout;
use super::state::QueuePosition;

/// How a driver broke its ring. The queue has retired and the driver was told.
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    /// The available index is more than the queue's size ahead, or went backwards.
    #[error("The driver's available index is out of step")]
    AvailableIndex,
    /// A head or a `next` field is not below the queue's size.
    #[error("Descriptor {index} does not exist")]
    BadDescriptorIndex {
        /// The index.
        index: u16,
    },
    /// The chain has more descriptors than the queue: it has a loop.
    #[error("The chain from descriptor {head} has a loop")]
    ChainTooLong {
        /// Where it begins.
        head: u16,
    },
    /// An indirect descriptor, without the feature.
    #[error("Descriptor {index} is indirect, which was not negotiated")]
    Indirect {
        /// Which descriptor.
        index: u16,
    },
    /// The queue library failed for another reason.
    #[error("The ring could not be read or written")]
    Ring(#[source] virtio_queue::Error),
    /// The queue has retired before.
    #[error("The queue has retired and waits for the driver to reset the device")]
    Retired,
}

/// Why [`ActiveQueue::drain`] came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a queue whose budget was spent has to be kicked again"]
pub enum Drained {
    /// Nothing is left, and the driver kicks when there is more.
    Empty,
    /// As many chains as the queue has descriptors were served, or what a round may cost was spent, and more may wait. No kick will come for
    /// these: the device kicks itself ([`QueueEvents::kick`](super::QueueEvents::kick)).
    BudgetSpent,
}

/// What came of one chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Served {
    /// Bytes that were written into it.
    pub written_bytes: u32,
    /// What it cost, in the device's own measure.
    pub cost: u64,
}

/// A queue in service.
pub struct ActiveQueue {
    queue: Queue,
    layout: QueueLayout,
    memory: GuestMemoryMmap,
    interrupt: VirtioInterrupt,
    retired: bool,
}

impl fmt::Debug for ActiveQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ActiveQueue")
            .field("queue", &self.queue)
            .field("retired", &self.retired)
            .finish_non_exhaustive()
    }
}

impl ActiveQueue {
    /// Takes a checked layout into service, at a position: the ring's beginning, or where a snapshot left it. A position that
    /// does not fit what the rings say is found as a driver's wrong index is.
    pub(super) fn new(
        layout: QueueLayout,
        position: QueuePosition,
        event_idx: bool,
        memory: GuestMemoryMmap,
        interrupt: VirtioInterrupt,
    ) -> Result<Self, virtio_queue::Error> {
        let mut queue = Queue::new(layout.max_size())?;
        queue.try_set_size(layout.size())?;
        queue.try_set_desc_table_address(layout.descriptor_table())?;
        queue.try_set_avail_ring_address(layout.driver_area())?;
        queue.try_set_used_ring_address(layout.device_area())?;
        queue.set_event_idx(event_idx);
        queue.set_next_avail(position.served);
        queue.set_next_used(position.served);
        queue.set_ready(true);
        Ok(Self {
            queue,
            layout,
            memory,
            interrupt,
            retired: position.is_retired,
        })
    }

    /// How far it is. Every chain that was taken has been given back.
    #[must_use]
    pub fn position(&self) -> QueuePosition {
        QueuePosition {
            served: self.queue.next_used(),
            is_retired: self.retired,
        }
    }

    /// The number of descriptors.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.layout.size()
    }

    /// Guest memory, which the chains' buffers are in.
    #[must_use]
    pub fn memory(&self) -> &GuestMemoryMmap {
        &self.memory
    }

    /// Whether the driver broke the ring.
    #[must_use]
    pub fn is_retired(&self) -> bool {
        self.retired
    }

    /// Takes the next chain that the driver made available. Its head must be given back by
    /// [`Self::add_used`], or the chain put back by [`Self::undo_pop`].
    ///
    /// # Errors
    ///
    /// [`QueueError`]: the queue has retired.
    pub fn pop(&mut self) -> Result<Option<Chain>, QueueError> {
        self.guard(|live| {
            // `iter` and not `pop_descriptor_chain`, which hides an index that ran ahead.
            let mut available = live.queue.iter(&live.memory).map_err(ring_error)?;
            let Some(head) = available.next().map(|chain| chain.head_index()) else {
                return Ok(None);
            };
            Chain::read(&live.memory, &live.layout, head).map(Some)
        })
    }

    /// Puts the chain back that [`Self::pop`] gave last: the next call gives it again, read anew.
    pub fn undo_pop(&mut self) {
        self.queue.go_to_previous_position();
    }

    /// Gives a chain back to the driver, with the number of bytes that were written into it.
    ///
    /// # Errors
    ///
    /// [`QueueError`]: the queue has retired.
    pub fn add_used(&mut self, head: u16, written_bytes: u32) -> Result<(), QueueError> {
        self.guard(|live| {
            live.queue
                .add_used(&live.memory, head, written_bytes)
                .map_err(ring_error)
        })
    }

    /// Interrupts the driver, if chains were given back since the last call and it wants to know (virtio 1.2 §2.7.7).
    ///
    /// # Errors
    ///
    /// [`QueueError`]: the queue has retired.
    pub fn signal_used(&mut self) -> Result<(), QueueError> {
        let wanted = self.guard(|live| {
            live.queue
                .needs_notification(&live.memory)
                .map_err(ring_error)
        })?;
        if wanted {
            self.interrupt_driver();
        }
        Ok(())
    }

    /// Asks the driver for a kick when it makes a chain available. True where one is available
    /// already, for which no kick may come: serve it first.
    ///
    /// # Errors
    ///
    /// [`QueueError`]: the queue has retired.
    pub fn enable_notification(&mut self) -> Result<bool, QueueError> {
        self.guard(|live| {
            live.queue
                .enable_notification(&live.memory)
                .map_err(ring_error)
        })
    }

    /// Tells the driver that kicks are not needed for now.
    ///
    /// # Errors
    ///
    /// [`QueueError`]: the queue has retired.
    pub fn disable_notification(&mut self) -> Result<(), QueueError> {
        self.guard(|live| {
            live.queue
                .disable_notification(&live.memory)
                .map_err(ring_error)
        })
    }

    /// Serves what is available: one round, at most as many chains as the queue has descriptors. `serve` gets each
    /// chain and returns the number of bytes that it wrote; its head then goes back to the driver.
    ///
    /// # Errors
    ///
    /// [`QueueError`]: the queue has retired.
    pub fn drain(
        &mut self,
        mut serve: impl FnMut(&GuestMemoryMmap, &Chain) -> u32,
    ) -> Result<Drained, QueueError> {
        self.drain_within(u64::MAX, |memory, chain| Served {
            written_bytes: serve(memory, chain),
            cost: 0,
        })
    }

    /// The same, but the round is also over with the chain that brings the cost of all to `cost_max`.
    ///
    /// # Errors
    ///
    /// [`QueueError`]: the queue has retired.
    pub fn drain_within(
        &mut self,
        cost_max: u64,
        mut serve: impl FnMut(&GuestMemoryMmap, &Chain) -> Served,
    ) -> Result<Drained, QueueError> {
        self.disable_notification()?;
        let mut cost_left = cost_max;
        for _ in 0..self.size() {
            if cost_left == 0 {
                break;
            }
            let chain = match self.pop()? {
                Some(chain) => chain,
                None => {
                    // Between the look and the request for a kick the driver may have added one, and not kicked.
                    if !self.enable_notification()? {
                        return Ok(Drained::Empty);
                    }
                    continue;
                }
            };
            let Served {
                written_bytes,
                cost,
            } = serve(&self.memory, &chain);
            cost_left = cost_left.saturating_sub(cost);
            self.add_used(chain.head(), written_bytes)?;
            self.signal_used()?;
        }
        Ok(Drained::BudgetSpent)
    }

    /// Runs one operation on the ring; any error retires the queue.
    fn guard<T>(
        &mut self,
        operation: impl FnOnce(&mut Self) -> Result<T, QueueError>,
    ) -> Result<T, QueueError> {
        if self.retired {
            return Err(QueueError::Retired);
        }
        let result = operation(self);
        if result.is_err() {
            self.retired = true;
            // Failing to raise the line costs an interrupt; the status register says it all the same.
            let _ = self.interrupt.set_needs_reset();
        }
        result
    }

    fn interrupt_driver(&self) {
        // An interrupt line that can't be raised has 2⁶⁴ − 1 interrupts pending: the driver has enough.
        let _ = self.interrupt.signal_used_queue();
    }
}

fn ring_error(source: virtio_queue::Error) -> QueueError {
    match source {
        virtio_queue::Error::InvalidAvailRingIndex => QueueError::AvailableIndex,
        other => QueueError::Ring(other),
    }
}

#[cfg(test)]
mod tests;
