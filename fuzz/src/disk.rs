//! A disk in memory that fails a target when it is asked for what it must not be asked for.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use devices::block::{Disk, SECTOR_SIZE};
use vm_memory::VolatileSlice;

use crate::memory::{BUFFERS, Memory};
use crate::ring::Ring;

/// Bytes of a sector, as an array's length.
const SECTOR_LEN: usize = 512;

const _: () = assert!(SECTOR_LEN as u64 == SECTOR_SIZE);

/// What the disk was asked for since it was last looked at.
#[derive(Debug, Default)]
pub(crate) struct Work {
    calls: AtomicU64,
    bytes: AtomicU64,
}

impl Work {
    /// Calls and bytes; both begin at 0 again.
    pub(crate) fn take(&self) -> (u64, u64) {
        (
            self.calls.swap(0, Ordering::Relaxed),
            self.bytes.swap(0, Ordering::Relaxed),
        )
    }

    fn add(&self, bytes: u64) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// The byte that fills sector `sector` at first: never 0.
pub(crate) fn filling(sector: u64) -> u8 {
    sector.to_le_bytes()[0] % 200 + 1
}

/// Makes a read of the first sector available in a disk's ring: its status goes to [`BUFFERS`] + 0x400.
pub(crate) fn request_first_sector(memory: &Memory, ring: &Ring) {
    memory.write(BUFFERS, &[0; 16]);
    let pieces = [
        (BUFFERS, 16, false),
        (BUFFERS + 0x200, 512, true),
        (BUFFERS + 0x400, 1, true),
    ];
    ring.set_chain(memory, 0, &pieces);
    ring.publish(memory, 0);
}

/// The disk.
#[derive(Debug)]
pub(crate) struct CheckingDisk {
    bytes: Mutex<Vec<u8>>,
    read_only: bool,
    work: Arc<Work>,
}

impl CheckingDisk {
    pub(crate) fn new(sectors: u64, read_only: bool, work: &Arc<Work>) -> Self {
        let bytes = (0..sectors)
            .flat_map(|sector| [filling(sector); SECTOR_LEN])
            .collect();
        Self {
            bytes: Mutex::new(bytes),
            read_only,
            work: Arc::clone(work),
        }
    }

    fn with_part<T>(&self, offset: u64, len: u64, action: impl FnOnce(&mut [u8]) -> T) -> T {
        self.work.add(len);
        let mut bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        let end = offset.checked_add(len).expect("the range wraps");
        assert!(len > 0 && len.is_multiple_of(SECTOR_SIZE) && offset.is_multiple_of(SECTOR_SIZE));
        assert!(end <= bytes.len() as u64, "{offset}+{len} is past the end");
        let range = usize::try_from(offset).expect("small")..usize::try_from(end).expect("small");
        action(&mut bytes[range])
    }
}

fn sum(slices: &[VolatileSlice<'_>]) -> u64 {
    slices.iter().map(|slice| slice.len() as u64).sum()
}

impl Disk for CheckingDisk {
    fn capacity_sectors(&self) -> u64 {
        let bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        bytes.len() as u64 / SECTOR_SIZE
    }

    fn read_only(&self) -> bool {
        self.read_only
    }

    fn read_at(&self, offset: u64, slices: &[VolatileSlice<'_>]) -> io::Result<()> {
        self.with_part(offset, sum(slices), |mut part| {
            for slice in slices {
                let (now, later) = part.split_at_mut(slice.len());
                slice.copy_from(now);
                part = later;
            }
        });
        Ok(())
    }

    fn write_at(&self, offset: u64, slices: &[VolatileSlice<'_>]) -> io::Result<()> {
        assert!(!self.read_only, "a write to a read-only disk");
        self.with_part(offset, sum(slices), |mut part| {
            for slice in slices {
                let (now, later) = part.split_at_mut(slice.len());
                slice.copy_to(now);
                part = later;
            }
        });
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        self.work.add(0);
        Ok(())
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        assert!(!self.read_only, "a discard on a read-only disk");
        self.with_part(offset, len, |part| part.fill(0xdd));
        Ok(())
    }

    fn write_zeroes(&self, offset: u64, len: u64, _unmap: bool) -> io::Result<()> {
        assert!(!self.read_only, "a write of zeros to a read-only disk");
        self.with_part(offset, len, |part| part.fill(0));
        Ok(())
    }
}
