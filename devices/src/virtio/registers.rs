//! A queue as the driver describes it, and the check that turns the description into a layout.

use virtio_queue::desc::split::{Descriptor, VirtqUsedElem};
use vm_memory::{Address, GuestAddress, GuestMemory, GuestMemoryMmap, Permissions};

/// Bytes in a descriptor (virtio 1.2 §2.7.5).
pub(super) const DESCRIPTOR_SIZE: u64 = size_of::<Descriptor>() as u64;

/// Bytes in the available ring beside its entries: flags, idx and used_event (virtio 1.2 §2.7.6).
const AVAIL_RING_FIXED_SIZE: u64 = 6;

/// Bytes in an entry of the available ring.
const AVAIL_ENTRY_SIZE: u64 = 2;

/// Bytes in the used ring beside its entries: flags, idx and avail_event (virtio 1.2 §2.7.8).
const USED_RING_FIXED_SIZE: u64 = 6;

/// Bytes in an entry of the used ring.
const USED_ENTRY_SIZE: u64 = size_of::<VirtqUsedElem>() as u64;

/// Alignment of the three parts in bytes (virtio 1.2 §2.7).
const DESCRIPTOR_TABLE_ALIGN: u64 = 16;
const AVAIL_RING_ALIGN: u64 = 2;
const USED_RING_ALIGN: u64 = 4;

/// Why a description is no queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// The size is 0, no power of two, or above the maximum.
    #[error("Queue size {size} is not a power of two from 1 to {max_size}")]
    Size {
        /// What the driver wrote.
        size: u32,
        /// The queue's maximum.
        max_size: u16,
    },
    /// A ring breaks its alignment.
    #[error("The ring at {address:#x} is not aligned to {align} bytes")]
    Align {
        /// Where the driver put it.
        address: u64,
        /// What the specification wants.
        align: u64,
    },
    /// A ring is not wholly in guest memory.
    #[error("The ring of {len:#x} bytes at {address:#x} is not in guest memory")]
    NotMemory {
        /// Where the driver put it.
        address: u64,
        /// Its length in bytes.
        len: u64,
    },
    /// Two rings share bytes.
    #[error("Two rings overlap at {address:#x}")]
    Overlap {
        /// Where the second one begins.
        address: u64,
    },
}

/// The registers of one queue: whatever the driver wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueRegisters {
    max_size: u16,
    /// QueueNum.
    pub size: u32,
    /// QueueDesc: address of the descriptor table.
    pub descriptor_table: u64,
    /// QueueDriver: address of the available ring.
    pub driver_area: u64,
    /// QueueDevice: address of the used ring.
    pub device_area: u64,
}

impl QueueRegisters {
    /// The registers after a reset.
    #[must_use]
    pub fn new(max_size: u16) -> Self {
        Self {
            max_size,
            size: u32::from(max_size),
            descriptor_table: 0,
            driver_area: 0,
            device_area: 0,
        }
    }

    /// QueueNumMax.
    #[must_use]
    pub fn max_size(&self) -> u16 {
        self.max_size
    }
}

/// Where a queue is: the size is a power of two and not above the maximum, the rings are aligned, in guest memory and disjoint.
///
/// The only way to one is [`QueueLayout::check`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueLayout {
    size: u16,
    max_size: u16,
    descriptor_table: GuestAddress,
    driver_area: GuestAddress,
    device_area: GuestAddress,
}

/// The bytes from `.0` to before `.1`.
pub(super) type AddressRange = (u64, u64);

impl QueueLayout {
    /// Checks what the driver wrote.
    ///
    /// # Errors
    ///
    /// [`LayoutError`], the first thing that is wrong.
    pub fn check(
        registers: &QueueRegisters,
        memory: &GuestMemoryMmap,
    ) -> Result<Self, LayoutError> {
        let max_size = registers.max_size;
        let bad_size = LayoutError::Size {
            size: registers.size,
            max_size,
        };
        let size = u16::try_from(registers.size).map_err(|_| bad_size)?;
        if !size.is_power_of_two() || size > max_size {
            return Err(bad_size);
        }
        let layout = Self {
            size,
            max_size,
            descriptor_table: GuestAddress(registers.descriptor_table),
            driver_area: GuestAddress(registers.driver_area),
            device_area: GuestAddress(registers.device_area),
        };
        for ((address, len), align) in layout.parts().into_iter().zip([
            DESCRIPTOR_TABLE_ALIGN,
            AVAIL_RING_ALIGN,
            USED_RING_ALIGN,
        ]) {
            if !address.raw_value().is_multiple_of(align) {
                return Err(LayoutError::Align {
                    address: address.raw_value(),
                    align,
                });
            }
            // At most 2¹⁵ entries: the length fits. The check fails on a sum that wraps, and in a hole.
            if !GuestMemory::check_range(
                memory,
                address,
                usize::try_from(len).unwrap_or(usize::MAX),
                Permissions::ReadWrite,
            ) {
                return Err(LayoutError::NotMemory {
                    address: address.raw_value(),
                    len,
                });
            }
        }
        match first_overlap(layout.ranges().to_vec()) {
            Some(address) => Err(LayoutError::Overlap { address }),
            None => Ok(layout),
        }
    }

    /// The number of descriptors.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.size
    }

    /// The queue's maximum.
    pub(super) fn max_size(&self) -> u16 {
        self.max_size
    }

    /// Address of the descriptor table.
    #[must_use]
    pub fn descriptor_table(&self) -> GuestAddress {
        self.descriptor_table
    }

    /// Address of the available ring.
    #[must_use]
    pub fn driver_area(&self) -> GuestAddress {
        self.driver_area
    }

    /// Address of the used ring.
    #[must_use]
    pub fn device_area(&self) -> GuestAddress {
        self.device_area
    }

    /// The three parts as ranges. They do not wrap.
    pub(super) fn ranges(&self) -> [AddressRange; 3] {
        self.parts()
            .map(|(address, len)| (address.raw_value(), address.raw_value().saturating_add(len)))
    }

    fn parts(&self) -> [(GuestAddress, u64); 3] {
        let size = u64::from(self.size);
        [
            (self.descriptor_table, DESCRIPTOR_SIZE * size),
            (
                self.driver_area,
                AVAIL_RING_FIXED_SIZE + AVAIL_ENTRY_SIZE * size,
            ),
            (
                self.device_area,
                USED_RING_FIXED_SIZE + USED_ENTRY_SIZE * size,
            ),
        ]
    }
}

/// Where two of the ranges share a byte.
pub(super) fn first_overlap(mut ranges: Vec<AddressRange>) -> Option<u64> {
    ranges.sort_unstable();
    ranges
        .iter()
        .zip(ranges.iter().skip(1))
        .find(|(before, after)| after.0 < before.1)
        .map(|(_, after)| after.0)
}
