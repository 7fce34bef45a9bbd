//! Whether the processor below is QEMU's translator, whose nested virtualization has faults of its own.

use std::arch::x86_64::__cpuid;

/// First leaf of what a hypervisor says of itself, and its name there (QEMU, `target/i386/cpu.c`, `TCGTCGTCGTCG`).
const HYPERVISOR_LEAF: u32 = 0x4000_0000;
const NAME: &[u8] = b"TCGTCGTCGTCG";

/// CPUID 1, ECX bit 31: there is a hypervisor, and so that leaf.
const HAS_HYPERVISOR: u32 = 1 << 31;

pub(crate) fn is_here() -> bool {
    if __cpuid(1).ecx & HAS_HYPERVISOR == 0 {
        return false;
    }
    let said = __cpuid(HYPERVISOR_LEAF);
    [said.ebx, said.ecx, said.edx]
        .map(u32::to_le_bytes)
        .concat()
        .as_slice()
        == NAME
}
