//! A kernel in ELF, a vmlinux.

use super::*;

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
