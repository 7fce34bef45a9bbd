//! Rings that are broken, and requests that name what is not memory.

use core::sync::atomic::{AtomicBool, Ordering};

use crate::virtio::block::{self, DATA, DISK, HEADER_PART, IO_ERROR, OK, QUEUE, READ, STATUS_PART};
use crate::virtio::queue::{Descriptor, INDIRECT, NEXT, Queue, WRITE};
use crate::virtio::vsock::{self, RECEIVE, SOCKETS, Sockets, TRANSMIT};
use crate::virtio::{CONFIG_INTERRUPT, EVENT_IDX, VERSION_1, register};
use crate::{boot, check, memory, same, second, time};

/// End of the machine's memory.
const MEMORY_END: u64 = 0x200_0000;

/// Breaks a queue of the disk, and a queue of packets in each direction, with `deed`: each device is to need a reset, not to look at the
/// ring again, and to serve after it. `deed` finds the queue in service and kicks nothing.
fn breaks(what: &str, deed: impl Fn(&Queue)) {
    block::start(&QUEUE);
    block::header(READ, 0);
    is_broken(&QUEUE, what, &deed);
    block::serves_again(&QUEUE);

    Sockets::start();
    is_broken(&TRANSMIT, what, &deed);
    Sockets::start().echo_works(1000);

    // The device looks into the receive queue when it has something to say: to a stranger, a reset.
    let sockets = Sockets::start_without_buffers();
    deed(&RECEIVE);
    sockets.send(&vsock::packet(1001, vsock::ECHO_PORT, vsock::DATA), b"");
    RECEIVE.kick();
    has_retired(&RECEIVE, what);
    Sockets::start().echo_works(1002);
}

fn is_broken(queue: &Queue, what: &str, deed: impl Fn(&Queue)) {
    deed(queue);
    queue.kick();
    has_retired(queue, what);
}

fn has_retired(queue: &Queue, what: &str) {
    let device = queue.device;
    check!(
        time::until(|| device.needs_reset()),
        "{what}: the device does not ask for a reset"
    );
    check!(
        time::until(|| device.read(register::INTERRUPT_STATUS) & CONFIG_INTERRUPT != 0),
        "{what}: the driver was not told"
    );
    // A good chain now, at an index that would be right: nobody looks.
    let done = queue.done();
    queue.set(0, Descriptor(DATA, 64, WRITE, 0));
    queue.set_offered(done);
    queue.offer(0);
    queue.kick();
    check!(
        !time::soon(|| queue.done() != done),
        "{what}: the ring was read again"
    );
}

fn with_chain(queue: &Queue, parts: &[(u16, Descriptor)], head: u16) {
    for (index, descriptor) in parts {
        queue.set(*index, *descriptor);
    }
    queue.offer(head);
}

const LOOSE: Descriptor = Descriptor(DATA, 64, WRITE, 0);

fn next(index: u16) -> Descriptor {
    Descriptor(DATA, 64, WRITE | NEXT, index)
}

pub(super) fn chains_that_loop() {
    breaks("a descriptor that follows itself", |queue| {
        with_chain(queue, &[(0, next(0))], 0)
    });
    breaks("two that follow one another", |queue| {
        with_chain(queue, &[(0, next(1)), (1, next(0))], 0)
    });
    breaks("a loop behind a beginning", |queue| {
        with_chain(
            queue,
            &[(0, next(1)), (1, next(2)), (2, next(3)), (3, next(1))],
            0,
        );
    });
}

pub(super) fn chain_longer_than_queue() {
    // As long as the queue is right.
    block::start(&QUEUE);
    block::header(READ, 0);
    let sectors = u64::from(QUEUE.size) - 2;
    QUEUE.set(0, Descriptor(HEADER_PART.0, 16, NEXT, 1));
    for index in 1..QUEUE.size - 1 {
        QUEUE.set(
            index,
            Descriptor(DATA + u64::from(index) * 512, 512, WRITE | NEXT, index + 1),
        );
    }
    QUEUE.set(QUEUE.size - 1, STATUS_PART);
    let used = QUEUE.serve(0);
    same!(
        (block::status(), u64::from(used.bytes)),
        (OK, sectors * 512 + 1),
        "a chain of all descriptors"
    );
    same!(
        memory::view(DATA + sectors * 512, 512),
        &block::pattern(sectors - 1)[..],
        "its last sector"
    );
    // One more is a loop.
    breaks("one descriptor more than there are", |queue| {
        for index in 0..queue.size {
            queue.set(index, next((index + 1) % queue.size));
        }
        queue.offer(0);
    });
}

