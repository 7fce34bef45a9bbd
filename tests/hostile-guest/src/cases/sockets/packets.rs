//! Packets that are wrong by themselves.

use super::is_reset;
use crate::same;
use crate::virtio::queue::Descriptor;
use crate::virtio::vsock::{
    CREDIT_REQUEST, CREDIT_UPDATE, DATA, ECHO_PORT, GUEST, HEADER_BYTES, HOST, Header, OUTGOING,
    REQUEST, RESET, RESPONSE, SHUTDOWN, Sockets, packet,
};

pub(crate) fn packets_shorter_than_they_say() {
    let sockets = Sockets::start();
    sockets.connect(1000, ECHO_PORT);
    // Headers cut short: nobody to answer.
    for bytes in [0, 1, 28, 43] {
        packet(1000, ECHO_PORT, DATA).store(OUTGOING);
        sockets.send_parts(&[Descriptor(OUTGOING, bytes, 0, 0)]);
        sockets.expect_nothing();
    }
    // Payloads that are not there, in a connection and out of one.
    for (port, len) in (1001..).zip([1, 5, 4096, 0x1_0000, 0x7fff_ffff, u32::MAX]) {
        sockets.connect(port, ECHO_PORT);
        let header = Header {
            len,
            ..packet(port, ECHO_PORT, DATA)
        };
        is_reset(&sockets, &header);
        is_reset(&sockets, &header);
    }
    // A header in pieces is right.
    packet(1100, ECHO_PORT, REQUEST).store(OUTGOING);
    let mut parts = [Descriptor(0, 1, 0, 0); HEADER_BYTES as usize];
    for (part, at) in parts.iter_mut().zip(OUTGOING..) {
        part.0 = at;
    }
    sockets.send_parts(&parts);
    sockets.expect(RESPONSE, 1100, ECHO_PORT);
    sockets.echo_works(1200);
}

pub(crate) fn foreign_addresses() {
    let sockets = Sockets::start();
    sockets.connect(2000, ECHO_PORT);
    let sources = [
        0,
        1,
        HOST,
        GUEST + 1,
        0xffff_ffff,
        1 << 32 | GUEST,
        u64::MAX,
    ];
    let destinations = [0, 1, GUEST, 4, 0xffff_ffff, 1 << 32 | HOST, u64::MAX];
    for op in [REQUEST, DATA, RESET, SHUTDOWN] {
        // In somebody else's name: dropped, also where the ports are those of a connection.
        for src_cid in sources {
            for port in [2000, 2001] {
                sockets.send(
                    &Header {
                        src_cid,
                        ..packet(port, ECHO_PORT, op)
                    },
                    b"",
                );
            }
        }
    }
    sockets.expect_nothing();
    for (port, dst_cid) in (2100..).zip(destinations) {
        // To somebody else: no connection comes of it. The reset is from whom it was sent to.
        sockets.send(
            &Header {
                dst_cid,
                ..packet(port, ECHO_PORT, REQUEST)
            },
            b"",
        );
        let (answer, _) = sockets.receive();
        same!(
            (answer.op, answer.src_cid, answer.src_port, answer.dst_port),
            (RESET, dst_cid, ECHO_PORT, port),
            "answer"
        );
    }
    // The connection has lived through all of it.
    sockets.send(
        &Header {
            len: 2,
            ..packet(2000, ECHO_PORT, DATA)
        },
        b"ok",
    );
    same!(
        sockets.expect(DATA, 2000, ECHO_PORT).1,
        b"ok",
        "what came back"
    );
    sockets.echo_works(2200);
}

pub(crate) fn unknown_operations() {
    let sockets = Sockets::start();
    let bad = [
        Header {
            op: 0,
            ..packet(3000, ECHO_PORT, REQUEST)
        },
        Header {
            op: 8,
            ..packet(3000, ECHO_PORT, REQUEST)
        },
        Header {
            op: 0xffff,
            ..packet(3000, ECHO_PORT, REQUEST)
        },
        Header {
            kind: 0,
            ..packet(3000, ECHO_PORT, REQUEST)
        },
        Header {
            kind: 2,
            ..packet(3000, ECHO_PORT, REQUEST)
        },
        Header {
            kind: 0xffff,
            ..packet(3000, ECHO_PORT, REQUEST)
        },
        Header {
            flags: 1,
            ..packet(3000, ECHO_PORT, REQUEST)
        },
        Header {
            flags: u32::MAX,
            ..packet(3000, ECHO_PORT, REQUEST)
        },
        Header {
            flags: 1,
            ..packet(3000, ECHO_PORT, DATA)
        },
        Header {
            flags: 4,
            ..packet(3000, ECHO_PORT, SHUTDOWN)
        },
        Header {
            flags: 1,
            ..packet(3000, ECHO_PORT, CREDIT_UPDATE)
        },
        Header {
            flags: 1,
            ..packet(3000, ECHO_PORT, CREDIT_REQUEST)
        },
    ];
    for (number, header) in (0..).zip(bad) {
        // Out of a connection, then in one.
        is_reset(
            &sockets,
            &Header {
                src_port: 3000 + number,
                ..header
            },
        );
        let port = 3100 + number;
        sockets.connect(port, ECHO_PORT);
        is_reset(
            &sockets,
            &Header {
                src_port: port,
                ..header
            },
        );
    }
    sockets.echo_works(3200);
}
