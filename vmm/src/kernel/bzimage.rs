//! Checks of a bzImage, before the loader sees it.
//!
//! Field offsets and meanings: Linux, Documentation/arch/x86/boot.rst.

use linux_loader::loader::bootparam::{LOADED_HIGH, XLF_KERNEL_64};

use super::KernelError;
use super::image::Image;
use crate::layout;

/// First and last offset of the setup header that is read: up to `kernel_info_offset` of protocol 2.15.
const HEADER_OFFSET: u64 = 0x1f1;
const HEADER_BYTES: usize = 0x26c - 0x1f1;

/// "HdrS".
const MAGIC: u32 = 0x5372_6448;

/// Protocol 2.12 brought `xloadflags` (Linux 3.8).
const MIN_PROTOCOL: u16 = 0x020c;

/// Most 512-byte sectors of setup code behind the first: it has to end below 32 KiB (arch/x86/boot/setup.ld).
const MAX_SETUP_SECTORS: u8 = 63;

/// From where the kernel is loaded to its 64-bit entry.
const ENTRY_OFFSET: u64 = 0x200;

/// A bzImage that can be loaded.
#[derive(Debug, Clone, Copy)]
pub(super) struct CheckedBzImage {
    pub(super) load_address: u64,
    pub(super) entry: u64,
    pub(super) end: u64,
}

/// Checks everything that the loader will trust. Nothing may lie at or above `memory_end`.
pub(super) fn check(image: &Image, memory_end: u64) -> Result<CheckedBzImage, KernelError> {
    if image.len() < HEADER_OFFSET + HEADER_BYTES as u64 {
        return Err(KernelError::UnknownFormat);
    }
    let header = image.bytes_at::<HEADER_BYTES>(HEADER_OFFSET, "setup header")?;
    let bad = |field, value| KernelError::BadField { field, value };
    if u16_at(&header, 0x1fe) != 0xaa55 || u32_at(&header, 0x202) != MAGIC {
        return Err(KernelError::UnknownFormat);
    }
    if u16_at(&header, 0x206) < MIN_PROTOCOL
        || byte_at(&header, 0x211) & LOADED_HIGH == 0
        || u16_at(&header, 0x236) & XLF_KERNEL_64 == 0
    {
        return Err(KernelError::No64BitEntry);
    }
    let setup_sectors = byte_at(&header, 0x1f1);
    if setup_sectors == 0 || setup_sectors > MAX_SETUP_SECTORS {
        return Err(bad("setup_sects", setup_sectors.into()));
    }
    // The protected-mode code: what the header says must be there; the loader takes all that is.
    let setup_bytes = (u64::from(setup_sectors) + 1) * 512;
    let code_bytes = image
        .len()
        .checked_sub(setup_bytes)
        .ok_or(KernelError::Truncated("setup code"))?;
    if code_bytes <= ENTRY_OFFSET || code_bytes < u64::from(u32_at(&header, 0x1f4)) * 16 {
        return Err(KernelError::Truncated("compressed kernel"));
    }

    let load_address = u64_at(&header, 0x258);
    if load_address < layout::HIGH_MEMORY {
        return Err(KernelError::OverBootData {
            address: load_address,
        });
    }
    // `init_size` is what it needs from there on until it knows the memory map.
    let needed = u64::from(u32_at(&header, 0x260)).max(code_bytes);
    match load_address.checked_add(needed) {
        Some(end) if end <= memory_end => Ok(CheckedBzImage {
            load_address,
            entry: load_address + ENTRY_OFFSET,
            end,
        }),
        end => Err(KernelError::OutsideMemory {
            address: load_address,
            end: end.unwrap_or(u64::MAX),
            memory_end,
        }),
    }
}

fn byte_at(header: &[u8; HEADER_BYTES], offset: u64) -> u8 {
    u8::from_le_bytes(array_at(header, offset))
}

fn u16_at(header: &[u8; HEADER_BYTES], offset: u64) -> u16 {
    u16::from_le_bytes(array_at(header, offset))
}

fn u32_at(header: &[u8; HEADER_BYTES], offset: u64) -> u32 {
    u32::from_le_bytes(array_at(header, offset))
}

fn u64_at(header: &[u8; HEADER_BYTES], offset: u64) -> u64 {
    u64::from_le_bytes(array_at(header, offset))
}

/// By offset in the file, as the documentation names fields. All callers name one inside the header; zeros elsewhere.
fn array_at<const M: usize>(header: &[u8; HEADER_BYTES], offset: u64) -> [u8; M] {
    usize::try_from(offset - HEADER_OFFSET)
        .ok()
        .and_then(|at| header.get(at..))
        .and_then(|rest| rest.first_chunk::<M>())
        .copied()
        .unwrap_or([0; M])
}
