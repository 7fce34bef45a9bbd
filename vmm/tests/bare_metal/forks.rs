//! Forks go on where their snapshot was taken, each by itself.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use sandvmm_vmm::control::{EndReason, Then, ToMachine};

use crate::guest::{Guest, Started, file, kvm_or_skip};
use crate::payload::payload;
use crate::script::{Descriptor, Queue, Step, guest, start_device};
use crate::snapshot::{Numbers, Snapshot};

payload!(
    /// Counts in a register, in memory, in a debug register and in a model-specific one (the base of GS), prints the number on a line
    /// as long as all four agree, and resets when they do not.
    counts,
    "xor ebx, ebx",
    "mov qword ptr [0x300000], 0",
    "xor eax, eax",
    "mov dr0, rax",
    "xor edx, edx",
    "mov ecx, 0xc0000101",
    "wrmsr",
    "2: inc rbx",
    "inc qword ptr [0x300000]",
    "cmp rbx, [0x300000]",
    "jne 9f",
    "mov rax, dr0",
    "inc rax",
    "mov dr0, rax",
    "cmp rbx, rax",
    "jne 9f",
    "mov ecx, 0xc0000101",
    "rdmsr",
    "inc eax",
    "wrmsr",
    "cmp ebx, eax",
    "jne 9f",
    "call 5f",
    "jmp 2b",
    "9: mov al, 0xfe",
    "out 0x64, al",
    "jmp 9b",
    // Prints eight digits of rbx and a line's end.
    "5: mov r8d, ebx",
    "mov ecx, 8",
    "mov dx, 0x3f8",
    "6: rol r8d, 4",
    "mov eax, r8d",
    "and eax, 15",
    "add al, 0x30",
    "cmp al, 0x39",
    "jbe 7f",
    "add al, 39",
    "7: out dx, al",
    "dec ecx",
    "jnz 6b",
    "mov al, 10",
    "out dx, al",
    "ret",
);

payload!(
    /// Adds one to every page from 4 MiB to 32 MiB again and again, and prints a number of eight digits after each round.
    writes_everywhere,
    "mov ebx, 0x10000000",
    "2: mov rdi, 0x400000",
    "3: inc qword ptr [rdi + 8]",
    "add rdi, 0x1000",
    "cmp rdi, 0x2000000",
    "jne 3b",
    "inc ebx",
    "mov r8d, ebx",
    "mov ecx, 8",
    "mov dx, 0x3f8",
    "6: rol r8d, 4",
    "mov eax, r8d",
    "and eax, 15",
    "add al, 0x30",
    "cmp al, 0x39",
    "jbe 7f",
    "add al, 39",
    "7: out dx, al",
    "dec ecx",
    "jnz 6b",
    "mov al, 10",
    "out dx, al",
    "jmp 2b",
);

payload!(
    /// Starts the two other processors, which count in real mode without end, each in its own segment, and prints a number each time after
    /// both have counted.
    counts_on_three_processors,
    "mov qword ptr [0xa018], 0x200003", // 3 to 4 GiB
    "mov edi, 0x10000",                 // The real-mode code goes to 0x10000 and 0x11000.
    "1: lea rsi, [rip + 3f]",
    "mov ecx, 64",
    "rep movsb",
    "add edi, 0xfc0",
    "cmp edi, 0x12000",
    "jne 1b",
    "mov ebp, 0xfee00000",
    "mov dword ptr [rbp + 0xf0], 0x1ff", // Software-enabled.
    "mov dword ptr [rbp + 0x310], 0x01000000",
    "mov dword ptr [rbp + 0x300], 0x4500", // INIT to APIC 1
    "mov dword ptr [rbp + 0x310], 0x01000000",
    "mov dword ptr [rbp + 0x300], 0x4610", // Start-up at page 0x10
    "mov dword ptr [rbp + 0x310], 0x02000000",
    "mov dword ptr [rbp + 0x300], 0x4500", // INIT to APIC 2
    "mov dword ptr [rbp + 0x310], 0x02000000",
    "mov dword ptr [rbp + 0x300], 0x4611", // Start-up at page 0x11
    "xor ebx, ebx",
    "2: inc ebx",
    "mov edi, [0x10800]",
    "mov esi, [0x11800]",
    "8: pause",
    "cmp edi, [0x10800]",
    "je 8b",
    "9: pause",
    "cmp esi, [0x11800]",
    "je 9b",
    "mov r8d, ebx",
    "mov ecx, 8",
    "mov dx, 0x3f8",
    "6: rol r8d, 4",
    "mov eax, r8d",
    "and eax, 15",
    "add al, 0x30",
    "cmp al, 0x39",
    "jbe 7f",
    "add al, 39",
    "7: out dx, al",
    "dec ecx",
    "jnz 6b",
    "mov al, 10",
    "out dx, al",
    "jmp 2b",
    ".code16",
    "3: mov ax, cs",
    "mov ds, ax",
    "4: inc dword ptr ds:[0x800]",
    "jmp 4b",
    ".code64",
);

