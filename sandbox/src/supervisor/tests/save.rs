//! A machine that is asked to write itself, against a scripted one.

use vmm::control::{Taken, Then};

use super::*;
use crate::save::SaveError;

const TAKEN: Taken = Taken {
    state_bytes: 1,
    memory_bytes: 2,
    paused_ns: 3,
};

fn file() -> OwnedFd {
    tempfile::tempfile().unwrap().into()
}

/// What comes of saving, when the machine does this after it was asked.
fn saved_when(then: impl FnOnce(&Peer)) -> Result<Taken, SaveError> {
    let (_sandbox, peer, _agent) = ready_sandbox(None);
    std::thread::scope(|scope| {
        let saving = scope.spawn(|| peer.shared.save(Then::Resume, vec![file(), file()], 128));
        let (asked, descriptors) = peer.machine.receive::<ToMachine>().unwrap();
        assert_eq!(asked, ToMachine::Snapshot { then: Then::Resume });
        assert_eq!(descriptors.len(), 2);
        assert!(matches!(
            peer.shared.save(Then::Stay, Vec::new(), 128),
            Err(SaveError::Busy)
        ));
        then(&peer);
        saving.join().unwrap()
    })
}

#[test]
fn saving_waits_for_the_machines_word() {
    let taken = saved_when(|peer| {
        let taken = FromMachine::SnapshotTaken(TAKEN);
        peer.machine.send(&taken, &[]).unwrap();
    });
    assert_eq!(taken.unwrap(), TAKEN);
}

#[test]
fn a_machine_that_can_not_be_saved_says_why() {
    let error = saved_when(|peer| {
        let failed = FromMachine::SnapshotFailed("The disk is\nfull".into());
        peer.machine.send(&failed, &[]).unwrap();
    })
    .unwrap_err();
    assert_eq!(error.to_string(), "The disk is full");
}

#[test]
fn a_machine_that_ends_while_it_is_saved_is_told() {
    let error = saved_when(|peer| peer.end(EndReason::TripleFault, b"")).unwrap_err();
    assert!(matches!(error, SaveError::MachineCrashed(_)), "{error:?}");
}

#[test]
fn an_unasked_snapshot_ends_the_machine() {
    let (_sandbox, peer, _agent) = ready_sandbox(None);
    let taken = FromMachine::SnapshotTaken(TAKEN);
    peer.machine.send(&taken, &[]).unwrap();
    let over = peer.shared.wait_over(SOON);
    assert!(matches!(over, Some(Over::Crashed(_))), "{over:?}");
}
