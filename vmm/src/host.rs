//! What this host's processor and KVM can do, asked without building a machine.

use std::arch::x86_64::__cpuid;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};

use kvm_ioctls::{Cap, Kvm};

/// The version of KVM's interface, the only one there has been since 2007.
pub const KVM_API_VERSION: i32 = 12;

/// What a machine needs of KVM, by the names of its documentation (`Documentation/virt/kvm/api.rst`).
const NEEDED: [(Cap, &str); 7] = [
    (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
    (Cap::Irqchip, "KVM_CAP_IRQCHIP"),
    (Cap::Irqfd, "KVM_CAP_IRQFD"),
    (Cap::Ioeventfd, "KVM_CAP_IOEVENTFD"),
    (Cap::SetTssAddr, "KVM_CAP_SET_TSS_ADDR"),
    (Cap::ExtCpuid, "KVM_CAP_EXT_CPUID"),
    (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT"),
];

/// Why an open `/dev/kvm` can't serve.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KvmProblem {
    /// It is another interface, or none.
    #[error("KVM speaks version {0} of its interface, not {KVM_API_VERSION}")]
    Version(i32),
    /// It is too old.
    #[error("KVM lacks {}", .0.join(", "))]
    Missing(Vec<&'static str>),
}

/// Checks that an open `/dev/kvm` can do what a machine needs.
///
/// # Errors
/// See [`KvmProblem`].
pub fn kvm_check(kvm: OwnedFd) -> Result<(), KvmProblem> {
    // SAFETY: the descriptor is open and handed over; `Kvm` only makes system calls on it, which fail on one that
    // is no KVM.
    let kvm = unsafe { Kvm::from_raw_fd(kvm.into_raw_fd()) };
    let version = kvm.get_api_version();
    if version != KVM_API_VERSION {
        return Err(KvmProblem::Version(version));
    }
    let missing: Vec<_> = NEEDED
        .iter()
        .filter(|(cap, _)| !kvm.check_extension(*cap))
        .map(|(_, name)| *name)
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(KvmProblem::Missing(missing))
}

/// Hardware virtualization that a processor offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hardware {
    /// Intel VT-x (CPUID 1, ECX bit 5; Intel SDM volume 2, CPUID).
    Vmx,
    /// AMD-V (CPUID 8000_0001h, ECX bit 2; AMD APM volume 3, appendix E).
    Svm,
}

/// The hardware virtualization of this processor, if it has and shows one.
#[must_use]
pub fn hardware() -> Option<Hardware> {
    const EXTENDED_FEATURES: u32 = 0x8000_0001;
    if __cpuid(1).ecx & (1 << 5) != 0 {
        return Some(Hardware::Vmx);
    }
    let has_extended = __cpuid(0x8000_0000).eax >= EXTENDED_FEATURES;
    (has_extended && __cpuid(EXTENDED_FEATURES).ecx & (1 << 2) != 0).then_some(Hardware::Svm)
}

/// Whether this host is itself a virtual machine (CPUID 1, ECX bit 31, which no processor sets and every
/// hypervisor does).
#[must_use]
pub fn is_virtual() -> bool {
    __cpuid(1).ecx & (1 << 31) != 0
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn what_is_no_kvm_has_no_version_of_it() {
        let null = File::open("/dev/null").unwrap();
        assert_eq!(kvm_check(null.into()), Err(KvmProblem::Version(-1)));
    }

    #[test]
    fn the_processor_shows_what_the_kernel_lists() {
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap();
        let lists = |flag: &str| cpuinfo.split_whitespace().any(|word| word == flag);
        assert_eq!(hardware().is_some(), lists("vmx") || lists("svm"));
        assert_eq!(is_virtual(), lists("hypervisor"));
    }
}
