//! The interrupt controllers in KVM and the guest's paravirtual clock, into a snapshot and out of it.

use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_clock_data, kvm_irqchip,
};
use kvm_ioctls::VmFd;

use super::state::{ChipsState, Controller};

/// The controllers in the order in which they are kept.
const CHIPS: [u32; 3] = [
    KVM_IRQCHIP_PIC_MASTER,
    KVM_IRQCHIP_PIC_SLAVE,
    KVM_IRQCHIP_IOAPIC,
];

/// Saves them; no processor runs.
///
/// # Errors
/// KVM's, with what it was asked for.
pub(crate) fn save(vm: &VmFd) -> Result<ChipsState, (&'static str, kvm_ioctls::Error)> {
    let mut controllers = CHIPS.map(|chip_id| {
        Controller(kvm_irqchip {
            chip_id,
            ..kvm_irqchip::default()
        })
    });
    for controller in &mut controllers {
        vm.get_irqchip(&mut controller.0)
            .map_err(|error| ("give an interrupt controller's state", error))?;
    }
    let clock = vm
        .get_clock()
        .map_err(|error| ("give the guest's clock", error))?;
    Ok(ChipsState {
        controllers,
        clock_ns: clock.clock,
    })
}

/// Sets them. The processors are there already: an interrupt that is pending goes to their local APICs at once.
///
/// # Errors
/// KVM's, with what it was asked for.
pub(crate) fn restore(
    vm: &VmFd,
    state: &ChipsState,
) -> Result<(), (&'static str, kvm_ioctls::Error)> {
    // Without the flag for the host's real time: the clock goes on from its value, see `super::tsc`.
    let clock = kvm_clock_data {
        clock: state.clock_ns,
        ..kvm_clock_data::default()
    };
    vm.set_clock(&clock)
        .map_err(|error| ("take the guest's clock", error))?;
    for (chip_id, controller) in CHIPS.into_iter().zip(&state.controllers) {
        // Which of the three it is, is its place's to say and not the file's.
        let controller = kvm_irqchip {
            chip_id,
            ..controller.0
        };
        vm.set_irqchip(&controller)
            .map_err(|error| ("take an interrupt controller's state", error))?;
    }
    Ok(())
}
