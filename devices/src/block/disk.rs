//! What a block device needs from a disk.

use std::fmt::Debug;
use std::io;

use vm_memory::VolatileSlice;

/// Bytes in a sector: the unit of the protocol, whatever the disk's own block size is (virtio 1.2 §5.2.4).
pub const SECTOR_SIZE: u64 = 512;

/// A raw disk. Offsets are bytes and, like the sum of offset and length, never past
/// [`Self::capacity_sectors`] × [`SECTOR_SIZE`]: the request parser has checked it.
///
/// Data goes directly between the disk and guest memory: a [`VolatileSlice`] is memory that the guest can change at any time,
/// so an implementation must not read it twice and expect the same. A disk
/// that ends early (cut short while the machine runs) is an error, never a short transfer.
pub trait Disk: Debug + Send {
    /// Size in sectors of [`SECTOR_SIZE`] bytes; in bytes it fits 64 bits. Does not change.
    fn capacity_sectors(&self) -> u64;

    /// Whether writing is refused.
    fn read_only(&self) -> bool;

    /// Fills `slices`, in order, from the disk.
    ///
    /// # Errors
    ///
    /// The system's, or [`io::ErrorKind::UnexpectedEof`]. Some slices may have been filled.
    fn read_at(&self, offset: u64, slices: &[VolatileSlice<'_>]) -> io::Result<()>;

    /// Writes `slices`, in order, to the disk.
    ///
    /// # Errors
    ///
    /// The system's. Some slices may have been written.
    fn write_at(&self, offset: u64, slices: &[VolatileSlice<'_>]) -> io::Result<()>;

    /// Makes what was written durable.
    ///
    /// # Errors
    ///
    /// The system's.
    fn flush(&self) -> io::Result<()>;

    /// The bytes are not needed any more: reading them afterwards may give anything that was there, or zeros.
    ///
    /// # Errors
    ///
    /// The system's.
    fn discard(&self, offset: u64, len: u64) -> io::Result<()>;

    /// The bytes read as zeros afterwards. With `unmap` the disk may give their space back.
    ///
    /// # Errors
    ///
    /// The system's.
    fn write_zeroes(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()>;
}
