//! A processor's registers into a snapshot and out of it.
//!
//! The order of the calls is not free (KVM API, and what its calls do to each other in arch/x86/kvm/x86.c):
//!
//! * Saving: the multiprocessing state first, since asking for it takes pending INIT and start-up interrupts, which changes
//!   registers; the events last, since every other call may move an exception on.
//! * Restoring: CPUID first, it says which bits of the others exist; special registers before the local APIC, they hold its
//!   base address; the local APIC before the model-specific registers, since its timer's deadline is one of these and is dropped
//!   while the timer is not set up for it; the time stamp counter before the deadline, which is a value of it; the events last,
//!   since setting the registers clears them.

use kvm_bindings::{CpuId, Msrs, kvm_lapic_state, kvm_msr_entry};
use kvm_ioctls::{Cap, VcpuFd, VmFd};

use super::raw::many::MAX_ENTRIES;
use super::state::VcpuState;
use super::tsc;

/// `IA32_TIME_STAMP_COUNTER` and `IA32_TSC_DEADLINE` (Intel SDM 4, table 2-2).
const MSR_TSC: u32 = 0x10;
const MSR_TSC_DEADLINE: u32 = 0x6e0;

/// Bytes of the extended state that the calls without a length take (`struct kvm_xsave`).
const MAX_XSAVE_BYTES: i32 = 4096;

/// The local APIC's timer: its register, its mask bit, and its mode as a deadline of the time stamp counter (Intel SDM 3A §11.5.1).
const LAPIC_LVT_TIMER: usize = 0x320;
const LVT_MASKED: u32 = 1 << 16;
const LVT_MODE: u32 = 0b11 << 17;
const LVT_MODE_DEADLINE: u32 = 0b10 << 17;

/// Why a processor could not be saved.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SaveVcpuError {
    /// KVM refused.
    #[error("KVM did not give a processor's {what}")]
    Kvm {
        /// What it was asked for.
        what: &'static str,
        /// Its failure.
        source: kvm_ioctls::Error,
    },
    /// More registers than a snapshot holds.
    #[error("KVM knows {count} model-specific registers, more than {MAX_ENTRIES}")]
    TooManyMsrs {
        /// How many.
        count: usize,
    },
    /// The processor runs or is gone.
    #[error("A processor that is not paused can't be saved")]
    NotPaused,
}

/// Why a processor can't go on from a snapshot.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RestoreVcpuError {
    /// KVM refused.
    #[error("KVM did not take a processor's {what}")]
    Kvm {
        /// What it was given.
        what: &'static str,
        /// Its failure.
        source: kvm_ioctls::Error,
    },
    /// KVM refused a model-specific register.
    #[error("KVM did not take model-specific register {index:#x} of a processor")]
    Msr {
        /// Which.
        index: u32,
    },
    /// A register has what no snapshot of ours has, and what KVM would take from us though the guest may not set it.
    #[error(
        "The snapshot sets {what} of a processor to {value:#x}, which no guest could have done"
    )]
    Forbidden {
        /// Which register.
        what: &'static str,
        /// What it was to be, or the number of a model-specific one.
        value: u64,
    },
    /// The host's counter runs at another rate.
    #[error(
        "The time stamp counter runs at {khz} kHz, and ran at {saved_khz} kHz when the snapshot was taken: make it anew on this host"
    )]
    Frequency {
        /// In the snapshot.
        saved_khz: u32,
        /// Here.
        khz: u32,
    },
    /// The host gives guests larger extended states than a snapshot holds.
    #[error(
        "The processor's extended state has {bytes} bytes here, and a snapshot holds {MAX_XSAVE_BYTES}"
    )]
    ExtendedState {
        /// How many.
        bytes: i32,
    },
}

