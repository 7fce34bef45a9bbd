//! The gate's streams: what is taken of them, and when.

use std::sync::mpsc::{channel, sync_channel};

use egress::audit::{Record, Verdict};
use egress::policy::{MAX_RULES, RuleError};
use protocol::gate::{
    FromGate, Inward, MAX_GATE_FRAME_BYTES, Open, Refusal, Refused, Rules, Target,
};

use super::*;
use crate::event::EventKind;
use crate::session::{Session, SessionClaim};
use crate::spans::Spans;

/// A sandbox that lets `a.example` leave, and what is told of attempts.
fn sandbox_with_egress() -> (Sandbox, Peer, std::sync::mpsc::Receiver<Record>) {
    let (sender, records) = channel();
    let options = EgressOptions {
        rules: vec!["a.example".to_owned(), "10.0.0.0/8:5432".to_owned()],
        sink: Some(Arc::new(move |record: &Record| {
            let _ = sender.send(record.clone());
        })),
        ..EgressOptions::default()
    };
    let (sandbox, peer) = sandbox_with(None, options);
    (sandbox, peer, records)
}

/// The agent greets and is told to start the gate.
fn greet_with_gate(peer: &Peer) -> UnixStream {
    let mut agent = peer.dial(port::CONTROL, port::CONTROL);
    say(&mut agent, &hello(protocol::VERSION));
    assert!(matches!(hear(&mut agent), ToAgent::Configure(_)));
    assert!(matches!(hear(&mut agent), ToAgent::Gate));
    agent
}

fn gate_says(gate: &mut UnixStream, word: &FromGate) {
    frame::write(gate, word, MAX_GATE_FRAME_BYTES).unwrap();
}

fn rules(gate: &mut UnixStream) -> Rules {
    frame::read(gate, MAX_TO_AGENT_BYTES).unwrap()
}

fn open(name: &str) -> Open {
    Open {
        target: Target::Name(name.to_owned()),
        port: 443,
        process: None,
    }
}

fn refused(name: &str, why: Refusal, others: u32) -> FromGate {
    let open = open(name);
    FromGate::Refused(Refused { open, why, others })
}

#[test]
fn commands_wait_until_the_gate_has_its_rules() {
    let (sandbox, peer, _records) = sandbox_with_egress();
    let _agent = greet_with_gate(&peer);
    let mut gate = peer.dial(port::GATE_CONTROL, port::GATE_CONTROL);

    let told = rules(&mut gate);
    assert!(sandbox.clocks().agent_ready.is_none());
    gate_says(&mut gate, &FromGate::Ready);
    sandbox.wait_ready().unwrap();

    assert_eq!(told.names.len(), 1);
    assert_eq!(told.names[0].name, "a.example");
    assert_eq!(told.addresses[0].prefix_bits, 8);
    assert_eq!(told.every, [0; 0]);
}

#[test]
fn a_command_that_was_asked_for_early_waits_for_the_gate() {
    let (sandbox, peer, _records) = sandbox_with_egress();
    std::thread::scope(|scope| {
        let spawning = scope.spawn(|| sandbox.command("true").spawn().map(drop));
        let mut agent = greet_with_gate(&peer);
        let mut gate = peer.dial(port::GATE_CONTROL, port::GATE_CONTROL);
        rules(&mut gate);
        agent
            .set_read_timeout(Some(Duration::from_millis(200)))
            .unwrap();
        let early = agent.read(&mut [0]).unwrap_err();
        assert_eq!(early.kind(), io::ErrorKind::WouldBlock);

        gate_says(&mut gate, &FromGate::Ready);

        agent.set_read_timeout(Some(SOON)).unwrap();
        assert!(matches!(hear(&mut agent), ToAgent::Spawn(_)));
        sandbox.end();
        spawning.join().unwrap().unwrap_err();
    });
}

