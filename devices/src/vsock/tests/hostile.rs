//! A guest that breaks the rules: it hurts its own connections, and nothing else.

use std::io::{ErrorKind, Read, Write};
use std::time::Duration;

use super::super::limits::Limits;
use super::super::packet::{HEADER_BYTES, Header, Op, SHUTDOWN_RECEIVE, SHUTDOWN_SEND};
use super::guest::{Machine, TX, data, ops, packet};
use crate::virtio::testing::Piece;
use vm_memory::{Bytes, GuestAddress};

const PORT: u32 = 1000;
const SERVICE: u32 = 7;

/// The device still serves a guest that plays by the rules.
pub(super) fn assert_serves(machine: &mut Machine) {
    let mut stream = machine.guest_connects(77, 78);
    machine.transmit_data(packet(Op::Data, 77, 78), b"ping");
    machine.settle();
    let mut got = [0; 4];
    stream.read_exact(&mut got).unwrap();
    stream.write_all(b"pong").unwrap();
    assert_eq!(data(&machine.all_packets()), b"pong");
    drop(stream);
    machine.all_packets();
}

/// A connection is reset by `attack`, the host reads end of file, and the slot is free.
fn assert_resets(attack: impl FnOnce(&mut Machine)) {
    let mut machine = Machine::new();
    let mut stream = machine.guest_connects(PORT, SERVICE);

    attack(&mut machine);

    let packets = machine.all_packets();
    assert_eq!(ops(&packets).last(), Some(&Op::Reset));
    let reset = packets.last().unwrap().0;
    assert_eq!((reset.src_port, reset.dst_port), (SERVICE, PORT));
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).unwrap();
    assert_eq!(machine.connection_count(), 0);
    assert_serves(&mut machine);
}

/// A packet that belongs to nothing gets `resets` answers.
fn assert_answered(header: &Header, resets: usize) {
    let mut machine = Machine::new();

    machine.transmit(header, b"");

    let packets = machine.all_packets();
    assert_eq!(ops(&packets), vec![Op::Reset; resets]);
    for (reset, _) in packets {
        let swapped = (reset.dst_cid, reset.src_cid, reset.dst_port, reset.src_port);
        assert_eq!(
            swapped,
            (
                header.src_cid,
                header.dst_cid,
                header.src_port,
                header.dst_port
            )
        );
        assert_eq!(reset.socket_type, header.socket_type);
    }
    assert_eq!(machine.connection_count(), 0);
    assert_serves(&mut machine);
}

fn send_raw(machine: &mut Machine, bytes: &[u8], pieces: &[Piece]) {
    machine
        .memory
        .write_slice(bytes, GuestAddress(0x80000))
        .unwrap();
    machine.add(TX, pieces);
    machine.kick(TX);
    machine.settle();
}

#[test]
fn row_41_a_length_beyond_the_descriptors_resets_the_connection() {
    for len in [5, 4096, u32::MAX] {
        assert_resets(|machine| {
            let header = Header {
                len,
                ..packet(Op::Data, PORT, SERVICE)
            };
            machine.transmit(&header, b"4444");
        });
    }
}

#[test]
fn row_41_a_payload_outside_memory_resets_the_connection() {
    for address in [1 << 40, u64::MAX - 3] {
        assert_resets(|machine| {
            let header = Header {
                len: 8,
                ..packet(Op::Data, PORT, SERVICE)
            };
            let pieces = [
                Piece::readable(0x80000, HEADER_BYTES),
                Piece::readable(address, 8),
            ];
            send_raw(machine, &header.to_bytes(), &pieces);
        });
    }
}

#[test]
fn row_41_a_header_that_is_cut_unreadable_or_writable_is_dropped() {
    let mut machine = Machine::new();
    let request = packet(Op::Request, PORT, SERVICE).to_bytes();
    for pieces in [
        [Piece::readable(0x80000, HEADER_BYTES - 1)],
        [Piece::readable(0x80000, 0)],
        [Piece::readable(1 << 40, HEADER_BYTES)],
        [Piece::writable(0x80000, HEADER_BYTES)],
    ] {
        send_raw(&mut machine, &request, &pieces);
    }

    assert!(machine.all_packets().is_empty());
    assert_eq!(machine.connection_count(), 0);
    assert_serves(&mut machine);
}

