//! The file that a guest is booted from.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

/// Where the code is loaded and entered.
pub(crate) const CODE: u64 = 0x10_0000;

/// A page directory for the addresses from 3 to 4 GiB, which the boot page tables leave out: guest code that wants the virtio devices
/// writes its address into the directory pointer table.
const HIGH_PAGE_DIRECTORY: u64 = 0x20_0000;

/// An anonymous file with these bytes.
pub(crate) fn file(bytes: &[u8]) -> OwnedFd {
    let file = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    File::from(file.try_clone().unwrap())
        .write_all_at(bytes, 0)
        .unwrap();
    file
}

/// The smallest ELF kernel: `code`, the page directory, and whatever else shall be in memory, as `(address, bytes)`.
pub(crate) fn elf(code: &[u8], data: &[(u64, Vec<u8>)]) -> Vec<u8> {
    const PAGE: usize = 0x1000;
    let directory: Vec<u8> = (0..512u64)
        .flat_map(|page| ((0xc000_0000 + (page << 21)) | 0x83).to_le_bytes())
        .collect();
    let mut segments = vec![(CODE, code.to_vec()), (HIGH_PAGE_DIRECTORY, directory)];
    segments.extend_from_slice(data);

    let mut elf = Vec::from(*b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    elf.extend_from_slice(&[2, 0, 62, 0, 1, 0, 0, 0]);
    elf.extend_from_slice(&CODE.to_le_bytes());
    elf.extend_from_slice(&64u64.to_le_bytes()); // e_phoff
    elf.extend_from_slice(&[0; 12]);
    let count = u16::try_from(segments.len()).unwrap();
    for half in [64u16, 56, count, 0, 0, 0] {
        elf.extend_from_slice(&half.to_le_bytes());
    }
    let mut offset = PAGE;
    for (address, bytes) in &segments {
        let len = bytes.len() as u64;
        elf.extend_from_slice(&[1, 0, 0, 0, 7, 0, 0, 0]);
        for word in [offset as u64, *address, *address, len, len, PAGE as u64] {
            elf.extend_from_slice(&word.to_le_bytes());
        }
        offset += bytes.len().next_multiple_of(PAGE);
    }
    for (_, bytes) in &segments {
        elf.resize(elf.len().next_multiple_of(PAGE), 0);
        elf.extend_from_slice(bytes);
    }
    elf
}
