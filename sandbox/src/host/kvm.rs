//! Hardware virtualization and `/dev/kvm`: without both there is no machine.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;

use vmm::host::{Hardware, kvm_check};

use super::{Check, Status};

/// Opens `/dev/kvm` for a machine, if this host can run one: the two checks that a start cannot do without.
///
/// # Errors
/// The sentence of the check that failed.
pub(crate) fn open_kvm() -> Result<OwnedFd, String> {
    let hardware = check_hardware();
    if hardware.status == Status::Missing {
        return Err(hardware.sentence());
    }
    kvm_device().map_err(|check| check.sentence())
}

pub(super) fn check_hardware() -> Check {
    const NAME: &str = "Hardware virtualization";
    let has_kvm = fs::exists("/dev/kvm").unwrap_or(false);
    match (vmm::host::hardware(), vmm::host::is_virtual()) {
        (Some(kind), false) => Check::ok(NAME, format!("The processor has {}", name_of(kind))),
        (Some(kind), true) => Check::not_ok(
            NAME,
            Status::Warning,
            format!(
                "This machine is virtual itself and has nested {}",
                name_of(kind)
            ),
            "all works, slower than on metal",
        ),
        (None, _) if has_kvm => Check::not_ok(
            NAME,
            Status::Missing,
            "The processor shows neither VMX nor SVM, so that /dev/kvm is a software KVM, which cannot run a \
             Linux guest",
            "use a machine with hardware virtualization, or `cargo xtask host`, which emulates one",
        ),
        (None, true) => Check::not_ok(
            NAME,
            Status::Missing,
            "This machine is virtual itself and its processor shows neither VMX nor SVM",
            "switch nested virtualization on where it is hosted, or use `cargo xtask host`, which emulates a \
             host that has it",
        ),
        (None, false) => Check::not_ok(
            NAME,
            Status::Missing,
            "The processor shows neither VMX nor SVM",
            "switch virtualization on in the firmware's setup, or use `cargo xtask host`, which emulates a \
             host that has it",
        ),
    }
}

fn name_of(kind: Hardware) -> &'static str {
    match kind {
        Hardware::Vmx => "Intel VT-x (VMX)",
        Hardware::Svm => "AMD-V (SVM)",
    }
}

const KVM: &str = "KVM";

pub(super) fn check_kvm() -> Check {
    let checked = kvm_device().and_then(|device| {
        kvm_check(device).map_err(|problem| {
            Check::not_ok(
                KVM,
                Status::Missing,
                problem.to_string(),
                "use a newer kernel",
            )
        })
    });
    match checked {
        Ok(()) => Check::ok(
            KVM,
            format!(
                "/dev/kvm opens, speaks version {} and has all that a machine needs",
                vmm::host::KVM_API_VERSION
            ),
        ),
        Err(check) => check,
    }
}

fn kvm_device() -> Result<OwnedFd, Check> {
    File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .map(OwnedFd::from)
        .map_err(|error| kvm_does_not_open(&error))
}

pub(super) fn kvm_does_not_open(error: &io::Error) -> Check {
    let (detail, advice) = match error.kind() {
        io::ErrorKind::NotFound => (
            "/dev/kvm does not exist".to_owned(),
            "load the module `kvm_intel` or `kvm_amd`, or switch virtualization on in the firmware's setup; in a \
             container, give it the device with `--device /dev/kvm`",
        ),
        io::ErrorKind::PermissionDenied => (
            "/dev/kvm may not be opened by this user".to_owned(),
            "add the user to the group `kvm` (`sudo usermod -aG kvm $USER`) and log in again",
        ),
        _ => (
            format!("/dev/kvm does not open ({error})"),
            "load the module `kvm_intel` or `kvm_amd`, and see what the kernel's log says of it",
        ),
    };
    Check::not_ok(KVM, Status::Missing, detail, advice)
}