#[test]
fn row_41_a_header_over_several_descriptors_is_read() {
    let mut machine = Machine::new();
    let request = packet(Op::Request, PORT, SERVICE).to_bytes();

    let pieces = [
        Piece::readable(0x80000, 13),
        Piece::readable(0x8000d, HEADER_BYTES - 13),
    ];
    send_raw(&mut machine, &request, &pieces);

    assert_eq!(ops(&machine.all_packets()), [Op::Response]);
}

#[test]
fn row_42_a_source_that_is_someone_else_is_dropped() {
    for src_cid in [0, 1, 2, 4, u64::from(u32::MAX), u64::MAX] {
        let header = Header {
            src_cid,
            ..packet(Op::Request, PORT, SERVICE)
        };
        assert_answered(&header, 0);
    }
}

#[test]
fn row_42_a_destination_that_is_not_the_host_is_reset() {
    for dst_cid in [0, 1, 3, 4, u64::from(u32::MAX), u64::MAX] {
        let header = Header {
            dst_cid,
            ..packet(Op::Request, PORT, SERVICE)
        };
        assert_answered(&header, 1);
    }
}

#[test]
fn row_43_an_unknown_type_is_reset() {
    for socket_type in [0, 2, 3, u16::MAX] {
        let header = Header {
            socket_type,
            ..packet(Op::Request, PORT, SERVICE)
        };
        assert_answered(&header, 1);
    }
}

#[test]
fn row_43_an_unknown_operation_is_reset() {
    for op in [0, 8, u16::MAX] {
        assert_answered(
            &Header {
                op,
                ..packet(Op::Request, PORT, SERVICE)
            },
            1,
        );
        assert_resets(|machine| {
            machine.transmit(
                &Header {
                    op,
                    ..packet(Op::Data, PORT, SERVICE)
                },
                b"",
            );
        });
    }
}

#[test]
fn row_43_unknown_flags_are_reset() {
    for (op, flags) in [
        (Op::Data, 1),
        (Op::Shutdown, 4),
        (Op::CreditUpdate, 1),
        (Op::CreditRequest, 1 << 31),
    ] {
        assert_resets(|machine| {
            machine.transmit(
                &Header {
                    flags,
                    ..packet(op, PORT, SERVICE)
                },
                b"",
            );
        });
    }
    assert_answered(
        &Header {
            flags: 1,
            ..packet(Op::Request, PORT, SERVICE)
        },
        1,
    );
}

#[test]
fn row_44_data_beyond_the_credit_is_reset() {
    // One packet above all credit; and the byte after the last, with a reader that has stopped.
    let buf_alloc = Limits::DEFAULT.max_buffer_bytes;
    assert_resets(|machine| {
        let slot = 0x80000;
        let header = Header {
            len: buf_alloc + 1,
            ..packet(Op::Data, PORT, SERVICE)
        };
        let pieces = [
            Piece::readable(slot, HEADER_BYTES),
            Piece::readable(slot, buf_alloc + 1),
        ];
        send_raw(machine, &header.to_bytes(), &pieces);
    });
    assert_resets(|machine| {
        for _ in 0..64 {
            machine.transmit_data(packet(Op::Data, PORT, SERVICE), &[1; 32 << 10]);
        }
    });
}

#[test]
fn row_44_a_count_that_runs_ahead_is_reset() {
    for fwd_cnt in [1, 1 << 30, u32::MAX / 2] {
        assert_resets(|machine| {
            machine.transmit(
                &Header {
                    fwd_cnt,
                    ..packet(Op::CreditUpdate, PORT, SERVICE)
                },
                b"",
            );
        });
    }
}

#[test]
fn row_44_a_buffer_that_shrinks_or_is_the_maximum_is_taken() {
    let mut machine = Machine::new();
    let mut stream = machine.guest_connects(PORT, SERVICE);
    for buf_alloc in [u32::MAX, 0, 1, u32::MAX] {
        machine.transmit(
            &Header {
                buf_alloc,
                ..packet(Op::CreditUpdate, PORT, SERVICE)
            },
            b"",
        );
        machine.settle();
    }

    stream.write_all(b"through").unwrap();

    assert_eq!(data(&machine.all_packets()), b"through");
}

