//! The registers that the boot processor starts with, and every processor's local APIC.
//!
//! The other processors wait for the kernel's start-up interrupt, which sets their registers itself, and KVM's reset
//! values of the floating-point state are already what the System V ABI wants (FCW 0x37f, MXCSR 0x1f80), so
//! neither is written.

use kvm_bindings::{
    Msrs, kvm_lapic_state, kvm_msr_entry, kvm_regs, kvm_segment, kvm_xcr, kvm_xcrs,
};
use kvm_ioctls::VcpuFd;

use crate::{boot, layout};

/// Why a processor's registers could not be set.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegistersError {
    /// KVM refused.
    #[error("KVM did not {action}")]
    Kvm {
        /// What it was asked for.
        action: &'static str,
        /// Its failure.
        source: kvm_ioctls::Error,
    },
    /// KVM does not know a model-specific register.
    #[error("KVM did not take model-specific register {index:#x}")]
    Msr {
        /// Which.
        index: u32,
    },
}

/// `IA32_MISC_ENABLE` with fast string operations (Intel SDM 4, table 2-2).
const MSR_MISC_ENABLE: (u32, u64) = (0x1a0, 1);

/// `IA32_MTRR_DEF_TYPE`: MTRRs on, all memory is write-back (Intel SDM 3A §12.11.2.1).
const MSR_MTRR_DEF_TYPE: (u32, u64) = (0x2ff, 1 << 11 | 6);

/// Control register and EFER bits (Intel SDM 3A §2.5, §2.2.1): protection and paging, physical address extension, long mode.
const CR0_PE: u64 = 1;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;

/// Local vector table entries for LINT0 and LINT1, and their delivery modes (Intel SDM 3A §11.5.1).
const LAPIC_LVT_LINT0: usize = 0x350;
const LAPIC_LVT_LINT1: usize = 0x360;
const LAPIC_MODE_EXTINT: u32 = 0b111 << 8;
const LAPIC_MODE_NMI: u32 = 0b100 << 8;

/// Bits of an LVT entry that hold the delivery mode.
const LAPIC_MODE_MASK: u32 = 0b111 << 8;

/// Sets the boot processor up to enter the kernel at `entry` in 64-bit mode.
///
/// # Errors
/// See [`RegistersError`].
pub fn set_boot_processor(vcpu: &VcpuFd, entry: u64) -> Result<(), RegistersError> {
    let failed = |action| move |source| RegistersError::Kvm { action, source };

    let mut sregs = vcpu
        .get_sregs()
        .map_err(failed("give a processor's special registers"))?;
    let data = segment(3);
    sregs.cs = segment(2);
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.gdt.base = layout::BOOT_GDT;
    sregs.gdt.limit = 4 * 8 - 1;
    // No interrupt can be taken before the kernel has loaded its own table; a fault before that ends the machine.
    sregs.idt.limit = 0;
    sregs.cr0 |= CR0_PE | CR0_PG;
    sregs.cr3 = layout::PML4;
    sregs.cr4 |= CR4_PAE;
    sregs.efer |= EFER_LME | EFER_LMA;
    vcpu.set_sregs(&sregs)
        .map_err(failed("take a processor's special registers"))?;

    let regs = kvm_regs {
        rip: entry,
        rsp: layout::BOOT_STACK,
        rbp: layout::BOOT_STACK,
        // The boot protocol's one argument.
        rsi: layout::ZERO_PAGE,
        // Bit 1 is always set; interrupts are off.
        rflags: 2,
        ..kvm_regs::default()
    };
    vcpu.set_regs(&regs)
        .map_err(failed("take a processor's registers"))?;
    set_msrs(vcpu)
}

fn set_msrs(vcpu: &VcpuFd) -> Result<(), RegistersError> {
    let list = [MSR_MISC_ENABLE, MSR_MTRR_DEF_TYPE];
    let entries = list.map(|(index, data)| kvm_msr_entry {
        index,
        data,
        ..kvm_msr_entry::default()
    });
    let first_refused = |count: usize| RegistersError::Msr {
        index: list.get(count).map_or(0, |(index, _)| *index),
    };
    let msrs = Msrs::from_entries(&entries).map_err(|_| first_refused(0))?;
    let taken = vcpu.set_msrs(&msrs).map_err(|source| RegistersError::Kvm {
        action: "take a processor's model-specific registers",
        source,
    })?;
    if taken < list.len() {
        return Err(first_refused(taken));
    }
    Ok(())
}

