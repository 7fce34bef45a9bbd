//! Rings at work: heads in flight many times, a descriptor that changes, indices that wrap.

use core::sync::atomic::{AtomicBool, Ordering};

use crate::virtio::block::{self, DATA, DISK, HEADER_PART, IO_ERROR, OK, QUEUE, READ, STATUS_PART};
use crate::virtio::queue::{Descriptor, NEXT, WRITE};
use crate::virtio::vsock::{self, Sockets, TRANSMIT};
use crate::virtio::{EVENT_IDX, VERSION_1, register};
use crate::{boot, check, memory, same, second, time};

pub(crate) fn same_head_twice() {
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

pub(crate) fn descriptor_changed_meanwhile() {
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

pub(crate) fn event_indices_poisoned_and_wrapped() {
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
