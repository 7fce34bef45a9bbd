//! The time stamp counter goes on from where it was.
//!
//! For the guest no time passes between snapshot and restore: counter and paravirtual clock go on from their saved values, so
//! monotonic time never jumps, and a timer fires as long after the restore as it had to go at the snapshot. Wall-clock time is
//! the supervisor's to tell.
//!
//! The counter is set by its offset to the host's, not by its value: setting values on several processors one after the other sets
//! them apart, unless KVM takes them for a guest's attempt to synchronize them; and a value below a second is taken for that on a
//! new machine, and not set at all (`kvm_synchronize_tsc`, arch/x86/kvm/x86.c, before Linux 6.7).

use std::arch::x86_64::_rdtsc;
use std::os::fd::AsRawFd;

use kvm_bindings::{KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, Msrs, kvm_device_attr, kvm_msr_entry};
use kvm_ioctls::VcpuFd;

/// `KVM_SET_DEVICE_ATTR` (include/uapi/linux/kvm.h), which kvm-ioctls has for processors of other architectures only.
const KVM_SET_DEVICE_ATTR: libc::c_ulong = 0x4018_aee1;

/// `IA32_TIME_STAMP_COUNTER`.
const MSR_TSC: u32 = 0x10;

/// Parts per million by which the counter's frequency may differ from the snapshot's: what Linux takes for the same
/// (`tsc_tolerance_ppm`, arch/x86/kvm/x86.c).
const TOLERANCE_PPM: u64 = 250;

/// Whether a guest that was used to the one frequency goes right with the other.
#[must_use]
pub(crate) fn is_same_frequency(saved_khz: u32, khz: u32) -> bool {
    let difference = u64::from(saved_khz.abs_diff(khz));
    difference * 1_000_000 <= u64::from(saved_khz) * TOLERANCE_PPM
}

/// Sets the counters of all processors of a machine in step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Counter {
    /// The first processor's saved value.
    first: u64,
    /// From the host's counter to the guest's.
    offset: u64,
    /// Values that are this near to the first one's were read one after the other from counters in step: a second's ticks, as KVM
    /// judges it.
    near: u64,
}

impl Counter {
    /// For a machine whose first processor's counter was at `first`, from now on.
    pub(crate) fn new(first: u64, tsc_khz: u32) -> Self {
        // SAFETY: the instruction reads a counter and is there on every x86-64 processor.
        let host = unsafe { _rdtsc() };
        Self {
            first,
            offset: first.wrapping_sub(host),
            near: u64::from(tsc_khz) * 1000,
        }
    }

    /// Sets a processor's counter, whose saved value is `saved`.
    pub(crate) fn set(self, vcpu: &VcpuFd, saved: u64) -> Result<(), kvm_ioctls::Error> {
        let apart = saved.wrapping_sub(self.first);
        let is_near = apart <= self.near || apart.wrapping_neg() <= self.near;
        let offset = if is_near {
            self.offset
        } else {
            self.offset.wrapping_add(apart)
        };
        match set_offset(vcpu, offset) {
            Ok(()) => Ok(()),
            // A KVM without the attribute: before Linux 5.16.
            Err(error) if matches!(error.errno(), libc::ENXIO | libc::ENOTTY | libc::EINVAL) => {
                set_value(vcpu, saved)
            }
            Err(error) => Err(error),
        }
    }
}

fn set_offset(vcpu: &VcpuFd, offset: u64) -> Result<(), kvm_ioctls::Error> {
    let attribute = kvm_device_attr {
        group: KVM_VCPU_TSC_CTRL,
        attr: u64::from(KVM_VCPU_TSC_OFFSET),
        addr: (&raw const offset) as u64,
        flags: 0,
    };
    // SAFETY: the call reads the structure, and the eight bytes of `offset` that it points to; both live until it returns.
    let result =
        unsafe { libc::ioctl(vcpu.as_raw_fd(), KVM_SET_DEVICE_ATTR, &raw const attribute) };
    if result == 0 {
        Ok(())
    } else {
        Err(kvm_ioctls::Error::last())
    }
}

fn set_value(vcpu: &VcpuFd, value: u64) -> Result<(), kvm_ioctls::Error> {
    let entry = kvm_msr_entry {
        index: MSR_TSC,
        data: value,
        ..kvm_msr_entry::default()
    };
    let msrs = Msrs::from_entries(&[entry]).map_err(|_| kvm_ioctls::Error::new(libc::ENOMEM))?;
    match vcpu.set_msrs(&msrs)? {
        0 => Err(kvm_ioctls::Error::new(libc::EINVAL)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequencies_are_the_same_within_what_a_calibration_varies() {
        assert!(is_same_frequency(2_500_000, 2_500_000));
        assert!(is_same_frequency(2_500_000, 2_500_625));
        assert!(!is_same_frequency(2_500_000, 2_500_626));
        assert!(!is_same_frequency(2_500_000, 3_000_000));
        assert!(is_same_frequency(0, 0));
        assert!(!is_same_frequency(0, 1));
    }
}
