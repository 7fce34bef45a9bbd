//! Whether an ELF file is a whole program for the guest's processor. The guest would say so too, after its boot, and of a file that was cut
//! not at all: such a program is killed when it comes to what is missing.
//!
//! Offsets are those of the ELF-64 object file format, figures of "ELF header" and "Program header".

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// How every ELF file begins.
pub(super) const MAGIC: &[u8] = b"\x7fELF";

/// Length of the header.
const HEADER_BYTES: usize = 64;

/// Length of a program header.
const PROGRAM_HEADER_BYTES: usize = 56;

/// Most program headers that are read: Linux loads none with more than 64 KiB of them (`load_elf_phdrs`).
const MAX_PROGRAM_HEADERS: u64 = (64 << 10) / PROGRAM_HEADER_BYTES as u64;

/// `ELFCLASS64`, `ELFDATA2LSB`.
const LITTLE_64: [u8; 2] = [2, 1];

/// `ET_EXEC` and `ET_DYN`.
const PROGRAMS: [u16; 2] = [2, 3];

/// `EM_X86_64`.
const X86_64: u16 = 62;

/// `PT_LOAD`.
const LOAD: u32 = 1;

/// What an ELF file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Elf {
    /// A program that the guest can load.
    Program,
    /// The beginning of one.
    Cut,
    /// One for another processor.
    Foreign,
    /// An object file, or what is left of a process.
    NotAProgram,
}

/// Looks at an ELF file.
///
/// # Errors
/// When it can't be read.
pub(super) fn look(file: &File) -> io::Result<Elf> {
    let length = file.metadata()?.len();
    let mut header = [0; HEADER_BYTES];
    if !read(file, &mut header, 0)? {
        return Ok(Elf::Cut);
    }
    if header.get(4..6) != Some(&LITTLE_64) || u16_at(&header, 18) != X86_64 {
        return Ok(Elf::Foreign);
    }
    if !PROGRAMS.contains(&u16_at(&header, 16)) {
        return Ok(Elf::NotAProgram);
    }
    let (first, count) = (u64_at(&header, 32), u16_at(&header, 56));
    for index in 0..u64::from(count).min(MAX_PROGRAM_HEADERS) {
        let mut row = [0; PROGRAM_HEADER_BYTES];
        let at = index * PROGRAM_HEADER_BYTES as u64;
        if !read(file, &mut row, first.saturating_add(at))? {
            return Ok(Elf::Cut);
        }
        // `p_offset` and `p_filesz`: of a segment that is zeros alone nothing is in the file, wherever that would be.
        let (start, bytes) = (u64_at(&row, 8), u64_at(&row, 32));
        if u32_at(&row, 0) == LOAD && bytes > 0 && start.saturating_add(bytes) > length {
            return Ok(Elf::Cut);
        }
    }
    Ok(Elf::Program)
}

/// Fills the buffer; false where the file ends before.
fn read(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<bool> {
    match file.read_exact_at(buffer, offset) {
        Ok(()) => Ok(true),
        // An offset that no file has is behind its end.
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidInput
            ) =>
        {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

fn bytes_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    // What lies outside is zero: the callers' offsets are inside.
    bytes
        .get(at..at + N)
        .and_then(|bytes| bytes.try_into().ok())
        .unwrap_or([0; N])
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes_at(bytes, at))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes_at(bytes, at))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes_at(bytes, at))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use proptest::prelude::*;

    use super::*;

    fn look_at(content: &[u8]) -> Elf {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(content).unwrap();
        look(&file).unwrap()
    }

    fn this_program() -> Vec<u8> {
        std::fs::read("/proc/self/exe").unwrap()
    }

    #[test]
    fn a_whole_program_is_one_and_a_cut_one_is_told_from_a_foreign_one() {
        let whole = this_program();

        // What lies behind the last segment, a table of symbols, no run needs.
        assert_eq!(look_at(&whole), Elf::Program);
        for length in [4, 19, 63, 64, 100, 8192] {
            assert_eq!(look_at(&whole[..length]), Elf::Cut, "{length}");
        }
    }

    #[test]
    fn a_segment_of_zeros_behind_the_files_end_cuts_nothing() {
        let mut program = this_program();
        let first = usize::try_from(u64_at(&program, 32)).unwrap();
        let loads = |program: &[u8], index: usize| {
            u32_at(program, first + index * PROGRAM_HEADER_BYTES) == LOAD
        };
        let index = (0..20).find(|index| loads(&program, *index)).unwrap();
        let row = first + index * PROGRAM_HEADER_BYTES;

        program[row + 8..row + 16].copy_from_slice(&(1_u64 << 40).to_le_bytes());
        assert_eq!(look_at(&program), Elf::Cut);
        program[row + 32..row + 40].fill(0);
        assert_eq!(look_at(&program), Elf::Program);
    }

    #[test]
    fn other_processors_and_other_files_are_told() {
        let changed = |at: usize, byte: u8| {
            let mut content = this_program();
            content[at] = byte;
            look_at(&content)
        };

        // ELFCLASS32, ELFDATA2MSB, EM_AARCH64.
        for (at, byte) in [(4, 1), (5, 2), (18, 183)] {
            assert_eq!(changed(at, byte), Elf::Foreign, "{at}");
        }
        // ET_REL and ET_CORE.
        for kind in [1, 4] {
            assert_eq!(changed(16, kind), Elf::NotAProgram, "{kind}");
        }
    }

    proptest! {
        #[test]
        fn any_content_is_looked_at(rest in proptest::collection::vec(any::<u8>(), 0..512)) {
            let mut content = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x3e\0".to_vec();
            content.extend(rest);
            let _ = look_at(&content);
        }
    }
}
