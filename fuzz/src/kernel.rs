//! Targets `kernel` and `initramfs`: files from the host's user, loaded into a guest's memory.
//!
//! Checked: what is loaded is what the file says and lies where it may, the rest of memory is as it was, and a file that is refused has
//! changed nothing below 1 MiB, where the machine keeps what a kernel is started with. The expectation is worked out here, by another
//! reader of the same headers.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use linux_loader::loader::bootparam::setup_header;
use rustix::fs::{MemfdFlags, memfd_create};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm::kernel::{BEHIND_KERNEL_BYTES, Kernel, load, load_initramfs};
use vmm::layout;

use crate::input::Input;

/// Guest memory in bytes.
const MEMORY_BYTES: usize = 2 << 20;
const MEMORY_END: u64 = MEMORY_BYTES as u64;

/// Bytes that are compared at a time.
const CHUNK_BYTES: usize = 64 << 10;

/// Bytes of an ELF header's program header (System V gABI, chapter 5).
const PROGRAM_HEADER_BYTES: usize = 56;

/// `PT_LOAD`.
const TYPE_LOAD: u32 = 1;

fn memory() -> GuestMemoryMmap {
    let ranges = [(GuestAddress(0), MEMORY_BYTES)];
    GuestMemoryMmap::from_ranges(&ranges).expect("memory can be mapped")
}

/// Checks that memory has these bytes at these addresses, and zeros elsewhere.
fn check(memory: &GuestMemoryMmap, parts: &[(u64, &[u8])]) {
    check_below(MEMORY_BYTES, memory, parts);
}

/// The same below an address.
fn check_below(end: usize, memory: &GuestMemoryMmap, parts: &[(u64, &[u8])]) {
    let mut expected = vec![0; CHUNK_BYTES];
    let mut found = vec![0; CHUNK_BYTES];
    for start in (0..end).step_by(CHUNK_BYTES) {
        expected.fill(0);
        for (address, bytes) in parts {
            let address = usize::try_from(*address).expect("small");
            let from = address.max(start);
            let to = (address + bytes.len()).min(start + CHUNK_BYTES);
            if from < to {
                expected[from - start..to - start]
                    .copy_from_slice(&bytes[from - address..to - address]);
            }
        }
        memory
            .read_slice(&mut found, GuestAddress(start as u64))
            .expect("the memory is mapped");
        assert!(
            found == expected,
            "memory near {start:#x} is not as it has to be"
        );
    }
}

/// A file in memory.
fn file(bytes: &[u8]) -> OwnedFd {
    let file = memfd_create("fuzz", MemfdFlags::CLOEXEC).expect("descriptors");
    let file = File::from(file);
    file.write_all_at(bytes, 0).expect("memory");
    file.into()
}

/// Runs the target `kernel`.
pub fn run(image: &[u8]) {
    let memory = memory();
    let Ok(kernel) = load(file(image), &memory) else {
        // Above, some of what is loaded may be there.
        let end = usize::try_from(layout::HIGH_MEMORY).expect("small");
        return check_below(end, &memory, &[]);
    };
    assert!((layout::HIGH_MEMORY..MEMORY_END).contains(&kernel.entry));
    assert!((kernel.entry..=MEMORY_END).contains(&kernel.end));
    let parts = parts(image, &kernel);
    for (address, bytes) in &parts {
        assert!(*address >= layout::HIGH_MEMORY);
        assert!(address + bytes.len() as u64 <= kernel.end);
    }
    check(&memory, &parts);
}

/// What has to be where.
fn parts<'a>(image: &'a [u8], kernel: &Kernel) -> Vec<(u64, &'a [u8])> {
    if kernel.setup_header.is_some() {
        let setup = (usize::from(image[0x1f1]) + 1) * 512;
        let address = u64::from_le_bytes(array(image, 0x258));
        assert_eq!(kernel.entry, address + 0x200);
        return vec![(address, &image[setup..])];
    }
    let table = usize::try_from(u64::from_le_bytes(array(image, 32))).expect("in the file");
    let count = usize::from(u16::from_le_bytes(array(image, 56)));
    let headers = (0..count).map(|index| table + index * PROGRAM_HEADER_BYTES);
    let parts: Vec<(u64, &[u8])> = headers
        .filter(|at| u32::from_le_bytes(array(image, *at)) == TYPE_LOAD)
        .map(|at| {
            let offset = usize::try_from(u64::from_le_bytes(array(image, at + 8)));
            let length = usize::try_from(u64::from_le_bytes(array(image, at + 32)));
            let address = u64::from_le_bytes(array(image, at + 24));
            match length.expect("64 bits") {
                // Neither its offset nor its address is looked at then.
                0 => (layout::HIGH_MEMORY, &[][..]),
                length => {
                    let offset = offset.expect("64 bits");
                    (address, &image[offset..offset + length])
                }
            }
        })
        .collect();
    assert!(
        parts
            .iter()
            .any(|(address, bytes)| (*address..*address + bytes.len() as u64)
                .contains(&kernel.entry)),
        "the kernel is entered where nothing was loaded"
    );
    parts
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("N bytes")
}

