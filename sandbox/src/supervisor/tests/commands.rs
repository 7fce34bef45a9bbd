//! Commands: how they run and end, and what becomes of them without a handle.

use super::*;

#[test]
fn a_command_runs_writes_and_ends() {
    let (sandbox, peer, mut agent) = ready_sandbox(None);
    let (mut child, mut stdout, stderr) = running(&sandbox, &peer, &mut agent);
    stdout.write_all(b"out\xff").unwrap();
    drop((stdout, stderr));
    say(&mut agent, &exited(child.id(), ExitStatus::Code(7), 0));

    let completion = child.wait();
    let mut read = Vec::new();
    child.stdout.take().unwrap().read_to_end(&mut read).unwrap();

    assert_eq!(read, b"out\xff");
    assert_eq!(completion.outcome, Outcome::Exited(7));
    assert_eq!(completion.usage.cpu_time, Duration::from_micros(1500));
    assert_eq!(completion.usage.peak_memory_bytes, 4096);
    assert_eq!(completion.usage.peak_processes, 3);
    let clocks = child.wait().clocks;
    assert!(clocks.started < clocks.exited);
    assert!(clocks.first_output.is_some());
    assert_eq!(sandbox.clocks().first_output, clocks.first_output);
}

#[test]
fn what_is_asked_for_arrives_as_it_was_said() {
    let (sandbox, _peer, mut agent) = ready_sandbox(None);
    let spawn = std::thread::scope(|scope| {
        scope.spawn(|| {
            sandbox
                .command("/bin/p")
                .args(["a", "b"])
                .env("K", "1")
                .env("K", "2")
                .current_dir("/d")
                .file("f", 0o755, b"c")
                .user("0:0")
                .pty(80, 25)
                .spawn()
        });
        let heard = hear(&mut agent);
        sandbox.end();
        heard
    });

    assert_eq!(
        spawn,
        ToAgent::Spawn(Spawn {
            command_id: 1,
            program: b"/bin/p".to_vec(),
            args: vec![b"a".to_vec(), b"b".to_vec()],
            env: vec![(b"K".to_vec(), b"2".to_vec())],
            env_clear: false,
            env_remove: Vec::new(),
            cwd: Some(b"/d".to_vec()),
            user: Some("0:0".to_owned()),
            stdio: protocol::message::Stdio::Terminal(protocol::message::TerminalSize {
                columns: 80,
                rows: 25
            }),
            file: Some(protocol::message::NewFile {
                path: b"f".to_vec(),
                mode: 0o755,
                content: b"c".to_vec(),
            }),
        })
    );
}

/// A command as the guest is asked for it.
fn asked(set: impl FnOnce(&mut crate::Command) + Send) -> Spawn {
    let (sandbox, _peer, mut agent) = ready_sandbox(None);
    let heard = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut command = sandbox.command("p");
            set(&mut command);
            command.spawn()
        });
        let heard = hear(&mut agent);
        sandbox.end();
        heard
    });
    let ToAgent::Spawn(spawn) = heard else {
        panic!("no spawn came");
    };
    spawn
}

#[test]
fn variables_are_left_out_as_std_process_leaves_them_out() {
    let pair = |name: &str, value: &str| (name.as_bytes().to_vec(), value.as_bytes().to_vec());

    let removed = asked(|command| {
        command.env("A", "1").env("B", "2").env("LANG", "C");
        command
            .env_remove("A")
            .env_remove("LANG")
            .env_remove("PATH");
        command.env("LANG", "D");
    });
    assert_eq!(removed.env, [pair("B", "2"), pair("LANG", "D")]);
    assert!(!removed.env_clear);
    assert_eq!(
        removed.env_remove,
        [b"A".to_vec(), b"LANG".to_vec(), b"PATH".to_vec()]
    );

    let cleared = asked(|command| {
        command.env("A", "1").env_remove("PATH").env_clear();
        command.env("B", "2");
    });
    assert_eq!(cleared.env, [pair("B", "2")]);
    assert!(cleared.env_clear && cleared.env_remove.is_empty());
}

