//! A small guest memory with a hole, and what has changed in it.

use std::ops::Range;

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::input::Input;

/// The two regions: first address and length. What is between them is no memory.
const REGIONS: [(u64, usize); 2] = [(0, 0x1_0000), (0x2_0000, 0x4000)];

/// Where buffers may be that are not the rings': behind the rings, which the targets put below.
pub(crate) const BUFFERS: u64 = 0x8000;

/// Guest memory.
#[derive(Debug)]
pub(crate) struct Memory(pub(crate) GuestMemoryMmap);

/// A copy of all of it.
#[derive(Debug)]
pub(crate) struct Snapshot(Vec<Vec<u8>>);

impl Memory {
    pub(crate) fn new() -> Self {
        let ranges = REGIONS.map(|(address, len)| (GuestAddress(address), len));
        Self(GuestMemoryMmap::from_ranges(&ranges).expect("memory can be mapped"))
    }

    /// Writes as the guest does: what is not memory takes nothing.
    pub(crate) fn write(&self, address: u64, bytes: &[u8]) {
        // A part of it may be written.
        let _ = self.0.write_slice(bytes, GuestAddress(address));
    }

    /// Reads a number of `N` bytes; zeros where there is no memory.
    pub(crate) fn read<const N: usize>(&self, address: u64) -> [u8; N] {
        let mut bytes = [0; N];
        if self
            .0
            .read_slice(&mut bytes, GuestAddress(address))
            .is_err()
        {
            return [0; N];
        }
        bytes
    }

    /// Reads `len` bytes; zeros where there is no memory.
    pub(crate) fn read_bytes(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        // What there is of it is enough: no ring is in service that is not wholly in memory.
        let _ = self.0.read_slice(&mut bytes, GuestAddress(address));
        bytes
    }

    pub(crate) fn read_u16(&self, address: u64) -> u16 {
        u16::from_le_bytes(self.read(address))
    }

    pub(crate) fn read_u32(&self, address: u64) -> u32 {
        u32::from_le_bytes(self.read(address))
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        Snapshot(
            REGIONS
                .iter()
                .map(|(address, len)| {
                    let mut bytes = vec![0; *len];
                    self.0
                        .read_slice(&mut bytes, GuestAddress(*address))
                        .expect("the region is mapped");
                    bytes
                })
                .collect(),
        )
    }

    /// Fails where a byte has changed that is in none of `allowed`.
    pub(crate) fn check_unchanged_but(&self, before: &Snapshot, allowed: &[Range<u64>]) {
        let mut after = self.snapshot();
        for (((base, len), before), after) in REGIONS.iter().zip(&before.0).zip(&mut after.0) {
            // As if what may have changed had not: then all is equal, which is compared at once.
            for range in allowed {
                let from = range.start.clamp(*base, base + *len as u64) - base;
                let to = range.end.clamp(*base, base + *len as u64) - base;
                if from < to {
                    let range =
                        usize::try_from(from).expect("small")..usize::try_from(to).expect("small");
                    after[range.clone()].copy_from_slice(&before[range]);
                }
            }
            if before != after {
                let offset = before.iter().zip(after).position(|(old, new)| old != new);
                let address = base + offset.unwrap_or(0) as u64;
                panic!("the device wrote to {address:#x}, which is none of {allowed:x?}");
            }
        }
    }
}

/// An address: most often in the buffers' part, else near an edge, or anything.
pub(crate) fn address(input: &mut Input<'_>) -> u64 {
    match input.below(8) {
        0..=4 => BUFFERS + u64::from(input.u16() & 0x7fff),
        5 => {
            let edge = input.pick(&[0, 0x1_0000, 0x2_0000, 0x2_4000, 1 << 32, u64::MAX]);
            edge.wrapping_add(u64::from(input.u8()))
                .wrapping_sub(u64::from(input.u8()))
        }
        6 => u64::from(input.u16()),
        _ => input.u64(),
    }
}

/// A length in bytes: most often a sensible one.
pub(crate) fn length(input: &mut Input<'_>) -> u32 {
    match input.below(4) {
        0 => u32::from(input.u8()),
        1 => 512 * u32::from(input.below(9)),
        2 => u32::from(input.u16()),
        _ => input.u32(),
    }
}

/// Whether two ranges have an address in common.
pub(crate) fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}
