//! What a kernel finds in memory when it begins: Linux's 64-bit boot protocol.
//!
//! Documentation/arch/x86/boot.rst, "64-bit Boot Protocol", and zero-page.rst.

use linux_loader::loader::bootparam::{SETUP_RNG_SEED, boot_e820_entry, boot_params, setup_header};
use vm_memory::{
    Address, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryError, GuestMemoryMmap,
    GuestMemoryRegion,
};

use crate::kernel::{Initramfs, Kernel};
use crate::{layout, mptable};

/// Type of ordinary RAM in the memory map.
const E820_RAM: u32 = 1;

/// Loader type "undefined": none of those that boot.rst lists.
const LOADER_UNDEFINED: u8 = 0xff;

/// Page table flags: present, writable (Intel SDM 3A §4.5).
const PAGE_PRESENT_WRITABLE: u64 = 0b11;

/// Page table flag: this is a 2 MiB page.
const PAGE_LARGE: u64 = 1 << 7;

/// Bytes of a large page.
const LARGE_PAGE_BYTES: u64 = 2 << 20;

/// The descriptors of the boot GDT. Linux wants `__BOOT_CS` at 0x10 and `__BOOT_DS` at 0x18: flat, 64-bit code that may be
/// executed and read, and data that may be read and written.
pub const BOOT_GDT: [u64; 4] = [0, 0, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff];

/// What the kernel is told.
#[derive(Debug)]
pub struct BootInfo<'a> {
    /// The loaded kernel.
    pub kernel: &'a Kernel,
    /// The loaded initramfs.
    pub initramfs: Option<Initramfs>,
    /// The whole command line: [`layout::MAX_CMDLINE_BYTES`] with its zero at most.
    pub cmdline: &'a str,
    /// For the kernel's random number generator.
    pub rng_seed: &'a [u8; 32],
    /// How many processors there are.
    pub vcpu_count: u8,
}

/// Writes all of it.
///
/// # Errors
/// When the memory has no RAM where [`layout`] says: it is smaller than a MiB.
pub fn write(memory: &GuestMemoryMmap, info: &BootInfo<'_>) -> Result<(), GuestMemoryError> {
    write_gdt_and_page_tables(memory)?;
    memory.write_slice(info.cmdline.as_bytes(), GuestAddress(layout::CMDLINE))?;
    memory.write_slice(
        &mptable::build(info.vcpu_count),
        GuestAddress(layout::MP_TABLE),
    )?;
    memory.write_slice(&setup_data(info.rng_seed), GuestAddress(layout::SETUP_DATA))?;
    memory.write_obj(zero_page(memory, info), GuestAddress(layout::ZERO_PAGE))
}

fn write_gdt_and_page_tables(memory: &GuestMemoryMmap) -> Result<(), GuestMemoryError> {
    memory.write_slice(&little_endian(BOOT_GDT), GuestAddress(layout::BOOT_GDT))?;
    memory.write_obj(
        layout::PDPT | PAGE_PRESENT_WRITABLE,
        GuestAddress(layout::PML4),
    )?;
    memory.write_obj(
        layout::PAGE_DIRECTORY | PAGE_PRESENT_WRITABLE,
        GuestAddress(layout::PDPT),
    )?;
    let pages = (0..layout::IDENTITY_MAPPED_BYTES / LARGE_PAGE_BYTES)
        .map(|page| (page * LARGE_PAGE_BYTES) | PAGE_LARGE | PAGE_PRESENT_WRITABLE);
    memory.write_slice(&little_endian(pages), GuestAddress(layout::PAGE_DIRECTORY))
}

fn little_endian(words: impl IntoIterator<Item = u64>) -> Vec<u8> {
    words.into_iter().flat_map(u64::to_le_bytes).collect()
}

/// One `struct setup_data` node with the seed; the kernel wipes it once it has read it.
fn setup_data(rng_seed: &[u8; 32]) -> Vec<u8> {
    let mut node = Vec::with_capacity(48);
    node.extend_from_slice(&0u64.to_le_bytes()); // No next node.
    node.extend_from_slice(&SETUP_RNG_SEED.to_le_bytes());
    node.extend_from_slice(&32u32.to_le_bytes());
    node.extend_from_slice(rng_seed);
    node
}

