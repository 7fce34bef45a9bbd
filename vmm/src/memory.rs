//! Guest memory: private, anonymous, with a hole below 4 GiB for the devices.

use std::fs::File;
use std::io;
use std::sync::Arc;

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use vm_memory::{
    Address, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
    GuestRegionMmap, MmapRegion,
    mmap::{MmapRegionBuilder, MmapRegionError},
};

use crate::layout;
use crate::snapshot::working_set::{PAGE_BYTES, Run};

/// Least memory of a machine in MiB: less holds no kernel.
pub const MIN_MEMORY_MIB: u32 = 32;

/// Most memory of a machine in MiB: 256 GiB, far below the 2³⁹ bytes that every x86-64 processor with
/// virtualization can address.
pub const MAX_MEMORY_MIB: u32 = 256 << 10;

/// What the processor maps with one entry of a page directory (AMD APM 2 §5.3.4, Intel SDM 3A §4.5.4).
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Why there is no guest memory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// Too little or too much.
    #[error(
        "A machine can't have {memory_mib} MiB of memory: give it {MIN_MEMORY_MIB} to {MAX_MEMORY_MIB} MiB"
    )]
    Size {
        /// What was asked for.
        memory_mib: u32,
    },
    /// The host has no address space left, or a limit forbids it.
    #[error("The host did not map {memory_mib} MiB for the guest's memory")]
    Map {
        /// What was asked for.
        memory_mib: u32,
        /// The mapping's failure.
        source: vm_memory::mmap::MmapRegionError,
    },
    /// The regions do not fit together.
    #[error("The guest's memory can't be put together")]
    Collect(#[source] vm_memory::GuestRegionCollectionError),
    /// A snapshot's memory file could not be looked at.
    #[error("The system did not tell the size of the snapshot's memory file")]
    Inspect(#[source] io::Error),
    /// A snapshot's memory file is another's, or cut.
    #[error(
        "The snapshot's memory file has {bytes} bytes, and the machine's memory {needed}: it was cut, or is another snapshot's"
    )]
    SnapshotSize {
        /// The file's size.
        bytes: u64,
        /// The machine's memory.
        needed: u64,
    },
    /// KVM refused a memory slot.
    #[error("KVM did not take {bytes:#x} bytes of memory at guest address {address:#x}")]
    Slot {
        /// Where it would begin.
        address: u64,
        /// How long it is.
        bytes: u64,
        /// KVM's failure.
        source: io::Error,
    },
}

/// The ranges of RAM, in order, as `(first address, bytes)`: one below the hole, and one above 4 GiB for what
/// does not fit.
///
/// # Errors
/// [`MemoryError::Size`].
pub fn ranges(memory_mib: u32) -> Result<Vec<(u64, u64)>, MemoryError> {
    if !(MIN_MEMORY_MIB..=MAX_MEMORY_MIB).contains(&memory_mib) {
        return Err(MemoryError::Size { memory_mib });
    }
    let bytes = u64::from(memory_mib) << 20;
    let low_bytes = bytes.min(layout::HOLE_START);
    let mut ranges = vec![(0, low_bytes)];
    if bytes > low_bytes {
        ranges.push((layout::HOLE_END, bytes - low_bytes));
    }
    Ok(ranges)
}

/// Maps the memory: zeros that take no room until they are touched.
///
/// # Errors
/// See [`MemoryError`].
pub fn map(memory_mib: u32) -> Result<GuestMemoryMmap, MemoryError> {
    let regions = ranges(memory_mib)?
        .into_iter()
        .map(|(address, bytes)| map_region(memory_mib, address, bytes, None))
        .collect::<Result<Vec<_>, _>>()?;
    GuestMemoryMmap::from_regions(regions).map_err(MemoryError::Collect)
}

/// Maps one range privately: from a file, or of zeros.
fn map_region(
    memory_mib: u32,
    address: u64,
    bytes: u64,
    file: Option<FileOffset>,
) -> Result<GuestRegionMmap, MemoryError> {
    let too_big = MemoryError::Size { memory_mib };
    let Ok(size) = usize::try_from(bytes) else {
        return Err(too_big);
    };
    let mapping = match file {
        Some(file) => private_mapping(size, 0).with_file_offset(file).build(),
        None => map_huge_aligned(size),
    }
    .map_err(|source| MemoryError::Map { memory_mib, source })?;
    GuestRegionMmap::new(mapping, GuestAddress(address)).ok_or(too_big)
}

/// Anonymous memory, at a multiple of [`HUGE_PAGE_BYTES`] where the host's kernel lets us choose.
///
/// The host's kernel fills and KVM maps a huge page at once only where the address in this process and the guest's agree in their
/// low bits. Linux aligns large mappings itself since 6.7; before, they lie below the last one, so a first mapping that fills the room down
/// to the next multiple puts the second one there.
fn map_huge_aligned(size: usize) -> Result<MmapRegion, MmapRegionError> {
    let mapping = map_anonymous(size)?;
    let excess = mapping.as_ptr() as usize % HUGE_PAGE_BYTES;
    if excess == 0 {
        return Ok(mapping);
    }
    drop(mapping);
    let filler = map_anonymous(excess)?;
    let mapping = map_anonymous(size);
    drop(filler);
    mapping
}

fn map_anonymous(size: usize) -> Result<MmapRegion, MmapRegionError> {
    private_mapping(size, libc::MAP_ANONYMOUS).build()
}

fn private_mapping(size: usize, kind: libc::c_int) -> MmapRegionBuilder<()> {
    MmapRegionBuilder::new(size)
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        .with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_NORESERVE | kind)
}

