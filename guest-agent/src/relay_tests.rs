//! Relays over real pipes, terminals and socket pairs, driven without epoll: a relay that waits is simply run
//! again.

use std::fs::File;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use protocol::message::{Stdio, TerminalSize};
use rustix::pipe::PipeFlags;

use super::*;
use crate::limits::RELAY_BYTES;
use crate::spawn::Ends;

/// A pipe whose first or second end is non-blocking, the agent's.
fn pipe(agent_reads: bool) -> (OwnedFd, OwnedFd) {
    let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).unwrap();
    set_nonblocking(if agent_reads { &read } else { &write }).unwrap();
    (read, write)
}

fn stream() -> (UnixStream, OwnedFd) {
    let (host, agent) = UnixStream::pair().unwrap();
    agent.set_nonblocking(true).unwrap();
    (host, agent.into())
}

fn run_until_done(relay: &mut Relay) {
    let mut buffer = vec![0; RELAY_BYTES];
    let started = Instant::now();
    while relay.run(&mut buffer, Instant::now()) != State::Done {
        assert!(
            started.elapsed() < Duration::from_secs(20),
            "the relay does not end"
        );
        thread::sleep(Duration::from_micros(50));
    }
}

fn terminal() -> (OwnedFd, File) {
    let size = TerminalSize {
        columns: 80,
        rows: 24,
    };
    match Ends::new(Stdio::Terminal(size)).unwrap() {
        Ends::Terminal { master, mut theirs } => (master, theirs.remove(0).into()),
        Ends::Pipes { .. } => unreachable!("a terminal was asked for"),
    }
}

#[test]
fn output_of_any_size_arrives_whole_and_the_stream_ends() {
    let (read, write) = pipe(true);
    let (mut host, agent) = stream();
    let sent: Vec<u8> = (0..1_000_000_u32).flat_map(u32::to_le_bytes).collect();
    let expected = sent.clone();
    let program = thread::spawn(move || File::from(write).write_all(&sent).unwrap());
    let reader = thread::spawn(move || {
        let mut received = Vec::new();
        host.read_to_end(&mut received).unwrap();
        received
    });
    let mut relay = Relay::new(1, Kind::Output, agent, read);

    run_until_done(&mut relay);
    drop(relay);

    program.join().unwrap();
    assert!(reader.join().unwrap() == expected);
}

#[test]
fn input_arrives_whole_and_its_half_close_closes_the_pipe() {
    let (read, write) = pipe(false);
    let (mut host, agent) = stream();
    let sent = vec![7; 3_000_000];
    let writer = thread::spawn(move || {
        host.write_all(&sent).unwrap();
        host.shutdown(Shutdown::Write).unwrap();
        host
    });
    let program = thread::spawn(move || {
        let mut received = Vec::new();
        File::from(read).read_to_end(&mut received).unwrap();
        received.len()
    });
    let mut relay = Relay::new(1, Kind::Input, agent, write);

    run_until_done(&mut relay);
    drop(relay);

    writer.join().unwrap();
    assert_eq!(program.join().unwrap(), 3_000_000);
}

#[test]
fn a_host_that_does_not_read_stops_the_program_and_memory_stays_flat() {
    let (read, write) = pipe(true);
    set_nonblocking(&write).unwrap();
    let (mut host, agent) = stream();
    let mut relay = Relay::new(1, Kind::Output, agent, read);
    let mut buffer = vec![0; RELAY_BYTES];
    let (mut program, block) = (File::from(write), vec![1; 4096]);

    let mut accepted = 0;
    for _ in 0..100_000 {
        match program.write(&block) {
            Ok(count) => accepted += count,
            Err(_) => {
                if relay.run(&mut buffer, Instant::now()) == State::Waiting
                    && program.write(&block).is_err()
                {
                    break;
                }
            }
        }
    }

    assert!(
        accepted < 4 << 20,
        "{accepted} bytes were taken for a host that reads none"
    );
    assert!(
        relay
            .outward
            .as_ref()
            .is_some_and(|pump| pump.held.len() <= RELAY_BYTES)
    );
    drop(program);
    let reader = thread::spawn(move || std::io::copy(&mut host, &mut std::io::sink()).unwrap());
    run_until_done(&mut relay);
    drop(relay);
    assert!(reader.join().unwrap() >= accepted as u64);
}

