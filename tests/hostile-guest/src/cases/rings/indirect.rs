//! Indirect tables, which are not offered.

use super::{LOOSE, MEMORY_END, breaks, next, with_chain};
use crate::memory;
use crate::virtio::block::{DATA, HEADER_PART, STATUS_PART};
use crate::virtio::queue::{Descriptor, INDIRECT, NEXT, WRITE};

pub(crate) fn indirect_descriptors() {
    // A table in memory that would be right, of three descriptors, if it had been negotiated.
    const TABLE: u64 = 0x98_0000;
    let descriptor = |at: u64, Descriptor(address, bytes, flags, next): Descriptor| {
        memory::write(at, address);
        memory::write(at + 8, bytes);
        memory::write(at + 12, flags);
        memory::write(at + 14, next);
    };
    descriptor(TABLE, Descriptor(HEADER_PART.0, 16, NEXT, 1));
    descriptor(TABLE + 16, Descriptor(DATA, 512, WRITE | NEXT, 2));
    descriptor(TABLE + 32, STATUS_PART);
    // Nested: a table whose first descriptor is a table.
    descriptor(TABLE + 48, Descriptor(TABLE, 48, INDIRECT, 0));
    for (what, address, bytes, flags) in [
        ("an indirect table", TABLE, 48, INDIRECT),
        ("a nested one", TABLE + 48, 16, INDIRECT),
        ("one with a next", TABLE, 48, INDIRECT | NEXT),
        ("one of 47 bytes", TABLE, 47, INDIRECT),
        ("one of no bytes", TABLE, 0, INDIRECT),
        ("one that the device may write", TABLE, 48, INDIRECT | WRITE),
        ("one outside memory", MEMORY_END, 48, INDIRECT),
        ("one that wraps", u64::MAX - 15, 48, INDIRECT),
        ("one of 4 GiB", TABLE, 0xffff_fff0, INDIRECT),
    ] {
        breaks(what, |queue| {
            with_chain(
                queue,
                &[(0, Descriptor(address, bytes, flags, 1)), (1, LOOSE)],
                0,
            )
        });
    }
    // Behind a descriptor that is right.
    breaks("an indirect table as the second", |queue| {
        with_chain(
            queue,
            &[(0, next(1)), (1, Descriptor(TABLE, 48, INDIRECT, 0))],
            0,
        );
    });
}
