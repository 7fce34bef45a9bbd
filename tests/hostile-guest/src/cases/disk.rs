//! Requests that make no sense for the disk.

use crate::virtio::block::{
    self, DATA, DISCARD, DISK, FLUSH, GET_ID, HEADER, HEADER_PART, IO_ERROR, NO_STATUS, OK, QUEUE,
    READ, READ_ONLY_QUEUE, SECTORS, STATUS, STATUS_PART, UNSUPPORTED, WRITE_TO, WRITE_ZEROES,
};
use crate::virtio::queue::{Descriptor, Queue, WRITE};
use crate::{check, memory, same};

/// What is in data that no request may touch.
const UNTOUCHED: u8 = 0x77;

/// A request of one part of data gives this status, leaves the data as it is, and the disk serves after it.
fn refused(queue: &Queue, kind: u32, sector: u64, bytes: u32, wanted: u8) {
    memory::fill(DATA, UNTOUCHED, 4096);
    let flags = if matches!(kind, READ | GET_ID) {
        WRITE
    } else {
        0
    };
    let status = block::simple(queue, kind, sector, Descriptor(DATA, bytes, flags, 0));
    same!(
        status,
        wanted,
        "status of request {kind} at sector {sector:#x} of {bytes} bytes"
    );
    check!(
        memory::is_filled(DATA, UNTOUCHED, 4096),
        "request {kind} at sector {sector:#x} of {bytes} bytes wrote"
    );
}

pub(super) fn sectors_past_the_end() {
    block::start(&QUEUE);
    for kind in [READ, WRITE_TO] {
        for (sector, bytes) in [
            (SECTORS, 512),
            (SECTORS - 1, 1024),
            (SECTORS + 1, 512),
            (u64::MAX / 512, 512),
            (u64::MAX / 512 + 1, 512),
            (1 << 55, 512),
            (1 << 63, 512),
            (u64::MAX, 512),
            (u64::MAX - 1, 1024),
            (u64::MAX - 7, 4096),
        ] {
            refused(&QUEUE, kind, sector, bytes, IO_ERROR);
        }
    }
    block::reads_right(&QUEUE, SECTORS - 1);
}

pub(super) fn lengths_that_are_no_sectors() {
    block::start(&QUEUE);
    for kind in [READ, WRITE_TO] {
        for bytes in [0, 1, 511, 513, 1023] {
            refused(&QUEUE, kind, 1, bytes, IO_ERROR);
        }
    }
    // No data at all.
    for kind in [READ, WRITE_TO] {
        block::header(kind, 1);
        same!(
            block::request(&QUEUE, &[HEADER_PART, STATUS_PART]).0,
            IO_ERROR,
            "status of request {kind} without data"
        );
    }
    block::reads_right(&QUEUE, 1);
}

/// Puts a range for a discard or write-zeroes where data is.
fn range(at: u64, sector: u64, sectors: u32, flags: u32) {
    memory::write(DATA + at, sector);
    memory::write(DATA + at + 8, sectors);
    memory::write(DATA + at + 12, flags);
}

fn ranged(queue: &Queue, kind: u32, bytes: u32) -> u8 {
    block::simple(queue, kind, 0, Descriptor(DATA, bytes, 0, 0))
}

pub(super) fn writes_to_a_read_only_disk() {
    block::start(&READ_ONLY_QUEUE);
    refused(&READ_ONLY_QUEUE, WRITE_TO, 0, 512, IO_ERROR);
    for kind in [DISCARD, WRITE_ZEROES] {
        range(0, 0, 8, 0);
        same!(
            ranged(&READ_ONLY_QUEUE, kind, 16),
            IO_ERROR,
            "status of request {kind}"
        );
    }
    block::header(FLUSH, 0);
    same!(
        block::request(&READ_ONLY_QUEUE, &[HEADER_PART, STATUS_PART]).0,
        OK,
        "status of a flush"
    );
    (0..8).for_each(|sector| block::reads_right(&READ_ONLY_QUEUE, sector));
}

pub(super) fn ids_without_room() {
    block::start(&QUEUE);
    for bytes in [0, 1, 19] {
        refused(&QUEUE, GET_ID, 0, bytes, IO_ERROR);
    }
    memory::fill(DATA, UNTOUCHED, 64);
    same!(
        block::simple(&QUEUE, GET_ID, 0, Descriptor(DATA, 20, WRITE, 0)),
        OK,
        "status of an id"
    );
    same!(
        memory::view(DATA, 21),
        b"hostile\0\0\0\0\0\0\0\0\0\0\0\0\0\x77",
        "the id, and the byte behind it"
    );
}

