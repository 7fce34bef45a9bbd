//! A disk in memory, for tests.

use std::sync::{Arc, Mutex};

use super::*;
use crate::lock;
use vm_memory::VolatileSlice;

/// A disk that can be read-only or cut short while it is in use. Clones share the bytes.
#[derive(Clone, Debug)]
pub(crate) struct MemoryDisk {
    bytes: Arc<Mutex<Vec<u8>>>,
    capacity_sectors: u64,
    pub(crate) read_only: bool,
    flushes: Arc<Mutex<u32>>,
}

impl MemoryDisk {
    /// Every sector is filled with the low byte of its number plus one.
    pub(crate) fn new(capacity_sectors: u64) -> Self {
        let bytes = (0..capacity_sectors)
            .flat_map(|sector| [sector.to_le_bytes()[0].wrapping_add(1); 512])
            .collect();
        Self {
            bytes: Arc::new(Mutex::new(bytes)),
            capacity_sectors,
            read_only: false,
            flushes: Arc::default(),
        }
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        lock(&self.bytes).clone()
    }

    pub(crate) fn flushes(&self) -> u32 {
        *lock(&self.flushes)
    }

    /// Loses everything behind `len` bytes, and says nothing.
    pub(crate) fn cut(&self, len: usize) {
        lock(&self.bytes).truncate(len);
    }

    fn transfer(
        &self,
        offset: u64,
        slices: &[VolatileSlice<'_>],
        mut copy: impl FnMut(&mut [u8], &VolatileSlice<'_>),
    ) -> io::Result<()> {
        let mut bytes = lock(&self.bytes);
        let mut at = usize::try_from(offset).unwrap();
        assert!(
            offset + slices.iter().map(|s| s.len() as u64).sum::<u64>()
                <= self.capacity_sectors * SECTOR_SIZE
        );
        for slice in slices {
            let part = bytes
                .get_mut(at..at + slice.len())
                .ok_or(io::ErrorKind::UnexpectedEof)?;
            copy(part, slice);
            at += slice.len();
        }
        Ok(())
    }

    fn fill(&self, offset: u64, len: u64, value: u8) -> io::Result<()> {
        let mut bytes = lock(&self.bytes);
        let from = usize::try_from(offset).unwrap();
        let to = usize::try_from(offset + len).unwrap();
        bytes
            .get_mut(from..to)
            .ok_or(io::ErrorKind::UnexpectedEof)?
            .fill(value);
        Ok(())
    }
}

impl Disk for MemoryDisk {
    fn capacity_sectors(&self) -> u64 {
        self.capacity_sectors
    }

    fn read_only(&self) -> bool {
        self.read_only
    }

    fn read_at(&self, offset: u64, slices: &[VolatileSlice<'_>]) -> io::Result<()> {
        self.transfer(offset, slices, |part, slice| slice.copy_from(part))
    }

    fn write_at(&self, offset: u64, slices: &[VolatileSlice<'_>]) -> io::Result<()> {
        assert!(!self.read_only);
        self.transfer(offset, slices, |part, slice| {
            assert_eq!(slice.copy_to(part), part.len());
        })
    }

    fn flush(&self) -> io::Result<()> {
        *lock(&self.flushes) += 1;
        Ok(())
    }

    /// Fills with a value that shows it.
    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        assert!(!self.read_only);
        self.fill(offset, len, 0xdd)
    }

    fn write_zeroes(&self, offset: u64, len: u64, _unmap: bool) -> io::Result<()> {
        assert!(!self.read_only);
        self.fill(offset, len, 0)
    }
}
