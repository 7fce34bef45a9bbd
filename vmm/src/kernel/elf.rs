//! Checks of an ELF kernel (vmlinux), before the loader sees it.
//!
//! Field offsets are those of `Elf64_Ehdr`, `Elf64_Phdr` and `Elf64_Nhdr` (System V gABI, chapters 4 and 5).

use super::KernelError;
use super::image::Image;
use crate::layout;

/// Most program headers; vmlinux has five.
const MAX_PROGRAM_HEADERS: u16 = 64;

/// Bytes of `Elf64_Ehdr`.
const HEADER_BYTES: usize = 64;

/// Bytes of `Elf64_Phdr`.
const PROGRAM_HEADER_BYTES: usize = 56;

/// Largest note segment in bytes; vmlinux's has about 500.
const MAX_NOTE_BYTES: u64 = 64 << 10;

/// Bytes of `Elf64_Nhdr`.
const NOTE_HEADER_BYTES: usize = 12;

/// `EM_X86_64`.
const MACHINE_X86_64: u16 = 62;

/// `PT_LOAD`.
const TYPE_LOAD: u32 = 1;

/// `PT_NOTE`.
const TYPE_NOTE: u32 = 4;

/// `XEN_ELFNOTE_PHYS32_ENTRY`: where PVH would enter the kernel.
const NOTE_PVH_ENTRY: u32 = 18;

/// An ELF kernel that can be loaded.
#[derive(Debug, Clone, Copy)]
pub(super) struct CheckedElf {
    pub(super) entry: u64,
    pub(super) end: u64,
}

/// One `PT_LOAD` segment: all of its fields are consistent.
#[derive(Debug, Clone, Copy)]
struct Segment {
    address: u64,
    /// First address behind what the file fills.
    file_end: u64,
    /// First address behind it.
    end: u64,
}

/// Whether the file says that it is ELF.
pub(super) fn is_elf(image: &Image) -> Result<bool, KernelError> {
    if image.len() < 4 {
        return Err(KernelError::UnknownFormat);
    }
    Ok(&image.bytes_at::<4>(0, "ELF header")? == b"\x7fELF")
}

/// Checks everything that the loader will trust. Nothing may lie at or above `memory_end`.
pub(super) fn check(image: &Image, memory_end: u64) -> Result<CheckedElf, KernelError> {
    let header = image.bytes_at::<HEADER_BYTES>(0, "ELF header")?;
    // e_ident: ELFCLASS64, ELFDATA2LSB; then e_machine.
    if header[4..6] != [2, 1] || u16_at(&header, 18) != MACHINE_X86_64 {
        return Err(KernelError::OtherArchitecture);
    }
    let bad = |field, value| KernelError::BadField { field, value };
    let table = u64_at(&header, 32);
    let entry_bytes = u16_at(&header, 54);
    let count = u16_at(&header, 56);
    if usize::from(entry_bytes) != PROGRAM_HEADER_BYTES {
        return Err(bad("e_phentsize", entry_bytes.into()));
    }
    if count == 0 || count > MAX_PROGRAM_HEADERS {
        return Err(bad("e_phnum", count.into()));
    }
    if table < HEADER_BYTES as u64 {
        return Err(bad("e_phoff", table));
    }

    let mut segments: Vec<Segment> = Vec::new();
    for index in 0..u64::from(count) {
        let at = table
            .checked_add(index * PROGRAM_HEADER_BYTES as u64)
            .ok_or(KernelError::Truncated("program headers"))?;
        let header = image.bytes_at::<PROGRAM_HEADER_BYTES>(at, "program headers")?;
        match u32_at(&header, 0) {
            TYPE_LOAD => {
                let segment = check_segment(image, &header, memory_end)?;
                if let Some(segment) = segment {
                    if segments
                        .iter()
                        .any(|other| segment.address < other.end && other.address < segment.end)
                    {
                        return Err(KernelError::SegmentsOverlap {
                            address: segment.address,
                        });
                    }
                    segments.push(segment);
                }
            }
            TYPE_NOTE => check_notes(image, &header)?,
            _ => {}
        }
    }

    let entry = u64_at(&header, 24);
    if !segments
        .iter()
        .any(|segment| (segment.address..segment.file_end).contains(&entry))
    {
        return Err(KernelError::EntryOutside { entry });
    }
    let end = segments.iter().map(|segment| segment.end).max();
    Ok(CheckedElf {
        entry,
        end: end.unwrap_or(entry),
    })
}

