//! How a guest begins and ends.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use sandvmm_vmm::control::EndReason;

use crate::guest::{Guest, elf, file, kvm_or_skip};
use crate::payload::payload;

/// A machine that has nobody left to run for ends within this time.
const AT_ONCE: Duration = Duration::from_secs(1);

payload!(
    /// Prints, then resets as Linux does.
    prints_and_resets,
    "lea rsi, [rip + 3f]",
    "mov dx, 0x3f8",
    "2: mov al, [rsi]",
    "test al, al",
    "jz 4f",
    "out dx, al",
    "inc rsi",
    "jmp 2b",
    "4: mov al, 0xfe",
    "out 0x64, al",
    "5: jmp 5b",
    "3: .asciz \"Hello from ring 0\\n\"",
);

payload!(
    /// Faults without a table of handlers.
    triple_faults,
    "ud2",
);

payload!(
    /// Jumps where nothing is mapped.
    jumps_to_nowhere,
    "mov rax, 0x7ffffff00000",
    "jmp rax",
);

payload!(
    /// Halts for ever.
    halts,
    "cli",
    "2: hlt",
    "jmp 2b",
);

payload!(
    /// Spins for ever.
    spins,
    "2: jmp 2b",
);

payload!(
    /// Spins politely for ever.
    pauses,
    "2: pause",
    "jmp 2b",
);

payload!(
    /// Leaves the guest without pause.
    exits_without_pause,
    "2: out 0x80, al",
    "jmp 2b",
);

payload!(
    /// Prints for ever.
    prints_without_end,
    "mov dx, 0x3f8",
    "mov al, 0x2e",
    "2: out dx, al",
    "jmp 2b",
);

payload!(
    /// Uses an instruction on a device's registers that KVM does not emulate.
    exchanges_16_bytes_with_a_device,
    "mov qword ptr [0xa018], 0x200003", // 3 to 4 GiB
    "mov ebx, 0xd0000000",
    "lock cmpxchg16b [rbx]",
    "2: jmp 2b",
);

payload!(
    /// Starts the second processor with INIT and a start-up interrupt, as Linux does, through the local APIC's page; each
    /// prints a letter, the second one in real mode, then it resets.
    starts_second_processor,
    "mov qword ptr [0xa018], 0x200003", // 3 to 4 GiB
    "lea rsi, [rip + 3f]",              // The real-mode code goes to 0x8000.
    "mov edi, 0x10000",
    "mov ecx, 64",
    "rep movsb",
    "mov dx, 0x3f8",
    "mov al, 0x41",
    "out dx, al",
    "mov ebx, 0xfee00000",
    "mov dword ptr [rbx + 0xf0], 0x1ff", // Software-enabled.
    "mov dword ptr [rbx + 0x310], 0x01000000",
    "mov dword ptr [rbx + 0x300], 0x4500", // INIT to APIC 1
    "mov dword ptr [rbx + 0x310], 0x01000000",
    "mov dword ptr [rbx + 0x300], 0x4610", // Start-up at page 0x10
    "2: pause",
    "jmp 2b",
    ".code16",
    "3: mov dx, 0x3f8",
    "mov al, 0x42",
    "out dx, al",
    "mov al, 0xfe",
    "out 0x64, al",
    "5: hlt",
    "jmp 5b",
    "4:",
    ".code64",
);

#[test]
fn a_guest_prints_and_resets() {
    let kvm = kvm_or_skip!("a_guest_prints_and_resets");

    let ended = Guest::new(prints_and_resets()).start(&kvm).ended();

    assert_eq!(ended.reason, EndReason::Reset);
    assert_eq!(ended.console, b"Hello from ring 0\n");
}

#[test]
fn a_guest_runs_with_its_memory_around_the_hole() {
    for memory_mib in [32, 3071, 3072, 3073, 5000] {
        let kvm = kvm_or_skip!("a_guest_runs_with_its_memory_around_the_hole");

        let ended = Guest::new(prints_and_resets())
            .memory_mib(memory_mib)
            .start(&kvm)
            .ended();

        assert_eq!(ended.reason, EndReason::Reset, "{memory_mib} MiB");
    }
}

#[test]
fn a_fault_without_handlers_ends_the_machine_as_a_triple_fault() {
    for code in [triple_faults(), jumps_to_nowhere()] {
        let kvm = kvm_or_skip!("a_fault_without_handlers_ends_the_machine_as_a_triple_fault");
        let machine = Guest::new(code).start(&kvm);
        machine.running();
        let ran = Instant::now();

        let ended = machine.ended();

        assert_eq!(ended.reason, EndReason::TripleFault);
        assert!(ran.elapsed() < AT_ONCE, "{:?}", ran.elapsed());
    }
}