/// Whether the host's extended states fit into what is saved: it is all that KVM reads and writes then.
///
/// # Errors
/// [`RestoreVcpuError::ExtendedState`].
pub(crate) fn check_extended_state(vm: &VmFd) -> Result<(), RestoreVcpuError> {
    // 0 where KVM knows no larger ones (before Linux 5.17).
    let bytes = vm.check_extension_int(Cap::Xsave2);
    if bytes <= MAX_XSAVE_BYTES {
        Ok(())
    } else {
        Err(RestoreVcpuError::ExtendedState { bytes })
    }
}

/// Saves a processor that is outside the guest; `msrs` are those that KVM says it has.
///
/// # Errors
/// See [`SaveVcpuError`].
pub(crate) fn save(vcpu: &VcpuFd, msrs: &[u32]) -> Result<VcpuState, SaveVcpuError> {
    let failed = |what| move |source| SaveVcpuError::Kvm { what, source };
    let mp_state = vcpu
        .get_mp_state()
        .map_err(failed("multiprocessing state"))?;
    let regs = vcpu.get_regs().map_err(failed("registers"))?;
    let sregs = vcpu.get_sregs().map_err(failed("special registers"))?;
    let xsave = vcpu.get_xsave().map_err(failed("extended state"))?;
    let xcrs = vcpu
        .get_xcrs()
        .map_err(failed("extended control registers"))?;
    let debugregs = vcpu.get_debug_regs().map_err(failed("debug registers"))?;
    let lapic = vcpu
        .get_lapic()
        .map_err(failed("local interrupt controller"))?;
    let mut msrs = read_msrs(vcpu, msrs)?;
    let tsc = msrs
        .iter()
        .find(|msr| msr.index == MSR_TSC)
        .map_or(0, |msr| msr.data);
    msrs.retain(|msr| msr.index != MSR_TSC);
    let tsc_khz = vcpu.get_tsc_khz().unwrap_or(0);
    rescue_deadline(&mut msrs, &lapic, tsc);
    let events = vcpu.get_vcpu_events().map_err(failed("events"))?;
    Ok(VcpuState {
        mp_state,
        regs,
        sregs,
        xsave,
        xcrs,
        debugregs,
        lapic,
        msrs,
        tsc,
        tsc_khz,
        events,
    })
}

/// Those registers that this processor has: KVM's list is of the host's.
fn read_msrs(vcpu: &VcpuFd, indices: &[u32]) -> Result<Vec<kvm_msr_entry>, SaveVcpuError> {
    let wanted: Vec<_> = indices
        .iter()
        .filter(|index| is_saved(**index))
        .map(|index| kvm_msr_entry {
            index: *index,
            ..kvm_msr_entry::default()
        })
        .collect();
    let too_many = || SaveVcpuError::TooManyMsrs {
        count: wanted.len(),
    };
    if wanted.len() > MAX_ENTRIES {
        return Err(too_many());
    }
    let mut found = Vec::with_capacity(wanted.len());
    let mut rest = wanted.as_slice();
    while !rest.is_empty() {
        let mut msrs = Msrs::from_entries(rest).map_err(|_| too_many())?;
        let count = vcpu
            .get_msrs(&mut msrs)
            .map_err(|source| SaveVcpuError::Kvm {
                what: "model-specific registers",
                source,
            })?;
        found.extend(msrs.as_slice().iter().take(count));
        // KVM stops at the first that it does not give.
        rest = rest.get(count + 1..).unwrap_or_default();
    }
    Ok(found)
}

/// Registers that are left out, by the names of Linux (arch/x86/include/asm/msr-index.h, hyperv-tlfs.h).
fn is_saved(index: u32) -> bool {
    !matches!(
        index,
        // Microcode's revision and the platform's: what the host's processor says, not what the guest wrote.
        0x8b | 0xce
        // Performance counters and their capabilities: guests have none.
        | 0xc1..=0xc8 | 0x186..=0x18d | 0x309..=0x30c | 0x345 | 0x38d..=0x390
        | 0x3f1 | 0x600 | 0x4c1..=0x4c8
        | 0xc001_0000..=0xc001_0007 | 0xc001_0200..=0xc001_020b | 0xc000_0300..=0xc000_0303
        // What nested virtualization could do: guests have none.
        | 0x480..=0x493 | 0xc001_0114..=0xc001_0117
        // Hyper-V's: guests are told of KVM.
        | 0x4000_0000..=0x4000_0fff
        // EFER: it is among the special registers.
        | 0xc000_0080
    )
}