fn zero_page(memory: &GuestMemoryMmap, info: &BootInfo<'_>) -> boot_params {
    let mut params = boot_params {
        hdr: info.kernel.setup_header.unwrap_or_else(elf_header),
        ..boot_params::default()
    };
    params.hdr.type_of_loader = LOADER_UNDEFINED;
    // All addresses of the layout are below 4 GiB, and the command line's length was checked.
    params.hdr.cmd_line_ptr = u32::try_from(layout::CMDLINE).unwrap_or(0);
    params.hdr.cmdline_size = u32::try_from(info.cmdline.len()).unwrap_or(0);
    params.hdr.setup_data = layout::SETUP_DATA;
    if let Some(initramfs) = info.initramfs {
        params.hdr.ramdisk_image = initramfs.address;
        params.hdr.ramdisk_size = initramfs.bytes;
    }

    let mut entries = 0;
    for (slot, (addr, size)) in params.e820_table.iter_mut().zip(usable_ram(memory)) {
        *slot = boot_e820_entry {
            addr,
            size,
            r#type: E820_RAM,
        };
        entries += 1;
    }
    params.e820_entries = entries;
    params
}

/// What an ELF kernel's own boot code would find in a bzImage's header.
fn elf_header() -> setup_header {
    setup_header {
        boot_flag: 0xaa55,
        header: 0x5372_6448, // "HdrS"
        kernel_alignment: 0x0100_0000,
        ..setup_header::default()
    }
}

/// `(first address, bytes)` of all RAM that the kernel may use: without the part of the first MiB from the MP table on, where a PC has
/// its firmware.
fn usable_ram(memory: &GuestMemoryMmap) -> Vec<(u64, u64)> {
    let mut ranges = vec![(0, layout::MP_TABLE)];
    for region in memory.iter() {
        let start = region.start_addr().raw_value().max(layout::HIGH_MEMORY);
        let end = region.start_addr().raw_value() + region.len();
        ranges.push((start, end.saturating_sub(start)));
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel() -> Kernel {
        Kernel {
            entry: 0x10_0000,
            end: 0x20_0000,
            setup_header: None,
        }
    }

    fn write_for_test(memory_mib: u32) -> GuestMemoryMmap {
        let memory = crate::memory::map(memory_mib).unwrap();
        let info = BootInfo {
            kernel: &kernel(),
            initramfs: Some(Initramfs {
                address: 0x1ff_0000,
                bytes: 77,
            }),
            cmdline: "panic=-1 quiet",
            rng_seed: &[7; 32],
            vcpu_count: 2,
        };
        write(&memory, &info).unwrap();
        memory
    }

    #[test]
    fn the_zero_page_points_to_everything() {
        let memory = write_for_test(64);

        let params: boot_params = memory.read_obj(GuestAddress(layout::ZERO_PAGE)).unwrap();
        let header = params.hdr;
        let mut seed = [0; 32];
        memory
            .read_slice(&mut seed, GuestAddress(header.setup_data + 16))
            .unwrap();
        let mut cmdline = [0; 15];
        memory
            .read_slice(&mut cmdline, GuestAddress(header.cmd_line_ptr.into()))
            .unwrap();

        assert_eq!({ header.header }, 0x5372_6448);
        assert_eq!(
            ({ header.ramdisk_image }, { header.ramdisk_size }),
            (0x1ff_0000, 77)
        );
        assert_eq!(&cmdline, b"panic=-1 quiet\0");
        assert_eq!(seed, [7; 32]);
    }

    #[test]
    fn the_memory_map_has_the_first_640_kib_and_what_is_above_a_mib() {
        let map = |memory: &GuestMemoryMmap| -> Vec<(u64, u64)> {
            let params: boot_params = memory.read_obj(GuestAddress(layout::ZERO_PAGE)).unwrap();
            params.e820_table[..usize::from(params.e820_entries)]
                .iter()
                .map(|entry| (entry.addr, entry.size))
                .collect()
        };

        assert_eq!(
            map(&write_for_test(64)),
            [(0, 0x9_fc00), (0x10_0000, 63 << 20)]
        );
        assert_eq!(
            map(&write_for_test(4096)),
            [
                (0, 0x9_fc00),
                (0x10_0000, 0xbff0_0000),
                (0x1_0000_0000, 1 << 30)
            ]
        );
    }

    #[test]
    fn page_tables_map_the_first_gib_one_to_one() {
        let memory = write_for_test(64);
        let read = |address| memory.read_obj::<u64>(GuestAddress(address)).unwrap();

        assert_eq!(
            read(read(layout::PML4) & !0xfff),
            layout::PAGE_DIRECTORY | 3
        );
        assert_eq!(read(layout::PAGE_DIRECTORY), 0x83);
        assert_eq!(read(layout::PAGE_DIRECTORY + 511 * 8), (511 << 21) | 0x83);
    }
}
