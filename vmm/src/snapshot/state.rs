//! Everything of a machine but its memory, as types.
//!
//! What is in a [`MachineState`] is well-formed and within its bounds, and no more: it comes from a file. Devices check their own
//! part when they take it ([`devices::virtio::Preserve`]); registers are KVM's to check.

use devices::serial::SerialState;
use devices::virtio::TransportState;
use devices::vsock::VsockState;
use kvm_bindings::{
    kvm_cpuid_entry2, kvm_debugregs, kvm_irqchip, kvm_lapic_state, kvm_mp_state, kvm_msr_entry,
    kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use serde::{Deserialize, Serialize};

use super::raw;

/// All of it.
#[derive(Debug)]
pub struct MachineState {
    /// What the machine is made of.
    pub shape: Shape,
    /// Its devices.
    pub devices: DevicesState,
    /// Its interrupt controllers and its clock.
    pub chips: ChipsState,
    /// Its processors, as many as [`Shape::vcpu_count`].
    pub vcpus: Vec<VcpuState>,
}

/// What a machine is made of.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Shape {
    /// Virtual processors.
    pub vcpu_count: u8,
    /// Guest memory in MiB: the memory file has as many.
    pub memory_mib: u32,
    /// The guest's vsock context identifier.
    pub guest_cid: u32,
    /// What the processors say of themselves, without what differs from one to the other
    /// ([`crate::cpuid::CpuidTemplate`]).
    #[serde(with = "raw::many")]
    pub cpuid: Vec<kvm_cpuid_entry2>,
}

/// The devices.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DevicesState {
    /// The virtio devices in the order of their addresses: the disks, then vsock.
    pub transports: Vec<TransportState>,
    /// What vsock has besides.
    pub vsock: VsockState,
    /// The console.
    pub serial: SerialState,
}

/// The interrupt controllers in KVM, and the clock that it shows to the guest.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ChipsState {
    /// Both legacy controllers and the IO-APIC, in this order.
    pub controllers: [Controller; 3],
    /// Nanoseconds of the guest's paravirtual clock.
    pub clock_ns: u64,
}

/// One interrupt controller.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Controller(#[serde(with = "raw::one")] pub kvm_irqchip);

/// A processor.
#[derive(Debug, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the names are KVM's")]
pub struct VcpuState {
    #[serde(with = "raw::one")]
    pub mp_state: kvm_mp_state,
    #[serde(with = "raw::one")]
    pub regs: kvm_regs,
    #[serde(with = "raw::one")]
    pub sregs: kvm_sregs,
    #[serde(with = "raw::one")]
    pub xsave: kvm_xsave,
    #[serde(with = "raw::one")]
    pub xcrs: kvm_xcrs,
    #[serde(with = "raw::one")]
    pub debugregs: kvm_debugregs,
    #[serde(with = "raw::one")]
    pub lapic: kvm_lapic_state,
    /// Without the time stamp counter.
    #[serde(with = "raw::many")]
    pub msrs: Vec<kvm_msr_entry>,
    /// The time stamp counter.
    pub tsc: u64,
    /// Its frequency; 0 where KVM does not tell.
    pub tsc_khz: u32,
    #[serde(with = "raw::one")]
    pub events: kvm_vcpu_events,
}
