//! Loading a kernel and its initramfs: untrusted files into guest memory.
//!
//! linux-loader copies the bytes; before it may, the checks here have seen that every
//! offset is inside the file, that every address is inside the guest's memory, and that nothing lies over anything else. An image that
//! passes them can't make the loader fail, loop or write where it should not.

mod bzimage;
mod elf;
mod image;

use std::io;
use std::os::fd::OwnedFd;

use linux_loader::loader::bootparam::setup_header;
use linux_loader::loader::{self, KernelLoader};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use crate::layout;
use crate::snapshot::working_set::PAGE_BYTES;
use image::Image;

/// Largest kernel or initramfs in bytes; an ordinary distribution's are below 100 MiB.
pub const MAX_IMAGE_BYTES: u64 = 1 << 30;

/// Bytes behind the kernel's last segment that its initramfs does not lie in. A kernel reserves memory there while it starts (`extend_brk`,
/// `arch/x86/kernel/setup.c` of Linux), and not every linker makes that area (`.brk`) a part of a segment. It has 64 KiB, 64 KiB for DMI
/// (`asm/dmi.h`) and 96 KiB for page tables (`arch/x86/mm/init.c`) in kernels as distributions have them. Not more than that: an initramfs
/// that begins in the kernel's last huge page of the host mostly ends there, too.
pub const BEHIND_KERNEL_BYTES: u64 = 256 << 10;

/// Why a file is no kernel for this machine. Sentences about "it", the kernel file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// A folder, pipe, device.
    #[error("It is not a regular file")]
    NotARegularFile,
    /// No bytes.
    #[error("It is empty")]
    Empty,
    /// Above [`MAX_IMAGE_BYTES`].
    #[error("Its {bytes} bytes are above the bound of {MAX_IMAGE_BYTES} bytes")]
    TooLarge {
        /// Its size.
        bytes: u64,
    },
    /// Neither of the two formats.
    #[error("It is not an ELF (vmlinux) or bzImage kernel")]
    UnknownFormat,
    /// The file ends inside something.
    #[error("It ends inside its {0}: it is cut short or damaged")]
    Truncated(&'static str),
    /// A 32-bit or big-endian file, or one for another processor.
    #[error("It is not for 64-bit x86 processors")]
    OtherArchitecture,
    /// A header field has a value that no kernel has.
    #[error("Its {field} is {value:#x}, which no kernel has: it is damaged")]
    BadField {
        /// Which field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// It would lie over the zero page, the command line, the page tables or the MP table.
    #[error(
        "It would be loaded at {address:#x}, below 1 MiB, where the machine keeps what the kernel is started with"
    )]
    OverBootData {
        /// Where it would begin.
        address: u64,
    },
    /// It needs addresses that are not RAM.
    #[error(
        "It needs the memory from {address:#x} to {end:#x}, but the machine's ends at {memory_end:#x}: give it more memory"
    )]
    OutsideMemory {
        /// Where it would begin.
        address: u64,
        /// First address that it does not need.
        end: u64,
        /// First address without memory.
        memory_end: u64,
    },
    /// Two segments share an address.
    #[error("Two of its segments overlap at {address:#x}")]
    SegmentsOverlap {
        /// Where the second begins.
        address: u64,
    },
    /// Execution would begin where nothing was loaded.
    #[error("Its entry point {entry:#x} is in none of its segments")]
    EntryOutside {
        /// The entry point.
        entry: u64,
    },
    /// It can't be entered in 64-bit mode, or is of before Linux 3.8.
    #[error("It lacks the 64-bit entry point that Linux has had since 3.8 (CONFIG_X86_64)")]
    No64BitEntry,
    /// The note that names the PVH entry is nonsense.
    #[error("Its PVH note has the wrong size or alignment: it is damaged")]
    BadPvhNote,
    /// The system's failure.
    #[error("It could not be read")]
    Read(#[source] io::Error),
    /// The loader's failure, after all checks: the file was changed meanwhile.
    #[error("It could not be loaded")]
    Load(#[source] loader::Error),
}

/// Why a file is no initramfs for this machine. Sentences about "it", the initramfs file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InitramfsError {
    /// A folder, pipe, device.
    #[error("It is not a regular file")]
    NotARegularFile,
    /// No bytes.
    #[error("It is empty")]
    Empty,
    /// It does not fit behind the kernel.
    #[error(
        "Its {bytes} bytes do not fit into the memory between the kernel's end at {kernel_end:#x} and {memory_end:#x}: give the machine more memory"
    )]
    DoesNotFit {
        /// Its size.
        bytes: u64,
        /// First address that the kernel leaves free.
        kernel_end: u64,
        /// First address that an initramfs may not use.
        memory_end: u64,
    },
    /// The system's failure.
    #[error("It could not be read")]
    Read(#[source] io::Error),
}

