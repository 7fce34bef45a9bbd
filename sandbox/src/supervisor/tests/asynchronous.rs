//! The asynchronous face, in a runtime with one thread: nothing may block it.

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
}

/// The guest's part in one command: says that it runs, gives its three streams to `act`, and says that it ended.
fn serve(
    peer: &Peer,
    agent: &mut UnixStream,
    act: impl FnOnce(UnixStream, UnixStream, UnixStream),
    status: ExitStatus,
) {
    let ToAgent::Spawn(spawn) = hear(agent) else {
        panic!("no spawn came");
    };
    let command_id = spawn.command_id;
    let [stdin, stdout, stderr] = [0; 3].map(|_| peer.accept().0);
    let warm = false;
    say(agent, &FromAgent::Spawned { command_id, warm });
    act(stdin, stdout, stderr);
    say(agent, &exited(command_id, status, 0));
}

#[test]
fn streams_and_ends_come_while_other_tasks_go_on() {
    let (sandbox, peer, mut agent) = ready_sandbox(None);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let act = |mut stdin: UnixStream, mut stdout: UnixStream, _stderr| {
                let mut line = [0; 3];
                stdin.read_exact(&mut line).unwrap();
                stdout.write_all(&line).unwrap();
            };
            serve(&peer, &mut agent, act, ExitStatus::Code(4));
        });
        let (completion, ticks, echoed) = runtime().block_on(async {
            let mut command = sandbox.command("program");
            let mut child = command.stdin(Stdio::piped()).spawn_async().await.unwrap();
            let mut stdin = child.stdin.take().unwrap().into_async().unwrap();
            let mut stdout = child.stdout.take().unwrap().into_async().unwrap();
            let ticking = async {
                let mut ticks = 0;
                for _ in 0..5 {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                    ticks += 1;
                }
                stdin.write_all(b"abc").await.unwrap();
                ticks
            };
            let waiting = async {
                let mut echoed = Vec::new();
                stdout.read_to_end(&mut echoed).await.unwrap();
                (child.wait_async().await, echoed)
            };
            let (ticks, (completion, echoed)) = tokio::join!(ticking, waiting);
            (completion, ticks, echoed)
        });
        assert_eq!(completion.outcome, Outcome::Exited(4));
        assert_eq!((ticks, echoed.as_slice()), (5, &b"abc"[..]));
        assert_eq!(
            (completion.usage.bytes_in, completion.usage.bytes_out),
            (3, 3)
        );
    });
}

#[test]
fn an_output_is_whole_and_cut_at_its_limit() {
    let (sandbox, peer, mut agent) = ready_sandbox(None);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let act = |_stdin, mut stdout: UnixStream, mut stderr: UnixStream| {
                stdout.write_all(&[b'o'; 300_000]).unwrap();
                stderr.write_all(b"err").unwrap();
            };
            serve(&peer, &mut agent, act, ExitStatus::Code(0));
        });
        let output = runtime().block_on(async {
            let mut command = sandbox.command("program");
            command.stdin(Stdio::piped()).output_limit(100_000);
            command.output_async().await.unwrap()
        });
        assert_eq!(
            (output.stdout.len(), output.stdout_truncated),
            (100_000, true)
        );
        assert_eq!(
            (output.stderr.as_slice(), output.stderr_truncated),
            (&b"err"[..], false)
        );
        assert!(output.completion.outcome.success());
    });
}

#[test]
fn a_status_drops_what_is_written_and_a_child_is_waited_for_with_it() {
    let (sandbox, peer, mut agent) = ready_sandbox(None);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for code in [4, 5] {
                let act = |_stdin, mut stdout: UnixStream, mut stderr: UnixStream| {
                    stdout.write_all(&[b'o'; 300_000]).unwrap();
                    stderr.write_all(b"err").unwrap();
                };
                serve(&peer, &mut agent, act, ExitStatus::Code(code));
            }
        });
        let (completion, output) = runtime().block_on(async {
            let mut command = sandbox.command("program");
            command.stdin(Stdio::piped());
            let completion = command.status_async().await.unwrap();
            let child = command.spawn_async().await.unwrap();
            (completion, child.wait_with_output_async().await.unwrap())
        });
        assert_eq!(completion.outcome, Outcome::Exited(4));
        assert_eq!(completion.usage.bytes_out, 300_003);
        assert_eq!(output.completion.outcome, Outcome::Exited(5));
        assert_eq!((output.stdout.len(), output.stderr.len()), (300_000, 3));
    });
}

#[test]
fn a_future_that_is_dropped_kills_its_command() {
    let (sandbox, peer, mut agent) = ready_sandbox(None);
    std::thread::scope(|scope| {
        let guest = scope.spawn(|| {
            let ToAgent::Spawn(spawn) = hear(&mut agent) else {
                panic!("no spawn came");
            };
            let command_id = spawn.command_id;
            let streams = [0; 2].map(|_| peer.accept().0);
            say(
                &mut agent,
                &FromAgent::Spawned {
                    command_id,
                    warm: false,
                },
            );
            assert_eq!(hear(&mut agent), ToAgent::Kill { command_id });
            drop(streams);
        });
        runtime().block_on(async {
            let mut command = sandbox.command("program");
            let output = command.output_async();
            let limit = Duration::from_secs(1);
            tokio::time::timeout(limit, output).await.unwrap_err();
        });
        guest.join().unwrap();
    });
}

#[test]
fn a_future_that_is_dropped_while_its_command_starts_kills_it_when_it_runs() {
    let (sandbox, peer, mut agent) = ready_sandbox(None);
    runtime().block_on(async {
        let mut command = sandbox.command("program");
        let output = command.output_async();
        let limit = Duration::from_millis(100);
        tokio::time::timeout(limit, output).await.unwrap_err();
    });

    let ToAgent::Spawn(spawn) = hear(&mut agent) else {
        panic!("no spawn came");
    };
    let command_id = spawn.command_id;
    let _streams = [0; 2].map(|_| peer.accept().0);
    say(
        &mut agent,
        &FromAgent::Spawned {
            command_id,
            warm: false,
        },
    );

    assert_eq!(hear(&mut agent), ToAgent::Kill { command_id });
}

#[test]
fn the_machines_end_ends_every_wait() {
    let (sandbox, peer, _agent) = ready_sandbox(None);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(100));
            peer.end(EndReason::TripleFault, b"");
        });
        let error = runtime()
            .block_on(async { sandbox.command("program").spawn_async().await })
            .unwrap_err();
        assert!(matches!(error, SpawnError::MachineCrashed(_)), "{error:?}");
    });
    let ended = runtime().block_on(sandbox.end_async());
    assert!(ended.crash.is_some());
}