pub(super) fn statuses_without_room() {
    block::start(&QUEUE);
    for (what, parts) in [
        (
            "of no bytes",
            &[
                HEADER_PART,
                Descriptor(DATA, 512, 0, 0),
                Descriptor(STATUS, 0, WRITE, 0),
            ][..],
        ),
        (
            "that can't be written",
            &[
                HEADER_PART,
                Descriptor(DATA, 512, 0, 0),
                Descriptor(STATUS, 1, 0, 0),
            ],
        ),
        (
            "that is not there",
            &[HEADER_PART, Descriptor(DATA, 512, 0, 0)],
        ),
    ] {
        // A write, which would show on the disk.
        memory::fill(DATA, UNTOUCHED, 512);
        block::header(WRITE_TO, 20);
        let (status, used) = block::request(&QUEUE, parts);
        same!(
            (status, used.bytes),
            (NO_STATUS, 0),
            "what came back with a status {what}"
        );
        block::reads_right(&QUEUE, 20);
    }
    // The last byte of all is the status, even where it is in one part with the data.
    block::header(READ, 1);
    let (_, used) = block::request(&QUEUE, &[HEADER_PART, Descriptor(DATA, 513, WRITE, 0)]);
    same!(
        (used.bytes, memory::read::<u8>(DATA + 512)),
        (513, OK),
        "bytes, and the last one"
    );
    block::reads_right(&QUEUE, 2);
}

pub(super) fn headers_short_split_and_writable() {
    block::start(&QUEUE);
    let data = Descriptor(DATA, 512, WRITE, 0);
    let read = |parts: &[Descriptor]| {
        block::header(READ, 21);
        memory::fill(DATA, 0, 512);
        block::request(&QUEUE, parts).0
    };
    // Short, and none.
    for bytes in [0, 1, 8, 15] {
        same!(
            read(&[Descriptor(HEADER, bytes, 0, 0), data, STATUS_PART]),
            IO_ERROR,
            "status with {bytes} bytes of header"
        );
    }
    same!(
        read(&[data, STATUS_PART]),
        IO_ERROR,
        "status without a header"
    );
    // One that only the device may write, and one behind what it may write.
    same!(
        read(&[Descriptor(HEADER, 16, WRITE, 0), data, STATUS_PART]),
        IO_ERROR,
        "status with a writable header"
    );
    same!(
        read(&[data, HEADER_PART, STATUS_PART]),
        IO_ERROR,
        "status with the header behind the data"
    );
    // Split, to single bytes: right.
    let mut parts = [STATUS_PART; 18];
    for (part, at) in parts.iter_mut().zip(HEADER..HEADER + 16) {
        *part = Descriptor(at, 1, 0, 0);
    }
    parts[16] = data;
    same!(read(&parts), OK, "status with a split header");
    same!(
        memory::view(DATA, 512),
        &block::pattern(21)[..],
        "the sector"
    );
    block::reads_right(&QUEUE, 22);
}

pub(super) fn unknown_requests() {
    block::start(&QUEUE);
    // SCSI commands and barriers of old, lifetime, secure erase, zones; and numbers that are none.
    for kind in [
        2,
        3,
        5,
        6,
        7,
        9,
        10,
        12,
        14,
        15,
        16,
        17,
        18,
        20,
        22,
        24,
        26,
        0x8000_0000,
        0x8000_0001,
        0xffff_ffff,
    ] {
        refused(&QUEUE, kind, 0, 512, UNSUPPORTED);
    }
    block::reads_right(&QUEUE, 23);
}

pub(super) fn ranges_that_overflow() {
    block::start(&QUEUE);
    for kind in [DISCARD, WRITE_ZEROES] {
        for (sector, sectors, flags, wanted) in [
            (SECTORS, 1, 0, IO_ERROR),
            (SECTORS - 1, 2, 0, IO_ERROR),
            (u64::MAX, 1, 0, IO_ERROR),
            (u64::MAX - 3, 8, 0, IO_ERROR),
            (1 << 55, 1, 0, IO_ERROR),
            (0, u32::MAX, 0, IO_ERROR),
            (0, 0, 0, IO_ERROR),
            (0, 1, 0x8000_0000, UNSUPPORTED),
            (0, 1, 2, UNSUPPORTED),
        ] {
            range(0, sector, sectors, flags);
            same!(
                ranged(&QUEUE, kind, 16),
                wanted,
                "status of {kind} from {sector:#x}, {sectors:#x} sectors"
            );
        }
        // No whole ranges, none, and far more than there may be.
        range(0, 0, 1, 0);
        for bytes in [0, 1, 15, 17, 31, 16 * 33, 0x1_0000, 0xffff_fff0] {
            same!(
                ranged(&QUEUE, kind, bytes),
                IO_ERROR,
                "status of {kind} with {bytes:#x} bytes of ranges"
            );
        }
        // A good one, then one that is not: nothing is done.
        range(0, 30, 1, 0);
        range(16, SECTORS, 1, 0);
        same!(
            ranged(&QUEUE, kind, 32),
            IO_ERROR,
            "status of {kind} with one good range"
        );
        block::reads_right(&QUEUE, 30);
    }
    (0..4).for_each(|sector| block::reads_right(&QUEUE, sector));
    // And one that is right.
    range(0, 40, 1, 0);
    same!(
        ranged(&QUEUE, WRITE_ZEROES, 16),
        OK,
        "status of a right one"
    );
    same!(
        block::simple(&QUEUE, READ, 40, Descriptor(DATA, 512, WRITE, 0)),
        OK,
        "status of a read"
    );
    check!(memory::is_filled(DATA, 0, 512), "it did not write zeros");
    check!(!DISK.needs_reset(), "the disk asks for a reset");
}

