//! A disk of the machine: a raw file or block device that the supervisor opened.

use std::io;
use std::os::fd::OwnedFd;

use devices::block::{Disk, SECTOR_SIZE};
use rustix::fs::{FallocateFlags, FileType};
use rustix::io::Errno;
use vm_memory::VolatileSlice;

use crate::volatile_io;

/// Largest disk in bytes: 16 TiB, the largest file of ext4 with 4 KiB blocks.
pub const MAX_DISK_BYTES: u64 = 16 << 40;

/// Bytes of zeros that are written at once where the file system can't make any.
const ZEROES_BYTES: usize = 16 << 10;

/// Gives space back.
const HOLE: FallocateFlags = FallocateFlags::PUNCH_HOLE.union(FallocateFlags::KEEP_SIZE);

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
}

impl FileDisk {
    /// Checks the descriptor and takes its size.
    ///
    /// # Errors
    /// See [`DiskError`].
    pub fn new(file: OwnedFd, read_only: bool) -> Result<Self, DiskError> {
        let inspect = |error: Errno| DiskError::Inspect(error.into());
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
        match rustix::fs::fallocate(&self.file, HOLE, offset, len) {
            // What is discarded may be anything afterwards, so also what it was.
            Ok(()) | Err(Errno::OPNOTSUPP) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn write_zeroes(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        let zeroed = if unmap {
            rustix::fs::fallocate(&self.file, HOLE, offset, len)
        } else {
            let zeroes = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(&self.file, zeroes, offset, len)
        };
        match zeroed {
            Ok(()) => Ok(()),
            // File systems differ: tmpfs has no ZERO_RANGE, others have neither.
            Err(Errno::OPNOTSUPP) => self.write_zero_bytes(offset, len),
            Err(error) => Err(error.into()),
        }
    }
}

impl FileDisk {
    fn write_zero_bytes(&self, offset: u64, len: u64) -> io::Result<()> {
        let zeroes = [0; ZEROES_BYTES];
        let mut done = 0;
        while done < len {
            let piece = usize::try_from(len - done)
                .unwrap_or(ZEROES_BYTES)
                .min(ZEROES_BYTES);
            let bytes = zeroes.get(..piece).unwrap_or_default();
            match rustix::io::pwrite(&self.file, bytes, offset + done) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => done += written as u64,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

    use super::*;

    fn file(bytes: &[u8]) -> OwnedFd {
        let file = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        File::from(file.try_clone().unwrap())
            .write_all_at(bytes, 0)
            .unwrap();
        file
    }

    /// Guest memory of two regions that a transfer has to step over.
    fn memory() -> GuestMemoryMmap {
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x1000), (GuestAddress(0x2000), 0x1000)])
            .unwrap()
    }

    #[test]
    fn a_disk_is_read_into_several_pieces_of_memory() {
        let memory = memory();
        let mut bytes = vec![1; 1024];
        bytes[600..].fill(2);
        let disk = FileDisk::new(file(&bytes), true).unwrap();
        let slices = [
            memory.get_slice(GuestAddress(0xff0), 16).unwrap(),
            memory.get_slice(GuestAddress(0x2000), 0).unwrap(),
            memory.get_slice(GuestAddress(0x2000), 496).unwrap(),
        ];

        disk.read_at(512, &slices).unwrap();

        assert_eq!(
            memory.read_obj::<[u8; 16]>(GuestAddress(0xff0)).unwrap(),
            [1; 16]
        );
        assert_eq!(memory.read_obj::<u8>(GuestAddress(0x2000 + 71)).unwrap(), 1);
        assert_eq!(memory.read_obj::<u8>(GuestAddress(0x2000 + 72)).unwrap(), 2);
        assert_eq!(disk.capacity_sectors(), 2);
    }

    #[test]
    fn test_read_at_of_a_disk_that_was_cut_returns_unexpected_eof() {
        let memory = memory();
        let file = file(&[1; 1024]);
        let disk = FileDisk::new(file.try_clone().unwrap(), true).unwrap();
        rustix::fs::ftruncate(&file, 700).unwrap();
        let slices = [memory.get_slice(GuestAddress(0), 512).unwrap()];

        let error = disk.read_at(512, &slices).unwrap_err();

        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn what_is_written_zeroed_and_discarded_reads_back() {
        let memory = memory();
        memory.write_obj([9u8; 32], GuestAddress(0x2000)).unwrap();
        let kept = file(&[5; 4096]);
        let disk = FileDisk::new(kept.try_clone().unwrap(), false).unwrap();
        let slices = [memory.get_slice(GuestAddress(0x2000), 32).unwrap()];

        disk.write_at(100, &slices).unwrap();
        disk.write_zeroes(512, 512, false).unwrap();
        disk.write_zeroes(1024, 512, true).unwrap();
        disk.write_zero_bytes(1536, 500).unwrap();
        disk.discard(2048, 512).unwrap();
        disk.flush().unwrap();

        let mut bytes = vec![0; 4096];
        File::from(kept).read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(
            (bytes[99], bytes[100], bytes[131], bytes[132]),
            (5, 9, 9, 5)
        );
        assert_eq!((bytes[511], bytes[2035], bytes[2036]), (5, 0, 5));
        assert!(bytes[512..2036].iter().all(|byte| *byte == 0));
        assert_eq!(bytes[2560], 5);
        assert_eq!(bytes.len(), 4096);
    }

    #[test]
    fn test_new_of_no_disk_returns_what_it_is() {
        let (pipe, _writer) = rustix::pipe::pipe().unwrap();
        let open = |path| OwnedFd::from(File::open(path).unwrap());
        let huge = file(&[]);
        rustix::fs::ftruncate(&huge, MAX_DISK_BYTES + 512).unwrap();

        for descriptor in [pipe, open("/"), open("/dev/zero")] {
            assert!(matches!(
                FileDisk::new(descriptor, true),
                Err(DiskError::Kind)
            ));
        }
        assert!(matches!(
            FileDisk::new(file(b""), true),
            Err(DiskError::Empty)
        ));
        assert!(matches!(
            FileDisk::new(file(&[0; 511]), true),
            Err(DiskError::Unaligned { bytes: 511 })
        ));
        assert!(matches!(
            FileDisk::new(huge, true),
            Err(DiskError::TooLarge { .. })
        ));
    }

    #[test]
    fn test_new_writable_of_a_read_only_descriptor_returns_access() {
        let folder = tempfile::NamedTempFile::new().unwrap();
        folder.as_file().set_len(512).unwrap();
        let read_only = OwnedFd::from(File::open(folder.path()).unwrap());

        assert!(matches!(
            FileDisk::new(read_only, false),
            Err(DiskError::Access("writing"))
        ));
    }
}