/// What a guest can have in EFER: SCE, LME, LMA, NXE, FFXSR, TCE, AIBRSE (AMD APM 2, 3.1.7). Not SVME: guests have no nested
/// virtualization, and KVM asks nothing but this bit for it.
const EFER_POSSIBLE: u64 = 1 | 1 << 8 | 1 << 10 | 1 << 11 | 1 << 14 | 1 << 15 | 1 << 21;

/// Refuses registers that [`save`] would not have written. KVM takes from its user what it would not take from a guest.
fn check_registers(state: &VcpuState) -> Result<(), RestoreVcpuError> {
    if state.sregs.efer & !EFER_POSSIBLE != 0 {
        return Err(RestoreVcpuError::Forbidden {
            what: "EFER",
            value: state.sregs.efer,
        });
    }
    // The counter is set by itself, so that all processors agree.
    let is_possible = |index| is_saved(index) && index != MSR_TSC;
    match state.msrs.iter().find(|entry| !is_possible(entry.index)) {
        Some(entry) => Err(RestoreVcpuError::Forbidden {
            what: "a model-specific register",
            value: entry.index.into(),
        }),
        None => Ok(()),
    }
}

/// A deadline that reads zero may have passed without its interrupt's having been delivered yet: KVM has taken it down and holds
/// the interrupt where no call reads it. Set to the present it comes again, at worst once too often.
fn rescue_deadline(msrs: &mut [kvm_msr_entry], lapic: &kvm_lapic_state, tsc: u64) {
    let timer = lapic_register(lapic, LAPIC_LVT_TIMER);
    if timer & LVT_MASKED != 0 || timer & LVT_MODE != LVT_MODE_DEADLINE {
        return;
    }
    for msr in msrs {
        if msr.index == MSR_TSC_DEADLINE && msr.data == 0 {
            msr.data = tsc;
        }
    }
}

fn lapic_register(lapic: &kvm_lapic_state, register: usize) -> u32 {
    lapic
        .regs
        .iter()
        .skip(register)
        .zip([0, 8, 16, 24])
        .fold(0, |value, (byte, shift)| {
            value | u32::from(byte.cast_unsigned()) << shift
        })
}

/// Sets a new processor to a state. [`check_extended_state`] has passed for its machine.
///
/// # Errors
/// See [`RestoreVcpuError`].
pub(crate) fn restore(
    vcpu: &VcpuFd,
    cpuid: &CpuId,
    state: &VcpuState,
    counter: tsc::Counter,
) -> Result<(), RestoreVcpuError> {
    check_registers(state)?;
    let failed = |what| move |source| RestoreVcpuError::Kvm { what, source };
    let khz = vcpu.get_tsc_khz().unwrap_or(0);
    if !tsc::is_same_frequency(state.tsc_khz, khz) {
        return Err(RestoreVcpuError::Frequency {
            saved_khz: state.tsc_khz,
            khz,
        });
    }
    vcpu.set_cpuid2(cpuid).map_err(failed("features"))?;
    vcpu.set_mp_state(state.mp_state)
        .map_err(failed("multiprocessing state"))?;
    vcpu.set_regs(&state.regs).map_err(failed("registers"))?;
    vcpu.set_sregs(&state.sregs)
        .map_err(failed("special registers"))?;
    // SAFETY: KVM reads as many bytes as the machine's extended state has; `check_extended_state` has found them to be no more
    // than the structure's, and no larger state is ever enabled in this process.
    unsafe { vcpu.set_xsave(&state.xsave) }.map_err(failed("extended state"))?;
    vcpu.set_xcrs(&state.xcrs)
        .map_err(failed("extended control registers"))?;
    vcpu.set_debug_regs(&state.debugregs)
        .map_err(failed("debug registers"))?;
    vcpu.set_lapic(&state.lapic)
        .map_err(failed("local interrupt controller"))?;
    counter
        .set(vcpu, state.tsc)
        .map_err(failed("time stamp counter"))?;
    write_msrs(vcpu, &state.msrs)?;
    vcpu.set_vcpu_events(&state.events)
        .map_err(failed("events"))
}

