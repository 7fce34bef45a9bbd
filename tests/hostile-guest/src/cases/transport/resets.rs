//! Resets of devices that are at work.

use crate::virtio::block::{self, DATA, DISK, QUEUE, READ};
use crate::virtio::queue::{Descriptor, WRITE};
use crate::virtio::vsock;
use crate::{check, memory, time};

/// Rounds of requests that are reset.
const RESETS: u32 = 60;

pub(crate) fn reset_with_requests_in_flight() {
    const BYTES: u64 = 512 << 10;
    for round in 0..RESETS {
        block::start(&QUEUE);
        block::header(READ, 0);
        // The same long read as often as the queue takes it.
        for index in 0..16 {
            QUEUE.chain(
                index * 3,
                &[
                    block::HEADER_PART,
                    Descriptor(DATA, BYTES as u32, WRITE, 0),
                    block::STATUS_PART,
                ],
            );
            QUEUE.offer(index * 3);
        }
        QUEUE.kick();
        for _ in 0..round * 500 {
            core::hint::spin_loop();
        }
        DISK.set_status(0);
        // Drained: from here on nothing of the device touches memory.
        memory::fill(DATA, 0x5a, BYTES);
        let done = QUEUE.done();
        let is_untouched = || QUEUE.done() == done && memory::is_filled(DATA, 0x5a, BYTES);
        check!(is_untouched(), "memory changed after reset {round}");
        if round % 10 == 0 {
            time::pass(2);
            check!(
                is_untouched(),
                "memory changed some time after reset {round}"
            );
        }
    }
    block::serves_again(&QUEUE);
}

pub(crate) fn reset_with_streams_open() {
    for round in 0..20 {
        let sockets = vsock::Sockets::start();
        (2000..2008).for_each(|port| sockets.connect(port, vsock::ECHO_PORT));
        for port in 2000..2008 {
            let header = vsock::Header {
                len: 512,
                ..vsock::packet(port, vsock::ECHO_PORT, vsock::DATA)
            };
            sockets.send(&header, &[round; 512]);
        }
        // What is echoed comes while the device is reset, or not at all.
        vsock::SOCKETS.set_status(0);
        let done = vsock::RECEIVE.done();
        check!(
            !time::soon(|| vsock::RECEIVE.done() != done),
            "a packet came after reset {round}"
        );
    }
    vsock::Sockets::start().echo_works(3000);
}
