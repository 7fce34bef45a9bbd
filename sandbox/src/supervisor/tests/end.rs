//! The end of a sandbox: its time is over, or it is asked for.

use super::*;

/// The time of a sandbox that runs out of it. It begins before the guest is ready and its command runs, which takes a busy machine a while.
const TIME: Duration = Duration::from_secs(3);

#[test]
fn at_the_end_of_its_time_a_command_is_killed_and_says_what_it_used() {
    let (sandbox, peer, mut agent) = ready_sandbox(Some(TIME));
    let (mut child, _stdout, _stderr) = running(&sandbox, &peer, &mut agent);
    let command_id = child.id();

    assert_eq!(hear(&mut agent), ToAgent::Kill { command_id });
    say(&mut agent, &exited(command_id, ExitStatus::Signal(9), 0));
    let completion = child.wait();

    assert_eq!(completion.outcome, Outcome::TimedOut);
    assert_eq!(completion.usage.cpu_time, Duration::from_micros(1500));
    let late = sandbox.command("late").spawn().unwrap_err();
    assert!(matches!(late, SpawnError::TimedOut), "{late:?}");
}

#[test]
fn a_command_that_is_killed_before_it_runs_is_out_of_time_too() {
    let (sandbox, _peer, mut agent) = ready_sandbox(Some(TIME));
    let error = std::thread::scope(|scope| {
        let spawning = scope.spawn(|| sandbox.command("slow").spawn());
        assert!(matches!(hear(&mut agent), ToAgent::Spawn(_)));
        let ToAgent::Kill { command_id } = hear(&mut agent) else {
            panic!("no kill came");
        };
        let failed = FromAgent::SpawnFailed {
            command_id,
            kind: SpawnFailure::Exhausted,
            message: "It was killed".to_owned(),
        };
        say(&mut agent, &failed);
        spawning.join().unwrap().unwrap_err()
    });

    assert!(matches!(error, SpawnError::TimedOut), "{error:?}");
}

#[test]
fn half_a_frame_held_for_ever_keeps_nobody_from_the_end() {
    let (sandbox, peer, mut agent) = ready_sandbox(Some(TIME));
    let (mut child, _stdout, _stderr) = running(&sandbox, &peer, &mut agent);
    agent.write_all(&[200, 0, 0, 0, 1]).unwrap();

    let completion = child.wait();

    assert_eq!(completion.outcome, Outcome::TimedOut);
}

#[test]
fn a_guest_that_ignores_the_end_of_its_time_is_killed_after_the_grace() {
    let began = Instant::now();
    let (sandbox, peer, mut agent) = ready_sandbox(Some(TIME));
    let (mut child, _stdout, _stderr) = running(&sandbox, &peer, &mut agent);

    let completion = child.wait();

    assert_eq!(completion.outcome, Outcome::TimedOut);
    assert!(began.elapsed() >= TIME + CLOSING_GRACE);
    assert!(began.elapsed() < TIME + CLOSING_GRACE + SOON);
    assert_eq!(sandbox.end().crash, None);
}

#[test]
fn ending_the_sandbox_ends_every_wait() {
    let (sandbox, peer, mut agent) = ready_sandbox(None);
    let (mut child, _stdout, _stderr) = running(&sandbox, &peer, &mut agent);
    assert!(child.wait_timeout(Duration::from_millis(10)).is_none());

    std::thread::scope(|scope| {
        let spawning = scope.spawn(|| sandbox.command("never answered").spawn());
        assert!(matches!(hear(&mut agent), ToAgent::Spawn(_)));
        let waiting = scope.spawn(|| child.wait());
        let first = sandbox.end();

        let error = spawning.join().unwrap().unwrap_err();
        assert!(matches!(error, SpawnError::SandboxEnded), "{error:?}");
        assert!(error.may_have_run());
        assert_eq!(waiting.join().unwrap().outcome, Outcome::SandboxEnded);
        assert_eq!(sandbox.end(), first);
    });
    let gone = peer.machine.receive::<ToMachine>();
    assert!(gone.is_ok() || matches!(gone, Err(ControlError::Closed)));
}
