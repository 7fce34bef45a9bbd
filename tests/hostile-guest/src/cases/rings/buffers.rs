//! Requests and packets that name what is not memory, or more than there is.

use super::MEMORY_END;
use crate::virtio::block::{self, DATA, HEADER_PART, IO_ERROR, OK, QUEUE, READ, STATUS_PART};
use crate::virtio::queue::{Descriptor, WRITE};
use crate::virtio::vsock::{self, RECEIVE, SOCKETS, Sockets};
use crate::{check, memory, same};

/// Ranges that are not wholly memory.
const NOT_MEMORY: [(u64, u32); 9] = [
    (MEMORY_END, 512),
    (MEMORY_END - 1, 512),
    (MEMORY_END - 511, 512),
    (0xd000_0000, 512),
    (0xfee0_0000, 512),
    (0xffff_fe00, 512),
    (0x8000_0000_0000_0000, 512),
    (u64::MAX - 511, 512),
    (u64::MAX, 512),
];

pub(crate) fn buffers_outside_memory() {
    block::start(&QUEUE);
    for (address, bytes) in NOT_MEMORY {
        let data = Descriptor(address, bytes, WRITE, 0);
        same!(
            block::simple(&QUEUE, READ, 0, data),
            IO_ERROR,
            "status of a read to {address:#x}"
        );
        let data = Descriptor(address, bytes, 0, 0);
        same!(
            block::simple(&QUEUE, block::WRITE_TO, 0, data),
            IO_ERROR,
            "status of a write from {address:#x}"
        );
        if address < MEMORY_END {
            // What begins in memory can be a header and a status.
            continue;
        }
        // A header, and a status, that are not there: the head comes back, and nothing was done.
        block::header(READ, 0);
        memory::fill(DATA, 0x77, 512);
        QUEUE.chain(
            0,
            &[
                Descriptor(address, 16, 0, 0),
                Descriptor(DATA, 512, WRITE, 0),
                STATUS_PART,
            ],
        );
        same!(QUEUE.serve(0).id, 0, "the head");
        check!(
            memory::is_filled(DATA, 0x77, 512),
            "a request whose header is at {address:#x} was carried out"
        );
        QUEUE.chain(
            0,
            &[
                HEADER_PART,
                Descriptor(DATA, 512, WRITE, 0),
                Descriptor(address, 1, WRITE, 0),
            ],
        );
        let used = QUEUE.serve(0);
        same!(
            (used.id, used.bytes),
            (0, 0),
            "what came back without a status"
        );
        check!(
            memory::is_filled(DATA, 0x77, 512),
            "a request whose status is at {address:#x} was carried out"
        );
        block::reads_right(&QUEUE, 11);
    }
}

pub(crate) fn packets_outside_memory() {
    let sockets = Sockets::start();
    for (address, bytes) in NOT_MEMORY {
        // No header: nobody to answer.
        sockets.send_parts(&[Descriptor(address, bytes, 0, 0)]);
        // A header that promises a payload which is not there.
        vsock::Header {
            len: bytes,
            ..vsock::packet(5000, vsock::ECHO_PORT, vsock::DATA)
        }
        .store(vsock::OUTGOING);
        sockets.send_parts(&[
            Descriptor(vsock::OUTGOING, vsock::HEADER_BYTES as u32, 0, 0),
            Descriptor(address, bytes, 0, 0),
        ]);
        sockets.expect(vsock::RESET, 5000, vsock::ECHO_PORT);
    }
    sockets.echo_works(5001);
    // Receive buffers that are not memory come back empty, and the packet waits for the next.
    let sockets = Sockets::start_without_buffers();
    let count = NOT_MEMORY.len() as u16;
    for (index, (address, bytes)) in (0..).zip(NOT_MEMORY) {
        RECEIVE.set(index, Descriptor(address, bytes, WRITE, 0));
        RECEIVE.offer(index);
    }
    RECEIVE.kick();
    sockets.send(&vsock::packet(5002, vsock::NOBODYS_PORT, vsock::DATA), b"");
    RECEIVE.await_done(count);
    for index in 0..count {
        same!(RECEIVE.entry(index).bytes, 0, "bytes in buffer {index}");
    }
    check!(!SOCKETS.needs_reset(), "the device asks for a reset");
    Sockets::start().echo_works(5003);
}

pub(crate) fn lengths_beyond_reason() {
    block::start(&QUEUE);
    let read = |parts: &[Descriptor]| {
        block::header(READ, 0);
        block::request(&QUEUE, parts).0
    };
    // Nothing, as much as there can be, and sums above 4 GiB: of memory, over and over.
    let huge = Descriptor(DATA, u32::MAX, WRITE, 0);
    let half = Descriptor(0, MEMORY_END as u32, WRITE, 0);
    same!(
        read(&[HEADER_PART, Descriptor(DATA, 0, WRITE, 0), STATUS_PART]),
        IO_ERROR,
        "status of a read of nothing"
    );
    same!(
        read(&[HEADER_PART, huge, STATUS_PART]),
        IO_ERROR,
        "status of a read of 4 GiB"
    );
    same!(
        read(&[HEADER_PART, huge, huge, huge, STATUS_PART]),
        IO_ERROR,
        "status of a read of 12 GiB"
    );
    let mut parts = [half; 60];
    parts[0] = HEADER_PART;
    parts[59] = STATUS_PART;
    same!(
        read(&parts),
        IO_ERROR,
        "status of a read of 58 times all memory"
    );
    // Empty descriptors between the others do no harm.
    let none = Descriptor(DATA, 0, WRITE, 0);
    same!(
        read(&[
            HEADER_PART,
            none,
            Descriptor(DATA, 512, WRITE, 0),
            none,
            none,
            STATUS_PART
        ]),
        OK,
        "status with empty parts"
    );
    same!(
        memory::view(DATA, 512),
        &block::pattern(0)[..],
        "the sector"
    );
    // An empty one at an address that is no memory names nothing.
    same!(
        read(&[
            HEADER_PART,
            Descriptor(u64::MAX, 0, WRITE, 0),
            Descriptor(DATA, 512, WRITE, 0),
            STATUS_PART
        ]),
        OK,
        "status with nothing nowhere"
    );
    block::reads_right(&QUEUE, 12);

    let sockets = Sockets::start();
    for len in [1, 65, 0x1_0000, 0x7fff_ffff, u32::MAX] {
        let header = vsock::Header {
            len,
            ..vsock::packet(6000, vsock::ECHO_PORT, vsock::DATA)
        };
        header.store(vsock::OUTGOING);
        sockets.send_parts(&[Descriptor(vsock::OUTGOING, u32::MAX, 0, 0)]);
        sockets.expect(vsock::RESET, 6000, vsock::ECHO_PORT);
    }
    sockets.echo_works(6001);
}
