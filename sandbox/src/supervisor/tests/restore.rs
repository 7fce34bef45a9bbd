//! A machine that is saved and one that was restored, against a scripted agent.

use protocol::message::{Restored, Resume};

use super::*;
use crate::builder::DEFAULT_HOSTNAME;
use crate::freeze::FreezeError;

fn restored(version: u32) -> FromAgent {
    FromAgent::Restored(Restored {
        version,
        noticed_ns: 1_000,
        sent_ns: 2_000,
    })
}

fn hear_resume(agent: &mut UnixStream) -> Resume {
    match hear(agent) {
        ToAgent::Resume(resume) => resume,
        other => panic!("{other:?}"),
    }
}

/// The end of a sandbox whose agent said `messages` after its restored greeting.
fn start_error_after(messages: &[FromAgent]) -> StartError {
    let (_sandbox, peer) = sandbox(None);
    let mut agent = peer.dial(port::CONTROL, port::CONTROL);
    for message in messages {
        say(&mut agent, message);
    }
    peer.shared.wait_ready().unwrap_err()
}

#[test]
fn a_restored_guest_is_ready_only_when_it_has_taken_what_is_new() {
    let (sandbox, peer) = sandbox(None);
    let mut agent = peer.dial(port::CONTROL, port::CONTROL);
    say(&mut agent, &restored(protocol::VERSION));
    let resume = hear_resume(&mut agent);

    assert!(matches!(peer.shared.lock().phase, Phase::Booting));
    say(&mut agent, &FromAgent::Resumed);
    peer.shared.wait_ready().unwrap();

    assert_eq!(resume.hostname, "scripted");
    assert_eq!(resume.max_processes, Some(64));
    assert!(resume.realtime_ns.abs_diff(realtime_ns()) < nanos(SOON));
    assert_ne!(resume.machine_id, resume.boot_id);
    let (_child, _stdout, _stderr) = running(&sandbox, &peer, &mut agent);
}

#[test]
fn two_restored_guests_are_told_nothing_alike() {
    let resumes = [(), ()].map(|()| {
        let (_sandbox, peer) = sandbox_called(None, None);
        let mut agent = peer.dial(port::CONTROL, port::CONTROL);
        say(&mut agent, &restored(protocol::VERSION));
        hear_resume(&mut agent)
    });

    let [first, second] = resumes;
    assert_ne!(first.entropy, second.entropy);
    assert_ne!(first.machine_id, second.machine_id);
    assert_ne!(first.boot_id, second.boot_id);
    assert_ne!(first.hostname, second.hostname);
    for name in [first.hostname, second.hostname] {
        let suffix = name.strip_prefix(&format!("{DEFAULT_HOSTNAME}-")).unwrap();
        assert!(suffix.len() == 16 && suffix.bytes().all(|byte| byte.is_ascii_hexdigit()));
    }
}

#[test]
fn a_restored_agent_of_another_version_fails_the_start() {
    let error = start_error_after(&[restored(protocol::VERSION - 1)]);
    assert!(matches!(error, StartError::Version { .. }), "{error:?}");
}

#[test]
fn words_of_a_restore_out_of_turn_end_the_machine() {
    let greeting = || restored(protocol::VERSION);
    for messages in [
        vec![FromAgent::Resumed],
        vec![greeting(), greeting()],
        vec![greeting(), hello(protocol::VERSION), FromAgent::Resumed],
    ] {
        let error = start_error_after(&messages);
        assert!(matches!(error, StartError::Crashed(_)), "{error:?}");
    }
}

#[test]
fn a_freeze_waits_for_the_agents_word_and_a_thaw_too() {
    let (_sandbox, peer, mut agent) = ready_sandbox(None);
    std::thread::scope(|scope| {
        let freezing = scope.spawn(|| peer.shared.freeze(true));
        let asked = hear(&mut agent);
        assert_eq!(
            asked,
            ToAgent::Freeze {
                close_streams: true
            }
        );
        assert!(matches!(peer.shared.freeze(true), Err(FreezeError::Busy)));
        assert!(matches!(peer.shared.thaw(), Err(FreezeError::Busy)));
        say(&mut agent, &FromAgent::Frozen);
        freezing.join().unwrap().unwrap();

        let thawing = scope.spawn(|| peer.shared.thaw());
        assert_eq!(hear(&mut agent), ToAgent::Thaw);
        say(&mut agent, &FromAgent::Thawed);
        thawing.join().unwrap().unwrap();
    });
    assert!(matches!(peer.shared.thaw(), Err(FreezeError::Busy)));
}