/// What a request may have at most: ranges, and sectors of each; here all of the disk.
const RANGES_MAX: u64 = 8;

/// A queue of all descriptors that the device takes.
const DEEP_QUEUE: Queue = Queue::new(DISK, 0, 256, 2);

/// Requests of three parts each that it has room for.
const REQUESTS: u16 = DEEP_QUEUE.size / 3;

/// A queue full of requests that write zeroes over all of the disk again and again, hundreds of MiB in all: the other disk is served between.
pub(super) fn zeroes_without_end() {
    block::start(&DEEP_QUEUE);
    block::start(&READ_ONLY_QUEUE);
    block::reads_right(&READ_ONLY_QUEUE, 3);
    block::header(WRITE_ZEROES, 0);
    let ranges = DATA + 0x1000;
    for index in 0..RANGES_MAX {
        range(0x1000 + 16 * index, 0, SECTORS as u32, 0);
    }
    let parts = [
        HEADER_PART,
        Descriptor(ranges, 16 * RANGES_MAX as u32, 0, 0),
        STATUS_PART,
    ];
    for number in 0..REQUESTS {
        DEEP_QUEUE.chain(3 * number, &parts);
        DEEP_QUEUE.offer(3 * number);
    }
    // A read of the other disk, with parts of its own.
    let (header, data, status) = (HEADER + 0x100, DATA, STATUS + 1);
    memory::write(header, READ);
    memory::write(header + 4, 0u32);
    memory::write(header + 8, 3u64);
    READ_ONLY_QUEUE.chain(
        0,
        &[
            Descriptor(header, 16, 0, 0),
            Descriptor(data, 512, WRITE, 0),
            Descriptor(status, 1, WRITE, 0),
        ],
    );
    let before = READ_ONLY_QUEUE.done();
    READ_ONLY_QUEUE.offer(0);
    DEEP_QUEUE.kick();
    READ_ONLY_QUEUE.kick();
    READ_ONLY_QUEUE.await_done(before.wrapping_add(1));
    let zeroed = DEEP_QUEUE.done();
    DEEP_QUEUE.await_done(REQUESTS);
    same!(block::status(), OK, "status of the last one");
    check!(
        zeroed < REQUESTS / 2,
        "the other disk waited for {zeroed} of {REQUESTS} requests"
    );
}

/// Nothing hostile: what a guest with a file system on its disk does.
pub(super) fn a_disk_is_used_for_all_that_it_can() {
    block::start(&QUEUE);
    memory::fill(DATA, UNTOUCHED, 1024);
    same!(
        block::simple(&QUEUE, WRITE_TO, 50, Descriptor(DATA, 1024, 0, 0)),
        OK,
        "status of a write"
    );
    memory::fill(DATA, 0, 1024);
    same!(
        block::simple(&QUEUE, READ, 50, Descriptor(DATA, 1024, WRITE, 0)),
        OK,
        "status of a read"
    );
    check!(
        memory::is_filled(DATA, UNTOUCHED, 1024),
        "what was written is not what is read"
    );
    block::header(FLUSH, 0);
    same!(
        block::request(&QUEUE, &[HEADER_PART, STATUS_PART]).0,
        OK,
        "status of a flush"
    );
    for kind in [DISCARD, WRITE_ZEROES] {
        range(0, 50, 2, 0);
        same!(ranged(&QUEUE, kind, 16), OK, "status of request {kind}");
    }
    same!(
        block::simple(&QUEUE, READ, 50, Descriptor(DATA, 1024, WRITE, 0)),
        OK,
        "status of a read"
    );
    check!(memory::is_filled(DATA, 0, 1024), "no zeros are read");
}
