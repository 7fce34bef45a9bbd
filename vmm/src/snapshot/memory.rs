//! Guest memory into a file: its ranges one after the other, pages of zeros left out as holes.

use std::io;
use std::os::fd::AsFd;

use vm_memory::{
    GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, VolatileMemory, VolatileSlice,
};

use crate::volatile_io;

/// Bytes of a page.
const PAGE_BYTES: usize = 4096;

/// Most bytes that are written at once.
const MAX_RUN_BYTES: usize = 1 << 20;

/// Writes all memory to `file`, which is as long as the memory and reads as zeros everywhere. Gives the number of bytes that were
/// written.
///
/// # Errors
/// The system's.
pub(crate) fn dump(memory: &GuestMemoryMmap, file: impl AsFd) -> io::Result<u64> {
    let mut written_bytes = 0;
    let mut region_start: u64 = 0;
    for region in memory.iter() {
        let slice = region.as_volatile_slice().map_err(io::Error::other)?;
        for (offset, len) in Runs::of(&slice) {
            let run = slice.subslice(offset, len).map_err(io::Error::other)?;
            volatile_io::write_at(file.as_fd(), region_start + offset as u64, &[run])?;
            written_bytes += len as u64;
        }
        region_start += region.len();
    }
    Ok(written_bytes)
}

/// The runs of pages that are not all zeros, as `(offset, bytes)`.
struct Runs<'a> {
    memory: &'a VolatileSlice<'a>,
    offset: usize,
}

impl<'a> Runs<'a> {
    fn of(memory: &'a VolatileSlice<'a>) -> Self {
        Self { memory, offset: 0 }
    }

    fn is_blank(&self, offset: usize) -> bool {
        let len = PAGE_BYTES.min(self.memory.len() - offset);
        self.memory
            .subslice(offset, len)
            .is_ok_and(|page| is_zero(&page))
    }
}

impl Iterator for Runs<'_> {
    type Item = (usize, usize);

    fn next(&mut self) -> Option<(usize, usize)> {
        while self.offset < self.memory.len() && self.is_blank(self.offset) {
            self.offset += PAGE_BYTES;
        }
        let start = self.offset;
        let most = self.memory.len().min(start.saturating_add(MAX_RUN_BYTES));
        while self.offset < most && !self.is_blank(self.offset) {
            self.offset += PAGE_BYTES;
        }
        let end = self.offset.min(self.memory.len());
        (start < end).then_some((start, end - start))
    }
}

/// Whether a page is all zeros.
fn is_zero(page: &VolatileSlice<'_>) -> bool {
    let words = page.len() / size_of::<u64>();
    page.get_array_ref::<u64>(0, words)
        .is_ok_and(|words| (0..words.len()).all(|index| words.load(index) == 0))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::{FileExt, MetadataExt};

    use vm_memory::{Bytes, GuestAddress};

    use super::*;

    #[test]
    fn pages_that_were_written_are_in_the_file_and_others_are_holes() {
        let memory = crate::memory::map(64).unwrap();
        let writes: [(u64, &[u8]); 4] = [
            (0x1fff, &[1]),
            (0x2000, &[2]),
            (0x80_0000, &[0]),
            ((64 << 20) - 1, &[3]),
        ];
        for (address, bytes) in writes {
            memory.write_slice(bytes, GuestAddress(address)).unwrap();
        }
        let file = tempfile::tempfile().unwrap();
        file.set_len(64 << 20).unwrap();

        let written = dump(&memory, &file).unwrap();

        assert_eq!(written, 3 * 4096);
        assert!(file.metadata().unwrap().blocks() * 512 <= 64 << 10);
        for (address, bytes) in writes {
            assert_eq!(read(&file, address), bytes[0]);
        }
        assert_eq!(read(&file, 0x1ffe), 0);
    }

    #[test]
    fn memory_on_both_sides_of_the_hole_is_one_file() {
        let memory = crate::memory::map(3073).unwrap();
        memory
            .write_slice(&[7], GuestAddress(0x1_0000_0000))
            .unwrap();
        let file = tempfile::tempfile().unwrap();
        file.set_len(3073 << 20).unwrap();

        dump(&memory, &file).unwrap();

        assert_eq!(read(&file, 3072 << 20), 7);
    }

    #[test]
    fn a_long_run_is_whole() {
        let memory = crate::memory::map(32).unwrap();
        let data: Vec<u8> = (1..=255).cycle().take(5 << 20).collect();
        memory.write_slice(&data, GuestAddress(0x3000)).unwrap();
        let file = tempfile::tempfile().unwrap();
        file.set_len(32 << 20).unwrap();

        dump(&memory, &file).unwrap();

        let mut read = vec![0; data.len()];
        file.read_exact_at(&mut read, 0x3000).unwrap();
        assert!(read == data);
    }

    fn read(file: &File, at: u64) -> u8 {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        byte[0]
    }
}