#[test]
fn a_child_is_waited_for_with_what_it_still_writes() {
    let (sandbox, peer, mut agent) = ready_sandbox(None);
    let (mut child, mut stdout, mut stderr) = running(&sandbox, &peer, &mut agent);
    let id = child.id();
    // More than a socket holds, and what was taken is the taker's.
    let taken = child.stderr.take().unwrap();
    let output = std::thread::scope(|scope| {
        scope.spawn(move || {
            stderr.write_all(b"taken").unwrap();
            stdout.write_all(&vec![b'x'; 4 << 20]).unwrap();
            drop((stdout, stderr));
            say(&mut agent, &exited(id, ExitStatus::Code(6), 0));
            agent
        });
        child.wait_with_output().unwrap()
    });

    assert_eq!(output.completion.outcome, Outcome::Exited(6));
    assert_eq!(
        (output.stdout.len(), output.stdout_truncated),
        (4 << 20, false)
    );
    assert_eq!(output.stderr, b"");
    let mut read = String::new();
    { taken }.read_to_string(&mut read).unwrap();
    assert_eq!(read, "taken");
}

#[test]
fn a_status_waits_for_no_reader_of_what_the_command_writes() {
    let (sandbox, peer, mut agent) = ready_sandbox(None);
    let completion = std::thread::scope(|scope| {
        let running = scope.spawn(|| sandbox.command("program").status().unwrap());
        let ToAgent::Spawn(spawn) = hear(&mut agent) else {
            panic!("no spawn came");
        };
        let (mut stdout, mut stderr) = (peer.accept().0, peer.accept().0);
        let command_id = spawn.command_id;
        let warm = false;
        say(&mut agent, &FromAgent::Spawned { command_id, warm });
        for stream in [&mut stdout, &mut stderr] {
            stream.set_write_timeout(Some(SOON)).unwrap();
            stream.write_all(&vec![b'x'; 4 << 20]).unwrap();
        }
        drop((stdout, stderr));
        say(&mut agent, &exited(command_id, ExitStatus::Code(9), 0));
        running.join().unwrap()
    });

    assert_eq!(completion.outcome, Outcome::Exited(9));
    assert_eq!(completion.usage.bytes_out, 8 << 20);
}

#[test]
fn a_command_that_does_not_start_says_why_and_may_be_tried_again() {
    let (sandbox, _peer, mut agent) = ready_sandbox(None);
    let error = std::thread::scope(|scope| {
        let spawning = scope.spawn(|| sandbox.command("absent").spawn());
        let ToAgent::Spawn(spawn) = hear(&mut agent) else {
            panic!("no spawn came");
        };
        let failed = FromAgent::SpawnFailed {
            command_id: spawn.command_id,
            kind: SpawnFailure::NotFound,
            message: "No program absent".to_owned(),
        };
        say(&mut agent, &failed);
        spawning.join().unwrap().unwrap_err()
    });

    assert!(matches!(&error, SpawnError::NotFound(message) if message == "No program absent"));
    assert!(!error.may_have_run());
}

#[test]
fn a_command_whose_writes_are_lost_has_not_succeeded() {
    let (sandbox, peer, mut agent) = ready_sandbox(None);
    let (mut child, _, _) = running(&sandbox, &peer, &mut agent);
    let FromAgent::Exited(ended) = exited(child.id(), ExitStatus::Code(0), 0) else {
        panic!("it is one");
    };

    say(
        &mut agent,
        &FromAgent::Exited(Exited {
            is_kept: false,
            ..ended
        }),
    );

    let status = crate::ExitStatus::Code(0);
    assert_eq!(child.wait().outcome, Outcome::NotKept { status });
}

#[test]
fn lack_of_memory_is_told_apart_from_a_signal() {
    let (sandbox, peer, mut agent) = ready_sandbox(None);
    for (status, oom_kills, expected) in [
        (
            ExitStatus::Signal(9),
            1,
            Outcome::OutOfMemory {
                status: crate::ExitStatus::Signal(9),
            },
        ),
        (
            ExitStatus::Code(1),
            2,
            Outcome::OutOfMemory {
                status: crate::ExitStatus::Code(1),
            },
        ),
        (ExitStatus::Code(0), 1, Outcome::Exited(0)),
        (ExitStatus::Signal(9), 0, Outcome::Signaled(9)),
    ] {
        let (mut child, _stdout, _stderr) = running(&sandbox, &peer, &mut agent);
        say(&mut agent, &exited(child.id(), status, oom_kills));
        assert_eq!(child.wait().outcome, expected);
    }
}