/// Memory of these guests in MiB.
const MEMORY_MIB: u64 = 32;

/// A counting machine that has counted a while.
fn counting(code: &[u8], vcpus: u8, kvm: &std::os::fd::OwnedFd) -> (Started, Numbers, u64) {
    let (mut numbers, console) = Numbers::new();
    let machine = Guest::new(code).vcpus(vcpus).console(console).start(kvm);
    machine.running();
    let first = numbers.number();
    numbers.expect_from(first + 1, 2);
    (machine, numbers, first + 2)
}

/// A fork with its console; a line that the snapshot cut is passed over. Gives the first whole number.
fn fork(snapshot: &Snapshot, kvm: &std::os::fd::OwnedFd) -> (Started, Numbers, u64) {
    let (mut numbers, console) = Numbers::new();
    let machine = snapshot.fork().console(console).start(kvm);
    machine.running();
    numbers.line();
    let first = numbers.number();
    (machine, numbers, first)
}

#[test]
fn forks_go_on_and_their_parent_too() {
    let kvm = kvm_or_skip!("forks_go_on_and_their_parent_too");
    let (parent, mut parents, last) = counting(counts(), 1, &kvm);

    let snapshot = parent.snapshot(&kvm, MEMORY_MIB, Then::Resume);

    parents.expect_from(last + 1, 20);
    let mut firsts = Vec::new();
    for _ in 0..8 {
        let (machine, mut numbers, first) = fork(&snapshot, &kvm);
        numbers.expect_from(first + 1, 20);
        machine.close();
        firsts.push(first);
    }
    assert!(firsts.iter().all(|first| *first == firsts[0]), "{firsts:?}");
    assert!(firsts[0] > last, "{firsts:?} after {last}");
    parents.expect_from(last + 21, 20);
    parent.close();
}

#[test]
fn a_machine_that_is_to_stay_does_not_run_on() {
    let kvm = kvm_or_skip!("a_machine_that_is_to_stay_does_not_run_on");
    let (parent, mut parents, last) = counting(counts(), 1, &kvm);

    let snapshot = parent.snapshot(&kvm, MEMORY_MIB, Then::Stay);
    let (_fork, _numbers, first) = fork(&snapshot, &kvm);
    parent.close();

    let mut lines = 0;
    while !parents.line().is_empty() {
        lines += 1;
    }
    assert!(last + lines < first, "{lines} lines after {last}");
}

#[test]
fn forks_of_forks_go_on() {
    let kvm = kvm_or_skip!("forks_of_forks_go_on");
    let (mut machine, _numbers, mut last) = counting(counts(), 1, &kvm);

    for generation in 0..5 {
        let snapshot = machine.snapshot(&kvm, MEMORY_MIB, Then::Stay);
        machine.close();
        let (next, mut numbers, first) = fork(&snapshot, &kvm);
        assert!(first > last, "{generation}: {first} after {last}");
        numbers.expect_from(first + 1, 3);
        (machine, last) = (next, first + 3);
        // The file may go while its last fork lives on: the mapping keeps it.
        drop(snapshot);
    }
    machine.close();
}

#[test]
fn fifty_forks_live_at_once() {
    let kvm = kvm_or_skip!("fifty_forks_live_at_once");
    let (parent, _parents, _) = counting(counts(), 1, &kvm);
    let snapshot = parent.snapshot(&kvm, MEMORY_MIB, Then::Stay);
    parent.close();

    let mut forks: Vec<_> = (0..50).map(|_| fork(&snapshot, &kvm)).collect();

    for (_, numbers, first) in &mut forks {
        numbers.expect_from(*first + 1, 5);
    }
    forks.into_iter().for_each(|(machine, ..)| {
        machine.close();
    });
}

#[test]
fn a_fork_that_writes_everywhere_changes_nothing_in_the_files() {
    let kvm = kvm_or_skip!("a_fork_that_writes_everywhere_changes_nothing_in_the_files");
    let (parent, _parents, _) = counting(writes_everywhere(), 1, &kvm);
    let snapshot = parent.snapshot(&kvm, MEMORY_MIB, Then::Stay);
    parent.close();
    let before = (snapshot.state_bytes(), snapshot.memory_bytes());
    assert!(
        snapshot.taken.memory_bytes > 28 << 20,
        "{:?}",
        snapshot.taken
    );

    for _ in 0..2 {
        let (machine, mut numbers, first) = fork(&snapshot, &kvm);
        numbers.expect_from(first + 1, 3);
        machine.close();
    }

    assert!(before == (snapshot.state_bytes(), snapshot.memory_bytes()));
}

