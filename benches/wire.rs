//! The wire format: the message that starts a command, written and read.
#![allow(clippy::expect_used, missing_docs, reason = "a measurement")]

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};

use protocol::frame::{Decoder, MAX_TO_AGENT_BYTES, encode};
use protocol::message::{Spawn, Stdio, ToAgent};

fn spawn() -> ToAgent {
    ToAgent::Spawn(Spawn {
        command_id: 1,
        program: b"python3".to_vec(),
        args: vec![b"-c".to_vec(), vec![b'x'; 1000]],
        env: vec![(b"HOME".to_vec(), b"/home/user".to_vec()); 8],
        env_clear: false,
        env_remove: Vec::new(),
        cwd: Some(b"/home/user".to_vec()),
        user: None,
        stdio: Stdio::Pipes { stdin: true },
        file: None,
    })
}

fn messages(criterion: &mut Criterion) {
    let message = spawn();
    let frame = encode(&message, MAX_TO_AGENT_BYTES).expect("it fits");
    let mut group = criterion.benchmark_group("wire");
    group.bench_function("write a command", |bencher| {
        bencher.iter(|| encode(black_box(&message), MAX_TO_AGENT_BYTES).expect("it fits"));
    });
    group.bench_function("read a command", |bencher| {
        bencher.iter(|| {
            let mut decoder = Decoder::new(MAX_TO_AGENT_BYTES);
            decoder.push(black_box(&frame));
            let read: Option<ToAgent> = decoder.next().expect("a frame");
            read.expect("a whole one")
        });
    });
    group.finish();
}

criterion_group!(wire, messages);
criterion_main!(wire);