/// A kernel in guest memory.
#[derive(Debug, Clone, Copy)]
pub struct Kernel {
    /// Where the boot processor begins, in 64-bit mode.
    pub entry: u64,
    /// First address that the kernel does not need while it starts.
    pub end: u64,
    /// A bzImage's own setup header; an ELF has none.
    pub setup_header: Option<setup_header>,
}

/// An initramfs in guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Initramfs {
    /// Its first byte.
    pub address: u32,
    /// How many.
    pub bytes: u32,
}

/// Checks and loads a kernel.
///
/// # Errors
/// See [`KernelError`]. Guest memory may have been written.
pub fn load(file: OwnedFd, memory: &GuestMemoryMmap) -> Result<Kernel, KernelError> {
    let mut image = Image::new(file).map_err(|error| match error {
        image::ImageError::NotARegularFile => KernelError::NotARegularFile,
        image::ImageError::Inspect(source) => KernelError::Read(source),
    })?;
    match image.len() {
        0 => return Err(KernelError::Empty),
        bytes if bytes > MAX_IMAGE_BYTES => return Err(KernelError::TooLarge { bytes }),
        _ => {}
    }
    let memory_end = low_memory_end(memory);
    if elf::is_elf(&image)? {
        let checked = elf::check(&image, memory_end.min(layout::IDENTITY_MAPPED_BYTES))?;
        loader::Elf::load(memory, None, &mut image, None).map_err(KernelError::Load)?;
        Ok(Kernel {
            entry: checked.entry,
            end: checked.end,
            setup_header: None,
        })
    } else {
        let checked = bzimage::check(&image, memory_end.min(layout::IDENTITY_MAPPED_BYTES))?;
        let address = GuestAddress(checked.load_address);
        let loaded = loader::BzImage::load(memory, Some(address), &mut image, None)
            .map_err(KernelError::Load)?;
        Ok(Kernel {
            entry: checked.entry,
            end: checked.end,
            setup_header: loaded.setup_header,
        })
    }
}

/// Loads an initramfs behind the kernel, [`BEHIND_KERNEL_BYTES`] after its end.
///
/// The last pages that a kernel needs and the first of its initramfs share a huge page of the host then, which is cleared once for both.
///
/// # Errors
/// See [`InitramfsError`]. Guest memory may have been written.
pub fn load_initramfs(
    file: OwnedFd,
    memory: &GuestMemoryMmap,
    kernel: &Kernel,
) -> Result<Initramfs, InitramfsError> {
    let mut image = Image::new(file).map_err(|error| match error {
        image::ImageError::NotARegularFile => InitramfsError::NotARegularFile,
        image::ImageError::Inspect(source) => InitramfsError::Read(source),
    })?;
    let bytes = image.len();
    if bytes == 0 {
        return Err(InitramfsError::Empty);
    }
    let limit = kernel.setup_header.map_or(u64::MAX, |header| {
        u64::from(header.initrd_addr_max).saturating_add(1)
    });
    let memory_end = low_memory_end(memory).min(limit);
    let kernel_end = kernel.end.saturating_add(BEHIND_KERNEL_BYTES);
    let does_not_fit = InitramfsError::DoesNotFit {
        bytes,
        kernel_end,
        memory_end,
    };
    // Page-aligned, so that the kernel can give its pages back.
    let address = match kernel_end.checked_next_multiple_of(PAGE_BYTES) {
        Some(address)
            if address
                .checked_add(bytes)
                .is_some_and(|end| end <= memory_end) =>
        {
            address
        }
        _ => return Err(does_not_fit),
    };
    let (Ok(address), Ok(size)) = (u32::try_from(address), u32::try_from(bytes)) else {
        return Err(does_not_fit);
    };
    memory
        .read_exact_volatile_from(GuestAddress(address.into()), &mut image, size as usize)
        .map_err(|error| InitramfsError::Read(io::Error::other(error)))?;
    Ok(Initramfs {
        address,
        bytes: size,
    })
}

/// First address behind the RAM below the hole.
fn low_memory_end(memory: &GuestMemoryMmap) -> u64 {
    memory
        .find_region(GuestAddress(0))
        .map_or(0, GuestMemoryRegion::len)
}

#[cfg(test)]
mod tests;
