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
    counting_vcpu_of(test, &Arc::new(StartLine::new(1)))
}

/// One that starts with others, of other machines.
fn counting_vcpu_of(
    test: &str,
    start_line: &Arc<StartLine>,
) -> Option<(Vcpu, GuestMemoryMmap, Arc<EndSignal>)> {
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
    let vcpu = Vcpu::spawn(0, vcpu, buses, Arc::clone(&end), &hooks, start_line).unwrap();
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
fn vcpus_that_are_paused_and_saved_before_all_were_in_the_guest_wait_for_nobody() {
    const TEST: &str =
        "vcpus_that_are_paused_and_saved_before_all_were_in_the_guest_wait_for_nobody";
    for _ in 0..20 {
        let start_line = Arc::new(StartLine::new(2));
        let vcpus = [(); 2].map(|()| counting_vcpu_of(TEST, &start_line));
        let [Some((first, memory, _)), Some((second, ..))] = vcpus else {
            return;
        };
        let (done, is_done) = std::sync::mpsc::channel();
        let pausing = thread::spawn(move || {
            first.resume();
            // It is at the line when the other one is paused again, as a rule before that has looked.
            thread::sleep(Duration::from_millis(5));
            second.resume();
            second.pause();
            first.pause();
            let states = (first.state(), second.state());
            let saved = [&first, &second].map(|vcpu| vcpu.save(&Arc::from([])).map(drop));
            done.send(()).unwrap();
            (first, second, states, saved)
        });

        is_done
            .recv_timeout(Duration::from_secs(60))
            .expect("they wait for each other");
        let (first, second, states, saved) = pausing.join().unwrap();
        assert_eq!(states, (State::Paused, State::Paused));
        assert!(saved.iter().all(Result::is_ok), "{saved:?}");
        first.resume();
        second.resume();
        wait_for_more_than(&memory, count(&memory));
    }
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
