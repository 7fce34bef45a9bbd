//! A machine, a kernel or an agent that ends when it should not, and what is told of it.

use super::*;

#[test]
fn an_agent_that_breaks_the_protocol_ends_the_machine() {
    type Lie = fn(u32) -> Vec<u8>;
    let lies: [Lie; 6] = [
        |_| vec![0xff; 64],
        |_| framed(&hello(protocol::VERSION)),
        |command_id| {
            framed(&FromAgent::Spawned {
                command_id,
                warm: false,
            })
        },
        |id| framed(&exited(id + 1, ExitStatus::Code(0), 0)),
        |id| framed(&exited(id, ExitStatus::Code(256), 0)),
        |id| framed(&exited(id, ExitStatus::Signal(0), 0)),
    ];
    for lie in lies {
        let (sandbox, peer, mut agent) = ready_sandbox(None);
        let (mut child, _stdout, _stderr) = running(&sandbox, &peer, &mut agent);

        agent.write_all(&lie(child.id())).unwrap();

        assert_eq!(crash_of(&child.wait()), CrashKind::AgentMisbehaved);
    }
}

#[test]
fn an_agent_that_gives_up_is_a_crash_in_its_own_words() {
    let (sandbox, peer, mut agent) = ready_sandbox(None);
    let (mut child, _stdout, _stderr) = running(&sandbox, &peer, &mut agent);
    let message = "The guest's cgroups can't be set up".to_owned();

    say(
        &mut agent,
        &FromAgent::Fatal {
            message: message.clone(),
        },
    );

    let completion = child.wait();
    assert_eq!(crash_of(&completion), CrashKind::AgentGone);
    assert!(
        matches!(&completion.outcome, Outcome::MachineCrashed(crash) if crash.to_string().contains(&message))
    );
}

#[test]
fn an_agent_that_closes_its_stream_is_a_crash() {
    let (sandbox, peer, mut agent) = ready_sandbox(None);
    let (mut child, _stdout, _stderr) = running(&sandbox, &peer, &mut agent);

    drop(agent);

    assert_eq!(crash_of(&child.wait()), CrashKind::AgentGone);
}

#[test]
fn the_kernels_reason_comes_before_the_closed_stream() {
    let (sandbox, peer, mut agent) = ready_sandbox(None);
    let (mut child, _stdout, _stderr) = running(&sandbox, &peer, &mut agent);

    drop(agent);
    std::thread::sleep(Duration::from_millis(50));
    peer.end(
        EndReason::Reset,
        b"Kernel panic - not syncing: Attempted to kill init!\n",
    );

    assert_eq!(crash_of(&child.wait()), CrashKind::KernelPanic);
}

#[test]
fn a_killed_process_is_a_crash_and_output_before_it_can_be_read() {
    let (sandbox, mut peer, mut agent) = ready_sandbox(None);
    let (mut child, mut stdout, _stderr) = running(&sandbox, &peer, &mut agent);
    stdout.write_all(b"before").unwrap();
    drop(stdout);

    peer.process.write_all(b"kill -9 $$\n").unwrap();
    let completion = child.wait();
    let mut read = Vec::new();
    child.stdout.take().unwrap().read_to_end(&mut read).unwrap();

    assert_eq!(crash_of(&completion), CrashKind::ProcessKilled);
    assert_eq!(read, b"before");
    let again = sandbox.command("next").spawn().unwrap_err();
    assert!(matches!(again, SpawnError::MachineCrashed(_)), "{again:?}");
    assert!(sandbox.end().crash.is_some());
}

#[test]
fn a_command_that_ended_before_the_machine_did_has_ended() {
    let (sandbox, peer, mut agent) = ready_sandbox(None);
    let (mut child, _stdout, _stderr) = running(&sandbox, &peer, &mut agent);

    // The machine's end is there first: the supervisor must look for what was said before it.
    let said = exited(child.id(), ExitStatus::Code(3), 0);
    let state = peer.shared.lock();
    peer.end(EndReason::TripleFault, b"");
    say(&mut agent, &said);
    drop(state);

    assert_eq!(child.wait().outcome, Outcome::Exited(3));
}