#[test]
fn test_allow_host_above_the_bound_returns_an_error_and_changes_nothing() {
    let (sandbox, _peer, _records) = sandbox_with_egress();
    let egress = sandbox.egress().unwrap();
    let known = egress.rules().len();
    for number in known..MAX_RULES {
        egress.allow_host(&format!("h{number}.example")).unwrap();
    }

    let error = egress.allow_host("more.example").unwrap_err();

    assert_eq!(error, RuleError::TooMany);
    assert!(error.to_string().contains("4096"), "{error}");
    assert_eq!(egress.rules().len(), MAX_RULES);
    // What is allowed already takes no room.
    egress.allow_host("a.example").unwrap();
    egress.forbid_host("a.example").unwrap();
    egress.allow_host("more.example").unwrap();
}

#[test]
fn rules_that_change_are_told_to_the_gate() {
    let (sandbox, peer, _records) = sandbox_with_egress();
    let _agent = greet_with_gate(&peer);
    let mut gate = peer.dial(port::GATE_CONTROL, port::GATE_CONTROL);
    assert_eq!(rules(&mut gate).names.len(), 1);
    let egress = sandbox.egress().unwrap();

    egress.allow_host("*.b.example:8443").unwrap();
    let more = rules(&mut gate);
    egress.forbid_host("a.example").unwrap();
    let less = rules(&mut gate);
    egress.allow_host("http://c.example").unwrap_err();

    assert_eq!(more.names.len(), 2);
    assert!(more.names[1].below && more.names[1].ports == [8443]);
    assert_eq!(less.names.len(), 1);
    assert_eq!(egress.rules(), ["10.0.0.0/8:5432", "*.b.example:8443"]);
}

#[test]
fn a_gate_that_fails_fails_the_start_with_its_own_words() {
    let (sandbox, peer, _records) = sandbox_with_egress();
    let _agent = greet_with_gate(&peer);
    let mut gate = peer.dial(port::GATE_CONTROL, port::GATE_CONTROL);
    let message = "The guest has no way out: port 53 can't be taken\x1b[31m".to_owned();
    gate_says(&mut gate, &FromGate::Failed { message });

    let error = sandbox.wait_ready().unwrap_err();

    assert_eq!(
        error.to_string(),
        "The guest has no way out: port 53 can't be taken [31m"
    );
}

#[test]
fn streams_are_taken_from_privileged_ports_alone_and_carry_what_is_allowed() {
    let (_sandbox, peer, records) = sandbox_with_egress();
    let _agent = greet_with_gate(&peer);
    let mut byte = [0];
    for guest_port in [0, 1, 63, 1024, u32::MAX] {
        let mut stream = peer.dial(port::GATE, guest_port);
        assert_eq!(stream.read(&mut byte).unwrap(), 0, "{guest_port}");
    }
    let mut stream = peer.dial(port::GATE, 64);
    frame::write(&mut stream, &open("b.example"), MAX_GATE_FRAME_BYTES).unwrap();

    assert_eq!(stream.read(&mut byte).unwrap(), 0);
    let record = records.recv_timeout(SOON).unwrap();
    assert_eq!((record.host.as_str(), record.port), ("b.example", 443));
    assert_eq!(record.sandbox, "scripted");
}

#[test]
fn each_attempt_is_an_event() {
    let (sender, events) = sync_channel(100);
    let events_of = Events::new(Some(sender), now_ns(), Spans::default());
    let options = EgressOptions {
        rules: vec!["a.example".to_owned()],
        ..EgressOptions::default()
    };
    let egress = options.open("scripted", &events_of).unwrap();
    let shared = Shared::new(now_ns(), events_of).unwrap();
    let (_sandbox, peer) = sandbox_of(Some("scripted"), None, shared.with_egress(egress));
    let _agent = greet_with_gate(&peer);
    let mut gate = peer.dial(port::GATE_CONTROL, port::GATE_CONTROL);
    rules(&mut gate);
    gate_says(&mut gate, &refused("b.example", Refusal::NotAllowed, 0));

    let event = loop {
        let event = events.recv_timeout(SOON).unwrap();
        if matches!(event.kind, EventKind::Connection(_)) {
            break event.to_json();
        }
    };

    assert_eq!(event["event"], "connection");
    assert_eq!(
        (&event["host"], &event["port"], &event["verdict"]),
        (&"b.example".into(), &443.into(), &"denied".into())
    );
}

