//! Packets at the wrong time of a connection, and more connections than there may be.

use super::{drain, is_reset};
use crate::virtio::queue::Descriptor;
use crate::virtio::vsock::{
    self, CREDIT_REQUEST, CREDIT_UPDATE, DATA, ECHO_PORT, HEADER_BYTES, Header, NOBODYS_PORT,
    OUTGOING, REQUEST, RESET, RESPONSE, SHUTDOWN, STALLED_PORT, Sockets, packet,
};
use crate::{check, same, say, time};

pub(crate) fn data_at_the_wrong_time() {
    let sockets = Sockets::start();
    let ops = [RESPONSE, DATA, SHUTDOWN, CREDIT_UPDATE, CREDIT_REQUEST];
    // Before a connect.
    for op in ops {
        is_reset(&sockets, &packet(6000, ECHO_PORT, op));
    }
    // A reset out of the blue is not answered.
    sockets.send(&packet(6000, ECHO_PORT, RESET), b"");
    sockets.expect_nothing();
    // A second connect, and an answer to one's own.
    for op in [REQUEST, RESPONSE] {
        sockets.connect(6001, ECHO_PORT);
        is_reset(&sockets, &packet(6001, ECHO_PORT, op));
    }
    // After the end of one direction: for bytes, not for the other direction.
    sockets.connect(6002, STALLED_PORT);
    sockets.send(
        &Header {
            flags: 2,
            ..packet(6002, STALLED_PORT, SHUTDOWN)
        },
        b"",
    );
    sockets.expect_nothing();
    let header = Header {
        len: 1,
        ..packet(6002, STALLED_PORT, DATA)
    };
    sockets.send(&header, b"x");
    sockets.expect(RESET, 6002, STALLED_PORT);
    // After the end of both, and after a reset.
    sockets.connect(6003, ECHO_PORT);
    sockets.send(
        &Header {
            flags: 3,
            ..packet(6003, ECHO_PORT, SHUTDOWN)
        },
        b"",
    );
    sockets.expect(RESET, 6003, ECHO_PORT);
    is_reset(&sockets, &packet(6003, ECHO_PORT, DATA));
    sockets.connect(6004, ECHO_PORT);
    sockets.send(&packet(6004, ECHO_PORT, RESET), b"");
    is_reset(&sockets, &packet(6004, ECHO_PORT, DATA));
    sockets.echo_works(6100);
}

/// Connects that a guest makes: as many as there is time for on an emulated processor, and all on a real one.
const CONNECTS: u32 = 100_000;
const CONNECTS_LEAST: u32 = 5_000;
const CONNECTS_MS: u64 = 15_000;

pub(crate) fn hundred_thousand_connects() {
    let sockets = Sockets::start();
    // Where nobody listens, in batches, without a wait for the answers: each is a reset in the end, or dropped at a bound.
    let batch = vsock::TRANSMIT.size / 2;
    let mut resets = 0u32;
    let mut from = 0u32;
    let since = time::now();
    while from < CONNECTS_LEAST || from < CONNECTS && !time::is_over(since, CONNECTS_MS) {
        let before = vsock::TRANSMIT.offered();
        for index in 0..batch {
            let at = OUTGOING + u64::from(index) * 64;
            packet(from, NOBODYS_PORT, REQUEST).store(at);
            vsock::TRANSMIT.set(index, Descriptor(at, HEADER_BYTES as u32, 0, 0));
            vsock::TRANSMIT.offer(index);
            from += 1;
        }
        vsock::TRANSMIT.kick();
        vsock::TRANSMIT.await_done(before.wrapping_add(batch));
        while let Some((header, _)) = sockets.try_receive() {
            check!(
                matches!(header.op, RESET | RESPONSE | SHUTDOWN),
                "operation {} to a connect",
                header.op
            );
            resets += u32::from(header.op == RESET);
        }
    }
    say!("note {resets} resets for {from} connects before the last came");
    drain(&sockets);
    // Ports at the ends.
    for port in [0, 1, u32::MAX - 1, u32::MAX] {
        is_refused(&sockets, port, port);
    }
    sockets.echo_works(7000);
}

/// A connect to a port where nobody listens ends with a reset: the host's answer may be that it accepts, and then closes.
fn is_refused(sockets: &Sockets, from: u32, to: u32) {
    sockets.send(&packet(from, to, REQUEST), b"");
    loop {
        let (header, _) = sockets.receive();
        same!(
            (header.src_port, header.dst_port),
            (to, from),
            "who answers"
        );
        match header.op {
            RESET => break,
            RESPONSE | SHUTDOWN => {}
            op => crate::report::fail(format_args!(
                "operation {op} in answer to a connect to nobody"
            )),
        }
    }
    sockets.expect_nothing();
}

/// Connections of a machine at one time: `limits` in the device.
const MAX_CONNECTIONS: u32 = 1023;

pub(crate) fn connections_to_the_cap() {
    let sockets = Sockets::start();
    let mut accepted = 0;
    for port in 0..MAX_CONNECTIONS + 50 {
        sockets.send(&packet(port, STALLED_PORT, REQUEST), b"");
        let (answer, _) = sockets.receive();
        same!(
            (answer.src_port, answer.dst_port),
            (STALLED_PORT, port),
            "who answers"
        );
        if answer.op == RESPONSE {
            accepted += 1;
        }
    }
    say!("note {accepted} connections accepted");
    check!(accepted <= MAX_CONNECTIONS, "{accepted} connections");
    check!(accepted > 100, "only {accepted} connections");
    // Each can hold a little; together it is bounded.
    for port in 0..accepted {
        let len = 512;
        sockets.send(
            &Header {
                len,
                ..packet(port, STALLED_PORT, DATA)
            },
            &[0x61; 512],
        );
    }
    drain(&sockets);
    // All go, and there is room again.
    for port in 0..accepted {
        sockets.send(&packet(port, STALLED_PORT, RESET), b"");
    }
    drain(&sockets);
    sockets.echo_works(8000);
}
