//! The MP table: which processors and interrupts the machine has, for a kernel without ACPI.
//!
//! Intel MultiProcessor Specification 1.4, chapter 4. Entries have to be in the order of their types.

use crate::layout;

/// Most processors of a machine: the table has to fit into one KiB, and the guest kernel is built for as many.
pub const MAX_VCPUS: u8 = 32;

/// Pins of the IO-APIC that KVM emulates (`KVM_IOAPIC_NUM_PINS`).
const IO_APIC_PINS: u8 = 24;

/// Version of the local APICs (`APIC_VERSION`, arch/x86/kvm/lapic.h).
const LOCAL_APIC_VERSION: u8 = 0x14;

/// Version of the IO-APIC (`IOAPIC_VERSION_ID`, arch/x86/kvm/ioapic.h).
const IO_APIC_VERSION: u8 = 0x11;

/// Destination of a local interrupt: all local APICs.
const ALL_LOCAL_APICS: u8 = 0xff;

/// Interrupt types.
const INTERRUPT_VECTORED: u8 = 0;
const INTERRUPT_NMI: u8 = 1;
const INTERRUPT_EXTINT: u8 = 3;

/// The floating pointer and the configuration table behind it, for [`layout::MP_TABLE`]. `vcpu_count` is at most
/// [`MAX_VCPUS`].
#[must_use]
pub fn build(vcpu_count: u8) -> Vec<u8> {
    let io_apic_id = vcpu_count;
    let mut entries = Vec::new();
    let mut entry_count: u16 = 0;
    let mut push = |entry: &[u8]| {
        entries.extend_from_slice(entry);
        entry_count += 1;
    };

    for id in 0..vcpu_count {
        // Enabled, and the first one is the boot processor. Signature and features: Linux asks CPUID instead.
        let flags = if id == 0 { 0b11 } else { 0b01 };
        let mut processor = [0; 20];
        processor[..4].copy_from_slice(&[0, id, LOCAL_APIC_VERSION, flags]);
        push(&processor);
    }
    push(b"\x01\x00ISA   ");
    let mut io_apic = [2, io_apic_id, IO_APIC_VERSION, 1, 0, 0, 0, 0];
    io_apic[4..].copy_from_slice(&layout::IO_APIC.to_le_bytes());
    push(&io_apic);
    for irq in 0..IO_APIC_PINS.min(16) {
        // Edge-triggered, active high, as the ISA bus is: devices give edges.
        push(&[3, INTERRUPT_VECTORED, 0, 0, 0, irq, io_apic_id, irq]);
    }
    push(&[4, INTERRUPT_EXTINT, 0, 0, 0, 0, ALL_LOCAL_APICS, 0]);
    push(&[4, INTERRUPT_NMI, 0, 0, 0, 0, ALL_LOCAL_APICS, 1]);

    let mut table = floating_pointer();
    let mut configuration = configuration_header(entries.len(), entry_count);
    configuration.extend_from_slice(&entries);
    seal(&mut configuration, 7);
    table.extend_from_slice(&configuration);
    table
}

fn floating_pointer() -> Vec<u8> {
    let mut pointer = Vec::from(*b"_MP_");
    // It lies below 1 MiB.
    let table = u32::try_from(layout::MP_TABLE).unwrap_or(0) + 16;
    pointer.extend_from_slice(&table.to_le_bytes());
    // Its length in 16 bytes, revision 1.4, checksum, and five feature bytes: a table is there, no IMCR.
    pointer.extend_from_slice(&[1, 4, 0, 0, 0, 0, 0, 0]);
    seal(&mut pointer, 10);
    pointer
}

fn configuration_header(entry_bytes: usize, entry_count: u16) -> Vec<u8> {
    let mut header = Vec::from(*b"PCMP");
    let bytes = u16::try_from(44 + entry_bytes).unwrap_or(u16::MAX);
    header.extend_from_slice(&bytes.to_le_bytes());
    header.extend_from_slice(&[4, 0]); // Revision 1.4, checksum.
    header.extend_from_slice(b"SANDVMM MICROVM     ");
    header.extend_from_slice(&[0; 6]); // No OEM table.
    header.extend_from_slice(&entry_count.to_le_bytes());
    header.extend_from_slice(&layout::LOCAL_APIC.to_le_bytes());
    header.extend_from_slice(&[0; 4]); // No extended table.
    header
}

/// Sets the byte at `checksum_at` so that all bytes add up to 0.
fn seal(bytes: &mut [u8], checksum_at: usize) {
    let sum = bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
    if let Some(checksum) = bytes.get_mut(checksum_at) {
        *checksum = sum.wrapping_neg();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(bytes: &[u8]) -> u8 {
        bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
    }

    #[test]
    fn every_table_fits_and_adds_up() {
        for vcpu_count in 1..=MAX_VCPUS {
            let table = build(vcpu_count);
            let (pointer, configuration) = table.split_at(16);
            let length = u16::from_le_bytes([configuration[4], configuration[5]]);

            assert!(table.len() <= layout::MAX_MP_TABLE_BYTES);
            assert_eq!(usize::from(length), configuration.len());
            assert_eq!((sum(pointer), sum(configuration)), (0, 0));
        }
    }

    #[test]
    fn entries_are_in_order_and_as_many_as_the_header_says() {
        let table = build(3);
        let configuration = &table[16..];
        let count = u16::from_le_bytes([configuration[34], configuration[35]]);
        let mut types = Vec::new();
        let mut rest = &configuration[44..];
        while let Some(&kind) = rest.first() {
            types.push(kind);
            rest = &rest[if kind == 0 { 20 } else { 8 }..];
        }

        assert_eq!(types.len(), usize::from(count));
        assert!(types.is_sorted());
        assert_eq!(types.iter().filter(|kind| **kind == 0).count(), 3);
    }
}
