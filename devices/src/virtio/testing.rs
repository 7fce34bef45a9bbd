//! The driver's side of a queue, for tests: it lays a queue out in guest memory and plays by the rules, or breaks them.

use std::num::Wrapping;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use virtio_queue::desc::split::Descriptor;
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryMmap};

use super::device::{Activation, ActivationError, VirtioDevice};
use super::interrupt::VirtioInterrupt;
use super::queue::ActiveQueue;
use super::registers::{QueueLayout, QueueRegisters};
use super::state::QueuePosition;
use crate::interrupt::Interrupt;

/// Descriptor flags (virtio 1.2 §2.7.5).
pub(crate) const NEXT: u16 = 1;
pub(crate) const WRITE: u16 = 2;
pub(crate) const INDIRECT: u16 = 4;

/// Room that a [`DriverQueue`] of up to 256 descriptors takes in guest memory.
pub(crate) const DRIVER_QUEUE_LEN: u64 = 0x3000;

/// Guest memory of `len` bytes from address 0 on.
pub(crate) fn memory(len: usize) -> GuestMemoryMmap {
    GuestMemoryMmap::from_ranges(&[(GuestAddress(0), len)]).unwrap()
}

/// An interrupt line that counts.
#[derive(Clone, Debug, Default)]
pub(crate) struct CountingLine {
    count: Arc<AtomicUsize>,
}

impl CountingLine {
    /// How often the line was raised.
    pub(crate) fn count(&self) -> usize {
        self.count.load(Ordering::SeqCst)
    }

    /// The device's voice over this line.
    pub(crate) fn interrupt(&self) -> VirtioInterrupt {
        VirtioInterrupt::new(Box::new(self.clone()))
    }
}

impl Interrupt for CountingLine {
    fn trigger(&self) -> std::io::Result<()> {
        self.count.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

/// One piece of a chain: address, length, and whether the device may write it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) address: u64,
    pub(crate) len: u32,
    pub(crate) writable: bool,
}

impl Piece {
    pub(crate) fn readable(address: u64, len: u32) -> Self {
        Self {
            address,
            len,
            writable: false,
        }
    }

    pub(crate) fn writable(address: u64, len: u32) -> Self {
        Self {
            address,
            len,
            writable: true,
        }
    }
}

/// A queue as its driver sees it. Descriptors are handed out in turn and reused without asking: a
/// test keeps at most `size` in flight.
#[derive(Debug)]
pub(crate) struct DriverQueue {
    memory: GuestMemoryMmap,
    size: u16,
    base: u64,
    next_descriptor: u16,
    available: Wrapping<u16>,
    seen: Wrapping<u16>,
}

impl DriverQueue {
    /// Lays a queue of `size` (at most 256) descriptors out at `base`, in [`DRIVER_QUEUE_LEN`] bytes.
    pub(crate) fn new(memory: &GuestMemoryMmap, base: u64, size: u16) -> Self {
        assert!(size <= 256 && base.is_multiple_of(16));
        let zeros = vec![0_u8; usize::try_from(DRIVER_QUEUE_LEN).unwrap()];
        memory.write_slice(&zeros, GuestAddress(base)).unwrap();
        Self {
            memory: memory.clone(),
            size,
            base,
            next_descriptor: 0,
            available: Wrapping(0),
            seen: Wrapping(0),
        }
    }

    pub(crate) fn descriptor_table(&self) -> u64 {
        self.base
    }

    pub(crate) fn driver_area(&self) -> u64 {
        self.base + 0x1000
    }

    pub(crate) fn device_area(&self) -> u64 {
        self.base + 0x2000
    }

    pub(crate) fn size(&self) -> u16 {
        self.size
    }

    /// The layout, through the same check as a guest's.
    pub(crate) fn layout(&self) -> QueueLayout {
        let mut registers = QueueRegisters::new(256);
        registers.size = u32::from(self.size);
        registers.descriptor_table = self.descriptor_table();
        registers.driver_area = self.driver_area();
        registers.device_area = self.device_area();
        QueueLayout::check(&registers, &self.memory).unwrap()
    }

