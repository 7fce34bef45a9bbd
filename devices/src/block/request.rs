//! One request: from a chain of descriptors to a status byte.
//!
//! ```text
//!  readable:  type u32 │ reserved u32 │ sector u64 │ data to write, or ranges …
//!  writable:  data that is read …                                    │ status u8
//! ```
//!
//! How the parts are spread over descriptors is the driver's choice (virtio 1.2 §2.7.4.2), and the status is the last writable byte.
//! [`Request::parse`] reads the header once and gives an operation whose offset and length lie in
//! the disk, so serving it can fail only in the disk. Every chain goes back to the driver, whatever is wrong with it.

use std::io;

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_ID_BYTES, VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP,
    VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN,
    VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};
use vm_memory::GuestMemoryMmap;

use super::disk::{Disk, SECTOR_SIZE};
use crate::virtio::{BufferError, Buffers, Chain, Served};

/// Bytes of a request's header (virtio 1.2 §5.2.6).
pub const HEADER_LEN: usize = 16;

/// Bytes of the identifier that GET_ID gives, padded with zeros (virtio 1.2 §5.2.6).
pub const DISK_ID_LEN: usize = VIRTIO_BLK_ID_BYTES as usize;

/// The driver's segments are at most this long (SIZE_MAX): with [`MAX_SEGMENTS`] it bounds what a conforming driver asks for at once.
pub const MAX_SEGMENT_LEN: u32 = 64 << 10;

/// A request has at most as many data segments (SEG_MAX): the queue's descriptors, without header and status.
pub const MAX_SEGMENTS: u32 = super::QUEUE_SIZE as u32 - 2;

/// The most data in one read or write, in bytes: what SIZE_MAX and SEG_MAX allow. A longer request fails with
/// IOERR, so that the event loop is not held for longer by one chain of 256 × 4 GiB.
pub const MAX_DATA_LEN: u64 = MAX_SEGMENT_LEN as u64 * MAX_SEGMENTS as u64;

/// The most ranges in one discard or write-zeroes; more fail with IOERR.
pub const MAX_RANGES: u32 = 8;

/// The most sectors in one range of a discard or write-zeroes: 8 MiB. A longer one fails with IOERR. A file system that can't make zeros gets
/// them written, byte for byte: with [`MAX_RANGES`] it bounds what one request may cost to 64 MiB, some tens of milliseconds in memory.
pub const MAX_RANGE_SECTORS: u32 = 1 << 14;

/// The most bytes that one round of requests reads, writes, zeroes and discards before others have their turn; the request with which it comes
/// to that is served whole, so that it may be twice as much.
pub const ROUND_BYTES_MAX: u64 = 64 << 20;

const _: () = assert!(
    MAX_DATA_LEN <= ROUND_BYTES_MAX
        && MAX_RANGES as u64 * MAX_RANGE_SECTORS as u64 * SECTOR_SIZE <= ROUND_BYTES_MAX,
    "a request is no more than a round"
);

/// Bytes of a range: sector u64, sectors u32, flags u32 (virtio 1.2 §5.2.6).
const RANGE_LEN: usize = 16;

/// Why a request was not carried out, as the driver reads it in the status byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// VIRTIO_BLK_S_IOERR: it makes no sense for this disk, or the disk failed.
    IoError,
    /// VIRTIO_BLK_S_UNSUPP: no such request here.
    Unsupported,
}

impl From<BufferError> for Refusal {
    fn from(_: BufferError) -> Self {
        Self::IoError
    }
}

impl From<io::Error> for Refusal {
    fn from(_: io::Error) -> Self {
        Self::IoError
    }
}

/// What a disk allows.
#[derive(Clone, Copy, Debug)]
pub struct Geometry {
    /// Size in sectors.
    pub capacity_sectors: u64,
    /// Whether writing is refused.
    pub read_only: bool,
}

/// A range of bytes that lies in the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskRange {
    /// First byte.
    offset: u64,
    /// Length in bytes: a multiple of [`SECTOR_SIZE`], not 0.
    len: u64,
}

impl DiskRange {
    fn check(sector: u64, len: u64, geometry: Geometry) -> Result<Self, Refusal> {
        let sectors = len / SECTOR_SIZE;
        let inside = sector
            .checked_add(sectors)
            .is_some_and(|end| end <= geometry.capacity_sectors);
        if len == 0 || !len.is_multiple_of(SECTOR_SIZE) || !inside {
            return Err(Refusal::IoError);
        }
        let offset = sector.checked_mul(SECTOR_SIZE).ok_or(Refusal::IoError)?;
        Ok(Self { offset, len })
    }
}

/// A range to be zeroed, and whether its space may be given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZeroRange {
    /// Where.
    pub range: DiskRange,
    /// Whether the disk may give the space back.
    pub unmap: bool,
}

