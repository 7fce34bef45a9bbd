//! Files that are no snapshot for this machine are refused, with the reason, and nothing is built from them.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};

use sandvmm_vmm::control::{EndReason, FromMachine, RestoreConfig, Then, ToMachine};
use sandvmm_vmm::snapshot::format::{encode, parse};
use sandvmm_vmm::snapshot::state::MachineState;

use crate::guest::{Guest, Started, file, kvm_or_skip};
use crate::payload::payload;
use crate::snapshot::Snapshot;

payload!(
    /// Spins for ever.
    idles,
    "2: jmp 2b",
);

const MEMORY_MIB: u64 = 32;

fn snapshot(kvm: &OwnedFd) -> Snapshot {
    let machine = Guest::new(idles()).disk(file(&[0; 4096]), true).start(kvm);
    machine.running();
    let snapshot = machine.snapshot(kvm, MEMORY_MIB, Then::Stay);
    machine.close();
    snapshot
}

/// The sentence with which a restore fails.
fn refusal(machine: Started) -> String {
    match machine.ended().reason {
        EndReason::StartFailed(sentence) => sentence,
        other => panic!("{other:?}"),
    }
}

/// A restore with this state file.
fn with_bytes(snapshot: &Snapshot, kvm: &OwnedFd, bytes: &[u8]) -> String {
    let changed = snapshot.with_state(bytes);
    refusal(changed.fork().disk(file(&[0; 4096]), true).start(kvm))
}

/// A restore with a state that was changed, and is whole.
fn with_state(
    snapshot: &Snapshot,
    kvm: &OwnedFd,
    change: impl FnOnce(&mut MachineState),
) -> String {
    let mut state = parse(&snapshot.state_bytes()).unwrap();
    change(&mut state);
    with_bytes(snapshot, kvm, &encode(&state).unwrap())
}

#[test]
fn a_state_file_that_is_cut_or_damaged_is_refused() {
    let kvm = kvm_or_skip!("a_state_file_that_is_cut_or_damaged_is_refused");
    let snapshot = snapshot(&kvm);
    let good = snapshot.state_bytes();

    let sentence = with_bytes(&snapshot, &kvm, &good[..good.len() - 1]);
    assert!(sentence.contains("cut or damaged"), "{sentence}");
    let sentence = with_bytes(&snapshot, &kvm, &[]);
    assert!(sentence.contains("no state file"), "{sentence}");
    let sentence = with_bytes(&snapshot, &kvm, &vec![0; 2 << 20]);
    assert!(sentence.contains("longer than"), "{sentence}");
    let mut bytes = good;
    let place = bytes.len() - 100;
    bytes[place] ^= 1;
    let sentence = with_bytes(&snapshot, &kvm, &bytes);
    assert!(sentence.contains("damaged in its part"), "{sentence}");
    bytes[8] = 9;
    let sentence = with_bytes(&snapshot, &kvm, &bytes);
    assert!(sentence.contains("has format 9"), "{sentence}");
}

#[test]
fn a_state_of_another_processor_is_refused() {
    let kvm = kvm_or_skip!("a_state_of_another_processor_is_refused");
    let snapshot = snapshot(&kvm);

    let sentence = with_state(&snapshot, &kvm, |state| {
        let leaf = state
            .shape
            .cpuid
            .iter_mut()
            .find(|leaf| leaf.function == 1)
            .unwrap();
        leaf.ecx ^= 1 << 20;
    });
    assert!(sentence.contains("CPUID leaf 0x1 differs"), "{sentence}");
    let sentence = with_state(&snapshot, &kvm, |state| {
        state.shape.cpuid.retain(|leaf| leaf.function != 0xd);
    });
    assert!(sentence.contains("CPUID leaf 0xd differs"), "{sentence}");
    let sentence = with_state(&snapshot, &kvm, |state| {
        state.vcpus[0].tsc_khz += 1000 * 1000;
    });
    assert!(sentence.contains("time stamp counter runs"), "{sentence}");
}

