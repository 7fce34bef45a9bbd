//! What is told of a sandbox's life, and of the ceilings that it meets.

use std::sync::mpsc::{Receiver, sync_channel};

use super::*;
use crate::spans::Spans;
use crate::{EventKind, Limit};

fn telling(timeout: Option<Duration>) -> (Sandbox, Peer, UnixStream, Receiver<crate::Event>) {
    let (sender, events) = sync_channel(100);
    let (sandbox, peer) = sandbox_telling(
        Some("scripted"),
        timeout,
        Events::new(Some(sender), now_ns(), Spans::default()),
    );
    let agent = greet(&peer);
    (sandbox, peer, agent, events)
}

fn told(events: &Receiver<crate::Event>) -> Vec<EventKind> {
    events.iter().map(|event| event.kind).collect()
}

#[test]
fn a_life_is_told_in_order_and_the_channel_closes_behind_it() {
    let (sandbox, peer, mut agent, events) = telling(None);
    let (mut child, stdout, stderr) = running(&sandbox, &peer, &mut agent);
    // A dial is looked at some time later: the life goes on when it was.
    peer.dial(80, 1024);
    let before: Vec<EventKind> = events.iter().map(|event| event.kind).take(3).collect();
    let status = ExitStatus::Code(3);
    say(&mut agent, &exited(child.id(), status, 0));
    drop((stdout, stderr));
    let completion = child.wait();
    sandbox.end();

    let told = [before, told(&events)].concat();
    let [
        EventKind::Ready,
        started,
        EventKind::Denied { port: 80 },
        ended,
        over,
    ] = told.as_slice()
    else {
        panic!("{told:?}");
    };
    assert_eq!(
        started,
        &EventKind::CommandStarted {
            command: child.id(),
            program: "program".into(),
            warm: false
        }
    );
    let EventKind::CommandEnded { outcome, usage, .. } = ended else {
        panic!("{ended:?}");
    };
    assert_eq!(*outcome, completion.outcome);
    assert_eq!((usage.disk_bytes, usage.peak_memory_bytes), (8192, 4096));
    assert!(matches!(
        over,
        EventKind::Ended {
            reason: "ended",
            ..
        }
    ));
    assert!(completion.usage.wall > Duration::ZERO);
}

#[test]
fn a_command_that_writes_too_much_is_killed_and_told_so() {
    let (sandbox, peer, mut agent, events) = telling(None);
    let mut command = sandbox.command("program");
    command.max_output_bytes(1000);
    let output = std::thread::scope(|scope| {
        let running = scope.spawn(|| command.output().unwrap());
        let ToAgent::Spawn(spawn) = hear(&mut agent) else {
            panic!("no spawn came");
        };
        let (mut stdout, mut stderr) = (peer.accept().0, peer.accept().0);
        let command_id = spawn.command_id;
        let warm = false;
        say(&mut agent, &FromAgent::Spawned { command_id, warm });
        stdout.write_all(&[b'x'; 600]).unwrap();
        stderr.write_all(&[b'y'; 400]).unwrap();
        // At the bound nothing happens; above it, once.
        stdout.write_all(b"z").unwrap();
        assert_eq!(hear(&mut agent), ToAgent::Kill { command_id });
        say(&mut agent, &exited(command_id, ExitStatus::Signal(9), 0));
        drop((stdout, stderr));
        running.join().unwrap()
    });
    sandbox.end();

    let limit = Limit::OutputBytes;
    assert_eq!(output.completion.outcome, Outcome::LimitExceeded(limit));
    assert_eq!(output.completion.limits_hit, [limit]);
    assert_eq!(output.completion.usage.bytes_out, 1001);
    let hit = |kind: &EventKind| {
        matches!(
            kind,
            EventKind::LimitHit {
                limit: Limit::OutputBytes,
                command: Some(_)
            }
        )
    };
    assert_eq!(told(&events).iter().filter(|kind| hit(kind)).count(), 1);
}

#[test]
fn ceilings_that_did_not_end_a_command_are_named_too() {
    let (sandbox, peer, mut agent) = ready_sandbox(None);
    let (mut child, _stdout, _stderr) = running(&sandbox, &peer, &mut agent);
    let FromAgent::Exited(exited) = exited(child.id(), ExitStatus::Code(0), 1) else {
        panic!("no end");
    };
    let full = Exited {
        process_limit_hits: 2,
        disk_free_bytes: 0,
        ..exited
    };

    say(&mut agent, &FromAgent::Exited(full));
    let completion = child.wait();

    assert_eq!(completion.outcome, Outcome::Exited(0));
    assert_eq!(
        completion.limits_hit,
        [Limit::Memory, Limit::Processes, Limit::Disk]
    );
}

#[test]
fn the_time_is_a_ceiling_that_is_told_of_once() {
    let (sandbox, peer, mut agent, events) = telling(Some(Duration::from_millis(300)));
    let (mut child, _stdout, _stderr) = running(&sandbox, &peer, &mut agent);
    let command_id = child.id();
    assert_eq!(hear(&mut agent), ToAgent::Kill { command_id });
    say(&mut agent, &exited(command_id, ExitStatus::Signal(9), 0));

    assert_eq!(child.wait().limits_hit, [Limit::WallTime]);
    let told = told(&events);
    let hits = told
        .iter()
        .filter(|kind| matches!(kind, EventKind::LimitHit { .. }));
    assert_eq!(
        hits.collect::<Vec<_>>(),
        [&EventKind::LimitHit {
            limit: Limit::WallTime,
            command: None
        }]
    );
    assert!(matches!(
        told.last(),
        Some(EventKind::Ended {
            reason: "timeout",
            ..
        })
    ));
}

#[test]
fn a_call_of_the_hosts_function_is_told_with_its_result() {
    let (sandbox, peer, _agent, events) = telling(None);
    let mut stream = std::thread::scope(|scope| {
        let registering = scope.spawn(|| sandbox.host_function("f", |(): ()| Ok::<_, String>(1)));
        let (mut stream, _) = peer.accept();
        let bound = protocol::call::MAX_FRAME_BYTES;
        frame::write(&mut stream, &protocol::call::FromBridge::Ready, bound).unwrap();
        registering.join().unwrap().unwrap();
        stream
    });
    for line in [&b"{\"call\":\"f\"}"[..], b"{\"call\":\"g\"}"] {
        let call = protocol::call::FromBridge::Call {
            id: 1,
            line: line.to_vec(),
        };
        let bound = protocol::call::MAX_FRAME_BYTES;
        frame::write(&mut stream, &call, bound).unwrap();
        let _: protocol::call::Answer = frame::read(&mut stream, bound).unwrap();
    }
    sandbox.end();

    let calls: Vec<_> = told(&events)
        .into_iter()
        .filter_map(|kind| match kind {
            EventKind::HostCall {
                function, result, ..
            } => Some((function, result)),
            _ => None,
        })
        .collect();
    assert_eq!(calls, [("f".to_owned(), "ok"), ("g".to_owned(), "unknown")]);
}