#[test]
fn what_the_gate_refused_is_told_and_what_is_no_name_is_counted() {
    let (_sandbox, peer, records) = sandbox_with_egress();
    let _agent = greet_with_gate(&peer);
    let mut gate = peer.dial(port::GATE_CONTROL, port::GATE_CONTROL);
    rules(&mut gate);
    for name in ["127.1", "a b", "", "denied.example"] {
        gate_says(&mut gate, &refused(name, Refusal::NotAllowed, 2));
    }

    let record = records.recv_timeout(SOON).unwrap();
    assert_eq!(
        record.line(),
        "denied: denied.example:443 (not allowed; add --allow-host denied.example)"
    );
    assert_eq!(record.unrecorded, 11);
}

#[test]
fn each_refusal_of_the_gates_has_its_verdict_and_says_what_bound_was_met() {
    let (_sandbox, peer, records) = sandbox_with_egress();
    let _agent = greet_with_gate(&peer);
    let mut gate = peer.dial(port::GATE_CONTROL, port::GATE_CONTROL);
    rules(&mut gate);
    for (why, verdict, reason) in [
        (Refusal::NotAllowed, Verdict::Denied, "not allowed; add"),
        (Refusal::Datagram, Verdict::Denied, "UDP, and QUIC with it"),
        (Refusal::NoListener, Verdict::Limited, "2048 listeners"),
        (Refusal::PortTaken, Verdict::Failed, "listens on port 443"),
        (Refusal::NoConnection, Verdict::Limited, "256 connections"),
    ] {
        gate_says(&mut gate, &refused("a.example", why, 0));
        let record = records.recv_timeout(SOON).unwrap();
        let said = record.reason.unwrap();
        assert_eq!(record.verdict, verdict, "{said}");
        assert!(said.contains(reason), "{said}");
        assert_eq!(said.contains("--allow-host"), why == Refusal::NotAllowed);
    }
}

#[test]
fn what_was_only_counted_is_told_before_the_last_event() {
    let (sender, events) = sync_channel(1000);
    let events_of = Events::new(Some(sender), now_ns(), Spans::default());
    let options = EgressOptions {
        rules: vec!["a.example".to_owned()],
        ..EgressOptions::default()
    };
    let egress = options.open("scripted", &events_of).unwrap();
    let shared = Shared::new(now_ns(), events_of).unwrap();
    let (sandbox, peer) = sandbox_of(Some("scripted"), None, shared.with_egress(egress));
    let _agent = greet_with_gate(&peer);
    let mut gate = peer.dial(port::GATE_CONTROL, port::GATE_CONTROL);
    rules(&mut gate);
    for _ in 0..1000 {
        gate_says(&mut gate, &refused("b.example", Refusal::NotAllowed, 1));
    }
    drop((gate, peer));
    sandbox.end();

    let events: Vec<EventKind> = events.iter().map(|event| event.kind).collect();
    assert!(matches!(events.last(), Some(EventKind::Ended { .. })));
    let records = events.iter().filter_map(|kind| match kind {
        EventKind::Connection(record) => Some(record),
        _ => None,
    });
    let counted: Vec<u64> = records.map(|record| 1 + record.unrecorded).collect();
    assert_eq!(counted.iter().sum::<u64>(), 2000);
    assert!(counted.len() < 500, "{}", counted.len());
    let totals = sandbox.egress().unwrap().totals();
    assert_eq!(totals.denied, 2000);
    assert_eq!(totals.unrecorded, 2000 - counted.len() as u64);
}

#[test]
fn a_gate_that_dials_again_and_again_has_one_stream() {
    let (_sandbox, peer, _records) = sandbox_with_egress();
    let _agent = greet_with_gate(&peer);
    let mut gates: Vec<UnixStream> = (0..100)
        .map(|_| peer.dial(port::GATE_CONTROL, port::GATE_CONTROL))
        .collect();
    let mut last = gates.pop().unwrap();
    assert_eq!(rules(&mut last).names.len(), 1);
    for mut former in gates {
        // Perhaps with its rules in front.
        let mut rest = Vec::new();
        former.read_to_end(&mut rest).unwrap();
    }
}

