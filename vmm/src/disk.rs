//! A disk of the machine: a raw file or block device that the supervisor opened.

use std::io;
use std::os::fd::OwnedFd;

use devices::block::{Disk, SECTOR_SIZE};
use rustix::fs::{FallocateFlags, FileType};
use vm_memory::VolatileSlice;

use crate::volatile_io;

/// Largest disk in bytes: 16 TiB, the largest file of ext4 with 4 KiB blocks.
pub const MAX_DISK_BYTES: u64 = 16 << 40;

/// Why a descriptor is no disk.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiskError {
    /// A folder, FIFO, socket or character device.
    #[error("It is neither a regular file nor a block device")]
    Kind,
    /// Nothing in it.
    #[error("It is empty")]
    Empty,
    /// Its size is no number of sectors.
    #[error("Its size of {bytes} bytes is not a multiple of 512: raw disk images only")]
    Unaligned {
        /// Its size.
        bytes: u64,
    },
    /// Above [`MAX_DISK_BYTES`].
    #[error("Its size of {bytes} bytes is above the bound of {MAX_DISK_BYTES} bytes")]
    TooLarge {
        /// Its size.
        bytes: u64,
    },
    /// It is not open for what it is for.
    #[error("It is not open for {0}")]
    Access(&'static str),
    /// The system did not answer.
    #[error("The system did not tell its kind or size")]
    Inspect(#[source] io::Error),
}

/// An open raw disk. Its size is read once, and is the disk's from then on.
#[derive(Debug)]
pub struct FileDisk {
    file: OwnedFd,
    capacity_bytes: u64,
    read_only: bool,
    is_block_device: bool,
}

impl FileDisk {
    /// Checks the descriptor and takes its size.
    ///
    /// # Errors
    /// See [`DiskError`].
    pub fn new(file: OwnedFd, read_only: bool) -> Result<Self, DiskError> {
        let inspect = |error: rustix::io::Errno| DiskError::Inspect(error.into());
        let stat = rustix::fs::fstat(&file).map_err(inspect)?;
        let is_block_device = match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => false,
            FileType::BlockDevice => true,
            _ => return Err(DiskError::Kind),
        };
        let access = rustix::fs::fcntl_getfl(&file).map_err(inspect)? & rustix::fs::OFlags::ACCMODE;
        if access == rustix::fs::OFlags::WRONLY {
            return Err(DiskError::Access("reading"));
        }
        if !read_only && access == rustix::fs::OFlags::RDONLY {
            return Err(DiskError::Access("writing"));
        }
        let bytes = if is_block_device {
            // `BLKGETSIZE64` in other words; the position is never used.
            rustix::fs::seek(&file, rustix::fs::SeekFrom::End(0)).map_err(inspect)?
        } else {
            u64::try_from(stat.st_size).unwrap_or(0)
        };
        if bytes == 0 {
            return Err(DiskError::Empty);
        }
        if !bytes.is_multiple_of(SECTOR_SIZE) {
            return Err(DiskError::Unaligned { bytes });
        }
        if bytes > MAX_DISK_BYTES {
            return Err(DiskError::TooLarge { bytes });
        }
        Ok(Self {
            file,
            capacity_bytes: bytes,
            read_only,
            is_block_device,
        })
    }
}

impl Disk for FileDisk {
    fn capacity_sectors(&self) -> u64 {
        self.capacity_bytes / SECTOR_SIZE
    }

    fn read_only(&self) -> bool {
        self.read_only
    }

    fn read_at(&self, offset: u64, slices: &[VolatileSlice<'_>]) -> io::Result<()> {
        volatile_io::read_at(&self.file, offset, slices)
    }

    fn write_at(&self, offset: u64, slices: &[VolatileSlice<'_>]) -> io::Result<()> {
        volatile_io::write_at(&self.file, offset, slices)
    }

    fn flush(&self) -> io::Result<()> {
        Ok(rustix::fs::fdatasync(&self.file)?)
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(&self.file, hole, offset, len)?)
    }

    fn write_zeroes(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        let flags = if unmap {
            FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE
        } else if self.is_block_device {
            FallocateFlags::ZERO_RANGE
        } else {
            FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE
        };
        Ok(rustix::fs::fallocate(&self.file, flags, offset, len)?)
    }
}
