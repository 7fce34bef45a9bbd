//! No wake-up is lost, none comes for nothing, and nobody waits behind a greedy neighbour.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use vm_memory::{Bytes, GuestAddress};

use super::super::ConnectError;
use super::super::limits::{FIRST_HOST_PORT, Limits};
use super::super::packet::{Header, Op};
use super::guest::{EVENTS, Machine, RX, TX, data, ops, packet};
use crate::virtio::testing::Piece;
use crate::virtio::{StateError, VirtioDevice};

const PORT: u32 = 1000;
const SERVICE: u32 = 7;

/// Writes without waiting, as much as the socket takes.
fn write_all_it_takes(stream: &UnixStream, bytes: &[u8]) -> usize {
    stream.set_nonblocking(true).unwrap();
    let mut written = 0;
    while let Ok(count) = (&mut &*stream).write(&bytes[written..]) {
        written += count;
        if count == 0 {
            break;
        }
    }
    written
}

/// Reads without waiting; true at the end of file.
fn read_all_there_is(stream: &UnixStream, into: &mut Vec<u8>) -> bool {
    stream.set_nonblocking(true).unwrap();
    match (&mut &*stream).read_to_end(into) {
        Ok(_) => true,
        Err(error) if error.kind() == ErrorKind::WouldBlock => false,
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn nothing_is_lost_when_both_rings_are_full() {
    // CVE-2020-16843: answers, bytes and ends of 500 connections come up while the guest has no receive buffer.
    let mut machine = Machine::new();
    let mut streams = Vec::new();
    for port in 0..500 {
        machine.transmit(&packet(Op::Request, port, SERVICE), b"");
        machine.settle();
        let (mut stream, ..) = machine.host.lock().unwrap().accepted.pop_front().unwrap();
        write!(stream, "{port}").unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        streams.push(stream);
    }
    // And the transmit ring full of what is in nobody's name.
    for port in 0..500 {
        machine.transmit(&packet(Op::CreditUpdate, port, 9), b"");
    }

    let mut got: HashMap<u32, Vec<(Op, Vec<u8>)>> = HashMap::new();
    let mut strays = 0;
    loop {
        // One buffer at a time: each kick must bring exactly what is next.
        machine.post(1);
        let packets = machine.packets();
        let Some((header, payload)) = packets.into_iter().next() else {
            break;
        };
        if header.src_port == 9 {
            strays += 1;
        } else {
            let op = header.operation().unwrap();
            got.entry(header.dst_port).or_default().push((op, payload));
        }
    }

    drop(streams);
    assert_eq!(strays, 500);
    assert_eq!(got.len(), 500);
    for (port, packets) in got {
        let expected = [
            (Op::Response, vec![]),
            (Op::Data, port.to_string().into_bytes()),
            (Op::Shutdown, vec![]),
        ];
        assert_eq!(packets, expected);
    }
}

#[test]
fn a_device_without_packets_wants_no_kicks() {
    let mut machine = Machine::new();
    let mut stream = machine.guest_connects(PORT, SERVICE);
    stream.write_all(b"x").unwrap();
    machine.all_packets();
    let before = machine.kicks();

    for _ in 0..100 {
        stream.write_all(b"x").unwrap();
        machine.settle();
        machine.packets();
        machine.post(1);
    }

    assert!(
        machine.kicks() - before <= 2,
        "{}",
        machine.kicks() - before
    );
}

#[test]
fn a_stream_without_credit_asks_once_and_sleeps_until_there_is_some() {
    let mut machine = Machine::new();
    let mut stream = machine.guest_connects(PORT, SERVICE);
    let credit = |buf_alloc, fwd_cnt| Header {
        buf_alloc,
        fwd_cnt,
        ..packet(Op::CreditUpdate, PORT, SERVICE)
    };
    machine.transmit(&credit(10, 0), b"");
    machine.settle();
    stream.write_all(&[1; 100]).unwrap();

    let first = machine.all_packets();
    stream.write_all(&[2; 100]).unwrap();
    let turns = machine.turns(100);
    let second = machine.all_packets();
    machine.transmit(&credit(10, 10), b"");
    let third = machine.all_packets();
    machine.transmit(&credit(1000, 20), b"");
    let fourth = machine.all_packets();

    assert_eq!(ops(&first), [Op::Data, Op::CreditRequest]);
    assert!(turns <= 2 && second.is_empty());
    assert_eq!(ops(&third), [Op::Data, Op::CreditRequest]);
    assert_eq!(
        (data(&first).len(), data(&third).len(), data(&fourth).len()),
        (10, 10, 180)
    );
}

#[test]
fn a_request_for_credit_is_answered() {
    let mut machine = Machine::new();
    let _stream = machine.guest_connects(PORT, SERVICE);
    machine.transmit_data(packet(Op::Data, PORT, SERVICE), b"twelve bytes");

    machine.transmit(&packet(Op::CreditRequest, PORT, SERVICE), b"");

    let packets = machine.all_packets();
    assert_eq!(ops(&packets), [Op::CreditUpdate]);
    assert_eq!(packets[0].0.fwd_cnt, 12);
}

#[test]
fn many_small_packets_under_back_pressure_all_arrive() {
    // Packets of one byte up to all of the credit, to a reader that has stopped.
    let mut machine = Machine::new();
    let stream = machine.guest_connects(PORT, SERVICE);
    let (mut sent, mut got, mut credit) =
        (Vec::new(), Vec::new(), Limits::DEFAULT.max_buffer_bytes);
    let mut forwarded = 0;
    while sent.len() < 700_000 {
        let room = credit - (u32::try_from(sent.len()).unwrap() - forwarded);
        for at in 0..room.min(5000) {
            let byte = (at * 7 + at / 256).to_le_bytes()[0];
            machine.transmit_data(packet(Op::Data, PORT, SERVICE), &[byte]);
            sent.push(byte);
        }
        if room == 0 {
            // The socket and the backlog are full: the reader wakes up for a while.
            let mut some = vec![0; 100_000];
            stream.set_nonblocking(true).unwrap();
            let count = (&mut &stream).read(&mut some).unwrap();
            got.extend_from_slice(&some[..count]);
        }
        for (header, _) in machine.all_packets() {
            assert_eq!(header.operation(), Some(Op::CreditUpdate));
            (credit, forwarded) = (header.buf_alloc, header.fwd_cnt);
        }
    }
    machine.settle();
    while !read_all_there_is(&stream, &mut got) && got.len() < sent.len() {
        machine.settle();
    }

    assert!(got == sent);
}

#[test]
fn forty_megabytes_in_packets_over_several_descriptors_arrive_whole() {
    let mut machine = Machine::new();
    let stream = machine.guest_connects(PORT, SERVICE);
    let pattern: Vec<u8> = (0..1 << 16)
        .map(|at: u32| at.wrapping_mul(2_654_435_761).to_le_bytes()[2])
        .collect();
    let (mut sent, mut got, mut forwarded) = (0_u32, Vec::new(), 0);
    let mut checked = 0;
    while checked < 40 << 20 {
        let room = Limits::DEFAULT.max_buffer_bytes - (sent - forwarded);
        let len = room.min(1 << 16) as usize;
        if len > 0 && sent < 40 << 20 {
            let start = sent as usize % pattern.len();
            let bytes = &pattern[start..(start + len).min(pattern.len())];
            let header = Header {
                len: u32::try_from(bytes.len()).unwrap(),
                ..packet(Op::Data, PORT, SERVICE)
            };
            machine.transmit_pieces(&header, bytes, &[3000, 4096, 4096, 4096, 1]);
            sent += header.len;
        }
        machine.settle();
        read_all_there_is(&stream, &mut got);
        for byte in got.drain(..) {
            assert_eq!(byte, pattern[checked % pattern.len()]);
            checked += 1;
        }
        for (header, _) in machine.all_packets() {
            forwarded = header.fwd_cnt;
        }
    }
}

#[test]
fn a_greedy_stream_leaves_every_second_buffer_to_the_other() {
    let mut machine = Machine::with(Limits::DEFAULT, 8, 4096);
    let greedy = machine.guest_connects(1, SERVICE);
    let modest = machine.guest_connects(2, SERVICE);
    write_all_it_takes(&greedy, &[0; 1 << 20]);
    machine.settle();
    write_all_it_takes(&modest, &[0; 40_000]);
    // The last buffers were filled by the greedy one alone.
    machine.packets();
    machine.settle();

    machine.post(8);

    let ports: Vec<_> = machine
        .packets()
        .iter()
        .map(|(header, _)| header.dst_port)
        .collect();
    assert_eq!(
        ports.iter().filter(|port| **port == 2).count(),
        4,
        "{ports:?}"
    );
}

#[test]
fn a_storm_of_refused_connects_does_not_starve_a_stream() {
    let mut machine = Machine::new();
    machine.host.lock().unwrap().refuse.insert(9);
    let stream = machine.guest_connects(PORT, SERVICE);
    machine.packets();
    for port in 0..500 {
        machine.transmit(&packet(Op::Request, port, 9), b"");
    }
    machine.settle();
    write_all_it_takes(&stream, &[0; 100_000]);
    machine.settle();
    machine.packets();

    machine.post(10);

    let packets = machine.packets();
    assert_eq!(
        ops(&packets).iter().filter(|op| **op == Op::Data).count(),
        5
    );
}

#[test]
fn a_transport_reset_ends_all_and_is_told_when_there_is_a_buffer() {
    let mut machine = Machine::new();
    let mut stream = machine.guest_connects(PORT, SERVICE);
    let (_other, host_port) = machine.host_connects(PORT);
    machine.transmit_data(packet(Op::Data, PORT, SERVICE), b"before");
    machine.settle();

    machine.device.lock().unwrap().reset_transport();
    machine.settle();
    let mut got = Vec::new();
    stream.read_to_end(&mut got).unwrap();
    machine
        .memory
        .write_slice(&[0xff; 8], GuestAddress(0x80000))
        .unwrap();
    machine.add(EVENTS, &[Piece::writable(0x80000, 3)]);
    machine.add(EVENTS, &[Piece::writable(0x80000, 8)]);
    machine.kick(EVENTS);
    machine.settle();

    assert_eq!(got, b"before");
    assert_eq!(machine.connection_count(), 0);
    let mut event = [0; 8];
    machine
        .memory
        .read_slice(&mut event, GuestAddress(0x80000))
        .unwrap();
    assert_eq!(event, [0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]);
    // A port that the guest may still know is not used again.
    assert_ne!(machine.host_connects(PORT).1, host_port);
}

#[test]
fn a_transport_reset_serves_a_packet_for_which_no_kick_will_come() {
    let mut machine = Machine::new();
    machine.transmit(&packet(Op::Request, PORT, SERVICE), b"");
    let kicks = machine.device.lock().unwrap().queue_events().clone();
    kicks.iter().for_each(|kick| drop(kick.read()));
    machine.settle();
    assert_eq!(machine.connection_count(), 0);

    machine.device.lock().unwrap().reset_transport();

    assert_eq!(ops(&machine.all_packets()), [Op::Response]);
}

#[test]
fn a_device_that_is_reset_lets_go_of_everything() {
    let mut machine = Machine::new();
    let mut stream = machine.guest_connects(PORT, SERVICE);
    stream.write_all(b"unread").unwrap();

    machine.device.lock().unwrap().reset();
    let end = stream.read(&mut [0; 8]);
    let (_ours, theirs) = UnixStream::pair().unwrap();
    let connected = machine.device.lock().unwrap().connect(PORT, theirs);
    (0..3).for_each(|queue| machine.force_kick(queue));
    machine.settle();

    assert_eq!(end.unwrap(), 0);
    assert!(matches!(connected, Err(ConnectError::NotInService)));
    assert_eq!(machine.connection_count(), 0);
}

#[test]
fn a_kick_storm_does_nothing() {
    let mut machine = Machine::new();
    let _stream = machine.guest_connects(PORT, SERVICE);
    let interrupts = machine.line.count();

    for _ in 0..1000 {
        [RX, TX, EVENTS]
            .into_iter()
            .for_each(|queue| machine.force_kick(queue));
        machine.turns(4);
    }

    assert_eq!(machine.line.count(), interrupts);
}

#[test]
fn streams_that_come_and_go_in_every_order_leave_nothing() {
    // libkrun 112: sockets pile up in CLOSE-WAIT.
    let mut machine = Machine::new();
    for round in 0..2_000_u32 {
        let stream = machine.guest_connects(round, SERVICE);
        let shutdown = Header {
            flags: 1 + round % 3,
            ..packet(Op::Shutdown, round, SERVICE)
        };
        match round % 4 {
            0 => drop(stream),
            1 => {
                machine.transmit(&shutdown, b"");
                machine.all_packets();
                drop(stream);
            }
            2 => {
                stream.shutdown(Shutdown::Write).unwrap();
                machine.all_packets();
                machine.transmit(
                    &Header {
                        flags: 3,
                        ..shutdown
                    },
                    b"",
                );
            }
            _ => {
                machine.transmit(&shutdown, b"");
                machine.transmit(
                    &Header {
                        flags: 3,
                        ..shutdown
                    },
                    b"",
                );
            }
        }
        machine.all_packets();
    }

    assert_eq!(machine.connection_count(), 0);
    assert_eq!(machine.budget_bytes(), Limits::DEFAULT.buffer_budget_bytes);
    assert_eq!(machine.turns(10), 0);
}

#[test]
fn host_ports_go_on_after_a_snapshot() {
    let machine = Machine::new();
    let mut device = machine.device.lock().unwrap();
    let mut state = device.save();
    assert_eq!(state.next_host_port, FIRST_HOST_PORT);

    state.next_host_port = FIRST_HOST_PORT + 5;
    device.restore(state).unwrap();
    assert_eq!(device.save(), state);

    for port in [0, FIRST_HOST_PORT - 1, 1 << 31, u32::MAX] {
        state.next_host_port = port;
        assert!(matches!(
            device.restore(state),
            Err(StateError::HostPort { port: refused }) if refused == port
        ));
    }
}
