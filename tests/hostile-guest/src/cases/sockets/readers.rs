//! Whoever should read and does not: the guest, the host, a supervisor that does not listen.

use crate::virtio::queue::Descriptor;
use crate::virtio::vsock::{
    CREDIT_REQUEST, DATA, ECHO_PORT, HEADER_BYTES, Header, NOBODYS_PORT, OUTGOING, RECEIVE,
    REQUEST, RESPONSE, SOCKETS, STALLED_PORT, Sockets, packet,
};
use crate::{check, memory, same, say};

/// The suite connects, writes without end, and waits for an answer; no buffer is ever offered.
pub(crate) fn receive_queue_never_filled() {
    get_stuck();
}

pub(crate) fn stuck_connections_go_with_a_reset() {
    get_stuck();
    Sockets::start().echo_works(1000);
}

fn get_stuck() {
    let sockets = Sockets::start_without_buffers();
    say!("@connect 77");
    // And the guest makes the host owe it packets.
    for port in 0..1500 {
        sockets.send(&packet(port, NOBODYS_PORT, REQUEST), b"");
        sockets.send(&packet(port, ECHO_PORT, REQUEST), b"");
        sockets.send(&packet(port, ECHO_PORT, DATA), b"");
    }
    check!(!SOCKETS.needs_reset(), "the device asks for a reset");
    same!(RECEIVE.done(), 0, "packets");
}

/// The suite connects with a stream that it writes to: the guest has accepted it, and reads nothing.
pub(crate) fn reader_that_never_reads() {
    let sockets = Sockets::start();
    say!("@connect 78");
    let (request, _) = sockets.receive();
    same!(
        (request.op, request.dst_port),
        (REQUEST, 78),
        "what the host wants"
    );
    let answer = packet(78, request.src_port, RESPONSE);
    sockets.send(
        &Header {
            buf_alloc: 100,
            ..answer
        },
        b"",
    );
    let (data, _) = sockets.expect(DATA, 78, request.src_port);
    same!(data.len, 100, "bytes within the credit");
    sockets.expect(CREDIT_REQUEST, 78, request.src_port);
    sockets.expect_nothing();
    sockets.echo_works(9000);
}

/// Connects, as often as a supervisor that does not listen has room for, and then some; and ends.
pub(crate) fn connects_then_ends() {
    let sockets = Sockets::start();
    for port in 9100..9132 {
        sockets.send(&packet(port, STALLED_PORT, REQUEST), b"");
        sockets.receive();
    }
    crate::report::now();
    crate::boot::triple_fault();
}

/// Sends as much as it may at once, whoever reads it when.
pub(crate) fn data_for_a_late_reader() {
    const BYTES: u32 = 2048;
    const PACKETS: u32 = 120;
    let sockets = Sockets::start();
    sockets.connect(9200, STALLED_PORT);
    memory::fill(OUTGOING + HEADER_BYTES, 0x62, u64::from(BYTES));
    for _ in 0..PACKETS {
        Header {
            len: BYTES,
            ..packet(9200, STALLED_PORT, DATA)
        }
        .store(OUTGOING);
        sockets.send_parts(&[Descriptor(OUTGOING, HEADER_BYTES as u32 + BYTES, 0, 0)]);
    }
    check!(!SOCKETS.needs_reset(), "the device asks for a reset");
}
