//! What a stream promises, with a driver that plays by the rules.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use super::super::limits::Limits;
use super::super::packet::{HEADER_BYTES, Header, Op, SHUTDOWN_RECEIVE, SHUTDOWN_SEND};
use super::super::{ConnectError, Incoming, Refused, Vsock};
use super::guest::{Machine, data, ops, packet};

const PORT: u32 = 1000;
const SERVICE: u32 = 7;

fn send(machine: &mut Machine, bytes: &[u8]) {
    machine.transmit_data(packet(Op::Data, PORT, SERVICE), bytes);
    machine.settle();
}

fn shutdown(machine: &mut Machine, flags: u32) {
    let header = Header {
        flags,
        ..packet(Op::Shutdown, PORT, SERVICE)
    };
    machine.transmit(&header, b"");
}

#[test]
fn the_guest_connects_and_bytes_flow_both_ways() {
    let mut machine = Machine::new();
    let mut stream = machine.guest_connects(PORT, SERVICE);

    send(&mut machine, b"from the guest");
    stream.write_all(b"from the host").unwrap();
    let packets = machine.all_packets();

    let mut got = [0; 14];
    stream.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"from the guest");
    assert_eq!(data(&packets), b"from the host");
}

#[test]
fn the_host_connects_and_bytes_written_before_the_answer_are_not_lost() {
    let mut machine = Machine::new();
    let (mut stream, host_port) = machine.host_connects(PORT);
    stream.write_all(b"early").unwrap();
    assert!(ops(&machine.all_packets()).is_empty());

    machine.transmit(&packet(Op::Response, PORT, host_port), b"");
    let packets = machine.all_packets();

    assert_eq!(data(&packets), b"early");
}

#[test]
fn all_that_was_written_arrives_when_the_peer_closed_before_the_answer() {
    let mut machine = Machine::new();
    let (mut stream, host_port) = machine.host_connects(PORT);
    stream.write_all(b"fire and forget").unwrap();
    drop(stream);
    assert!(ops(&machine.all_packets()).is_empty());

    machine.transmit(&packet(Op::Response, PORT, host_port), b"");
    let packets = machine.all_packets();

    assert_eq!(data(&packets), b"fire and forget");
    assert_eq!(packets.last().unwrap().0.op, Op::Reset as u16);
}

#[test]
fn a_refused_host_connect_is_an_end_of_file_even_with_bytes_unread() {
    let mut machine = Machine::new();
    let (mut stream, host_port) = machine.host_connects(PORT);
    stream.write_all(b"nobody reads this").unwrap();

    machine.transmit(&packet(Op::Reset, PORT, host_port), b"");
    machine.settle();

    assert_eq!(stream.read(&mut [0; 8]).unwrap(), 0);
}

#[test]
fn a_connect_before_the_driver_is_ready_is_refused_at_once() {
    let mut vsock = Vsock::new(3, Box::new(Nobody)).unwrap();
    let (mut ours, theirs) = UnixStream::pair().unwrap();

    let error = vsock.connect(PORT, theirs).unwrap_err();

    assert!(matches!(error, ConnectError::NotInService));
    assert_eq!(ours.read(&mut [0; 8]).unwrap(), 0);
}

#[derive(Debug)]
struct Nobody;

impl Incoming for Nobody {
    fn accept(&mut self, _: UnixStream, _: u32, _: u32) -> Result<(), Refused> {
        Err(Refused)
    }
}

#[test]
fn the_hosts_half_close_reaches_the_guest_after_the_bytes_and_the_other_half_goes_on() {
    let mut machine = Machine::new();
    let mut stream = machine.guest_connects(PORT, SERVICE);
    stream.write_all(b"last words").unwrap();
    stream.shutdown(Shutdown::Write).unwrap();

    let packets = machine.all_packets();
    send(&mut machine, b"answer");

    assert_eq!(ops(&packets), [Op::Data, Op::Shutdown]);
    assert_eq!(packets[1].0.flags, SHUTDOWN_SEND);
    let mut got = [0; 6];
    stream.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"answer");
}

#[test]
fn the_guests_half_close_reaches_the_host_after_the_bytes_and_the_other_half_goes_on() {
    let mut machine = Machine::new();
    let mut stream = machine.guest_connects(PORT, SERVICE);
    send(&mut machine, b"last words");
    shutdown(&mut machine, SHUTDOWN_SEND);
    machine.settle();

    let mut got = Vec::new();
    stream.read_to_end(&mut got).unwrap();
    stream.write_all(b"answer").unwrap();
    let answered = machine.all_packets();
    drop(stream);
    let ended = machine.all_packets();

    assert_eq!(got, b"last words");
    assert_eq!(data(&answered), b"answer");
    assert_eq!(ops(&ended), [Op::Reset]);
}

#[test]
fn a_guest_that_closes_is_answered_at_once_and_its_bytes_reach_a_slow_reader() {
    let mut machine = Machine::new();
    let mut stream = machine.guest_connects(PORT, SERVICE);
    let sent = vec![7; 256 << 10];
    sent.chunks(32 << 10)
        .for_each(|chunk| send(&mut machine, chunk));
    shutdown(&mut machine, SHUTDOWN_SEND | SHUTDOWN_RECEIVE);

    let packets = machine.all_packets();
    assert_eq!(packets.last().unwrap().0.op, Op::Reset as u16);
    let reader = std::thread::spawn(move || {
        let mut got = Vec::new();
        stream.read_to_end(&mut got).unwrap();
        got
    });
    while !reader.is_finished() {
        machine.settle();
    }

    assert!(reader.join().unwrap() == sent);
}