#[test]
fn a_state_that_kvm_or_a_device_can_not_have_is_refused() {
    let kvm = kvm_or_skip!("a_state_that_kvm_or_a_device_can_not_have_is_refused");
    let snapshot = snapshot(&kvm);

    let sentence = with_state(&snapshot, &kvm, |state| {
        state.devices.transports[0].device_status = 4;
    });
    assert!(sentence.starts_with("Device 0 can't go on"), "{sentence}");
    let sentence = with_state(&snapshot, &kvm, |state| {
        state.devices.serial.in_buffer = vec![0; 100];
    });
    assert!(sentence.contains("100 bytes of input"), "{sentence}");
    let sentence = with_state(&snapshot, &kvm, |state| {
        state.devices.vsock.next_host_port = 1;
    });
    assert!(sentence.contains("can't come from port 1"), "{sentence}");
    let sentence = with_state(&snapshot, &kvm, |state| {
        state.vcpus[0].sregs.cr4 = u64::MAX;
    });
    assert!(
        sentence.starts_with("Processor 0 can't go on"),
        "{sentence}"
    );
}

#[test]
fn a_memory_file_of_another_size_or_kind_is_refused() {
    let kvm = kvm_or_skip!("a_memory_file_of_another_size_or_kind_is_refused");
    let snapshot = snapshot(&kvm);
    let memory = File::from(snapshot.memory.try_clone().unwrap());

    for bytes in [0, (MEMORY_MIB << 20) - 1, (MEMORY_MIB << 20) + 4096] {
        memory.set_len(bytes).unwrap();
        let sentence = refusal(snapshot.fork().disk(file(&[0; 4096]), true).start(&kvm));
        assert!(sentence.contains("it was cut"), "{sentence}");
    }
    let mut other = snapshot.with_state(&snapshot.state_bytes());
    other.memory = rustix::pipe::pipe().unwrap().0;
    let sentence = refusal(other.fork().disk(file(&[0; 4096]), true).start(&kvm));
    assert!(sentence.contains("memory file"), "{sentence}");
}

#[test]
fn other_disks_are_refused() {
    let kvm = kvm_or_skip!("other_disks_are_refused");
    let snapshot = snapshot(&kvm);
    let disk = |sectors: usize| file(&vec![0; sectors * 512]);

    let sentence = refusal(snapshot.fork().start(&kvm));
    assert!(
        sentence.contains("had 1 disks when the snapshot was taken, and is given 0"),
        "{sentence}"
    );
    let sentence = refusal(snapshot.fork().disk(disk(9), true).start(&kvm));
    assert!(sentence.contains("a disk has another size"), "{sentence}");
    let sentence = refusal(snapshot.fork().disk(disk(8), false).start(&kvm));
    assert!(sentence.contains("offers features"), "{sentence}");
}

#[test]
fn a_message_without_its_descriptors_is_refused() {
    let kvm = kvm_or_skip!("a_message_without_its_descriptors_is_refused");
    let config = RestoreConfig {
        has_console: true,
        disks: Vec::new(),
        check_host: true,
        has_working_set: false,
    };
    let sentence = refusal(Started::new(&ToMachine::Restore(config), &[kvm.as_fd()]));
    assert!(
        sentence.contains("sent 1 descriptors, and the machine needs 4"),
        "{sentence}"
    );
}

#[test]
fn a_snapshot_that_can_not_be_written_leaves_the_machine_as_it_was() {
    let kvm = kvm_or_skip!("a_snapshot_that_can_not_be_written_leaves_the_machine_as_it_was");
    let machine = Guest::new(idles()).start(&kvm);
    machine.running();
    let null = File::open("/dev/null").unwrap();
    let take = |descriptors: &[&dyn AsFd]| {
        let descriptors: Vec<_> = descriptors.iter().map(|one| one.as_fd()).collect();
        let then = Then::Resume;
        machine
            .socket
            .send(&ToMachine::Snapshot { then }, &descriptors)
            .unwrap();
        match machine.next().0 {
            FromMachine::SnapshotFailed(sentence) => sentence,
            other => panic!("{other:?}"),
        }
    };

    let sentence = take(&[&kvm]);
    assert!(sentence.contains("sent 1 descriptors"), "{sentence}");
    let sentence = take(&[&kvm, &null, &null]);
    assert!(
        sentence.contains("memory file could not be written"),
        "{sentence}"
    );
    let sentence = take(&[&null, &null, &null]);
    assert!(sentence.contains("list its model-specific"), "{sentence}");

    let snapshot = machine.snapshot(&kvm, MEMORY_MIB, Then::Stay);
    assert!(snapshot.taken.state_bytes > 4096);
    machine.close();
}
