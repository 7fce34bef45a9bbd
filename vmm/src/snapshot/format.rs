//! The state file: its parts, and what is wrong with a file that is none.
//!
//! ```text
//!  "SVMMSNAP" │ format u16 │ parts u16 │ bytes of the file u32          all numbers little endian
//!  kind u16 │ version u16 │ payload bytes u32 │ CRC-32 of these eight bytes and the payload u32 │ payload
//!  … shape, devices, chips, then one part for each processor
//! ```
//!
//! A payload is a type of [`super::state`] in postcard. Whoever changes one of these types counts its version up: the test with
//! the golden file fails until then. [`parse`] trusts nothing: every length is compared with what is there before it is used, and
//! nothing is allocated that the file does not hold.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::state::{ChipsState, DevicesState, MachineState, Shape, VcpuState};
use crate::control::MAX_DISKS;
use crate::memory::{MAX_MEMORY_MIB, MIN_MEMORY_MIB};
use crate::mptable::MAX_VCPUS;

/// Largest state file in bytes: a processor takes some 12 KiB, and there are at most [`MAX_VCPUS`].
pub const MAX_STATE_BYTES: u64 = 1 << 20;

/// How every state file begins.
const MAGIC: [u8; 8] = *b"SVMMSNAP";

/// The layout of header and parts. What is in the parts has versions of its own.
const FORMAT: u16 = 1;

/// Bytes before the first part, and before each part's payload.
const HEADER_BYTES: usize = 16;
const PART_HEADER_BYTES: usize = 12;

/// What is wrong with a state file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// Longer than any.
    #[error("The state file is longer than {MAX_STATE_BYTES} bytes: it is none, or damaged")]
    TooLong,
    /// It does not begin as one.
    #[error("The file is no state file of sandvmm")]
    NotAState,
    /// It is of another version.
    #[error(
        "The state file has format {found}, and this sandvmm reads format {FORMAT}: make the snapshot anew"
    )]
    Format {
        /// In the file.
        found: u16,
    },
    /// It ends early, or goes on behind its end.
    #[error("The state file has {bytes} bytes, and says that it has {said}: it was cut or damaged")]
    Length {
        /// What there is.
        bytes: usize,
        /// What the header says.
        said: u32,
    },
    /// A part is not the one that has to be at its place, or is missing.
    #[error("The state file has no part {part} where it has to be: it was cut or damaged")]
    Missing {
        /// Which.
        part: Part,
    },
    /// A part's bytes are not those that were written.
    #[error("The state file is damaged in its part {part}")]
    Damaged {
        /// Which.
        part: Part,
    },
    /// A part is of another version.
    #[error("The state file's part {part} has version {found}, and this sandvmm reads version {}: make the snapshot anew", part.version())]
    PartVersion {
        /// Which.
        part: Part,
        /// In the file.
        found: u16,
    },
    /// A part is whole, and makes no sense.
    #[error("The state file's part {part} makes no sense")]
    Malformed {
        /// Which.
        part: Part,
    },
}

/// A kind of part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Part {
    /// [`Shape`].
    Shape,
    /// [`DevicesState`].
    Devices,
    /// [`ChipsState`].
    Chips,
    /// [`VcpuState`], with the processor's number.
    Vcpu(u8),
}

impl Part {
    fn kind(self) -> u16 {
        match self {
            Self::Shape => 1,
            Self::Devices => 2,
            Self::Chips => 3,
            Self::Vcpu(_) => 4,
        }
    }

    /// The version of its layout: counted up with every change.
    fn version(self) -> u16 {
        match self {
            Self::Shape | Self::Devices | Self::Chips | Self::Vcpu(_) => 1,
        }
    }
}

impl std::fmt::Display for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Shape => f.write_str("\"shape\""),
            Self::Devices => f.write_str("\"devices\""),
            Self::Chips => f.write_str("\"chips\""),
            Self::Vcpu(id) => write!(f, "\"processor {id}\""),
        }
    }
}

/// The state as a file's content; `None` where a part is longer than any can be.
#[must_use]
pub fn encode(state: &MachineState) -> Option<Vec<u8>> {
    let mut file = vec![0; HEADER_BYTES];
    append(&mut file, Part::Shape, &state.shape)?;
    append(&mut file, Part::Devices, &state.devices)?;
    append(&mut file, Part::Chips, &state.chips)?;
    for (id, vcpu) in (0..).zip(&state.vcpus) {
        append(&mut file, Part::Vcpu(id), vcpu)?;
    }
    let parts = u16::try_from(state.vcpus.len() + 3).ok()?;
    let bytes = u32::try_from(file.len()).ok()?;
    let header: Vec<u8> = [
        MAGIC.as_slice(),
        &FORMAT.to_le_bytes(),
        &parts.to_le_bytes(),
        &bytes.to_le_bytes(),
    ]
    .concat();
    file.get_mut(..HEADER_BYTES)?.copy_from_slice(&header);
    (u64::from(bytes) <= MAX_STATE_BYTES).then_some(file)
}

