//! Calls of the host's functions, by a bridge that may have been taken over.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;

use protocol::call::{Answer, FromBridge, MAX_CALL_BYTES, MAX_FRAME_BYTES};
use serde::Deserialize;

use super::*;
use crate::{CallLimits, HostFunctionError};

#[derive(Clone, Copy, Debug, Deserialize)]
struct Lookup {
    id: u32,
}

fn lookup(args: Lookup) -> Result<u32, String> {
    match args.id {
        0 => Err("There is no row 0".to_owned()),
        id => Ok(id * 2),
    }
}

/// A sandbox whose functions are registered by `register`, and the bridge's end of the stream.
fn with_bridge(
    register: impl FnOnce(&Sandbox) -> Result<(), HostFunctionError> + Send,
) -> (Sandbox, Peer, UnixStream, UnixStream) {
    let (sandbox, peer, agent) = ready_sandbox(None);
    let stream = std::thread::scope(|scope| {
        let registering = scope.spawn(|| register(&sandbox));
        let (mut stream, header) = peer.accept();
        assert_eq!(header.kind, StreamKind::Calls);
        frame::write(&mut stream, &FromBridge::Ready, MAX_FRAME_BYTES).unwrap();
        registering.join().unwrap().unwrap();
        stream
    });
    stream.set_read_timeout(Some(SOON)).unwrap();
    (sandbox, peer, agent, stream)
}

fn call(stream: &mut UnixStream, id: u32, line: &str) {
    let line = line.as_bytes().to_vec();
    frame::write(stream, &FromBridge::Call { id, line }, MAX_FRAME_BYTES).unwrap();
}

fn answer(stream: &mut UnixStream) -> (u32, String) {
    let answer: Answer = frame::read(stream, MAX_FRAME_BYTES).unwrap();
    (answer.id, String::from_utf8(answer.line).unwrap())
}

fn kind(line: &str) -> String {
    let line: serde_json::Value = serde_json::from_str(line).unwrap();
    line["error"]["kind"].as_str().unwrap().to_owned()
}