#[test]
fn an_instruction_that_cannot_be_emulated_ends_the_machine() {
    let kvm = kvm_or_skip!("an_instruction_that_cannot_be_emulated_ends_the_machine");

    let ended = Guest::new(exchanges_16_bytes_with_a_device())
        .start(&kvm)
        .ended();

    let EndReason::VcpuFailed(sentence) = &ended.reason else {
        panic!("{ended:?}");
    };
    assert!(sentence.starts_with("vCPU 0 can't go on"), "{sentence}");
}

#[test]
fn a_console_gets_what_the_guest_prints() {
    let kvm = kvm_or_skip!("a_console_gets_what_the_guest_prints");
    let (mut reader, console) = UnixStream::pair().unwrap();

    let ended = Guest::new(prints_and_resets())
        .console(console.into())
        .start(&kvm)
        .ended();

    let mut printed = String::new();
    reader.read_to_string(&mut printed).unwrap();
    assert_eq!(
        (ended.reason, printed.as_str()),
        (EndReason::Reset, "Hello from ring 0\n")
    );
}

#[test]
fn a_console_that_nobody_reads_holds_nothing_up() {
    let kvm = kvm_or_skip!("a_console_that_nobody_reads_holds_nothing_up");
    let (_reader, console) = UnixStream::pair().unwrap();
    let filled = console.try_clone().unwrap();
    filled.set_nonblocking(true).unwrap();
    while (&filled).write(&[b'x'; 4096]).is_ok() {}
    filled.set_nonblocking(false).unwrap();

    let ended = Guest::new(prints_and_resets())
        .console(console.into())
        .start(&kvm)
        .ended();

    assert_eq!(ended.console, b"Hello from ring 0\n");
}

#[test]
fn a_guest_that_never_ends_is_gone_when_the_supervisor_is() {
    let guests = [
        halts(),
        spins(),
        pauses(),
        exits_without_pause(),
        prints_without_end(),
    ];
    for (index, code) in guests.into_iter().enumerate() {
        let kvm = kvm_or_skip!("a_guest_that_never_ends_is_gone_when_the_supervisor_is");
        let machine = Guest::new(code).vcpus(2).start(&kvm);
        machine.running();
        thread::sleep(Duration::from_millis(50));

        let lived_on = machine.close();

        assert!(lived_on < AT_ONCE, "guest {index}: {lived_on:?}");
    }
}

#[test]
fn a_second_processor_starts() {
    let kvm = kvm_or_skip!("a_second_processor_starts");

    let ended = Guest::new(starts_second_processor())
        .vcpus(2)
        .start(&kvm)
        .ended();

    assert_eq!(
        (ended.reason, ended.console.as_slice()),
        (EndReason::Reset, b"AB".as_slice())
    );
}

#[test]
fn a_machine_that_cannot_be_built_says_why_in_one_sentence() {
    let refused = |guest: Guest, kvm: &OwnedFd| match guest.start(kvm).ended().reason {
        EndReason::StartFailed(sentence) => sentence,
        reason => panic!("{reason:?}"),
    };
    let good = || Guest::new(spins());
    let not_a_disk = || file(&[0; 513]);
    let mut cut = elf(spins(), &[]);
    cut.truncate(100);

    let cases: [(Guest, &str); 7] = [
        (
            good().vcpus(0),
            "A machine can't have 0 processors: give it 1 to 32",
        ),
        (
            good().vcpus(33),
            "A machine can't have 33 processors: give it 1 to 32",
        ),
        (
            good().memory_mib(0),
            "A machine can't have 0 MiB of memory: give it 32 to 262144 MiB",
        ),
        (
            good().kernel(b"MZ"),
            "The kernel file can't be used: It is not an ELF (vmlinux) or bzImage kernel",
        ),
        (
            good().kernel(&cut),
            "The kernel file can't be used: It ends inside its program headers: it is cut short or damaged",
        ),
        (
            good().disk(not_a_disk(), true),
            "Disk 0 can't be used: Its size of 513 bytes is not a multiple of 512: raw disk images only",
        ),
        (
            good().disk(file(b""), true),
            "Disk 0 can't be used: It is empty",
        ),
    ];
    for (guest, sentence) in cases {
        let kvm = kvm_or_skip!("a_machine_that_cannot_be_built_says_why_in_one_sentence");
        assert_eq!(refused(guest, &kvm), sentence);
    }
    assert_eq!(
        refused(good(), &file(b"not KVM")),
        "The descriptor for KVM does not answer as KVM does"
    );
}