/// A segment, or none where it has no bytes at all.
fn check_segment(
    image: &Image,
    header: &[u8; PROGRAM_HEADER_BYTES],
    memory_end: u64,
) -> Result<Option<Segment>, KernelError> {
    let offset = u64_at(header, 8);
    let address = u64_at(header, 24);
    let file_bytes = u64_at(header, 32);
    let memory_bytes = u64_at(header, 40);
    if file_bytes > memory_bytes {
        return Err(KernelError::BadField {
            field: "p_filesz",
            value: file_bytes,
        });
    }
    if memory_bytes == 0 {
        return Ok(None);
    }
    if offset
        .checked_add(file_bytes)
        .is_none_or(|end| end > image.len())
    {
        return Err(KernelError::Truncated("segments"));
    }
    if address < layout::HIGH_MEMORY {
        return Err(KernelError::OverBootData { address });
    }
    let end = address.checked_add(memory_bytes);
    match end {
        Some(end) if end <= memory_end => Ok(Some(Segment {
            address,
            file_end: address + file_bytes,
            end,
        })),
        _ => Err(KernelError::OutsideMemory {
            address,
            end: end.unwrap_or(u64::MAX),
            memory_end,
        }),
    }
}

/// Walks a note segment as the loader will: each step goes forward by at least a note's header.
fn check_notes(image: &Image, header: &[u8; PROGRAM_HEADER_BYTES]) -> Result<(), KernelError> {
    let offset = u64_at(header, 8);
    let bytes = u64_at(header, 32);
    let alignment = u64_at(header, 48);
    if bytes > MAX_NOTE_BYTES {
        return Err(KernelError::BadPvhNote);
    }
    let mut notes = vec![0; usize::try_from(bytes).unwrap_or(0)];
    image.fill_at(&mut notes, offset, "notes")?;
    let mut rest = notes.as_slice();
    while !rest.is_empty() {
        let note = rest
            .first_chunk::<NOTE_HEADER_BYTES>()
            .ok_or(KernelError::Truncated("notes"))?;
        let name_bytes = padded(u32_at(note, 0));
        let description_bytes = u32_at(note, 4);
        let name = rest
            .get(NOTE_HEADER_BYTES..)
            .and_then(|body| body.get(..name_bytes))
            .ok_or(KernelError::Truncated("notes"))?;
        if u32_at(note, 8) == NOTE_PVH_ENTRY
            && name == b"Xen\0"
            && (!matches!(description_bytes, 4 | 8) || !matches!(alignment, 0 | 1 | 4))
        {
            return Err(KernelError::BadPvhNote);
        }
        rest = rest
            .get(NOTE_HEADER_BYTES + name_bytes + padded(description_bytes)..)
            .ok_or(KernelError::Truncated("notes"))?;
    }
    Ok(())
}

/// Names and descriptions of notes are padded to 4 bytes.
fn padded(bytes: u32) -> usize {
    (bytes as usize).next_multiple_of(4)
}

fn u16_at<const N: usize>(bytes: &[u8; N], at: usize) -> u16 {
    u16::from_le_bytes(array_at(bytes, at))
}

fn u32_at<const N: usize>(bytes: &[u8; N], at: usize) -> u32 {
    u32::from_le_bytes(array_at(bytes, at))
}

fn u64_at<const N: usize>(bytes: &[u8; N], at: usize) -> u64 {
    u64::from_le_bytes(array_at(bytes, at))
}

/// All callers name a constant inside the array; zeros elsewhere.
fn array_at<const N: usize, const M: usize>(bytes: &[u8; N], at: usize) -> [u8; M] {
    bytes
        .get(at..)
        .and_then(|rest| rest.first_chunk::<M>())
        .copied()
        .unwrap_or([0; M])
}
