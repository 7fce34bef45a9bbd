//! A virtual machine as KVM makes it, with nothing in it: what booting and restoring begin with.

use std::io;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::sync::Arc;

use kvm_ioctls::{Kvm, VmFd};
use vm_memory::GuestMemoryMmap;

use crate::builder::BuildError;
use crate::{layout, memory};

/// The version of KVM's interface, the only one there has been since 2007.
const KVM_API_VERSION: i32 = 12;

/// How often creating a virtual machine is tried again when a signal interrupts it.
const MAX_CREATE_RETRIES: u32 = 100;

pub(crate) fn kvm_did_not(action: &'static str) -> impl Fn(kvm_ioctls::Error) -> BuildError {
    move |error| BuildError::Kvm {
        action,
        source: error.into(),
    }
}

pub(crate) fn system(what: &'static str) -> impl Fn(io::Error) -> BuildError {
    move |source| BuildError::System { what, source }
}

pub(crate) fn kvm_from(descriptor: OwnedFd) -> Result<Kvm, BuildError> {
    // SAFETY: the descriptor is open and ours alone; `Kvm` becomes its owner. That it is KVM's is no matter of memory
    // safety: another file answers the ioctls with an error.
    let kvm = unsafe { Kvm::from_raw_fd(descriptor.into_raw_fd()) };
    if kvm.get_api_version() == KVM_API_VERSION {
        Ok(kvm)
    } else {
        Err(BuildError::NotKvm)
    }
}

fn create_vm(kvm: &Kvm) -> Result<VmFd, BuildError> {
    let mut tries = 0;
    loop {
        match kvm.create_vm() {
            Err(error) if error.errno() == libc::EINTR && tries < MAX_CREATE_RETRIES => tries += 1,
            result => return result.map_err(kvm_did_not("create a virtual machine")),
        }
    }
}

/// The pages that KVM needs for itself on some Intel processors.
fn reserve_for_kvm(vm: &VmFd) -> Result<(), BuildError> {
    vm.set_identity_map_address(layout::KVM_IDENTITY_MAP)
        .map_err(kvm_did_not("take the address of its identity map"))?;
    vm.set_tss_address(layout::KVM_TSS)
        .map_err(kvm_did_not("take the address of its task state segment"))
}

/// Makes a virtual machine with this memory and an interrupt controller.
///
/// # Errors
/// See [`BuildError`].
pub(crate) fn with_memory(kvm: &Kvm, memory: &GuestMemoryMmap) -> Result<Arc<VmFd>, BuildError> {
    let vm = create_vm(kvm)?;
    // All memory slots before the interrupt controller; KVM's own, at these two addresses, too.
    memory::register(&vm, memory)?;
    reserve_for_kvm(&vm)?;
    vm.create_irq_chip()
        .map_err(kvm_did_not("create the interrupt controller"))?;
    Ok(Arc::new(vm))
}
