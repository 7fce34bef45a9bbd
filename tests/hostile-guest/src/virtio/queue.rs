//! A split virtqueue (virtio 1.2 §2.7) with every field open.

use core::sync::atomic::{Ordering, fence};

use super::Device;
use crate::{check, memory, time};

/// Descriptor flags.
pub(crate) const NEXT: u16 = 1;
pub(crate) const WRITE: u16 = 2;
pub(crate) const INDIRECT: u16 = 4;

/// Where the queues are: each has its own 64 KiB, its three parts a page apart.
const QUEUES: u64 = 0x80_0000;
const QUEUE_BYTES: u64 = 0x1_0000;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;

/// A descriptor: address, length, flags, next.
#[derive(Clone, Copy)]
pub(crate) struct Descriptor(
    pub(crate) u64,
    pub(crate) u32,
    pub(crate) u16,
    pub(crate) u16,
);

/// A queue in the guest's memory.
#[derive(Clone, Copy)]
pub(crate) struct Queue {
    pub(crate) device: Device,
    pub(crate) index: u32,
    pub(crate) size: u16,
    pub(crate) base: u64,
}

/// An entry of the used ring.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Used {
    pub(crate) id: u32,
    pub(crate) bytes: u32,
}

impl Queue {
    /// Queue `index` of `device`, in memory of number `place`, which no other queue has.
    pub(crate) const fn new(device: Device, index: u32, size: u16, place: u64) -> Self {
        Self {
            device,
            index,
            size,
            base: QUEUES + place * QUEUE_BYTES,
        }
    }

    pub(crate) fn table(&self) -> u64 {
        self.base
    }

    pub(crate) fn available(&self) -> u64 {
        self.base + AVAILABLE
    }

    pub(crate) fn used(&self) -> u64 {
        self.base + USED
    }

    /// Nothing offered, nothing used.
    pub(crate) fn clear(&self) {
        memory::fill(self.base, 0, USED + AVAILABLE);
    }

    pub(crate) fn set(&self, index: u16, descriptor: Descriptor) {
        let at = self.table() + 16 * u64::from(index);
        let Descriptor(address, bytes, flags, next) = descriptor;
        memory::write(at, address);
        memory::write(at + 8, bytes);
        memory::write(at + 12, flags);
        memory::write(at + 14, next);
    }

    /// A chain in the descriptors from `first` on. Flags say `WRITE` or nothing; `NEXT` is added.
    pub(crate) fn chain(&self, first: u16, parts: &[Descriptor]) {
        for (index, part) in (first..).zip(parts) {
            let is_last = usize::from(index - first) + 1 == parts.len();
            let (more, next) = if is_last { (0, 0) } else { (NEXT, index + 1) };
            self.set(index, Descriptor(part.0, part.1, part.2 | more, next));
        }
    }

    /// Index of the available ring.
    pub(crate) fn offered(&self) -> u16 {
        memory::read(self.available() + 2)
    }

    pub(crate) fn set_offered(&self, index: u16) {
        fence(Ordering::SeqCst);
        memory::write(self.available() + 2, index);
        fence(Ordering::SeqCst);
    }

    /// Puts a head into the available ring, without a kick.
    pub(crate) fn offer(&self, head: u16) {
        let index = self.offered();
        let slot = u64::from(index % self.size);
        memory::write(self.available() + 4 + 2 * slot, head);
        self.set_offered(index.wrapping_add(1));
    }

    pub(crate) fn kick(&self) {
        self.device.kick(self.index);
    }

    /// Index of the used ring.
    pub(crate) fn done(&self) -> u16 {
        fence(Ordering::SeqCst);
        memory::read(self.used() + 2)
    }

    /// The entry that the used ring got as number `index`.
    pub(crate) fn entry(&self, index: u16) -> Used {
        let at = self.used() + 4 + 8 * u64::from(index % self.size);
        Used {
            id: memory::read(at),
            bytes: memory::read(at + 4),
        }
    }

    /// Where the driver says when it wants an interrupt, and where the device says when it wants a kick (EVENT_IDX).
    pub(crate) fn used_event(&self) -> u64 {
        self.available() + 4 + 2 * u64::from(self.size)
    }

    pub(crate) fn available_event(&self) -> u64 {
        self.used() + 4 + 8 * u64::from(self.size)
    }

    /// Offers a head, kicks, and waits for it to come back.
    pub(crate) fn serve(&self, head: u16) -> Used {
        let before = self.done();
        self.offer(head);
        self.kick();
        self.await_done(before.wrapping_add(1));
        self.entry(before)
    }

    /// Waits until the used ring's index has come to a value.
    pub(crate) fn await_done(&self, index: u16) {
        let came = time::until(|| self.done() == index);
        check!(
            came,
            "queue {} used {} of {index}, status {:#x}",
            self.index,
            self.done(),
            self.device.status()
        );
    }
}