/// A request that makes sense for the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// Read into the writable part, from its start.
    Read(DiskRange),
    /// Write from the readable part, from behind the header.
    Write(DiskRange),
    /// Make everything that was written durable.
    Flush,
    /// Write the identifier to the start of the writable part.
    GetId,
    /// Forget ranges.
    Discard(Vec<DiskRange>),
    /// Zero ranges.
    WriteZeroes(Vec<ZeroRange>),
}

impl Request {
    /// Reads the header, and the ranges where there are some, and checks them. `data_room` is the length of the
    /// writable part without the status byte.
    ///
    /// # Errors
    ///
    /// [`Refusal`], which is the status to give to the driver.
    pub fn parse(
        memory: &GuestMemoryMmap,
        readable: &Buffers,
        data_room: u64,
        geometry: Geometry,
    ) -> Result<Self, Refusal> {
        let mut header = [0_u8; HEADER_LEN];
        readable.read_at(memory, 0, &mut header)?;
        // Four words: type, reserved, and the sector in two halves.
        let [kind, _reserved, sector_low, sector_high] = words(header);
        let sector = u64::from(sector_high) << 32 | u64::from(sector_low);
        let payload_len = readable.len().saturating_sub(HEADER_LEN as u64);
        match kind {
            VIRTIO_BLK_T_IN => data_range(sector, data_room, geometry).map(Self::Read),
            VIRTIO_BLK_T_OUT => {
                writable(geometry)?;
                data_range(sector, payload_len, geometry).map(Self::Write)
            }
            VIRTIO_BLK_T_FLUSH => Ok(Self::Flush),
            VIRTIO_BLK_T_GET_ID if data_room < DISK_ID_LEN as u64 => Err(Refusal::IoError),
            VIRTIO_BLK_T_GET_ID => Ok(Self::GetId),
            VIRTIO_BLK_T_DISCARD => {
                writable(geometry)?;
                ranges(memory, readable, payload_len)?
                    .into_iter()
                    .map(|range| range.to_discard(geometry))
                    .collect::<Result<_, _>>()
                    .map(Self::Discard)
            }
            VIRTIO_BLK_T_WRITE_ZEROES => {
                writable(geometry)?;
                ranges(memory, readable, payload_len)?
                    .into_iter()
                    .map(|range| range.to_zero(geometry))
                    .collect::<Result<_, _>>()
                    .map(Self::WriteZeroes)
            }
            _ => Err(Refusal::Unsupported),
        }
    }
}

impl Request {
    /// What it takes of a round's [`ROUND_BYTES_MAX`]. How long it takes to make something durable no number of bytes tells: others have their
    /// turn after it.
    fn cost(&self, write_through: bool) -> u64 {
        let bytes = match self {
            Self::Flush => return ROUND_BYTES_MAX,
            Self::GetId => return 0,
            Self::Read(range) => return range.len,
            Self::Write(range) => range.len,
            Self::Discard(ranges) => ranges.iter().map(|range| range.len).sum(),
            Self::WriteZeroes(ranges) => ranges.iter().map(|zero| zero.range.len).sum(),
        };
        if write_through {
            ROUND_BYTES_MAX
        } else {
            bytes
        }
    }
}

fn writable(geometry: Geometry) -> Result<(), Refusal> {
    if geometry.read_only {
        return Err(Refusal::IoError);
    }
    Ok(())
}

fn data_range(sector: u64, len: u64, geometry: Geometry) -> Result<DiskRange, Refusal> {
    if len > MAX_DATA_LEN {
        return Err(Refusal::IoError);
    }
    DiskRange::check(sector, len, geometry)
}

/// A range as the driver wrote it.
struct RawRange {
    sector: u64,
    sectors: u32,
    flags: u32,
}

impl RawRange {
    /// A discard has no flags (virtio 1.2 §5.2.6.2).
    fn to_discard(&self, geometry: Geometry) -> Result<DiskRange, Refusal> {
        if self.flags != 0 {
            return Err(Refusal::Unsupported);
        }
        self.check(geometry)
    }

    fn to_zero(&self, geometry: Geometry) -> Result<ZeroRange, Refusal> {
        if self.flags & !VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0 {
            return Err(Refusal::Unsupported);
        }
        Ok(ZeroRange {
            range: self.check(geometry)?,
            unmap: self.flags != 0,
        })
    }

    fn check(&self, geometry: Geometry) -> Result<DiskRange, Refusal> {
        if self.sectors > MAX_RANGE_SECTORS {
            return Err(Refusal::IoError);
        }
        DiskRange::check(self.sector, u64::from(self.sectors) * SECTOR_SIZE, geometry)
    }
}

