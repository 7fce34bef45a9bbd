use std::time::Instant;

use kvm_bindings::KVM_MAX_CPUID_ENTRIES;
use kvm_ioctls::Kvm;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::*;
use crate::memory;
use crate::serve::NoHooks;

/// Where the guest counts.
const COUNTER: u64 = 0x8000;

/// A vCPU in real mode that increments the 32-bit word at [`COUNTER`] without end, and never leaves the guest by itself; `None`, said aloud,
/// where there is no KVM.
fn counting_vcpu(test: &str) -> Option<(Vcpu, GuestMemoryMmap, Arc<EndSignal>)> {
    let kvm = match Kvm::new() {
        Ok(kvm) => kvm,
        Err(error) => {
            use std::io::Write as _;
            let _ = writeln!(
                io::stderr().lock(),
                "SKIPPED {test}: /dev/kvm can't be opened: {error}"
            );
            return None;
        }
    };
    let memory = memory::map(memory::MIN_MEMORY_MIB).unwrap();
    let vm = kvm.create_vm().unwrap();
    memory::register(&vm, &memory).unwrap();
    vm.create_irq_chip().unwrap();
    // inc dword ptr [0x8000]; jmp
    memory
        .write_slice(
            &[0x66, 0xff, 0x06, 0x00, 0x80, 0xeb, 0xf9],
            GuestAddress(0x1000),
        )
        .unwrap();
    let vcpu = vm.create_vcpu(0).unwrap();
    vcpu.set_cpuid2(&kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap())
        .unwrap();
    let mut sregs = vcpu.get_sregs().unwrap();
    (sregs.cs.base, sregs.cs.selector) = (0, 0);
    vcpu.set_sregs(&sregs).unwrap();
    let mut regs = vcpu.get_regs().unwrap();
    (regs.rip, regs.rflags) = (0x1000, 2);
    vcpu.set_regs(&regs).unwrap();
    let buses = Buses {
        ports: Arc::new(Bus::new()),
        mmio: Arc::new(Bus::new()),
    };
    let end = Arc::new(EndSignal::new().unwrap());
    let hooks: Arc<dyn Hooks> = Arc::new(NoHooks);
    let start_line = Arc::new(StartLine::new(1));
    let vcpu = Vcpu::spawn(0, vcpu, buses, Arc::clone(&end), &hooks, &start_line).unwrap();
    Some((vcpu, memory, end))
}

fn count(memory: &GuestMemoryMmap) -> u32 {
    memory.read_obj(GuestAddress(COUNTER)).unwrap()
}

fn wait_for_more_than(memory: &GuestMemoryMmap, before: u32) {
    let begun = Instant::now();
    while count(memory) == before {
        assert!(
            begun.elapsed() < Duration::from_secs(20),
            "the guest does not run"
        );
        thread::yield_now();
    }
}

#[test]
fn a_vcpu_runs_only_between_resume_and_pause() {
    let Some((vcpu, memory, end)) = counting_vcpu("a_vcpu_runs_only_between_resume_and_pause")
    else {
        return;
    };
    assert_eq!((vcpu.state(), count(&memory)), (State::Paused, 0));

    for _ in 0..200 {
        let before = count(&memory);
        vcpu.resume();
        wait_for_more_than(&memory, before);
        vcpu.pause();

        let paused_at = count(&memory);
        thread::sleep(Duration::from_micros(200));
        assert_eq!((vcpu.state(), count(&memory)), (State::Paused, paused_at));
    }
    assert_eq!(end.reason(), None);
}

#[test]
fn a_kick_is_never_lost_however_close_it_comes_to_the_entry() {
    let Some((vcpu, _memory, _)) =
        counting_vcpu("a_kick_is_never_lost_however_close_it_comes_to_the_entry")
    else {
        return;
    };

    // A lost kick would leave `pause` waiting for ever: the guest never exits by itself.
    for _ in 0..2000 {
        vcpu.resume();
        vcpu.pause();
    }
}

#[test]
fn a_vcpu_is_stopped_from_any_state() {
    for resumed in [false, true] {
        let Some((vcpu, memory, _)) = counting_vcpu("a_vcpu_is_stopped_from_any_state") else {
            return;
        };
        if resumed {
            vcpu.resume();
            wait_for_more_than(&memory, 0);
        }
        let shared = Arc::clone(&vcpu.shared);

        drop(vcpu);

        assert_eq!(lock(&shared.status).state, State::Stopped);
        assert!(lock(&shared.kick).is_none());
    }
}