fn append(file: &mut Vec<u8>, part: Part, value: &impl Serialize) -> Option<()> {
    let payload = postcard::to_stdvec(value).ok()?;
    let mut header = Vec::with_capacity(PART_HEADER_BYTES);
    header.extend_from_slice(&part.kind().to_le_bytes());
    header.extend_from_slice(&part.version().to_le_bytes());
    header.extend_from_slice(&u32::try_from(payload.len()).ok()?.to_le_bytes());
    let crc = checksum(&header, &payload);
    file.extend_from_slice(&header);
    file.extend_from_slice(&crc.to_le_bytes());
    file.extend_from_slice(&payload);
    Some(())
}

fn checksum(header: &[u8], payload: &[u8]) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    crc.update(header);
    crc.update(payload);
    crc.finalize()
}

/// Reads a state file's content.
///
/// # Errors
/// See [`FormatError`].
pub fn parse(bytes: &[u8]) -> Result<MachineState, FormatError> {
    if bytes.len() as u64 > MAX_STATE_BYTES {
        return Err(FormatError::TooLong);
    }
    let mut rest = Bytes(bytes);
    if rest.take::<8>() != Some(MAGIC) {
        return Err(FormatError::NotAState);
    }
    let (Some(format), Some(parts), Some(said)) = (rest.u16(), rest.u16(), rest.u32()) else {
        return Err(FormatError::NotAState);
    };
    if format != FORMAT {
        return Err(FormatError::Format { found: format });
    }
    let wrong_length = FormatError::Length {
        bytes: bytes.len(),
        said,
    };
    if usize::try_from(said) != Ok(bytes.len()) {
        return Err(wrong_length);
    }
    let shape: Shape = rest.part(Part::Shape)?;
    check_shape(&shape)?;
    if usize::from(parts) != usize::from(shape.vcpu_count) + 3 {
        return Err(FormatError::Malformed { part: Part::Shape });
    }
    let devices: DevicesState = rest.part(Part::Devices)?;
    if devices.transports.is_empty() || devices.transports.len() > MAX_DISKS + 1 {
        return Err(FormatError::Malformed {
            part: Part::Devices,
        });
    }
    let chips: ChipsState = rest.part(Part::Chips)?;
    let vcpus = (0..shape.vcpu_count)
        .map(|id| rest.part::<VcpuState>(Part::Vcpu(id)))
        .collect::<Result<Vec<_>, _>>()?;
    if !rest.0.is_empty() {
        return Err(wrong_length);
    }
    Ok(MachineState {
        shape,
        devices,
        chips,
        vcpus,
    })
}

fn check_shape(shape: &Shape) -> Result<(), FormatError> {
    let is_possible = (1..=MAX_VCPUS).contains(&shape.vcpu_count)
        && (MIN_MEMORY_MIB..=MAX_MEMORY_MIB).contains(&shape.memory_mib);
    if is_possible {
        Ok(())
    } else {
        Err(FormatError::Malformed { part: Part::Shape })
    }
}

/// What has not been read yet.
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*first)
    }

    fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn slice(&mut self, len: usize) -> Option<&'a [u8]> {
        let (first, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(first)
    }

    /// The next part, which has to be this one, in this version, unchanged, and nothing but it.
    fn part<T: DeserializeOwned>(&mut self, part: Part) -> Result<T, FormatError> {
        let missing = FormatError::Missing { part };
        let header: [u8; 8] = self.take().ok_or_else(|| missing.clone())?;
        let mut fields = Bytes(&header);
        let (Some(kind), Some(version), Some(len), Some(crc)) =
            (fields.u16(), fields.u16(), fields.u32(), self.u32())
        else {
            return Err(missing);
        };
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        let payload = self.slice(len).ok_or_else(|| missing.clone())?;
        if checksum(&header, payload) != crc {
            return Err(FormatError::Damaged { part });
        }
        if kind != part.kind() {
            return Err(missing);
        }
        if version != part.version() {
            return Err(FormatError::PartVersion {
                part,
                found: version,
            });
        }
        match postcard::take_from_bytes::<T>(payload) {
            Ok((value, [])) => Ok(value),
            _ => Err(FormatError::Malformed { part }),
        }
    }
}

#[cfg(test)]
mod tests;
