//! Requests to the disks.

use super::queue::{Descriptor, Queue, Used, WRITE};
use super::{Device, VERSION_1};
use crate::{memory, same};

/// The machine's devices: a disk, a disk that may only be read.
pub(crate) const DISK: Device = Device::number(0);
pub(crate) const READ_ONLY_DISK: Device = Device::number(1);

/// Sectors of each.
pub(crate) const SECTORS: u64 = 2048;
pub(crate) const SECTOR_BYTES: u32 = 512;

/// Their queues.
pub(crate) const QUEUE: Queue = Queue::new(DISK, 0, 64, 0);
pub(crate) const READ_ONLY_QUEUE: Queue = Queue::new(READ_ONLY_DISK, 0, 64, 1);

/// VIRTIO_BLK_F_FLUSH, _DISCARD, _WRITE_ZEROES (virtio 1.2 §5.2.3).
pub(crate) const FLUSH_FEATURE: u64 = 1 << 9;
pub(crate) const DISCARD_FEATURES: u64 = 1 << 13 | 1 << 14;

/// Request types.
pub(crate) const READ: u32 = 0;
pub(crate) const WRITE_TO: u32 = 1;
pub(crate) const FLUSH: u32 = 4;
pub(crate) const GET_ID: u32 = 8;
pub(crate) const DISCARD: u32 = 11;
pub(crate) const WRITE_ZEROES: u32 = 13;

/// Statuses.
pub(crate) const OK: u8 = 0;
pub(crate) const IO_ERROR: u8 = 1;
pub(crate) const UNSUPPORTED: u8 = 2;

/// What a status byte holds before: no status.
pub(crate) const NO_STATUS: u8 = 0xee;

/// Where requests keep their parts.
pub(crate) const HEADER: u64 = 0x90_0000;
pub(crate) const STATUS: u64 = 0x90_1000;
pub(crate) const DATA: u64 = 0xa0_0000;

/// Descriptors of the parts.
pub(crate) const HEADER_PART: Descriptor = Descriptor(HEADER, 16, 0, 0);
pub(crate) const STATUS_PART: Descriptor = Descriptor(STATUS, 1, WRITE, 0);

/// Writes a header, and forgets the status before.
pub(crate) fn header(kind: u32, sector: u64) {
    memory::write(HEADER, kind);
    memory::write(HEADER + 4, 0u32);
    memory::write(HEADER + 8, sector);
    memory::write(STATUS, NO_STATUS);
}

/// The status.
pub(crate) fn status() -> u8 {
    memory::read(STATUS)
}

/// Takes the disk of this queue into service.
pub(crate) fn start(queue: &Queue) {
    let features = queue.device.features();
    queue.device.start(
        features & (VERSION_1 | FLUSH_FEATURE | DISCARD_FEATURES),
        &[queue],
    );
}

/// Serves a chain of these parts in the first descriptors, and gives its status.
pub(crate) fn request(queue: &Queue, parts: &[Descriptor]) -> (u8, Used) {
    queue.chain(0, parts);
    let used = queue.serve(0);
    same!(used.id, 0, "the head that came back");
    (status(), used)
}

/// Serves a request of a header, one part of data, and a status.
pub(crate) fn simple(queue: &Queue, kind: u32, sector: u64, data: Descriptor) -> u8 {
    header(kind, sector);
    request(queue, &[HEADER_PART, data, STATUS_PART]).0
}

/// What the suite has put into a sector.
pub(crate) fn pattern(sector: u64) -> [u8; 512] {
    core::array::from_fn(|index| (sector as u8).wrapping_mul(7).wrapping_add(index as u8))
}

/// Reads a sector, whose number picks a chain of its own, and checks it: the device serves.
pub(crate) fn reads_right(queue: &Queue, sector: u64) {
    memory::fill(DATA, 0, 512);
    let status = simple(
        queue,
        READ,
        sector,
        Descriptor(DATA, SECTOR_BYTES, WRITE, 0),
    );
    same!(status, OK, "status of a read of sector {sector}");
    same!(
        memory::view(DATA, 512),
        &pattern(sector)[..],
        "sector {sector}"
    );
}

/// Starts the disk anew and reads: it serves.
pub(crate) fn serves_again(queue: &Queue) {
    start(queue);
    reads_right(queue, 5);
}
