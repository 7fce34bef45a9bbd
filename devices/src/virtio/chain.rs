//! A descriptor chain that was read once, and the buffers it names.

use virtio_bindings::virtio_ring::VRING_DESC_F_INDIRECT;
use virtio_queue::desc::split::Descriptor;
use vm_memory::{
    Address, Bytes, GuestAddress, GuestMemory, GuestMemoryMmap, Permissions, VolatileSlice,
};

use super::queue::QueueError;
use super::registers::{DESCRIPTOR_SIZE, QueueLayout};

/// Why a buffer can't be used. The chain's head is returned to the driver all the same, and the queue goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BufferError {
    /// The chain names fewer bytes than the request needs.
    #[error("The chain ends before byte {end} of the request")]
    TooShort {
        /// First byte that was not needed, counted from the start of the chain's part.
        end: u64,
    },
    /// A descriptor names bytes that are not guest memory.
    #[error("The descriptor's {len:#x} bytes at {address:#x} are not guest memory")]
    NotMemory {
        /// First address.
        address: u64,
        /// Length in bytes.
        len: u64,
    },
}

/// A piece of memory that a descriptor names. Nothing says that it exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// First address.
    pub address: GuestAddress,
    /// Length in bytes; may be 0.
    pub len: u32,
}

/// The readable or the writable part of a chain: a sequence of bytes, scattered over guest memory.
///
/// At most as many segments as the queue has descriptors. The segments are the driver's word and are checked against
/// guest memory when they are used; the sum of lengths may be far above 4 GiB, so a device bounds what it accepts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Buffers {
    segments: Vec<Segment>,
    len: u64,
}

impl Buffers {
    /// Sum of the segments' lengths in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there is not one byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The segments in order.
    #[must_use]
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Reads exactly `data.len()` bytes that begin `offset` bytes into the sequence.
    ///
    /// # Errors
    ///
    /// [`BufferError`], possibly after some of `data` was filled.
    pub fn read_at(
        &self,
        memory: &GuestMemoryMmap,
        offset: u64,
        data: &mut [u8],
    ) -> Result<(), BufferError> {
        let mut rest = data;
        for slice in self.slices(memory, offset, rest.len() as u64)? {
            let (now, later) = rest.split_at_mut_checked(slice.len()).unwrap_or_default();
            slice.copy_to(now);
            rest = later;
        }
        Ok(())
    }

    /// Writes all of `data`, beginning `offset` bytes into the sequence.
    ///
    /// # Errors
    ///
    /// [`BufferError`]; nothing was written then.
    pub fn write_at(
        &self,
        memory: &GuestMemoryMmap,
        offset: u64,
        data: &[u8],
    ) -> Result<(), BufferError> {
        let mut rest = data;
        for slice in self.slices(memory, offset, rest.len() as u64)? {
            let (now, later) = rest.split_at_checked(slice.len()).unwrap_or_default();
            slice.copy_from(now);
            rest = later;
        }
        Ok(())
    }

    /// Guest memory behind `len` bytes that begin `offset` bytes into the sequence, for scattered input and output. No empty slices;
    /// their lengths sum up to `len`. One segment gives several slices where it crosses from one region of memory to the next.
    ///
    /// # Errors
    ///
    /// [`BufferError`] where the sequence is shorter or a part of it is not guest memory.
    pub fn slices<'m>(
        &self,
        memory: &'m GuestMemoryMmap,
        offset: u64,
        len: u64,
    ) -> Result<Vec<VolatileSlice<'m>>, BufferError> {
        let end = offset.saturating_add(len);
        if end > self.len {
            return Err(BufferError::TooShort { end });
        }
        let mut slices = Vec::with_capacity(self.segments.len());
        let mut segment_start = 0_u64;
        for segment in &self.segments {
            let segment_end = segment_start + u64::from(segment.len);
            // The part of this segment that was asked for, counted in the sequence.
            let from = offset.max(segment_start);
            let to = end.min(segment_end);
            if from < to {
                push_slices(
                    memory,
                    segment.address,
                    from - segment_start,
                    to - from,
                    &mut slices,
                )?;
            }
            segment_start = segment_end;
        }
        Ok(slices)
    }

    fn push(&mut self, descriptor: &Descriptor) {
        self.segments.push(Segment {
            address: descriptor.addr(),
            len: descriptor.len(),
        });
        // At most 2¹⁵ descriptors of below 2³² bytes.
        self.len += u64::from(descriptor.len());
    }
}

fn push_slices<'m>(
    memory: &'m GuestMemoryMmap,
    start: GuestAddress,
    skip: u64,
    len: u64,
    slices: &mut Vec<VolatileSlice<'m>>,
) -> Result<(), BufferError> {
    let not_memory = BufferError::NotMemory {
        address: start.raw_value().wrapping_add(skip),
        len,
    };
    let address = start.checked_add(skip).ok_or(not_memory)?;
    let count = usize::try_from(len).map_err(|_| not_memory)?;
    // A part that is not there gives an error, also behind parts that are.
    for slice in GuestMemory::get_slices(memory, address, count, Permissions::ReadWrite)
        .map_err(|_| not_memory)?
    {
        slices.push(slice.map_err(|_| not_memory)?);
    }
    Ok(())
}

/// A descriptor chain, copied out of guest memory: whatever the guest does to its descriptors afterwards, this does not change.
///
/// A chain with a readable descriptor behind a writable one (virtio 1.2 §2.7.4.2 forbids it) has no readable part: every
/// request has a readable header, so the device finds it too short and fails it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    head: u16,
    readable: Buffers,
    writable: Buffers,
}

impl Chain {
    /// What is handed back to the driver when the chain was used.
    #[must_use]
    pub fn head(&self) -> u16 {
        self.head
    }

    /// The bytes that the driver gives to the device.
    #[must_use]
    pub fn readable(&self) -> &Buffers {
        &self.readable
    }

    /// The bytes that the device may write.
    #[must_use]
    pub fn writable(&self) -> &Buffers {
        &self.writable
    }

    /// Walks the chain from `head` on. Each descriptor is read once, and there are at most as many as the queue has.
    ///
    /// The queue library's own iterator is not used: it ends silently on a loop, a bad index or an overlong sum and follows
    /// indirect tables that were not negotiated; here each of these must be told from a chain's regular end.
    pub(super) fn read(
        memory: &GuestMemoryMmap,
        layout: &QueueLayout,
        head: u16,
    ) -> Result<Self, QueueError> {
        let mut chain = Self {
            head,
            readable: Buffers::default(),
            writable: Buffers::default(),
        };
        let mut index = head;
        let mut misordered = false;
        for _ in 0..layout.size() {
            if index >= layout.size() {
                return Err(QueueError::BadDescriptorIndex { index });
            }
            // Inside guest memory, because the layout's table is.
            let address = layout
                .descriptor_table()
                .unchecked_add(u64::from(index) * DESCRIPTOR_SIZE);
            let descriptor: Descriptor = memory
                .read_obj(address)
                .map_err(|_| QueueError::BadDescriptorIndex { index })?;
            if u32::from(descriptor.flags()) & VRING_DESC_F_INDIRECT != 0 {
                return Err(QueueError::Indirect { index });
            }
            if descriptor.is_write_only() {
                chain.writable.push(&descriptor);
            } else {
                misordered |= !chain.writable.segments.is_empty();
                chain.readable.push(&descriptor);
            }
            if !descriptor.has_next() {
                if misordered {
                    chain.readable = Buffers::default();
                }
                return Ok(chain);
            }
            index = descriptor.next();
        }
        Err(QueueError::ChainTooLong { head })
    }
}