/// Runs the target `initramfs`: where the kernel ends, how far up it wants the initramfs at most, and the file.
pub fn run_initramfs(data: &[u8]) {
    let mut input = Input::new(data);
    let flags = input.u8();
    let kernel = Kernel {
        entry: layout::HIGH_MEMORY,
        end: layout::HIGH_MEMORY + u64::from(input.u32()) % (MEMORY_END + 0x1000),
        setup_header: (flags & 1 != 0).then(|| setup_header {
            initrd_addr_max: input.u32(),
            ..setup_header::default()
        }),
    };
    // Long files without long inputs.
    let mut bytes = input.rest().to_vec();
    bytes.resize(bytes.len() << (flags >> 4), 0x5a);
    let memory = memory();
    let Ok(loaded) = load_initramfs(file(&bytes), &memory, &kernel) else {
        return check(&memory, &[]);
    };
    let start = u64::from(loaded.address);
    let end = start + u64::from(loaded.bytes);
    assert_eq!(loaded.bytes as usize, bytes.len());
    assert!(
        start >= kernel.end + BEHIND_KERNEL_BYTES
            && start.is_multiple_of(0x1000)
            && end <= MEMORY_END
    );
    if let Some(header) = kernel.setup_header {
        assert!(end <= u64::from(header.initrd_addr_max) + 1);
    }
    check(&memory, &[(start, &bytes)]);
}

/// Inputs to begin with for `kernel`.
#[must_use]
pub fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let load = |address: u64, offset: u64, bytes: u64, memory: u64| {
        header(TYPE_LOAD, offset, address, bytes, memory)
    };
    let one = [load(0x10_0000, 0x100, 0x80, 0x1000)];
    let two = [
        load(0x10_0000, 0x100, 0x80, 0x1000),
        load(0x18_0000, 0x180, 0x40, 0x40),
    ];
    let overlapping = [
        load(0x10_0000, 0x100, 0x80, 0x1000),
        load(0x10_0800, 0x180, 0x40, 0x40),
    ];
    let with_note = [
        load(0x10_0000, 0x100, 0x80, 0x1000),
        header(4, 0x1c0, 0, 20, 20),
    ];
    let mut note = elf(&with_note);
    // Name of 4 bytes, description of 4, type 18: PVH's entry.
    for (at, value) in [(0x1c0, 4_u32), (0x1c4, 4), (0x1c8, 18)] {
        note[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }
    note[0x1cc..0x1d0].copy_from_slice(b"Xen\0");
    vec![
        ("elf", elf(&one)),
        ("elf_of_two_segments", elf(&two)),
        ("elf_that_overlaps", elf(&overlapping)),
        ("elf_with_note", note),
        ("bzimage", bzimage()),
        ("empty", Vec::new()),
    ]
}

fn header(kind: u32, offset: u64, address: u64, bytes: u64, memory: u64) -> Vec<u8> {
    let mut header = kind.to_le_bytes().to_vec();
    header.extend_from_slice(&5_u32.to_le_bytes());
    for word in [offset, address, address, bytes, memory, 4] {
        header.extend_from_slice(&word.to_le_bytes());
    }
    header
}

/// A vmlinux of 512 bytes, entered at 1 MiB.
fn elf(headers: &[Vec<u8>]) -> Vec<u8> {
    let mut image = vec![0x90; 512];
    image[..64].fill(0);
    image[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
    image[16] = 2;
    image[18] = 62;
    image[24..32].copy_from_slice(&layout::HIGH_MEMORY.to_le_bytes());
    image[32] = 64;
    image[54] = 56;
    image[56] = u8::try_from(headers.len()).expect("few");
    for (index, header) in headers.iter().enumerate() {
        let at = 64 + index * PROGRAM_HEADER_BYTES;
        image[at..at + PROGRAM_HEADER_BYTES].copy_from_slice(header);
    }
    image
}

/// A bzImage of one sector of setup code and one and a half of kernel, protocol 2.15, to be run at 1 MiB.
fn bzimage() -> Vec<u8> {
    let mut image = vec![0; 512 * 3 + 256];
    image[0x1f1] = 1;
    image[0x1f4] = 8;
    image[0x1fe..0x200].copy_from_slice(&[0x55, 0xaa]);
    image[0x202..0x206].copy_from_slice(b"HdrS");
    image[0x206..0x208].copy_from_slice(&[0x0f, 0x02]);
    image[0x211] = 1;
    image[0x22c..0x230].copy_from_slice(&0x7fff_ffff_u32.to_le_bytes());
    image[0x236] = 1;
    image[0x258..0x260].copy_from_slice(&layout::HIGH_MEMORY.to_le_bytes());
    image[0x260..0x264].copy_from_slice(&0x1000_u32.to_le_bytes());
    image[1024..].fill(0x90);
    image
}

/// Inputs to begin with for `initramfs`.
#[must_use]
pub fn initramfs_seeds() -> Vec<(&'static str, Vec<u8>)> {
    // Flags; where the kernel ends, above 1 MiB; the highest address, if flagged; the file.
    vec![
        ("behind_an_elf", b"\x00\x00\x00\x01\x00070701".to_vec()),
        (
            "behind_a_bzimage",
            b"\x01\x00\x00\x01\x00\xff\xff\x17\x00070701".to_vec(),
        ),
        (
            "large",
            b"\xf0\x00\x00\x01\x000707010000000000000000".to_vec(),
        ),
        (
            "just_fits",
            [&[0x80, 0, 0xf0, 0x0b, 0], [b'0'; 16].as_slice()].concat(),
        ),
        ("empty", vec![0; 5]),
    ]
}
