//! A program's standard streams.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::thread;
use std::time::{Duration, Instant};

use protocol::message::{ExitStatus, FromAgent, Stdio, StreamKind, ToAgent};

use crate::host::{host, read_all};

#[test]
fn streams_may_come_after_the_request() {
    let mut host = host();
    let spawn = host.spawn("echo", &["hi"]);

    host.send(&ToAgent::Spawn(spawn.clone()));
    thread::sleep(Duration::from_millis(20));
    let stdout = host.dial(spawn.command_id, StreamKind::Stdout);
    let _stderr = host.dial(spawn.command_id, StreamKind::Stderr);

    assert_eq!(
        host.next(),
        FromAgent::Spawned {
            command_id: spawn.command_id,
            warm: false,
        }
    );
    assert_eq!(read_all(Some(&stdout)), "hi\n");
    assert_eq!(host.exited(spawn.command_id), ExitStatus::Code(0));
}

#[test]
fn standard_streams_can_be_opened_by_name() {
    let mut host = host();

    let (status, out, err) = host.sh("echo one > /dev/stdout; echo two > /dev/stderr");

    assert_eq!(
        (status, out.as_str(), err.as_str()),
        (ExitStatus::Code(0), "one\n", "two\n")
    );
}

#[test]
fn input_arrives_and_ends_and_its_reader_may_leave() {
    let mut host = host();
    let mut spawn = host.spawn("wc", &["-c"]);
    spawn.stdio = Stdio::Pipes { stdin: true };
    let mut running = host.start(&spawn);
    host.next();
    let mut stdin = running.stdin.take().unwrap();
    stdin.write_all(&vec![b'x'; 5_000_000]).unwrap();
    stdin.shutdown(Shutdown::Write).unwrap();
    assert_eq!(running.output().0, "5000000\n");
    assert_eq!(host.exited(running.id), ExitStatus::Code(0));

    let mut spawn = host.spawn("sh", &["-c", "exec <&-; sleep 0.2; echo alive"]);
    spawn.stdio = Stdio::Pipes { stdin: true };
    let mut running = host.start(&spawn);
    host.next();
    let mut stdin = running.stdin.take().unwrap();
    let broken = (0..10_000).any(|_| stdin.write_all(&[0; 4096]).is_err());
    assert!(
        broken,
        "the host can write for ever to a program that reads no more"
    );
    assert_eq!(running.output().0, "alive\n");
    assert_eq!(host.exited(running.id), ExitStatus::Code(0));
}

#[test]
fn a_host_that_closes_the_output_ends_the_writer_with_sigpipe() {
    let mut host = host();
    let spawn = host.spawn("yes", &[]);
    let mut running = host.start(&spawn);
    host.next();
    let mut some = [0; 4];
    running
        .stdout
        .as_ref()
        .unwrap()
        .read_exact(&mut some)
        .unwrap();

    drop(running.stdout.take());

    assert_eq!(host.exited(running.id), ExitStatus::Signal(13));
}

#[test]
fn the_status_does_not_wait_for_a_slow_reader_and_nothing_is_lost() {
    let mut host = host();
    let running = host.start_sh("head -c 60000 /dev/zero; exit 3");

    assert_eq!(host.exited(running.id), ExitStatus::Code(3));
    thread::sleep(Duration::from_millis(100));

    assert_eq!(running.output().0.len(), 60_000);
}

#[test]
fn an_escaped_holder_of_the_pipe_does_not_keep_the_stream_open() {
    let mut host = host();
    // The plain folder that stands for a cgroup kills nobody, as if the sleep had escaped from it.
    let started = Instant::now();
    let running = host.start_sh("setsid sleep 15 & echo done");

    assert_eq!(host.exited(running.id), ExitStatus::Code(0));
    assert_eq!(running.output().0, "done\n");
    assert!(started.elapsed() < Duration::from_secs(10));
}