#[test]
fn a_host_that_closes_is_told_apart_from_one_that_half_closes() {
    let (read, _write) = pipe(true);
    let (host, agent) = stream();
    let relay = Relay::new(1, Kind::Output, agent, read);

    host.shutdown(Shutdown::Write).unwrap();
    assert!(!relay.host_event(EventFlags::RDHUP));
    drop(host);
    assert!(relay.host_event(EventFlags::RDHUP | EventFlags::HUP));
}

#[test]
fn a_program_that_closes_its_input_ends_the_relay() {
    let (read, write) = pipe(false);
    let (mut host, agent) = stream();
    let mut relay = Relay::new(1, Kind::Input, agent, write);

    assert!(!relay.guest_event(EventFlags::OUT));
    assert!(relay.guest_event(EventFlags::OUT | EventFlags::ERR));
    drop(read);
    host.write_all(b"unwanted").unwrap();
    run_until_done(&mut relay);
}

#[test]
fn silence_after_the_end_ends_the_relay_but_a_slow_host_is_waited_for() {
    let (read, write) = pipe(true);
    let (_host, agent) = stream();
    let mut relay = Relay::new(1, Kind::Output, agent, read);
    let mut buffer = vec![0; RELAY_BYTES];
    let now = Instant::now();

    relay.command_ended(now);
    assert_eq!(relay.run(&mut buffer, now), State::Waiting);
    File::from(write.try_clone().unwrap())
        .write_all(b"late")
        .unwrap();
    let later = now + DRAIN_IDLE - Duration::from_millis(1);
    assert_eq!(relay.run(&mut buffer, later), State::Waiting);
    assert_eq!(relay.run(&mut buffer, now + DRAIN_IDLE), State::Waiting);
    assert_eq!(relay.run(&mut buffer, later + DRAIN_IDLE), State::Done);

    let (read, write) = pipe(true);
    let (_host, agent) = stream();
    let mut relay = Relay::new(1, Kind::Output, agent, read);
    set_nonblocking(&write).unwrap();
    let mut program = File::from(write);
    while program.write(&[0; 4096]).is_ok() {
        while relay.run(&mut buffer, now) == State::Ready {}
    }
    relay.command_ended(now);
    assert_eq!(relay.deadline(), None);
    assert_eq!(
        relay.run(&mut buffer, now + 10 * DRAIN_IDLE),
        State::Waiting
    );
}

#[test]
fn a_terminal_carries_both_ways_and_its_input_ends_by_the_end_of_file_key() {
    for (typed, expected) in [("line\n", "line\n"), ("half", "half"), ("", "")] {
        let (master, mut slave) = terminal();
        let (mut host, agent) = stream();
        let mut relay = Relay::new(1, Kind::Terminal, agent, master);
        let program = thread::spawn(move || {
            let mut received = String::new();
            slave.read_to_string(&mut received).unwrap();
            slave.write_all(b"bye").unwrap();
            received
        });

        host.write_all(typed.as_bytes()).unwrap();
        host.shutdown(Shutdown::Write).unwrap();
        run_until_done(&mut relay);
        drop(relay);

        assert_eq!(program.join().unwrap(), expected);
        let mut shown = String::new();
        host.read_to_string(&mut shown).unwrap();
        assert!(shown.ends_with("bye"), "{shown:?}");
    }
}

#[test]
fn a_terminal_in_raw_mode_takes_a_large_paste_whole() {
    let (master, slave) = terminal();
    let mut settings = rustix::termios::tcgetattr(&slave).unwrap();
    settings.make_raw();
    rustix::termios::tcsetattr(&slave, rustix::termios::OptionalActions::Now, &settings).unwrap();
    let (mut host, agent) = stream();
    let mut relay = Relay::new(1, Kind::Terminal, agent, master);
    let mut program = slave;
    let reader = thread::spawn(move || {
        let mut received = vec![0; 1 << 20];
        program.read_exact(&mut received).unwrap();
        received.iter().all(|byte| *byte == 0x1b)
    });
    let writer = thread::spawn(move || {
        host.write_all(&vec![0x1b; 1 << 20]).unwrap();
        host
    });

    run_until_done(&mut relay);

    assert!(reader.join().unwrap());
    drop(writer.join().unwrap());
}