#[test]
fn row_45_data_before_a_connection_and_after_its_reset_is_reset() {
    let data_packet = packet(Op::Data, PORT, SERVICE);
    for op in [
        Op::Data,
        Op::Response,
        Op::Shutdown,
        Op::CreditUpdate,
        Op::CreditRequest,
    ] {
        assert_answered(&packet(op, PORT, SERVICE), 1);
    }
    assert_answered(&packet(Op::Reset, PORT, SERVICE), 0);
    assert_resets(|machine| {
        machine.transmit(&packet(Op::Reset, PORT, SERVICE), b"");
        machine.transmit_data(data_packet, b"late");
    });
}

#[test]
fn row_45_data_before_the_answer_to_the_host_is_reset() {
    let mut machine = Machine::new();
    let (mut stream, host_port) = machine.host_connects(PORT);

    machine.transmit_data(packet(Op::Data, PORT, host_port), b"early");

    assert_eq!(ops(&machine.all_packets()), [Op::Reset]);
    assert_eq!(stream.read(&mut [0; 8]).unwrap(), 0);
}

#[test]
fn row_45_data_after_shutdown_is_reset() {
    for flags in [SHUTDOWN_SEND, SHUTDOWN_SEND | SHUTDOWN_RECEIVE] {
        assert_resets(|machine| {
            machine.transmit(
                &Header {
                    flags,
                    ..packet(Op::Shutdown, PORT, SERVICE)
                },
                b"",
            );
            machine.transmit_data(packet(Op::Data, PORT, SERVICE), b"late");
        });
    }
}

#[test]
fn row_45_a_second_connect_or_answer_resets_the_connection() {
    for op in [Op::Request, Op::Response] {
        assert_resets(|machine| machine.transmit(&packet(op, PORT, SERVICE), b""));
    }
}

#[test]
fn row_48_the_handler_is_told_the_port_that_the_guest_came_from() {
    // Ports below 1024 are the guest kernel's to guard; here they only must not be mixed up.
    let mut machine = Machine::new();

    let _privileged = machine.guest_connects(1023, 1);
    let _any = machine.guest_connects(1024, 1);

    assert_eq!(machine.connection_count(), 2);
}

#[test]
fn a_broken_transmit_ring_retires_the_queue_and_the_device_goes_on_after_a_reset() {
    use crate::virtio::VirtioDevice;

    let mut machine = Machine::new();
    let mut stream = machine.guest_connects(PORT, SERVICE);
    machine.transmit_data(packet(Op::Data, PORT, SERVICE), b"before");
    machine.settle();
    machine.publish_raw(TX, u16::MAX);
    machine.settle();
    machine.transmit_data(packet(Op::Data, PORT, SERVICE), b"after");
    machine.settle();

    machine.device.lock().unwrap().reset();
    let mut got = Vec::new();
    stream.read_to_end(&mut got).unwrap();

    assert_eq!(got, b"before");
    assert_eq!(machine.connection_count(), 0);
    assert_eq!(machine.turns(10), 0);
}

#[test]
fn headers_of_all_kinds_leave_the_device_serving() {
    // Every operation against every type, with lengths and counts at their edges, on an open connection and off.
    let mut machine = Machine::new();
    for op in 0..10 {
        for socket_type in 0..3 {
            for edge in [0, 1, HEADER_BYTES, u32::MAX / 2, u32::MAX / 2 + 1, u32::MAX] {
                for port in [PORT, PORT + 1] {
                    machine.transmit(&packet(Op::Request, PORT, SERVICE), b"");
                    let header = Header {
                        op,
                        socket_type,
                        len: edge,
                        flags: edge & 3,
                        buf_alloc: edge,
                        fwd_cnt: edge,
                        ..packet(Op::Data, port, SERVICE)
                    };
                    machine.transmit(&header, b"x");
                    machine.all_packets();
                    machine.transmit(&packet(Op::Reset, PORT, SERVICE), b"");
                    machine.transmit(&packet(Op::Reset, PORT + 1, SERVICE), b"");
                    machine.host.lock().unwrap().accepted.clear();
                    machine.all_packets();
                }
            }
        }
    }

    assert_eq!(machine.connection_count(), 0);
    assert_eq!(machine.budget_bytes(), Limits::DEFAULT.buffer_budget_bytes);
    assert_serves(&mut machine);
    let timeout = Some(Duration::from_millis(1));
    let stream = machine.guest_connects(PORT, SERVICE);
    stream.set_read_timeout(timeout).unwrap();
    assert_eq!(
        (&stream).read(&mut [0]).unwrap_err().kind(),
        ErrorKind::WouldBlock
    );
}