    /// The device's side, with EVENT_IDX negotiated.
    pub(crate) fn activate(&self, interrupt: &VirtioInterrupt) -> ActiveQueue {
        ActiveQueue::new(
            self.layout(),
            QueuePosition::default(),
            true,
            self.memory.clone(),
            interrupt.clone(),
        )
        .unwrap()
    }

    /// Writes one descriptor, whatever is in it.
    pub(crate) fn set_descriptor(&self, index: u16, address: u64, len: u32, flags: u16, next: u16) {
        let at = GuestAddress(self.base + u64::from(index) * 16);
        let descriptor = Descriptor::new(address, len, flags, next);
        self.memory.write_obj(descriptor, at).unwrap();
    }

    /// Makes `head` available, whatever it is.
    pub(crate) fn publish(&mut self, head: u16) {
        let entry = u64::from(self.available.0 % self.size) * 2;
        self.store_u16(self.driver_area() + 4 + entry, head);
        self.available += 1;
        self.set_available_index(self.available.0);
    }

    /// Writes the available index, whatever it is.
    pub(crate) fn set_available_index(&mut self, index: u16) {
        self.available = Wrapping(index);
        self.store_u16(self.driver_area() + 2, index);
    }

    /// Asks for an interrupt when the used index passes `index`.
    pub(crate) fn set_used_event(&self, index: u16) {
        let at = self.driver_area() + 4 + u64::from(self.size) * 2;
        self.store_u16(at, index);
    }

    /// Reads the device's wish: kick when the available index passes this.
    pub(crate) fn avail_event(&self) -> u16 {
        self.load_u16(self.device_area() + 4 + u64::from(self.size) * 8)
    }

    /// Adds a chain of `pieces` (at least one) and makes it available. The result is its head.
    pub(crate) fn add(&mut self, pieces: &[Piece]) -> u16 {
        let head = self.next_descriptor;
        for (at, piece) in pieces.iter().enumerate() {
            let index = self.next_descriptor;
            self.next_descriptor = (index + 1) % self.size;
            let more = if at + 1 < pieces.len() { NEXT } else { 0 };
            let write = if piece.writable { WRITE } else { 0 };
            self.set_descriptor(
                index,
                piece.address,
                piece.len,
                more | write,
                self.next_descriptor,
            );
        }
        self.publish(head);
        head
    }

    /// The next chain that the device gave back: its head and the number of bytes written.
    pub(crate) fn take_used(&mut self) -> Option<(u16, u32)> {
        if self.used_index() == self.seen.0 {
            return None;
        }
        let at = self.device_area() + 4 + u64::from(self.seen.0 % self.size) * 8;
        let [id, len]: [u32; 2] = self.memory.read_obj(GuestAddress(at)).unwrap();
        self.seen += 1;
        Some((u16::try_from(id).unwrap(), len))
    }

    /// The used index.
    pub(crate) fn used_index(&self) -> u16 {
        self.load_u16(self.device_area() + 2)
    }

    fn store_u16(&self, address: u64, value: u16) {
        let at = GuestAddress(address);
        assert!(at.raw_value().is_multiple_of(2));
        self.memory.store(value, at, Ordering::SeqCst).unwrap();
    }

    fn load_u16(&self, address: u64) -> u16 {
        self.memory
            .load(GuestAddress(address), Ordering::SeqCst)
            .unwrap()
    }
}

/// Activates `device` with these queues, as the transport does, and kicks them.
pub(crate) fn activate<D: VirtioDevice>(
    device: &mut D,
    memory: &GuestMemoryMmap,
    queues: &[&DriverQueue],
    interrupt: &VirtioInterrupt,
) -> Result<(), ActivationError> {
    device.activate(Activation {
        memory: memory.clone(),
        queues: queues
            .iter()
            .map(|queue| queue.activate(interrupt))
            .collect(),
        interrupt: interrupt.clone(),
        features: device.features() | 1 << 32 | 1 << 29,
    })?;
    (0..queues.len()).for_each(|index| device.queue_events().kick(index));
    Ok(())
}
