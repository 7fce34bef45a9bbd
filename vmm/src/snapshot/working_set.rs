//! The pages of a snapshot's memory that its guests write to at once, found out by having one of them run.
//!
//! Each costs a guest up to three faults: one to read it from the page cache, one to be denied writing there, and one for the copy.
//! Copied before the guest runs, all in a few calls, it costs one. A page that is copied in vain costs its room and no more.
//!
//! The file is runs of pages, two numbers of 32 bits, little-endian, for each: the first page of the memory file, and how many.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Bytes of a page.
pub const PAGE_BYTES: u64 = 4096;

/// Most runs of a working set; further ones are left out.
pub const MAX_RUNS: usize = 16 << 10;

/// Most pages of a working set: 64 MiB. The rest comes as the guest gets to it.
pub const MAX_PAGES: u64 = 16 << 10;

/// Bytes of a run in the file.
const RUN_BYTES: usize = 8;

/// Pages one after another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// The first one's number in the memory file.
    pub first: u32,
    /// How many.
    pub count: u32,
}

/// The content of a working set's file.
#[must_use]
pub fn encode(runs: &[Run]) -> Vec<u8> {
    runs.iter()
        .take(MAX_RUNS)
        .flat_map(|run| [run.first.to_le_bytes(), run.count.to_le_bytes()])
        .flatten()
        .collect()
}

/// Reads a working set's file. What comes after [`MAX_RUNS`] or [`MAX_PAGES`], and what is no whole run, is left out; whether the
/// pages are there is for the memory to say. The file's position is not used.
///
/// # Errors
/// The system's.
pub(crate) fn read(file: &File) -> io::Result<Vec<Run>> {
    let bytes = file.metadata()?.len();
    let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
    let mut content = vec![0; bytes.min(MAX_RUNS * RUN_BYTES)];
    file.read_exact_at(&mut content, 0)?;
    Ok(parse(&content))
}

fn parse(content: &[u8]) -> Vec<Run> {
    let mut pages_left = MAX_PAGES;
    let (numbers, _) = content.as_chunks::<RUN_BYTES>();
    numbers
        .iter()
        .map(|number| {
            let number = u64::from_le_bytes(*number);
            // Both halves fit.
            let [first, count] = [number & 0xffff_ffff, number >> 32]
                .map(|half| u32::try_from(half).unwrap_or_default());
            Run { first, count }
        })
        .take_while(|run| {
            let fits = u64::from(run.count) <= pages_left;
            pages_left = pages_left.saturating_sub(u64::from(run.count));
            fits
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const RUNS: [Run; 2] = [
        Run { first: 1, count: 2 },
        Run {
            first: 0x0102_0304,
            count: 5,
        },
    ];

    #[test]
    fn a_working_set_has_the_bytes_that_are_documented() {
        let bytes = encode(&RUNS);

        assert_eq!(bytes, [1, 0, 0, 0, 2, 0, 0, 0, 4, 3, 2, 1, 5, 0, 0, 0]);
        assert_eq!(parse(&bytes), RUNS);
        assert_eq!(parse(&bytes[..15]), RUNS[..1]);
    }

    #[test]
    fn a_working_set_beyond_its_bounds_is_cut() {
        let most = u32::try_from(MAX_PAGES).unwrap();
        let run = |count| Run { first: 0, count };
        assert_eq!(parse(&encode(&[run(most), run(1)])), [run(most)]);
        assert_eq!(parse(&encode(&[run(most + 1)])), []);
        assert_eq!(parse(&encode(&vec![run(0); MAX_RUNS + 1])).len(), MAX_RUNS);
    }

    proptest! {
        #[test]
        fn whatever_is_in_the_file_no_more_pages_come_out_than_may_be(content in prop::collection::vec(any::<u8>(), 0..200)) {
            let pages: u64 = parse(&content).iter().map(|run| u64::from(run.count)).sum();
            prop_assert!(pages <= MAX_PAGES);
        }
    }
}
