//! More than there is room for: connections, answers, and a guest that takes nothing.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::super::limits::Limits;
use super::super::packet::{HEADER_BYTES, Header, Op, SHUTDOWN_RECEIVE, SHUTDOWN_SEND};
use super::guest::{Machine, RX, open_descriptors, ops, packet};
use super::hostile::assert_serves;
use crate::virtio::testing::Piece;

const PORT: u32 = 1000;
const SERVICE: u32 = 7;

#[test]
fn row_46_a_hundred_thousand_connects_that_nobody_takes() {
    let mut machine = Machine::new();
    machine.host.lock().unwrap().refuse.extend([0, 9, u32::MAX]);
    let mut resets = 0;
    for number in 0..100_000_u32 {
        let host_port = [0, 9, u32::MAX][number as usize % 3];
        machine.transmit(&packet(Op::Request, number, host_port), b"");
        if number % 50 == 49 {
            resets += ops(&machine.all_packets())
                .iter()
                .filter(|op| **op == Op::Reset)
                .count();
        }
    }

    assert_eq!(resets, 100_000);
    assert_eq!(machine.connection_count(), 0);
    assert!(open_descriptors() < 8_000);
}

#[test]
fn row_46_connects_that_the_host_accepts_and_drops_leave_nothing() {
    let mut machine = Machine::new();
    machine.host.lock().unwrap().drop_at_once = true;
    for number in 0..10_000_u32 {
        machine.transmit(&packet(Op::Request, number, SERVICE), b"");
        if number % 50 == 49 {
            machine.all_packets();
        }
    }

    machine.all_packets();
    assert_eq!(machine.connection_count(), 0);
    assert_eq!(machine.budget_bytes(), Limits::DEFAULT.buffer_budget_bytes);
    assert!(open_descriptors() < 8_000);
}

#[test]
fn row_46_connects_beyond_the_cap_are_reset_and_the_rest_go_on() {
    let limits = Limits {
        connections: 10,
        ..Limits::DEFAULT
    };
    let mut machine = Machine::with(limits, 128, 4096);
    let streams: Vec<_> = (0..10)
        .map(|port| machine.guest_connects(port, SERVICE))
        .collect();

    machine.transmit(&packet(Op::Request, 10, SERVICE), b"");
    let (_ours, theirs) = UnixStream::pair().unwrap();
    let refused = machine.device.lock().unwrap().connect(1, theirs);

    assert_eq!(ops(&machine.all_packets()), [Op::Reset]);
    assert!(refused.is_err());
    assert_eq!(machine.connection_count(), 10);
    drop(streams);
    machine.all_packets();
    assert_serves(&mut machine);
}

#[test]
fn row_46_streams_that_the_guest_leaves_unread_count_until_it_closes_them() {
    let limits = Limits {
        connections: 10,
        ..Limits::DEFAULT
    };
    let mut machine = Machine::with(limits, 128, 4096);
    for port in 0..10 {
        let request = packet(Op::Request, port, SERVICE);
        machine.transmit(
            &Header {
                buf_alloc: 0,
                ..request
            },
            b"",
        );
        machine.all_packets();
        let (mut stream, ..) = machine.host.lock().unwrap().accepted.pop_front().unwrap();
        stream.write_all(b"never read").unwrap();
    }
    machine.all_packets();

    machine.transmit(&packet(Op::Request, 10, SERVICE), b"");
    let refused = machine.all_packets();
    let close = Header {
        flags: SHUTDOWN_SEND | SHUTDOWN_RECEIVE,
        ..packet(Op::Shutdown, 3, SERVICE)
    };
    machine.transmit(&close, b"");
    let closed = machine.all_packets();

    assert_eq!(
        (ops(&refused), ops(&closed)),
        (vec![Op::Reset], vec![Op::Reset])
    );
    assert_serves(&mut machine);
}

#[test]
fn row_47_a_receive_queue_that_is_never_filled_costs_nothing() {
    let mut machine = Machine::new();
    for port in 0..5_000 {
        machine.transmit(&packet(Op::Request, port, SERVICE), b"");
        machine.transmit(&packet(Op::Data, port, 9), b"");
        machine.settle();
    }
    let accepted = std::mem::take(&mut machine.host.lock().unwrap().accepted);
    let streams: Vec<_> = accepted.into_iter().map(|(stream, ..)| stream).collect();
    assert_eq!(streams.len(), Limits::DEFAULT.connections);

    let mut stream = &streams[0];
    let timeout = Some(Duration::from_millis(20));
    stream.set_read_timeout(timeout).unwrap();
    stream.set_write_timeout(timeout).unwrap();
    let read = stream.read(&mut [0; 8]).unwrap_err();
    let written = std::iter::from_fn(|| stream.write(&[0; 4096]).ok()).sum::<usize>();

    assert_eq!(read.kind(), ErrorKind::WouldBlock);
    assert!(written < 1 << 20);
    machine.settle();
    assert_eq!(machine.connection_count(), Limits::DEFAULT.connections);
    drop(streams);
    machine.settle();
    assert_eq!(machine.turns(10), 0);
    // When the guest comes to itself, nothing of what it is owed has been lost.
    let packets = machine.all_packets();
    let answered = ops(&packets)
        .iter()
        .filter(|op| **op == Op::Response)
        .count();
    assert_eq!(answered, Limits::DEFAULT.connections);
    assert_eq!(machine.connection_count(), 0);
}

#[test]
fn row_47_receive_buffers_that_are_too_small_or_not_memory_come_back_empty() {
    let mut machine = Machine::with(Limits::DEFAULT, 128, 4096);
    machine.transmit(&packet(Op::Request, PORT, SERVICE), b"");
    for piece in [
        Piece::writable(0x80000, HEADER_BYTES),
        Piece::writable(0x80000, 0),
        Piece::writable(1 << 40, 4096),
        Piece::readable(0x80000, 4096),
    ] {
        machine.add(RX, &[piece]);
        machine.kick(RX);
    }
    machine.settle();

    assert_eq!(ops(&machine.all_packets()), [Op::Response]);
    let _stream = machine.host.lock().unwrap().accepted.pop_front();
    assert_serves(&mut machine);
}