fn write_msrs(vcpu: &VcpuFd, entries: &[kvm_msr_entry]) -> Result<(), RestoreVcpuError> {
    let refused = |count: usize| RestoreVcpuError::Msr {
        index: entries.get(count).map_or(0, |entry| entry.index),
    };
    let msrs = Msrs::from_entries(entries).map_err(|_| refused(0))?;
    let taken = vcpu
        .set_msrs(&msrs)
        .map_err(|source| RestoreVcpuError::Kvm {
            what: "model-specific registers",
            source,
        })?;
    if taken < entries.len() {
        return Err(refused(taken));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use kvm_bindings::{
        kvm_debugregs, kvm_mp_state, kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
    };

    use super::*;

    fn timer(value: u32) -> kvm_lapic_state {
        let mut lapic = kvm_lapic_state::default();
        for (slot, byte) in lapic.regs[LAPIC_LVT_TIMER..]
            .iter_mut()
            .zip(value.to_le_bytes())
        {
            *slot = byte.cast_signed();
        }
        lapic
    }

    fn deadline_after(value: u32, before: u64) -> u64 {
        let mut msrs = [kvm_msr_entry {
            index: MSR_TSC_DEADLINE,
            data: before,
            ..kvm_msr_entry::default()
        }];
        rescue_deadline(&mut msrs, &timer(value), 77);
        msrs[0].data
    }

    #[test]
    fn a_deadline_that_passed_comes_again() {
        assert_eq!(deadline_after(LVT_MODE_DEADLINE | 0xec, 0), 77);
    }

    #[test]
    fn a_deadline_that_is_pending_or_not_in_use_is_left() {
        assert_eq!(deadline_after(LVT_MODE_DEADLINE | 0xec, 99), 99);
        assert_eq!(deadline_after(LVT_MODE_DEADLINE | LVT_MASKED, 0), 0);
        assert_eq!(deadline_after(0b01 << 17, 0), 0);
    }

    fn state(efer: u64, msr: u32) -> VcpuState {
        VcpuState {
            mp_state: kvm_mp_state::default(),
            regs: kvm_regs::default(),
            sregs: kvm_sregs {
                efer,
                ..kvm_sregs::default()
            },
            xsave: kvm_xsave::default(),
            xcrs: kvm_xcrs::default(),
            debugregs: kvm_debugregs::default(),
            lapic: kvm_lapic_state::default(),
            msrs: vec![kvm_msr_entry {
                index: msr,
                ..kvm_msr_entry::default()
            }],
            tsc: 0,
            tsc_khz: 0,
            events: kvm_vcpu_events::default(),
        }
    }

    #[test]
    fn a_snapshot_can_not_set_what_no_guest_could() {
        // LSTAR, and a processor in long mode.
        check_registers(&state(0xd01, 0xc000_0082)).unwrap();

        for (efer, msr) in [
            // SVME.
            (0x1d01, 0xc000_0082),
            // EFER by its number, SVM's host area, VMX's capabilities, Hyper-V's guest, the counter.
            (0xd01, 0xc000_0080),
            (0xd01, 0xc001_0117),
            (0xd01, 0x480),
            (0xd01, 0x4000_0000),
            (0xd01, MSR_TSC),
        ] {
            let error = check_registers(&state(efer, msr)).unwrap_err();
            assert!(
                matches!(error, RestoreVcpuError::Forbidden { .. }),
                "{error}"
            );
        }
    }
}