/// Copies the ranges of a discard or write-zeroes: whole ones, at least one, at most [`MAX_RANGES`].
fn ranges(
    memory: &GuestMemoryMmap,
    readable: &Buffers,
    payload_len: u64,
) -> Result<Vec<RawRange>, Refusal> {
    let count = payload_len / RANGE_LEN as u64;
    if count == 0 || count > u64::from(MAX_RANGES) || !payload_len.is_multiple_of(RANGE_LEN as u64)
    {
        return Err(Refusal::IoError);
    }
    (0..count)
        .map(|index| {
            let mut raw = [0_u8; RANGE_LEN];
            readable.read_at(
                memory,
                HEADER_LEN as u64 + index * RANGE_LEN as u64,
                &mut raw,
            )?;
            let [sector_low, sector_high, sectors, flags] = words(raw);
            Ok(RawRange {
                sector: u64::from(sector_high) << 32 | u64::from(sector_low),
                sectors,
                flags,
            })
        })
        .collect()
}

/// Sixteen bytes as four little-endian words.
fn words(bytes: [u8; 16]) -> [u32; 4] {
    // The shifts take one word each out of the number that the bytes are.
    let number = u128::from_le_bytes(bytes);
    [0, 32, 64, 96]
        .map(|shift| u32::try_from(number >> shift & u128::from(u32::MAX)).unwrap_or_default())
}

/// A disk with the identifier that it answers to.
#[derive(Debug)]
pub struct DiskService {
    disk: Box<dyn Disk>,
    id: [u8; DISK_ID_LEN],
}

impl DiskService {
    /// Serves `disk`. The guest sees `id` as the disk's serial number.
    #[must_use]
    pub fn new(disk: Box<dyn Disk>, id: [u8; DISK_ID_LEN]) -> Self {
        Self { disk, id }
    }

    /// What the disk allows.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        Geometry {
            capacity_sectors: self.disk.capacity_sectors(),
            read_only: self.disk.read_only(),
        }
    }

    /// Carries out the request in `chain` and writes its status. With `write_through`, what is written is durable when this returns.
    ///
    /// No bytes are written into the chain where there is no status byte to write to, as nothing was done then. The cost is that of
    /// [`ROUND_BYTES_MAX`].
    pub fn serve(&self, memory: &GuestMemoryMmap, chain: &Chain, write_through: bool) -> Served {
        let mut cost = 0;
        let written_bytes = self.serve_counted(memory, chain, write_through, &mut cost);
        Served {
            written_bytes,
            cost,
        }
    }

    fn serve_counted(
        &self,
        memory: &GuestMemoryMmap,
        chain: &Chain,
        write_through: bool,
        cost: &mut u64,
    ) -> u32 {
        let Some(data_room) = chain.writable().len().checked_sub(1) else {
            return 0;
        };
        // Before anything is done: a request whose outcome can't be told is not carried out.
        if chain.writable().slices(memory, data_room, 1).is_err() {
            return 0;
        }
        let outcome = Request::parse(memory, chain.readable(), data_room, self.geometry())
            .and_then(|request| {
                *cost = request.cost(write_through);
                self.carry_out(&request, memory, chain, write_through)
            });
        let (status, written) = match outcome {
            Ok(written) => (VIRTIO_BLK_S_OK, written),
            Err(Refusal::IoError) => (VIRTIO_BLK_S_IOERR, 0),
            Err(Refusal::Unsupported) => (VIRTIO_BLK_S_UNSUPP, 0),
        };
        let [status, ..] = status.to_le_bytes();
        match chain.writable().write_at(memory, data_room, &[status]) {
            // At most MAX_DATA_LEN and one byte.
            Ok(()) => u32::try_from(written + 1).unwrap_or(u32::MAX),
            Err(_) => 0,
        }
    }

    /// The result is the number of bytes that were written into the chain.
    fn carry_out(
        &self,
        request: &Request,
        memory: &GuestMemoryMmap,
        chain: &Chain,
        write_through: bool,
    ) -> Result<u64, Refusal> {
        match request {
            Request::Read(range) => {
                let slices = chain.writable().slices(memory, 0, range.len)?;
                self.disk.read_at(range.offset, &slices)?;
                return Ok(range.len);
            }
            Request::Write(range) => {
                let slices = chain
                    .readable()
                    .slices(memory, HEADER_LEN as u64, range.len)?;
                self.disk.write_at(range.offset, &slices)?;
            }
            Request::Flush => self.disk.flush()?,
            Request::GetId => {
                chain.writable().write_at(memory, 0, &self.id)?;
                return Ok(DISK_ID_LEN as u64);
            }
            Request::Discard(ranges) => {
                for range in ranges {
                    self.disk.discard(range.offset, range.len)?;
                }
            }
            Request::WriteZeroes(ranges) => {
                for zero in ranges {
                    self.disk
                        .write_zeroes(zero.range.offset, zero.range.len, zero.unmap)?;
                }
            }
        }
        if write_through && !matches!(request, Request::Flush) {
            self.disk.flush()?;
        }
        Ok(0)
    }
}

#[cfg(test)]
mod tests;
