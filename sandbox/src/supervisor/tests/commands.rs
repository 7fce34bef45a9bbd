//! Commands without a handle, and handles of them.

use super::*;

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