pub(super) fn next_past_the_end() {
    for index in [0, 1, 0x7fff, 0xffff] {
        breaks("a next field past the end", |queue| {
            with_chain(queue, &[(0, next(index.max(queue.size)))], 0);
        });
    }
}

pub(super) fn head_past_the_end() {
    for index in [0, 1, 0x7fff, 0xffff] {
        breaks("a head past the end", |queue| {
            queue.set(0, LOOSE);
            queue.offer(index.max(queue.size));
        });
    }
}

pub(super) fn available_index_ahead() {
    for surplus in [1, 2, 0x7fff, 0xff00] {
        breaks("an available index too far ahead", |queue| {
            queue.set(0, LOOSE);
            queue.set_offered(queue.done().wrapping_add(queue.size).wrapping_add(surplus));
        });
    }
}

pub(super) fn available_index_backwards() {
    // Each queue of the socket device has used nothing yet when it goes back: from 0 to 65535. The disk goes back from 3.
    breaks("an available index before the first", |queue| {
        queue.set_offered(queue.offered().wrapping_sub(1))
    });
    block::start(&QUEUE);
    (0..3).for_each(|sector| block::reads_right(&QUEUE, sector));
    is_broken(&QUEUE, "an available index that goes back", |queue| {
        queue.set_offered(2)
    });
    block::serves_again(&QUEUE);
}

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