#[test]
fn all_processors_go_on() {
    let kvm = kvm_or_skip!("all_processors_go_on");
    let (parent, mut parents, last) = counting(counts_on_three_processors(), 3, &kvm);

    let snapshot = parent.snapshot(&kvm, MEMORY_MIB, Then::Resume);
    parents.expect_from(last + 1, 5);
    parent.close();

    for _ in 0..5 {
        let (machine, mut numbers, first) = fork(&snapshot, &kvm);
        assert!(first > last);
        numbers.expect_from(first + 1, 10);
        machine.close();
    }
}

/// Where tests put buffers, and queues.
const BUFFER: u64 = 0x40_0000;
const QUEUES: u64 = 0x50_0000;

#[test]
fn a_disk_goes_on_with_each_forks_own_file() {
    let kvm = kvm_or_skip!("a_disk_goes_on_with_each_forks_own_file");
    let queue = Queue {
        index: 0,
        base: QUEUES,
    };
    let data = vec![
        queue.data(
            &[
                Descriptor(BUFFER, 16, false, true),
                Descriptor(BUFFER + 0x1000, 512, true, true),
                Descriptor(BUFFER + 0x2000, 1, true, false),
            ],
            &[],
        ),
        (BUFFER, vec![0; 16]),
    ];
    let disk = |line: &[u8; 8]| {
        let mut sectors = line.to_vec();
        sectors.resize(4096, 0);
        file(&sectors)
    };
    let mut steps = start_device(0, &[queue]);
    steps.push(Step::RequestForEver(QUEUES, 0));
    let (mut parents, console) = Numbers::new();
    let parent = guest(&steps, &data)
        .disk(disk(b"parent.\n"), true)
        .console(console)
        .start(&kvm);
    parent.running();
    for _ in 0..10 {
        assert_eq!(parents.line(), "parent.");
    }

    let snapshot = parent.snapshot(&kvm, MEMORY_MIB, Then::Stay);
    parent.close();

    for name in [b"fork-1.\n", b"fork-2.\n"] {
        let (mut numbers, console) = Numbers::new();
        let machine = snapshot
            .fork()
            .disk(disk(name), true)
            .console(console)
            .start(&kvm);
        machine.running();
        // What was read before the snapshot may still be printed, and a line may have been cut.
        let expected = std::str::from_utf8(name).unwrap().trim_end();
        let seen: Vec<_> = (0..40).map(|_| numbers.line()).collect();
        assert!(seen[2..].iter().all(|line| line == expected), "{seen:?}");
        machine.close();
    }
}

#[test]
fn vsock_tells_a_fork_that_its_connections_are_gone_and_takes_new_ones() {
    let kvm = kvm_or_skip!("vsock_tells_a_fork_that_its_connections_are_gone_and_takes_new_ones");
    let queue = |index: u32| Queue {
        index,
        base: QUEUES + u64::from(index) * 0x1_0000,
    };
    let steps = [
        start_device(0, &[queue(0), queue(1), queue(2)]),
        vec![
            Step::Await(queue(2).used_index(), 1),
            Step::Print(BUFFER + 0x1000, 4),
            Step::Await(queue(0).used_index(), 1),
            Step::Print(BUFFER, 44),
        ],
    ]
    .concat();
    let data = vec![
        queue(0).data(&[Descriptor(BUFFER, 4096, true, false)], &[0]),
        queue(1).data(&[], &[]),
        queue(2).data(&[Descriptor(BUFFER + 0x1000, 8, true, false)], &[0]),
        (BUFFER + 0x1000, vec![0xee; 8]),
    ];
    let parent = guest(&steps, &data).start(&kvm);
    parent.running();
    // Until the guest has taken the device into service: before, a connection is refused.
    std::thread::sleep(std::time::Duration::from_millis(300));
    let snapshot = parent.snapshot(&kvm, MEMORY_MIB, Then::Stay);
    parent.close();

    let machine = snapshot.fork().start(&kvm);
    machine.running();
    let (_ours, theirs) = UnixStream::pair().unwrap();
    machine
        .socket
        .send(&ToMachine::Connect { port: 77 }, &[theirs.as_fd()])
        .unwrap();
    let ended = machine.ended();

    assert_eq!(ended.reason, EndReason::Reset);
    // VIRTIO_VSOCK_EVENT_TRANSPORT_RESET is 0; then a request to port 77.
    assert_eq!(ended.console[..4], [0; 4]);
    assert_eq!(ended.console.len(), 48);
    assert_eq!(ended.console[4 + 20..4 + 24], 77_u32.to_le_bytes());
    assert_eq!(ended.console[4 + 30..4 + 32], 1_u16.to_le_bytes());
}