#[test]
fn a_stream_that_nobody_wants_does_not_hold_the_command_up() {
    let (sandbox, peer, mut agent) = ready_sandbox(None);
    let (mut stdout, mut child) = std::thread::scope(|scope| {
        let spawning = scope.spawn(|| sandbox.command("loud").stdout(Stdio::null()).spawn());
        let ToAgent::Spawn(spawn) = hear(&mut agent) else {
            panic!("no spawn came");
        };
        let (stdout, _) = peer.accept();
        let (_stderr, _) = peer.accept();
        let command_id = spawn.command_id;
        say(
            &mut agent,
            &FromAgent::Spawned {
                command_id,
                warm: false,
            },
        );
        (stdout, spawning.join().unwrap().unwrap())
    });

    stdout.set_write_timeout(Some(SOON)).unwrap();
    stdout.write_all(&vec![b'x'; 4 << 20]).unwrap();
    say(&mut agent, &exited(child.id(), ExitStatus::Code(0), 0));

    assert!(child.stdout.is_none());
    assert_eq!(child.wait().outcome, Outcome::Exited(0));
}

#[test]
fn a_handle_that_is_dropped_takes_its_command_with_it_and_one_that_has_ended_is_left_alone() {
    let (sandbox, peer, mut agent) = ready_sandbox(None);
    let (mut ended, ..) = running(&sandbox, &peer, &mut agent);
    say(&mut agent, &exited(ended.id(), ExitStatus::Code(0), 0));
    ended.wait();
    drop(ended);
    let (child, ..) = running(&sandbox, &peer, &mut agent);
    let command_id = child.id();

    drop(child);

    assert_eq!(hear(&mut agent), ToAgent::Kill { command_id });
}

#[test]
fn a_detached_command_is_listed_and_attached_once_with_its_streams() {
    let (sandbox, peer, mut agent) = ready_sandbox(None);
    let (first, mut stdout, _stderr) = running(&sandbox, &peer, &mut agent);
    let (second, ..) = running(&sandbox, &peer, &mut agent);
    let second_id = second.id();
    stdout.write_all(b"meanwhile").unwrap();

    let id = first.detach();
    let listed = sandbox.commands();
    assert!(sandbox.attach(second_id).is_none(), "it has a handle");
    assert!(sandbox.attach(id + 100).is_none(), "there is none");
    let mut child = sandbox.attach(id).unwrap();
    assert!(sandbox.attach(id).is_none(), "it has a handle again");

    assert_eq!(
        (listed.len(), listed[0].id, listed[1].id),
        (2, id, second_id)
    );
    assert_eq!(listed[0].program, "program");
    let flags: Vec<_> = listed
        .iter()
        .map(|info| (info.is_running, info.is_detached))
        .collect();
    assert_eq!(flags, [(true, true), (true, false)]);
    let mut read = [0; 9];
    child
        .stdout
        .as_mut()
        .unwrap()
        .read_exact(&mut read)
        .unwrap();
    assert_eq!(&read, b"meanwhile");
    assert_eq!(child.wait_timeout(Duration::from_millis(10)), None);
}

#[test]
fn a_command_that_ends_while_detached_keeps_its_end_for_whoever_asks() {
    let (sandbox, peer, mut agent) = ready_sandbox(None);
    let (child, stdout, stderr) = running(&sandbox, &peer, &mut agent);
    let id = child.detach();

    say(&mut agent, &exited(id, ExitStatus::Code(5), 0));
    drop((stdout, stderr));
    let mut child = sandbox.attach(id).unwrap();

    assert_eq!(child.wait().outcome, Outcome::Exited(5));
    assert!(!sandbox.commands()[0].is_running);
    drop(child);
    assert_eq!(sandbox.commands(), []);
}