#[test]
fn a_function_is_called_by_name_and_nothing_else_is() {
    let (sandbox, _peer, _agent, mut stream) =
        with_bridge(|sandbox| sandbox.host_function("lookup", lookup));

    call(&mut stream, 1, r#"{"call":"lookup","args":{"id":21}}"#);
    assert_eq!(answer(&mut stream), (1, r#"{"ok":42}"#.to_owned()));
    call(&mut stream, 1, r#"{"call":"lookup","args":{"id":0}}"#);
    assert_eq!(
        answer(&mut stream).1,
        r#"{"error":{"kind":"failed","message":"There is no row 0"}}"#
    );
    for (line, expected) in [
        (r#"{"call":"lookup"}"#, "arguments"),
        (r#"{"call":"lookup","args":{"id":-1}}"#, "arguments"),
        ("garbage", "arguments"),
        (r#"{"call":"lookUp","args":{"id":1}}"#, "unknown"),
    ] {
        call(&mut stream, 1, line);
        assert_eq!(kind(&answer(&mut stream).1), expected, "{line}");
    }
    // A second function needs no second stream.
    sandbox
        .host_function("now", |(): ()| Ok::<_, String>("now"))
        .unwrap();
    call(&mut stream, 7, r#"{"call":"now"}"#);
    assert_eq!(answer(&mut stream), (7, r#"{"ok":"now"}"#.to_owned()));
    assert!(sandbox.remove_host_function("now"));
    call(&mut stream, 7, r#"{"call":"now"}"#);
    assert_eq!(kind(&answer(&mut stream).1), "unknown");
}

#[test]
fn a_panic_is_the_callers_error_and_harms_no_other_call() {
    let (_sandbox, _peer, _agent, mut stream) = with_bridge(|sandbox| {
        sandbox.host_function("divide", |by: u32| {
            Ok::<_, String>(42_u32.checked_div(by).unwrap())
        })
    });

    call(&mut stream, 1, r#"{"call":"divide","args":0}"#);
    let panicked = answer(&mut stream).1;
    call(&mut stream, 2, r#"{"call":"divide","args":6}"#);

    assert_eq!(kind(&panicked), "failed");
    assert_eq!(answer(&mut stream), (2, r#"{"ok":7}"#.to_owned()));
}

#[test]
fn calls_run_at_once_up_to_their_concurrency_and_late_ones_are_told_so() {
    static RUNNING: AtomicUsize = AtomicUsize::new(0);
    let (release, released) = channel::<()>();
    let released = std::sync::Mutex::new(released);
    let limits = CallLimits::default()
        .concurrency(2)
        .deadline(Duration::from_millis(300));
    let (_sandbox, _peer, _agent, mut stream) = with_bridge(move |sandbox| {
        sandbox.host_function_with("wait", limits, move |(): ()| {
            RUNNING.fetch_add(1, Ordering::SeqCst);
            let _ = released.lock().unwrap().recv();
            RUNNING.fetch_sub(1, Ordering::SeqCst);
            Ok::<_, String>(())
        })
    });

    for id in 1..=3 {
        call(&mut stream, id, r#"{"call":"wait"}"#);
    }
    let mut kinds: Vec<_> = (0..3)
        .map(|_| answer(&mut stream))
        .map(|(id, line)| (id, kind(&line)))
        .collect();
    kinds.sort();

    let expected = [(1, "deadline"), (2, "deadline"), (3, "busy")];
    assert_eq!(kinds, expected.map(|(id, kind)| (id, kind.to_owned())));
    assert_eq!(RUNNING.load(Ordering::SeqCst), 2);
    // What the late ones return is dropped, and their places are free again.
    for _ in 0..3 {
        release.send(()).unwrap();
    }
    let until = Instant::now() + SOON;
    while RUNNING.load(Ordering::SeqCst) > 0 {
        assert!(Instant::now() < until);
        std::thread::yield_now();
    }
    call(&mut stream, 1, r#"{"call":"wait"}"#);
    assert_eq!(answer(&mut stream), (1, r#"{"ok":null}"#.to_owned()));
}

#[test]
fn a_storm_of_calls_is_bounded_by_the_rate() {
    let limits = CallLimits::default().rate_per_s(10);
    let (_sandbox, _peer, _agent, mut stream) = with_bridge(move |sandbox| {
        sandbox.host_function_with("count", limits, |(): ()| Ok::<_, String>(1))
    });
    let mut storm = stream.try_clone().unwrap();

    let began = Instant::now();
    let sending = std::thread::spawn(move || {
        for id in 0..1000 {
            call(&mut storm, id, r#"{"call":"count"}"#);
        }
    });
    let answers: Vec<_> = (0..1000).map(|_| answer(&mut stream).1).collect();
    sending.join().unwrap();
    let seconds = began.elapsed().as_secs() + 1;

    let counted = answers.iter().filter(|line| line.contains("ok")).count();
    assert!(
        counted >= 10 && counted as u64 <= 10 + 10 * seconds,
        "{counted}"
    );
    let refused = answers.iter().filter(|line| !line.contains("ok"));
    assert!(refused.map(|line| kind(line)).all(|kind| kind == "rate"));
}

#[test]
fn a_bridge_that_was_taken_over_loses_its_stream_and_nothing_else() {
    let lies: [&[u8]; 4] = [
        // A second call of a number that is under way, after one that never ends.
        &frame::encode(
            &FromBridge::Call {
                id: 9,
                line: br#"{"call":"wait"}"#.to_vec(),
            },
            MAX_FRAME_BYTES,
        )
        .unwrap()
        .repeat(2),
        &frame::encode(&FromBridge::Ready, MAX_FRAME_BYTES).unwrap(),
        &[0xff; 64],
        &frame::encode(&vec![1_u8; MAX_CALL_BYTES + 30], MAX_FRAME_BYTES).unwrap(),
    ];
    for lie in lies {
        let (sandbox, _peer, _agent, mut stream) = with_bridge(|sandbox| {
            sandbox.host_function("wait", |(): ()| {
                std::thread::sleep(Duration::from_secs(1));
                Ok::<_, String>(())
            })
        });
        // It may be closed before all of it is sent.
        let _ = stream.write_all(lie);

        let mut rest = Vec::new();
        match stream.read_to_end(&mut rest) {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::ConnectionReset),
        }
        assert!(sandbox.end().crash.is_none());
    }
}

#[test]
fn names_and_limits_that_are_none_are_refused_and_nothing_is_opened() {
    let (sandbox, _peer, _agent) = ready_sandbox(None);
    let none = |(): ()| Ok::<_, String>(());

    let name = sandbox.host_function("a-b", none).unwrap_err();
    let limits = [
        CallLimits::default().concurrency(0),
        CallLimits::default().concurrency(crate::MAX_CONCURRENCY + 1),
        CallLimits::default().rate_per_s(0),
    ]
    .map(|limits| sandbox.host_function_with("a", limits, none).unwrap_err());

    assert!(matches!(name, HostFunctionError::Name(_)));
    for error in limits {
        assert!(matches!(error, HostFunctionError::Limits));
    }
}

#[test]
fn a_name_is_given_once_and_an_ended_sandbox_takes_none() {
    let none = |(): ()| Ok::<_, String>(());
    let (sandbox, _peer, _agent, _stream) =
        with_bridge(move |sandbox| sandbox.host_function("a", none));

    let twice = sandbox.host_function("a", none).unwrap_err();
    sandbox.end();

    assert!(matches!(twice, HostFunctionError::Taken(_)));
    let (sandbox, _peer, _agent) = ready_sandbox(None);
    sandbox.end();
    let late = sandbox.host_function("a", none).unwrap_err();
    assert!(matches!(late, HostFunctionError::SandboxEnded), "{late:?}");
}