#[test]
fn a_guest_that_cannot_be_frozen_says_why_and_goes_on() {
    let (sandbox, peer, mut agent) = ready_sandbox(None);
    let error = std::thread::scope(|scope| {
        let freezing = scope.spawn(|| peer.shared.freeze(false));
        hear(&mut agent);
        let message = "A process is\nstuck".to_owned();
        say(&mut agent, &FromAgent::FreezeFailed { message });
        freezing.join().unwrap().unwrap_err()
    });

    assert_eq!(error.to_string(), "A process is stuck");
    let (_child, _stdout, _stderr) = running(&sandbox, &peer, &mut agent);
}

#[test]
fn a_machine_that_ends_while_it_freezes_is_told() {
    let (_sandbox, peer, mut agent) = ready_sandbox(None);
    let error = std::thread::scope(|scope| {
        let freezing = scope.spawn(|| peer.shared.freeze(false));
        hear(&mut agent);
        peer.end(EndReason::TripleFault, b"");
        freezing.join().unwrap().unwrap_err()
    });
    assert!(matches!(error, FreezeError::MachineCrashed(_)), "{error:?}");
}

#[test]
fn an_unasked_frozen_or_thawed_ends_the_machine() {
    for word in [FromAgent::Frozen, FromAgent::Thawed] {
        let (_sandbox, peer, mut agent) = ready_sandbox(None);
        say(&mut agent, &word);
        let over = peer.shared.wait_over(SOON);
        assert!(matches!(over, Some(Over::Crashed(_))), "{word:?}");
    }
}

#[test]
fn an_interpreter_that_stays_is_asked_for_and_its_forks_are_known() {
    let (sandbox, peer, mut agent) = ready_sandbox(None);
    let completion = std::thread::scope(|scope| {
        let warming = scope.spawn(|| sandbox.warm_up("import json").spawn().unwrap().wait());
        let ToAgent::WarmUp(spawn) = hear(&mut agent) else {
            panic!("no warm-up came");
        };
        let _streams = (peer.accept(), peer.accept());
        assert_eq!(spawn.program, b"python3");
        assert_eq!(spawn.args, [&b"-c"[..], b"import json"]);
        let command_id = spawn.command_id;
        let warm = true;
        say(&mut agent, &FromAgent::Spawned { command_id, warm });
        say(
            &mut agent,
            &exited(spawn.command_id, ExitStatus::Code(0), 0),
        );
        warming.join().unwrap()
    });
    assert!(completion.outcome.success() && completion.warm);
}

/// What a command is asked for with before its guest has greeted.
fn spawn_early<'scope>(
    scope: &'scope std::thread::Scope<'scope, '_>,
    sandbox: &'scope Sandbox,
    shared: &Shared,
) -> std::thread::ScopedJoinHandle<'scope, Result<crate::Child, SpawnError>> {
    let spawning = scope.spawn(|| sandbox.command("early").spawn());
    // Until it is in the supervisor's hands.
    let deadline = Instant::now() + SOON;
    while shared.lock().commands.is_empty() || !shared.lock().requests.is_empty() {
        assert!(Instant::now() < deadline);
        std::thread::yield_now();
    }
    spawning
}

#[test]
fn a_command_that_was_asked_for_early_comes_right_behind_what_is_new() {
    let (sandbox, peer) = sandbox(None);
    std::thread::scope(|scope| {
        let spawning = spawn_early(scope, &sandbox, &peer.shared);
        let mut agent = peer.dial(port::CONTROL, port::CONTROL);
        say(&mut agent, &restored(protocol::VERSION));

        hear_resume(&mut agent);
        // No word of the agent's in between.
        let ToAgent::Spawn(spawn) = hear(&mut agent) else {
            panic!("no command came");
        };
        let _streams = (peer.accept(), peer.accept());
        say(&mut agent, &FromAgent::Resumed);
        let (command_id, warm) = (spawn.command_id, false);
        say(&mut agent, &FromAgent::Spawned { command_id, warm });
        spawning.join().unwrap().unwrap();
    });
}

#[test]
fn a_machine_that_does_not_start_ends_the_command_and_says_why() {
    let (sandbox, peer) = sandbox(None);
    std::thread::scope(|scope| {
        let spawning = spawn_early(scope, &sandbox, &peer.shared);
        peer.end(EndReason::StartFailed("No memory".into()), b"");

        let error = spawning.join().unwrap().unwrap_err();
        assert!(matches!(error, SpawnError::SandboxEnded), "{error:?}");
    });
    let error = sandbox.wait_ready().unwrap_err();
    assert!(matches!(error, StartError::Machine { .. }), "{error:?}");
}
