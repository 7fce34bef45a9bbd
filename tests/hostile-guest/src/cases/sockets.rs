//! Packets that break the rules of sockets.

use crate::virtio::queue::Descriptor;
use crate::virtio::vsock::{
    self, CREDIT_REQUEST, CREDIT_UPDATE, DATA, ECHO_PORT, GUEST, HEADER_BYTES, HOST, Header,
    NOBODYS_PORT, OUTGOING, RECEIVE, REQUEST, RESET, RESPONSE, SHUTDOWN, SOCKETS, STALLED_PORT,
    Sockets, packet,
};
use crate::{check, memory, same, say, time};

/// A packet gets a reset in answer, and nothing else.
fn is_reset(sockets: &Sockets, header: &Header) {
    sockets.send(header, b"");
    sockets.expect(RESET, header.src_port, header.dst_port);
    sockets.expect_nothing();
}

pub(super) fn packets_shorter_than_they_say() {
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

pub(super) fn foreign_addresses() {
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

pub(super) fn unknown_operations() {
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

/// Sends data in packets of 2 KiB, until a reset comes; how many bytes it had taken.
fn sent_until_reset(sockets: &Sockets, port: u32, to: u32, bound: u32) -> u32 {
    const BYTES: u32 = 2048;
    memory::fill(OUTGOING + HEADER_BYTES, 0x61, u64::from(BYTES));
    let mut sent = 0;
    while sent <= bound {
        Header {
            len: BYTES,
            ..packet(port, to, DATA)
        }
        .store(OUTGOING);
        sockets.send_parts(&[Descriptor(OUTGOING, HEADER_BYTES as u32 + BYTES, 0, 0)]);
        sent += BYTES;
        while let Some((header, _)) = sockets.try_receive() {
            if header.op == RESET {
                drain(sockets);
                return sent;
            }
        }
    }
    crate::report::fail(format_args!("{sent} bytes were taken without credit"))
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

/// The most that a connection's peer may hold back: what the device promises, and what the system's socket buffers take.
const HELD_MAX: u32 = 2 << 20;

pub(super) fn data_beyond_credit() {
    let sockets = Sockets::start();
    sockets.send(&packet(4000, STALLED_PORT, REQUEST), b"");
    let (answer, _) = sockets.expect(RESPONSE, 4000, STALLED_PORT);
    let sent = sent_until_reset(&sockets, 4000, STALLED_PORT, HELD_MAX);
    say!(
        "note {} bytes of credit, {sent} bytes taken",
        answer.buf_alloc
    );
    // In one packet, beyond all credit.
    sockets.connect(4001, STALLED_PORT);
    let len = answer.buf_alloc + 1;
    Header {
        len,
        ..packet(4001, STALLED_PORT, DATA)
    }
    .store(OUTGOING);
    sockets.send_parts(&[Descriptor(OUTGOING, HEADER_BYTES as u32 + len, 0, 0)]);
    sockets.expect(RESET, 4001, STALLED_PORT);
    sockets.echo_works(4100);
}

pub(super) fn credit_that_shrinks_and_lies() {
    let sockets = Sockets::start();
    let say_credit = |port: u32, buf_alloc: u32, fwd_cnt: u32| {
        sockets.send(
            &Header {
                buf_alloc,
                fwd_cnt,
                ..packet(port, ECHO_PORT, CREDIT_UPDATE)
            },
            b"",
        );
    };
    let echo = |port: u32, text: &[u8], buf_alloc: u32| {
        sockets.send(
            &Header {
                len: text.len() as u32,
                buf_alloc,
                ..packet(port, ECHO_PORT, DATA)
            },
            text,
        );
    };
    // Room for 8 bytes: so many come, then a question for more.
    sockets.send(
        &Header {
            buf_alloc: 8,
            ..packet(5000, ECHO_PORT, REQUEST)
        },
        b"",
    );
    sockets.expect(RESPONSE, 5000, ECHO_PORT);
    echo(5000, b"0123456789ab", 8);
    same!(
        sockets.expect(DATA, 5000, ECHO_PORT).1,
        b"01234567",
        "what came within the credit"
    );
    sockets.expect(CREDIT_REQUEST, 5000, ECHO_PORT);
    // Less than what is under way, and the least: nothing more comes.
    for buf_alloc in [7, 1, 0] {
        say_credit(5000, buf_alloc, 0);
        sockets.expect_nothing();
    }
    // The most there can be: the rest.
    say_credit(5000, u32::MAX, 0);
    same!(sockets.expect(DATA, 5000, ECHO_PORT).1, b"89ab", "the rest");
    // Bytes taken that never came.
    is_reset(
        &sockets,
        &Header {
            fwd_cnt: 13,
            ..packet(5000, ECHO_PORT, CREDIT_UPDATE)
        },
    );
    for (port, fwd_cnt) in (5001..).zip([1, 0x7fff_ffff]) {
        sockets.connect(port, ECHO_PORT);
        is_reset(
            &sockets,
            &Header {
                fwd_cnt,
                ..packet(port, ECHO_PORT, CREDIT_UPDATE)
            },
        );
    }
    // A connect that claims so at once.
    let header = Header {
        fwd_cnt: 1,
        ..packet(5100, ECHO_PORT, REQUEST)
    };
    sockets.send(&header, b"");
    sockets.expect(RESET, 5100, ECHO_PORT);
    // A count that is behind is stale: nothing comes of it.
    sockets.connect(5101, ECHO_PORT);
    say_credit(5101, 0x1_0000, u32::MAX);
    say_credit(5101, 0x1_0000, 0x8000_0001);
    echo(5101, b"still here", 0x1_0000);
    same!(
        sockets.expect(DATA, 5101, ECHO_PORT).1,
        b"still here",
        "after stale counts"
    );
    sockets.echo_works(5200);
}

pub(super) fn data_at_the_wrong_time() {
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

/// Connections of a machine at one time: `limits` in the device.
const MAX_CONNECTIONS: u32 = 1023;

pub(super) fn hundred_thousand_connects() {
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

fn drain(sockets: &Sockets) {
    while time::soon(|| RECEIVE.done() != sockets.taken()) {
        let _ = sockets.try_receive();
    }
}

pub(super) fn connections_to_the_cap() {
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

/// The suite connects, writes without end, and waits for an answer; no buffer is ever offered.
pub(super) fn receive_queue_never_filled() {
    get_stuck();
}

pub(super) fn stuck_connections_go_with_a_reset() {
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
pub(super) fn reader_that_never_reads() {
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
pub(super) fn connects_then_ends() {
    let sockets = Sockets::start();
    for port in 9100..9132 {
        sockets.send(&packet(port, STALLED_PORT, REQUEST), b"");
        sockets.receive();
    }
    crate::report::now();
    crate::boot::triple_fault();
}

/// Sends as much as it may at once, whoever reads it when.
pub(super) fn data_for_a_late_reader() {
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