pub(super) fn buffers_outside_memory() {
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

pub(super) fn packets_outside_memory() {
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

pub(super) fn lengths_beyond_reason() {
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

pub(super) fn indirect_descriptors() {
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

pub(super) fn same_head_twice() {
    block::start(&QUEUE);
    block::header(READ, 3);
    memory::fill(DATA, 0, 512);
    QUEUE.chain(
        0,
        &[HEADER_PART, Descriptor(DATA, 512, WRITE, 0), STATUS_PART],
    );
    (0..QUEUE.size).for_each(|_| QUEUE.offer(0));
    QUEUE.kick();
    QUEUE.await_done(QUEUE.size);
    for index in 0..QUEUE.size {
        let used = QUEUE.entry(index);
        same!((used.id, used.bytes), (0, 513), "entry {index}");
    }
    same!(
        memory::view(DATA, 512),
        &block::pattern(3)[..],
        "the sector"
    );
    // Two chains that share their parts.
    QUEUE.set(8, Descriptor(HEADER_PART.0, 16, NEXT, 1));
    QUEUE.offer(0);
    QUEUE.offer(8);
    QUEUE.offer(1);
    QUEUE.kick();
    QUEUE.await_done(QUEUE.size + 3);
    block::reads_right(&QUEUE, 13);

    let sockets = Sockets::start();
    TRANSMIT.set(0, Descriptor(vsock::OUTGOING, 44, 0, 0));
    vsock::packet(7000, vsock::NOBODYS_PORT, vsock::DATA).store(vsock::OUTGOING);
    (0..20).for_each(|_| TRANSMIT.offer(0));
    TRANSMIT.kick();
    (0..20).for_each(|_| {
        sockets.expect(vsock::RESET, 7000, vsock::NOBODYS_PORT);
    });
    sockets.echo_works(7001);
}

/// Whether the second processor is to stop, and whether it has.
static STOP: AtomicBool = AtomicBool::new(false);
static STOPPED: AtomicBool = AtomicBool::new(false);

/// Where a buffer may be, and where none ever is: the device must not write there.
const LEFT: u64 = DATA;
const RIGHT: u64 = DATA + 0x10_0000;
const CANARIES: [u64; 4] = [LEFT - 0x1000, LEFT + 0x1000, RIGHT - 0x1000, RIGHT + 0x1000];

/// Two versions of a descriptor; a mixture of both is none that may be.
const VERSIONS: [Descriptor; 2] = [
    Descriptor(LEFT, 512, WRITE | NEXT, 2),
    Descriptor(RIGHT, 0x1000, WRITE | NEXT, 2),
];

fn flip_until_stopped() -> ! {
    while !STOP.load(Ordering::Relaxed) {
        for version in VERSIONS {
            QUEUE.set(1, version);
        }
        // And one that leads nowhere.
        QUEUE.set(1, Descriptor(u64::MAX, u32::MAX, NEXT, 2));
    }
    STOPPED.store(true, Ordering::Release);
    boot::halt()
}

/// Reads while the other processor changes the data's descriptor.
const FLIPPED_READS: u32 = 3000;

pub(super) fn descriptor_changed_meanwhile() {
    block::start(&QUEUE);
    CANARIES
        .iter()
        .for_each(|canary| memory::fill(*canary, 0x33, 0x1000));
    QUEUE.set(0, Descriptor(HEADER_PART.0, 16, NEXT, 1));
    QUEUE.set(1, VERSIONS[0]);
    QUEUE.set(2, STATUS_PART);
    second::start(flip_until_stopped);
    let mut seen = [0u32; 3];
    for round in 0..FLIPPED_READS {
        block::header(READ, 1);
        let used = QUEUE.serve(0);
        let status = block::status();
        // One version or the other, or an error; fields of both can be mixed while the other processor writes them, but what the device
        // checked is what it used.
        let kind = match (status, used.bytes) {
            (OK, 513) => 0,
            (OK, 0x1001) => 1,
            (IO_ERROR, 1) => 2,
            _ => crate::report::fail(format_args!(
                "status {status}, {} bytes in round {round}",
                used.bytes
            )),
        };
        seen[kind] += 1;
    }
    STOP.store(true, Ordering::Relaxed);
    // The descriptors are this processor's again only when the other one has seen it.
    check!(
        time::until(|| STOPPED.load(Ordering::Acquire)),
        "the second processor does not stop"
    );
    crate::say!("note {seen:?} short reads, long reads, errors");
    check!(
        CANARIES
            .iter()
            .all(|canary| memory::is_filled(*canary, 0x33, 0x1000)),
        "a buffer was written that was none"
    );
    check!(!DISK.needs_reset(), "the ring was right all along");
    block::reads_right(&QUEUE, 14);
}

/// Requests to go round the 16-bit indices once and some more.
const WRAP_REQUESTS: u32 = 66_000;

pub(super) fn event_indices_poisoned_and_wrapped() {
    let features = VERSION_1 | EVENT_IDX;
    QUEUE.device.start(features, &[&QUEUE]);
    // No header at all: the least that can be asked, and it comes back.
    for index in 0..QUEUE.size {
        QUEUE.set(index, Descriptor(block::STATUS, 1, WRITE, 0));
    }
    let (used_event, available_event) = (QUEUE.used_event(), QUEUE.available_event());
    let mut served = 0u32;
    while served < WRAP_REQUESTS {
        let batch = QUEUE.size / 2;
        // Anything, in both: where the device wants a kick is its own to know.
        memory::write(used_event, (served as u16).wrapping_mul(40503));
        memory::write(available_event, (served as u16).wrapping_mul(25173));
        (0..batch).for_each(|index| QUEUE.offer(index));
        QUEUE.kick();
        served += u32::from(batch);
        QUEUE.await_done(served as u16);
    }
    // An interrupt is asked for at the next completion: it comes.
    DISK.write(register::INTERRUPT_ACK, 3);
    memory::write(used_event, QUEUE.done());
    block::reads_right(&QUEUE, 15);
    let raised =
        time::until(|| DISK.read(register::INTERRUPT_STATUS) & crate::virtio::USED_INTERRUPT != 0);
    check!(raised, "no interrupt after the indices wrapped");
    check!(!DISK.needs_reset(), "the device asks for a reset");
}
