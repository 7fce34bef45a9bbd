//! A kernel or initramfs file that is read without its own position, which its descriptor may share with other machines.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use vm_memory::bitmap::BitmapSlice;
use vm_memory::{ReadVolatile, VolatileMemoryError, VolatileSlice};

use super::KernelError;
use crate::volatile_io;

/// A regular file, its length, and a position of its own.
#[derive(Debug)]
pub(super) struct Image {
    file: File,
    len: u64,
    position: u64,
}

/// Why a descriptor is no image.
#[derive(Debug)]
pub(super) enum ImageError {
    NotARegularFile,
    Inspect(io::Error),
}

impl Image {
    pub(super) fn new(file: OwnedFd) -> Result<Self, ImageError> {
        let file = File::from(file);
        let metadata = file.metadata().map_err(ImageError::Inspect)?;
        if !metadata.is_file() {
            // Reading from a pipe or device could block for ever.
            return Err(ImageError::NotARegularFile);
        }
        Ok(Self {
            file,
            len: metadata.len(),
            position: 0,
        })
    }

    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Reads `N` bytes at `offset`; an error names `what` the file ends in.
    pub(super) fn bytes_at<const N: usize>(
        &self,
        offset: u64,
        what: &'static str,
    ) -> Result<[u8; N], KernelError> {
        let mut bytes = [0; N];
        self.fill_at(&mut bytes, offset, what)?;
        Ok(bytes)
    }

    /// Fills `bytes` from `offset` on; an error names `what` the file ends in.
    pub(super) fn fill_at(
        &self,
        bytes: &mut [u8],
        offset: u64,
        what: &'static str,
    ) -> Result<(), KernelError> {
        self.file
            .read_exact_at(bytes, offset)
            .map_err(|error| match error.kind() {
                io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidInput => {
                    KernelError::Truncated(what)
                }
                _ => KernelError::Read(error),
            })
    }
}

impl Read for Image {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read_at(buffer, self.position)?;
        self.position += count as u64;
        Ok(count)
    }
}

impl Seek for Image {
    fn seek(&mut self, target: SeekFrom) -> io::Result<u64> {
        let position = match target {
            SeekFrom::Start(position) => Some(position),
            SeekFrom::End(distance) => self.len.checked_add_signed(distance),
            SeekFrom::Current(distance) => self.position.checked_add_signed(distance),
        };
        self.position = position.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.position)
    }
}

impl ReadVolatile for Image {
    fn read_volatile<B: BitmapSlice>(
        &mut self,
        buffer: &mut VolatileSlice<B>,
    ) -> Result<usize, VolatileMemoryError> {
        let left = usize::try_from(self.len.saturating_sub(self.position)).unwrap_or(usize::MAX);
        let count = buffer.len().min(left);
        let slice = buffer.subslice(0, count)?;
        volatile_io::read_at(&self.file, self.position, &[slice])
            .map_err(VolatileMemoryError::IOError)?;
        self.position += count as u64;
        Ok(count)
    }
}
