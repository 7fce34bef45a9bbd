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
fn an_elf_kernel_is_loaded_where_it_says() {
    let memory = memory::map(MEMORY_MIB).unwrap();

    let kernel = load(file(&good_elf()), &memory).unwrap();

    assert_eq!((kernel.entry, kernel.end), (0x10_0010, 0x10_3000));
    assert_eq!(
        memory.read_obj::<u8>(GuestAddress(0x10_0fff)).unwrap(),
        0x90
    );
    assert_eq!(memory.read_obj::<u8>(GuestAddress(0x10_1000)).unwrap(), 0);
}

#[test]
fn a_bzimage_is_loaded_where_it_prefers() {
    let memory = memory::map(MEMORY_MIB).unwrap();
    let mut image = good_bzimage();
    let last = image.len() - 1;
    image[last] = 7;

    let kernel = load(file(&image), &memory).unwrap();

    assert_eq!((kernel.entry, kernel.end), (0x100_0200, 0x110_0000));
    assert_eq!(memory.read_obj::<u8>(GuestAddress(0x100_07ff)).unwrap(), 7);
    assert!(kernel.setup_header.is_some());
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

#[test]
fn test_load_cut_elf_returns_truncated() {
    let image = good_elf();
    for len in [4, 63, 64, 64 + 55, 0x1000, 0x1fff] {
        assert!(
            matches!(load_bytes(&image[..len]), Err(KernelError::Truncated(_))),
            "{len}"
        );
    }
}

#[test]
fn test_load_elf_with_offsets_past_the_end_returns_truncated() {
    for offset in [0x1001, u64::MAX, u64::MAX - 0x1000 + 1, 1 << 63] {
        let mut table = good_elf();
        put(&mut table, 32, &offset.max(0x2000).to_le_bytes());
        assert!(matches!(load_bytes(&table), Err(KernelError::Truncated(_))));

        let segment = Header {
            offset,
            ..Header::load(0x10_0000, 0x3000)
        };
        assert!(matches!(
            load_bytes(&elf(&[segment])),
            Err(KernelError::Truncated(_))
        ));
    }
}

#[test]
fn test_load_elf_with_bad_table_fields_returns_bad_field() {
    for (at, value, name) in [
        (54, 55u16, "e_phentsize"),
        (54, 0, "e_phentsize"),
        (56, 0, "e_phnum"),
        (56, 65535, "e_phnum"),
        (32, 8, "e_phoff"),
    ] {
        let mut image = good_elf();
        put(&mut image, at, &value.to_le_bytes());
        assert!(
            matches!(load_bytes(&image), Err(KernelError::BadField { field, .. }) if field == name),
            "{name} {value}"
        );
    }
}

#[test]
fn test_load_elf_of_another_machine_returns_other_architecture() {
    for (at, value) in [(4, 1u8), (5, 2), (18, 183), (18, 3)] {
        let mut image = good_elf();
        image[at] = value;
        assert!(matches!(
            load_bytes(&image),
            Err(KernelError::OtherArchitecture)
        ));
    }
}

#[test]
fn test_load_elf_over_boot_data_returns_over_boot_data() {
    for address in [
        0,
        layout::ZERO_PAGE,
        layout::CMDLINE,
        layout::PML4,
        0xf_f000,
    ] {
        assert!(matches!(
            load_bytes(&elf(&[Header::load(address, 0x1000)])),
            Err(KernelError::OverBootData { .. })
        ));
    }
}

#[test]
fn test_load_elf_outside_memory_returns_outside_memory() {
    for (address, bytes) in [
        (MEMORY_END - 0x1000, 0x1001),
        (MEMORY_END, 0x1000),
        (0x10_0000, u64::MAX),
        (u64::MAX - 0xfff, 0x1000),
        (layout::HOLE_START, 0x1000),
        (layout::HOLE_END, 0x1000),
    ] {
        assert!(matches!(
            load_bytes(&elf(&[Header::load(address, bytes)])),
            Err(KernelError::OutsideMemory { .. })
        ));
    }
}

#[test]
fn test_load_elf_with_overlapping_segments_returns_segments_overlap() {
    for address in [0x10_0000, 0x10_2fff] {
        let image = elf(&[
            Header::load(0x10_0000, 0x3000),
            Header::load(address, 0x1000),
        ]);
        assert!(matches!(
            load_bytes(&image),
            Err(KernelError::SegmentsOverlap { .. })
        ));
    }
    let beside = elf(&[
        Header::load(0x10_0000, 0x3000),
        Header::load(0x10_3000, 0x1000),
    ]);
    load_bytes(&beside).unwrap();
}

#[test]
fn test_load_elf_with_more_in_the_file_than_in_memory_returns_bad_field() {
    let image = elf(&[Header::load(0x10_0000, 0xfff)]);

    assert!(matches!(
        load_bytes(&image),
        Err(KernelError::BadField {
            field: "p_filesz",
            ..
        })
    ));
}

#[test]
fn test_load_elf_with_entry_outside_returns_entry_outside() {
    for entry in [0, 0xf_ffff, 0x10_1000, u64::MAX] {
        let mut image = good_elf();
        put(&mut image, 24, &entry.to_le_bytes());
        assert!(matches!(
            load_bytes(&image),
            Err(KernelError::EntryOutside { .. })
        ));
    }
}

fn elf_with_note(sizes: [u32; 2], note_bytes: u64, alignment: u64) -> Vec<u8> {
    let note = Header {
        alignment,
        ..Header::note(0x800, note_bytes)
    };
    let mut image = elf(&[Header::load(0x10_0000, 0x3000), note]);
    put(&mut image, 0x800, &sizes[0].to_le_bytes());
    put(&mut image, 0x804, &sizes[1].to_le_bytes());
    put(&mut image, 0x808, &18u32.to_le_bytes());
    put(&mut image, 0x80c, b"Xen\0");
    image
}

#[test]
fn a_good_pvh_note_is_no_reason_to_refuse() {
    load_bytes(&elf_with_note([4, 4], 20, 4)).unwrap();
    load_bytes(&elf_with_note([4, 8], 24, 4)).unwrap();
}

#[test]
fn test_load_elf_with_bad_pvh_note_returns_named_error() {
    for (sizes, bytes, alignment) in [
        ([4, 0], 16, 4),
        ([4, 3], 20, 4),
        ([4, 16], 32, 4),
        ([4, u32::MAX], 20, 4),
        ([4, 4], 20, 0x1000),
        ([4, 4], 1 << 40, 4),
    ] {
        let result = load_bytes(&elf_with_note(sizes, bytes, alignment));
        assert!(matches!(result, Err(KernelError::BadPvhNote)), "{result:?}");
    }
    for (sizes, bytes) in [([u32::MAX, 4], 20), ([4, 4], 13), ([4, 8], 20)] {
        let result = load_bytes(&elf_with_note(sizes, bytes, 4));
        assert!(
            matches!(result, Err(KernelError::Truncated(_))),
            "{result:?}"
        );
    }
}

#[test]
fn test_load_bzimage_with_bad_setup_size_returns_named_error() {
    for sectors in [0, 64, 255] {
        let mut image = good_bzimage();
        image[0x1f1] = sectors;
        assert!(matches!(
            load_bytes(&image),
            Err(KernelError::BadField {
                field: "setup_sects",
                ..
            })
        ));
    }
    let mut image = good_bzimage();
    image[0x1f1] = 60;
    assert!(matches!(load_bytes(&image), Err(KernelError::Truncated(_))));
}

#[test]
fn test_load_bzimage_without_magic_returns_unknown_format() {
    for at in [0x1fe, 0x202] {
        let mut image = good_bzimage();
        image[at] ^= 1;
        assert!(matches!(
            load_bytes(&image),
            Err(KernelError::UnknownFormat)
        ));
    }
}

#[test]
fn test_load_bzimage_without_64_bit_entry_returns_no_64_bit_entry() {
    for (at, value) in [(0x206, 0x0b), (0x211, 0), (0x236, 0)] {
        let mut image = good_bzimage();
        image[at] = value;
        assert!(matches!(load_bytes(&image), Err(KernelError::No64BitEntry)));
    }
}

#[test]
fn test_load_bzimage_that_does_not_fit_returns_outside_memory() {
    for (at, value) in [
        (0x260, u64::from(u32::MAX)),
        (0x258, u64::MAX),
        (0x258, MEMORY_END),
        (0x258, layout::HOLE_END),
    ] {
        let mut image = good_bzimage();
        let bytes = if at == 0x260 { 4 } else { 8 };
        put(&mut image, at, &value.to_le_bytes()[..bytes]);
        assert!(matches!(
            load_bytes(&image),
            Err(KernelError::OutsideMemory { .. })
        ));
    }
}

#[test]
fn test_load_bzimage_over_boot_data_returns_over_boot_data() {
    let mut image = good_bzimage();
    put(&mut image, 0x258, &0x7000u64.to_le_bytes());

    assert!(matches!(
        load_bytes(&image),
        Err(KernelError::OverBootData { .. })
    ));
}

#[test]
fn test_load_cut_bzimage_returns_truncated() {
    let image = good_bzimage();

    assert!(matches!(
        load_bytes(&image[..image.len() - 1]),
        Err(KernelError::Truncated(_))
    ));
}

fn load_initramfs_bytes(bytes: &[u8]) -> Result<Initramfs, InitramfsError> {
    let memory = memory::map(MEMORY_MIB).unwrap();
    let kernel = load(file(&good_elf()), &memory).unwrap();
    load_initramfs(file(bytes), &memory, &kernel)
}

#[test]
fn an_initramfs_lies_behind_the_kernel_and_what_that_reserves() {
    let memory = memory::map(MEMORY_MIB).unwrap();
    let kernel = load(file(&good_elf()), &memory).unwrap();
    // Ends within a page.
    let kernel = Kernel {
        end: kernel.end - 5,
        ..kernel
    };

    let initramfs = load_initramfs(file(&[7; 5000]), &memory, &kernel).unwrap();

    assert_eq!(u64::from(initramfs.address), kernel.end + 5 + (256 << 10));
    assert_eq!(initramfs.bytes, 5000);
}

#[test]
fn test_load_initramfs_invalid_file_returns_named_error() {
    let memory = memory::map(MEMORY_MIB).unwrap();
    let kernel = load(file(&good_elf()), &memory).unwrap();
    let sized = |bytes: u64| {
        let file = file(b"");
        rustix::fs::ftruncate(&file, bytes).unwrap();
        load_initramfs(file, &memory, &kernel)
    };

    assert!(matches!(
        load_initramfs_bytes(b""),
        Err(InitramfsError::Empty)
    ));
    // One byte more than there is behind the kernel; as much as the memory; more than any address.
    let room = MEMORY_END - kernel.end - BEHIND_KERNEL_BYTES;
    for bytes in [room + 1, MEMORY_END, 1 << 40] {
        assert!(matches!(
            sized(bytes),
            Err(InitramfsError::DoesNotFit { .. })
        ));
    }
    sized(room).unwrap();
    let (reader, _writer) = rustix::pipe::pipe().unwrap();
    assert!(matches!(
        load_initramfs(reader, &memory, &kernel),
        Err(InitramfsError::NotARegularFile)
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