/// Switches on all extended states of `xcr0` (Intel SDM 3A §2.6), as every kernel does itself.
///
/// Seen in a host that QEMU emulates: with the reset value here, KVM's CPUID leaf 0xd kept the size of that value after a Linux guest had
/// switched more states on, and Linux warned of an "XSAVE consistency problem". The likely cause is that the emulated processor
/// does not intercept `XSETBV`, so that KVM never learns of it.
///
/// # Errors
/// See [`RegistersError`].
pub fn set_extended_states(vcpu: &VcpuFd, xcr0: u64) -> Result<(), RegistersError> {
    let mut xcrs = kvm_xcrs {
        nr_xcrs: 1,
        ..kvm_xcrs::default()
    };
    if let Some(first) = xcrs.xcrs.first_mut() {
        *first = kvm_xcr {
            xcr: 0,
            reserved: 0,
            value: xcr0,
        };
    }
    vcpu.set_xcrs(&xcrs).map_err(|source| RegistersError::Kvm {
        action: "take a processor's extended states",
        source,
    })
}

/// Routes the legacy interrupt controller and NMIs through a local APIC, as the MP table says.
///
/// # Errors
/// See [`RegistersError`].
pub fn set_local_interrupts(vcpu: &VcpuFd) -> Result<(), RegistersError> {
    let failed = |action| move |source| RegistersError::Kvm { action, source };
    let mut lapic = vcpu
        .get_lapic()
        .map_err(failed("give a local interrupt controller's state"))?;
    set_delivery_mode(&mut lapic, LAPIC_LVT_LINT0, LAPIC_MODE_EXTINT);
    set_delivery_mode(&mut lapic, LAPIC_LVT_LINT1, LAPIC_MODE_NMI);
    vcpu.set_lapic(&lapic)
        .map_err(failed("take a local interrupt controller's state"))
}

fn set_delivery_mode(lapic: &mut kvm_lapic_state, register: usize, mode: u32) {
    for (byte, shift) in lapic.regs.iter_mut().skip(register).zip([0, 8, 16, 24]) {
        let keep = !(LAPIC_MODE_MASK >> shift).to_le_bytes()[0];
        let set = (mode >> shift).to_le_bytes()[0];
        let old = byte.to_le_bytes()[0];
        *byte = i8::from_le_bytes([old & keep | set]);
    }
}

/// The hidden part of a segment register that was loaded with the descriptor at `index` of [`boot::BOOT_GDT`] (Intel SDM 3A
/// §3.4.5).
fn segment(index: u16) -> kvm_segment {
    let descriptor = boot::BOOT_GDT.get(usize::from(index)).copied().unwrap_or(0);
    let bits = |from: u32, count: u32| (descriptor >> from) & ((1 << count) - 1);
    let flag = |from: u32| u8::from(bits(from, 1) == 1);
    // In units of pages, since all descriptors here have their granularity bit set.
    let limit = (bits(48, 4) << 16 | bits(0, 16)) << 12 | 0xfff;
    kvm_segment {
        base: 0,
        limit: u32::try_from(limit).unwrap_or(u32::MAX),
        selector: index * 8,
        type_: bits(40, 4).to_le_bytes()[0],
        present: flag(47),
        dpl: 0,
        db: flag(54),
        s: flag(44),
        l: flag(53),
        g: flag(55),
        avl: 0,
        unusable: 0,
        padding: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_are_flat_64_bit_code_and_data() {
        let (code, data) = (segment(2), segment(3));

        assert_eq!(
            (code.selector, code.type_, code.l, code.db, code.s),
            (0x10, 0xb, 1, 0, 1)
        );
        assert_eq!(
            (data.selector, data.type_, data.l, data.db, data.s),
            (0x18, 0x3, 0, 1, 1)
        );
        assert_eq!((code.limit, data.limit, code.g), (u32::MAX, u32::MAX, 1));
    }

    #[test]
    fn setting_a_delivery_mode_keeps_the_other_bits() {
        let mut lapic = kvm_lapic_state::default();
        lapic.regs[LAPIC_LVT_LINT0 + 1] = 0b1000_0100u8.cast_signed();
        lapic.regs[LAPIC_LVT_LINT0 + 2] = 1;

        set_delivery_mode(&mut lapic, LAPIC_LVT_LINT0, LAPIC_MODE_EXTINT);

        assert_eq!(lapic.regs[LAPIC_LVT_LINT0 + 1], 0b1000_0111u8.cast_signed());
        assert_eq!(lapic.regs[LAPIC_LVT_LINT0 + 2], 1);
    }
}
