//! More than there is room for, and lies about room.

use super::{drain, is_reset};
use crate::virtio::queue::Descriptor;
use crate::virtio::vsock::{
    CREDIT_REQUEST, CREDIT_UPDATE, DATA, ECHO_PORT, HEADER_BYTES, Header, OUTGOING, REQUEST, RESET,
    RESPONSE, STALLED_PORT, Sockets, packet,
};
use crate::{memory, same, say};

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

/// The most that a connection's peer may hold back: what the device promises, and what the system's socket buffers take.
const HELD_MAX: u32 = 2 << 20;

pub(crate) fn data_beyond_credit() {
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

pub(crate) fn credit_that_shrinks_and_lies() {
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