/// Maps the memory that a snapshot has left in `file`, range after range: privately, so that what the guest writes stays in this
/// process, and pages that it only reads are the page cache's, shared with every other machine of the snapshot.
///
/// The file must not be cut while it is mapped: a page that is gone ends the process.
///
/// # Errors
/// See [`MemoryError`].
pub fn map_snapshot(memory_mib: u32, file: &Arc<File>) -> Result<GuestMemoryMmap, MemoryError> {
    let needed = u64::from(memory_mib) << 20;
    let metadata = file.metadata().map_err(MemoryError::Inspect)?;
    if !metadata.is_file() || metadata.len() != needed {
        return Err(MemoryError::SnapshotSize {
            bytes: metadata.len(),
            needed,
        });
    }
    let mut offset = 0;
    let regions = ranges(memory_mib)?
        .into_iter()
        .map(|(address, bytes)| {
            let part = FileOffset::from_arc(Arc::clone(file), offset);
            offset += bytes;
            map_region(memory_mib, address, bytes, Some(part))
        })
        .collect::<Result<Vec<_>, _>>()?;
    GuestMemoryMmap::from_regions(regions).map_err(MemoryError::Collect)
}

/// Copies the pages of a snapshot's memory that the guest will write to, all of a run in one call. What is not there is left out, and a
/// host's kernel that can't (before Linux 5.14), or has no memory left, leaves the copying to the guest's faults.
pub(crate) fn populate(memory: &GuestMemoryMmap, runs: &[Run]) {
    for run in runs {
        let mut offset = u64::from(run.first) * PAGE_BYTES;
        let bytes = u64::from(run.count) * PAGE_BYTES;
        for region in memory.iter() {
            if offset < region.len() {
                if offset + bytes <= region.len() && !populate_range(region, offset, bytes) {
                    return;
                }
                break;
            }
            offset -= region.len();
        }
    }
}

/// False where the host's kernel does not do it. The range lies in the region.
fn populate_range(region: &GuestRegionMmap, offset: u64, bytes: u64) -> bool {
    let (Ok(offset), Ok(bytes)) = (usize::try_from(offset), usize::try_from(bytes)) else {
        return false;
    };
    let start = region.as_ptr().wrapping_add(offset);
    // SAFETY: the range lies in one mapping, which `region` keeps. The call changes no byte that can be read there: it does what a write
    // to each page would have the kernel do before the write itself.
    unsafe { libc::madvise(start.cast(), bytes, libc::MADV_POPULATE_WRITE) == 0 }
}

/// Gives the memory to the virtual machine, one slot a region.
///
/// To be called before the interrupt controller is created: a slot that is added afterwards waits for a grace period of
/// the host's kernel, for several milliseconds.
///
/// # Errors
/// [`MemoryError::Slot`].
pub fn register(vm: &VmFd, memory: &GuestMemoryMmap) -> Result<(), MemoryError> {
    for (slot, region) in (0..).zip(memory.iter()) {
        let mapping = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: region.start_addr().raw_value(),
            memory_size: region.len(),
            userspace_addr: region.as_ptr() as u64,
        };
        // SAFETY: KVM lets the guest read and write `memory_size` bytes from `userspace_addr` on. They are exactly one
        // mapping of `memory`, which the machine keeps until after its vCPUs have stopped (fields of `Machine`
        // are dropped in that order), and through which nothing but volatile access is possible: no Rust reference
        // into it exists that the guest's writes could invalidate.
        unsafe { vm.set_user_memory_region(mapping) }.map_err(|error| MemoryError::Slot {
            address: mapping.guest_phys_addr,
            bytes: mapping.memory_size,
            source: error.into(),
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn test_ranges_up_to_the_hole_returns_one_range() {
        assert_eq!(ranges(128).unwrap(), [(0, 128 << 20)]);
        assert_eq!(ranges(3072).unwrap(), [(0, 0xc000_0000)]);
    }

    #[test]
    fn test_ranges_past_the_hole_returns_the_rest_above_4_gib() {
        assert_eq!(
            ranges(3073).unwrap(),
            [(0, 0xc000_0000), (0x1_0000_0000, 1 << 20)]
        );
    }

    #[test]
    fn test_ranges_invalid_size_returns_size() {
        for memory_mib in [0, 1, MIN_MEMORY_MIB - 1, MAX_MEMORY_MIB + 1, u32::MAX] {
            assert!(matches!(ranges(memory_mib), Err(MemoryError::Size { .. })));
        }
    }

    #[test]
    fn memory_that_is_mapped_reads_as_zeros_on_both_sides_of_the_hole() {
        use vm_memory::Bytes;
        let memory = map(4096).unwrap();

        assert_eq!(
            memory
                .read_obj::<u64>(GuestAddress(0xc000_0000 - 8))
                .unwrap(),
            0
        );
        assert_eq!(
            memory
                .read_obj::<u64>(GuestAddress(0x1_4000_0000 - 8))
                .unwrap(),
            0
        );
        memory
            .read_obj::<u64>(GuestAddress(0xc000_0000))
            .unwrap_err();
        memory
            .read_obj::<u64>(GuestAddress(0x1_4000_0000))
            .unwrap_err();
    }

    proptest! {
        #[test]
        fn ranges_hold_all_memory_and_none_of_the_hole(
            memory_mib in MIN_MEMORY_MIB..=MAX_MEMORY_MIB
        ) {
            let ranges = ranges(memory_mib).unwrap();
            let total: u64 = ranges.iter().map(|(_, bytes)| bytes).sum();
            prop_assert_eq!(total, u64::from(memory_mib) << 20);
            for (address, bytes) in ranges {
                prop_assert!(
                    address + bytes <= layout::HOLE_START || address >= layout::HOLE_END
                );
            }
        }
    }
}
