//! A kernel as a bzImage.

use super::*;

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