#[test]
fn a_port_of_the_guest_is_a_stream_or_refused() {
    let (sandbox, peer, _records) = sandbox_with_egress();
    let _agent = greet_with_gate(&peer);
    let mut gate = peer.dial(port::GATE_CONTROL, port::GATE_CONTROL);
    rules(&mut gate);
    gate_says(&mut gate, &FromGate::Ready);
    sandbox.wait_ready().unwrap();
    for (answer, is_refused) in [(&[1][..], false), (&[], true)] {
        let (result, heard) = std::thread::scope(|scope| {
            let connecting = scope.spawn(|| sandbox.connect(8000));
            let (message, mut descriptors) = peer.machine.receive::<ToMachine>().unwrap();
            assert_eq!(message, ToMachine::Connect { port: port::GATE });
            let mut stream = UnixStream::from(descriptors.remove(0));
            let heard: Inward = frame::read(&mut stream, MAX_GATE_FRAME_BYTES).unwrap();
            stream.write_all(answer).unwrap();
            drop(stream);
            (connecting.join().unwrap(), heard)
        });
        assert_eq!(heard, Inward { port: 8000 });
        assert_eq!(result.is_err(), is_refused);
    }
}

#[test]
fn without_a_rule_there_is_no_gate() {
    let (sandbox, peer, mut agent) = ready_sandbox(None);
    let mut byte = [0];
    for (host_port, guest_port) in [(port::GATE, 64), (port::GATE_CONTROL, port::GATE_CONTROL)] {
        let mut stream = peer.dial(host_port, guest_port);
        assert_eq!(stream.read(&mut byte).unwrap(), 0);
    }
    assert!(sandbox.egress().is_none());
    assert_eq!(
        sandbox.connect(80).unwrap_err().kind(),
        io::ErrorKind::Unsupported
    );
    // Nothing was said to the agent but what every agent is told.
    agent.set_nonblocking(true).unwrap();
    assert_eq!(
        agent.read(&mut byte).unwrap_err().kind(),
        io::ErrorKind::WouldBlock
    );
}

#[test]
fn a_sessions_command_sets_no_secrets_variable_and_certificates_are_told_once() {
    let value = b"s3cr3t-value".to_vec();
    let secret = egress::secret::Secret::new("TOKEN", &["a.example"], value).unwrap();
    let options = EgressOptions {
        secrets: vec![secret],
        ..EgressOptions::default()
    };
    let (sandbox, peer) = sandbox_with(Some(SOON), options);
    let _agent = greet_with_gate(&peer);
    let mut gate = peer.dial(port::GATE_CONTROL, port::GATE_CONTROL);
    assert!(rules(&mut gate).trust.is_some());
    gate_says(&mut gate, &FromGate::Ready);
    sandbox.wait_ready().unwrap();
    sandbox.egress().unwrap().allow_host("b.example").unwrap();
    let told = rules(&mut gate);
    assert_eq!((told.names.len(), told.trust), (2, None));
    let egress = sandbox.shared().egress.as_ref().unwrap();
    let documented = include_str!("../../../../docs/egress.md");
    for (name, value) in egress.variables() {
        let is_secret = name == "TOKEN" && value.starts_with("sandvmm-secret-");
        let is_told = documented.contains(&format!("`{name}`"));
        assert!(is_secret || is_told && value.starts_with("/run/"), "{name}");
    }
    assert_eq!(egress.variables().len(), 14);

    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("own/sessions");
    let claim = SessionClaim::below(&root, "dev").unwrap();
    let server = claim.listen(&sandbox, None, None).unwrap();
    let error = std::thread::scope(|scope| {
        let serving = scope.spawn(|| server.run(&sandbox).unwrap());
        let session = Session::open_below(&root, "dev").unwrap();
        let error = session.command("true").env("TOKEN", "x").spawn().err();
        sandbox.end();
        serving.join().unwrap();
        error
    });
    let sentence = format!("{:?}", error.unwrap());
    assert!(
        sentence.contains("The variable TOKEN is a secret"),
        "{sentence}"
    );
}
