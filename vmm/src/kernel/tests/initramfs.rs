//! What lies behind the kernel.

use super::*;

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