#[test]
fn a_writer_in_the_guest_hears_at_once_that_its_reader_closed() {
    // `yes | head`: also when the guest does not read what the peer had written.
    let mut machine = Machine::new();
    let mut stream = machine.guest_connects(PORT, SERVICE);
    let yes = Header {
        len: 4096,
        buf_alloc: 0,
        ..packet(Op::Data, PORT, SERVICE)
    };
    machine.transmit(&yes, &[b'y'; 4096]);
    machine.settle();
    stream.write_all(b"never read").unwrap();
    assert_eq!(ops(&machine.all_packets()), [Op::CreditRequest]);

    drop(stream);
    let told = machine.all_packets();
    machine.transmit(&yes, &[b'y'; 4096]);
    let after = machine.all_packets();

    assert_eq!(ops(&told), [Op::Shutdown]);
    assert_eq!(told[0].0.flags, SHUTDOWN_RECEIVE);
    assert!(ops(&after).is_empty());
}

#[test]
fn a_peer_that_only_reads_no_more_does_not_end_what_it_writes() {
    let mut machine = Machine::new();
    let mut stream = machine.guest_connects(PORT, SERVICE);
    stream.shutdown(Shutdown::Read).unwrap();
    send(&mut machine, b"refused");

    let told = machine.all_packets();
    stream.write_all(b"still here").unwrap();
    let packets = machine.all_packets();

    assert_eq!(told[0].0.flags, SHUTDOWN_RECEIVE);
    assert_eq!(data(&packets), b"still here");
}

#[test]
fn a_guest_that_reads_no_more_gives_the_host_epipe_and_goes_on_writing() {
    let mut machine = Machine::new();
    let mut stream = machine.guest_connects(PORT, SERVICE);
    shutdown(&mut machine, SHUTDOWN_RECEIVE);
    machine.settle();

    let error = stream.write_all(b"x").unwrap_err();
    send(&mut machine, b"go on");

    assert_eq!(error.kind(), ErrorKind::BrokenPipe);
    let mut got = [0; 5];
    stream.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"go on");
}

#[test]
fn a_payload_over_many_descriptors_arrives_in_order() {
    let mut machine = Machine::new();
    let mut stream = machine.guest_connects(PORT, SERVICE);
    let sent: Vec<u8> = (0..60_000_u32)
        .map(|at| (at % 251).to_le_bytes()[0])
        .collect();
    let header = Header {
        len: 60_000,
        ..packet(Op::Data, PORT, SERVICE)
    };

    machine.transmit_pieces(&header, &sent, &[1, 4096, 4095, 17, 30_000]);
    machine.settle();

    let mut got = vec![0; sent.len()];
    stream.read_exact(&mut got).unwrap();
    assert!(got == sent);
}

#[test]
fn an_end_of_file_at_the_border_of_a_receive_buffers_descriptors_is_told() {
    let mut machine = Machine::new();
    machine.rx_cut = HEADER_BYTES + 100;
    let mut stream = machine.guest_connects(PORT, SERVICE);
    stream.write_all(&[7; 100]).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();

    let packets = machine.all_packets();

    assert_eq!(ops(&packets), [Op::Data, Op::Shutdown]);
    assert_eq!(data(&packets), [7; 100]);
}

#[test]
fn bytes_that_wait_are_not_overtaken_when_the_socket_has_room_again() {
    let mut machine = Machine::new();
    let (mut stream, host_port) = machine.host_connects(PORT);
    machine.transmit(&packet(Op::Response, PORT, host_port), b"");
    for number in 0..100 {
        machine.transmit_data(packet(Op::Data, PORT, host_port), &[number]);
        machine.settle();
    }

    // The kick is there before the socket has room.
    machine.transmit_data(packet(Op::Data, PORT, host_port), &[100]);
    let mut got = vec![0; 101];
    let count = stream.read(&mut got).unwrap();
    machine.settle();

    assert!(count < 100, "All fitted into the socket");
    stream.set_nonblocking(true).unwrap();
    let mut at = count;
    while at < got.len() {
        machine.settle();
        at += stream.read(&mut got[at..]).unwrap();
    }
    assert_eq!(got, (0..=100).collect::<Vec<_>>());
}

#[test]
fn a_receive_buffer_that_was_not_needed_is_used_later() {
    let mut machine = Machine::with(Limits::DEFAULT, 8, 4096);
    let mut streams = Vec::new();
    for port in 0..50 {
        // The device looks for bytes as soon as the guest has answered, and finds none.
        let (mut stream, host_port) = machine.host_connects(port);
        machine.transmit(&packet(Op::Response, port, host_port), b"");
        assert!(machine.all_packets().is_empty());

        stream.write_all(b"there they are").unwrap();

        assert_eq!(data(&machine.all_packets()), b"there they are");
        streams.push(stream);
    }
}
