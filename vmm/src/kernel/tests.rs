//! Kernels and initramfs that are loaded, and those that are refused.

mod bzimage;
mod elf;
mod initramfs;

use std::fs::File;
use std::io::Write;

use proptest::prelude::*;
use vm_memory::Bytes;

use super::*;
use crate::memory;

/// Memory of the machines in these tests.
const MEMORY_MIB: u32 = 32;
const MEMORY_END: u64 = 32 << 20;

fn file(bytes: &[u8]) -> OwnedFd {
    let file = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    File::from(file.try_clone().unwrap())
        .write_all(bytes)
        .unwrap();
    file
}

fn load_bytes(bytes: &[u8]) -> Result<Kernel, KernelError> {
    load(file(bytes), &memory::map(MEMORY_MIB).unwrap())
}

fn put(bytes: &mut [u8], at: usize, field: &[u8]) {
    bytes[at..at + field.len()].copy_from_slice(field);
}

/// One program header to be.
struct Header {
    kind: u32,
    offset: u64,
    address: u64,
    file_bytes: u64,
    memory_bytes: u64,
    alignment: u64,
}

impl Header {
    fn load(address: u64, memory_bytes: u64) -> Self {
        Self {
            kind: 1,
            offset: 0x1000,
            address,
            file_bytes: 0x1000,
            memory_bytes,
            alignment: 0x1000,
        }
    }

    fn note(offset: u64, bytes: u64) -> Self {
        Self {
            kind: 4,
            offset,
            address: 0,
            file_bytes: bytes,
            memory_bytes: bytes,
            alignment: 4,
        }
    }
}

/// A vmlinux of 8 KiB with these program headers, entered at 1 MiB + 0x10.
fn elf(headers: &[Header]) -> Vec<u8> {
    let mut image = vec![0x90; 0x2000];
    image[..0x1000].fill(0);
    put(&mut image, 0, b"\x7fELF\x02\x01\x01");
    put(&mut image, 16, &[2, 0, 62, 0, 1]);
    put(&mut image, 24, &0x10_0010u64.to_le_bytes());
    put(&mut image, 32, &64u64.to_le_bytes());
    put(&mut image, 54, &56u16.to_le_bytes());
    put(
        &mut image,
        56,
        &u16::try_from(headers.len()).unwrap().to_le_bytes(),
    );
    for (index, header) in headers.iter().enumerate() {
        let at = 64 + index * 56;
        put(&mut image, at, &header.kind.to_le_bytes());
        for (field, value) in [
            (8, header.offset),
            (24, header.address),
            (32, header.file_bytes),
            (40, header.memory_bytes),
            (48, header.alignment),
        ] {
            put(&mut image, at + field, &value.to_le_bytes());
        }
    }
    image
}

fn good_elf() -> Vec<u8> {
    elf(&[Header::load(0x10_0000, 0x3000)])
}

/// A bzImage of two setup sectors and 2 KiB of code, protocol 2.15, to be run at 16 MiB.
fn good_bzimage() -> Vec<u8> {
    let mut image = vec![0; 512 * 3 + 2048];
    put(&mut image, 0x1f1, &[2]);
    put(&mut image, 0x1f4, &128u32.to_le_bytes());
    put(&mut image, 0x1fe, &[0x55, 0xaa]);
    put(&mut image, 0x202, b"HdrS");
    put(&mut image, 0x206, &0x020fu16.to_le_bytes());
    put(&mut image, 0x211, &[1]);
    put(&mut image, 0x22c, &0x7fff_ffffu32.to_le_bytes());
    put(&mut image, 0x236, &1u16.to_le_bytes());
    put(&mut image, 0x258, &0x100_0000u64.to_le_bytes());
    put(&mut image, 0x260, &0x10_0000u32.to_le_bytes());
    image
}

#[test]
fn a_position_of_the_descriptor_does_not_matter() {
    let kernel = file(&good_elf());
    rustix::fs::seek(&kernel, rustix::fs::SeekFrom::Start(100)).unwrap();
    let shared = kernel.try_clone().unwrap();

    load(kernel, &memory::map(MEMORY_MIB).unwrap()).unwrap();

    assert_eq!(rustix::fs::tell(&shared).unwrap(), 100);
}

#[test]
fn test_load_of_no_kernel_returns_what_it_is() {
    assert!(matches!(load_bytes(b""), Err(KernelError::Empty)));
    assert!(matches!(
        load_bytes(b"\x7fEL"),
        Err(KernelError::UnknownFormat)
    ));
    assert!(matches!(
        load_bytes(b"#!/bin/sh\n"),
        Err(KernelError::UnknownFormat)
    ));
    assert!(matches!(
        load_bytes(&[0; 4096]),
        Err(KernelError::UnknownFormat)
    ));
}

#[test]
fn test_load_not_a_regular_file_returns_not_a_regular_file_and_does_not_block() {
    let (reader, _writer) = rustix::pipe::pipe().unwrap();
    let folder = File::open("/").unwrap();
    let device = File::open("/dev/zero").unwrap();

    for descriptor in [reader, folder.into(), device.into()] {
        assert!(matches!(
            load(descriptor, &memory::map(MEMORY_MIB).unwrap()),
            Err(KernelError::NotARegularFile)
        ));
    }
}

#[test]
fn test_load_huge_file_returns_too_large() {
    let file = file(b"\x7fELF");
    rustix::fs::ftruncate(&file, MAX_IMAGE_BYTES + 1).unwrap();

    assert!(matches!(
        load(file, &memory::map(MEMORY_MIB).unwrap()),
        Err(KernelError::TooLarge { .. })
    ));
}

proptest! {
    #[test]
    fn any_bytes_are_a_kernel_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..4096)) {
        let _ = load_bytes(&bytes);
    }

    #[test]
    fn what_is_left_of_a_mutated_kernel_stays_inside_memory(
        is_elf in any::<bool>(),
        changes in proptest::collection::vec((0usize..0x300, any::<u8>()), 1..6),
        len in 0usize..0x2000,
        cuts in any::<bool>(),
    ) {
        let mut image = if is_elf {
            elf(&[Header::load(0x10_0000, 0x3000), Header::note(0x800, 20)])
        } else {
            good_bzimage()
        };
        for (at, value) in changes {
            image[at] = value;
        }
        if cuts {
            image.truncate(len);
        }
        match load_bytes(&image) {
            Ok(kernel) => {
                prop_assert!(kernel.end <= MEMORY_END);
                prop_assert!((layout::HIGH_MEMORY..kernel.end).contains(&kernel.entry));
            }
            // What the checks let through, the loader must be able to load.
            Err(error) => prop_assert!(!matches!(error, KernelError::Load(_)), "{error:?}"),
        }
    }
}
