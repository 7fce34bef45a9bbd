//! The driver's side of a queue (virtio 1.2 §2.7), for a driver that need not keep the rules.

use std::ops::Range;

use crate::input::Input;
use crate::memory::{Memory, overlap};

/// Descriptor flags (virtio 1.2 §2.7.5).
pub(crate) const NEXT: u16 = 1;
pub(crate) const WRITE: u16 = 2;

/// Where a ring's three parts are, and how many descriptors it has.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Ring {
    pub(crate) size: u16,
    pub(crate) descriptors: u64,
    pub(crate) available: u64,
    pub(crate) used: u64,
}

/// A descriptor as it lies in memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Descriptor {
    pub(crate) address: u64,
    pub(crate) len: u32,
    pub(crate) flags: u16,
    pub(crate) next: u16,
}

impl Descriptor {
    fn from_bytes(bytes: &[u8]) -> Self {
        let mut input = Input::new(bytes);
        Self {
            address: input.u64(),
            len: input.u32(),
            flags: input.u16(),
            next: input.u16(),
        }
    }

    fn buffer(self) -> Range<u64> {
        // What wraps is not memory: the device must refuse it, so that no byte of it may change.
        match self.address.checked_add(self.len.into()) {
            Some(end) => self.address..end,
            None => 0..0,
        }
    }
}

impl Ring {
    /// The parts one after another from `base` on, which is a multiple of 16.
    pub(crate) fn at(base: u64, size: u16) -> Self {
        let entries = u64::from(size);
        let available = base + entries * 16;
        let used = (available + 6 + entries * 2).next_multiple_of(4);
        Self {
            size,
            descriptors: base,
            available,
            used,
        }
    }

    pub(crate) fn descriptor(&self, memory: &Memory, index: u16) -> Descriptor {
        Descriptor::from_bytes(&memory.read::<16>(self.descriptors + u64::from(index) * 16))
    }

    pub(crate) fn set_descriptor(&self, memory: &Memory, index: u16, descriptor: Descriptor) {
        let at = self.descriptors + u64::from(index % self.size) * 16;
        memory.write(at, &descriptor.address.to_le_bytes());
        memory.write(at + 8, &descriptor.len.to_le_bytes());
        memory.write(at + 12, &descriptor.flags.to_le_bytes());
        memory.write(at + 14, &descriptor.next.to_le_bytes());
    }

    /// Lays a chain out from descriptor `first` on, and returns the descriptor behind it. `pieces` are address, length, and whether the
    /// device may write there.
    pub(crate) fn set_chain(
        &self,
        memory: &Memory,
        first: u16,
        pieces: &[(u64, u32, bool)],
    ) -> u16 {
        let mut index = first;
        for (at, (address, len, writable)) in pieces.iter().enumerate() {
            let next = index.wrapping_add(1) % self.size;
            let more = if at + 1 < pieces.len() { NEXT } else { 0 };
            let descriptor = Descriptor {
                address: *address,
                len: *len,
                flags: more | if *writable { WRITE } else { 0 },
                next,
            };
            self.set_descriptor(memory, index, descriptor);
            index = next;
        }
        index
    }

    pub(crate) fn available_index(&self, memory: &Memory) -> u16 {
        memory.read_u16(self.available + 2)
    }

    pub(crate) fn set_available_index(&self, memory: &Memory, index: u16) {
        memory.write(self.available + 2, &index.to_le_bytes());
    }

    /// Makes a head available, whatever it is.
    pub(crate) fn publish(&self, memory: &Memory, head: u16) {
        let index = self.available_index(memory);
        let entry = self.available + 4 + u64::from(index % self.size) * 2;
        memory.write(entry, &head.to_le_bytes());
        self.set_available_index(memory, index.wrapping_add(1));
    }

    pub(crate) fn used_index(&self, memory: &Memory) -> u16 {
        memory.read_u16(self.used + 2)
    }

    /// The head and the number of written bytes of the chain that was given back as the `index`th.
    pub(crate) fn used_element(&self, memory: &Memory, index: u16) -> (u32, u32) {
        let at = self.used + 4 + u64::from(index % self.size) * 8;
        (memory.read_u32(at), memory.read_u32(at + 4))
    }

    /// The buffers that a device may write to by any descriptor.
    pub(crate) fn writable_buffers(&self, memory: &Memory) -> Vec<Range<u64>> {
        memory
            .read_bytes(self.descriptors, usize::from(self.size) * 16)
            .chunks(16)
            .map(Descriptor::from_bytes)
            .filter(|descriptor| descriptor.flags & WRITE != 0)
            .map(Descriptor::buffer)
            .collect()
    }

    /// The used ring, which the device alone writes.
    pub(crate) fn used_range(&self) -> Range<u64> {
        self.used..self.used + 6 + u64::from(self.size) * 8
    }

    /// Descriptor table, available ring and used ring.
    pub(crate) fn ranges(&self) -> [Range<u64>; 3] {
        let entries = u64::from(self.size);
        [
            self.descriptors..self.descriptors + entries * 16,
            self.available..self.available + 6 + entries * 2,
            self.used_range(),
        ]
    }

    /// The writable parts of the chain from `head` on, as the driver has described it; `None` where it is no chain.
    pub(crate) fn writable_parts(&self, memory: &Memory, head: u16) -> Option<Vec<Range<u64>>> {
        let mut parts = Vec::new();
        let mut index = head;
        for _ in 0..self.size {
            if index >= self.size {
                return None;
            }
            let descriptor = self.descriptor(memory, index);
            if descriptor.flags & WRITE != 0 {
                parts.push(descriptor.buffer());
            }
            if descriptor.flags & NEXT == 0 {
                return Some(parts);
            }
            index = descriptor.next;
        }
        None
    }
}

/// Whether a writable buffer lies over a ring: the driver lets the device change what the driver has written, so that little can be
/// said about what follows.
pub(crate) fn feeds_itself(memory: &Memory, rings: &[Ring]) -> bool {
    let parts: Vec<Range<u64>> = rings.iter().flat_map(Ring::ranges).collect();
    rings
        .iter()
        .flat_map(|ring| ring.writable_buffers(memory))
        .any(|buffer| parts.iter().any(|part| overlap(&buffer, part)))
}
