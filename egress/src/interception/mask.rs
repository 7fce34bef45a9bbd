//! What comes back from a server, with every secret in it made unreadable, as long as it was: so no length in it changes.
//!
//! A secret may come in pieces: what could be the beginning of one is held until the next bytes tell. A message may end
//! so, and its last bytes can't be held for ever: after [`PAUSE`] a short beginning is let through, and what follows it is still
//! seen to be the rest.

use std::time::Duration;

use memchr::memmem;
use zeroize::Zeroizing;

/// How long the beginning of a secret is held for the rest.
pub(super) const PAUSE: Duration = Duration::from_millis(20);

/// Most bytes of a secret's beginning that a pause lets through, and never more than a third of it.
const MAX_BEGINNING_BYTES: usize = 8;

/// Most different values: those of the secrets, and of credentials that one was put into.
pub(super) const MAX_MASKS: usize = 128;

/// What stands for each byte.
const MASK: u8 = b'*';

/// The values that don't come back over one connection, and where its bytes stand.
#[derive(Default)]
pub(super) struct Masks {
    values: Vec<Zeroizing<Vec<u8>>>,
    /// What may belong to a value, as it came.
    held: Zeroizing<Vec<u8>>,
    /// So many of them at the front belong to a value that ended there.
    covered: usize,
    /// So many of them at the front were let through.
    passed: usize,
}

impl Masks {
    /// One value more: false where there is no room for it.
    pub(super) fn add(&mut self, value: &[u8]) -> bool {
        if self.values.iter().any(|known| known.as_slice() == value) {
            return true;
        }
        let has_room = self.values.len() < MAX_MASKS;
        if has_room {
            self.values.push(Zeroizing::new(value.to_vec()));
        }
        has_room
    }

    /// Takes what came next, and appends to `out` what may pass.
    pub(super) fn take(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        self.held.extend_from_slice(bytes);
        let ranges = self.ranges();
        let count = self.held.len() - self.beginning();
        self.pass(count, &ranges, out);
        let beyond = ranges
            .iter()
            .filter(|(start, _)| *start <= count)
            .map(|(_, end)| end.saturating_sub(count));
        self.covered = beyond.max().unwrap_or(0);
        self.passed = self.passed.saturating_sub(count);
        self.held.drain(..count);
    }

    /// Whether something is held that a pause lets through.
    pub(super) fn waits(&self) -> bool {
        let shortest = self.values.iter().map(|value| value.len()).min();
        let most = (shortest.unwrap_or(0) / 3).min(MAX_BEGINNING_BYTES);
        self.passed < self.held.len() && self.held.len() <= most
    }

    /// Nothing came for [`PAUSE`].
    pub(super) fn pause(&mut self, out: &mut Vec<u8>) {
        if self.waits() {
            self.pass(self.held.len(), &[(0, self.covered)], out);
            self.passed = self.held.len();
        }
    }

    /// Nothing will come: what is held is no value.
    pub(super) fn end(&mut self, out: &mut Vec<u8>) {
        self.pass(self.held.len(), &[(0, self.covered)], out);
        self.held.clear();
        (self.covered, self.passed) = (0, 0);
    }

    /// Appends the first bytes that are held, but for those that were let through.
    fn pass(&self, count: usize, ranges: &[(usize, usize)], out: &mut Vec<u8>) {
        let begin = out.len();
        out.extend_from_slice(self.held.get(self.passed..count).unwrap_or_default());
        for (start, end) in ranges {
            let at = |position: usize| begin + position.min(count).saturating_sub(self.passed);
            if let Some(bytes) = out.get_mut(at(*start)..at(*end)) {
                bytes.fill(MASK);
            }
        }
    }

    /// Where values are, from and to; they may overlap.
    fn ranges(&self) -> Vec<(usize, usize)> {
        let mut ranges = vec![(0, self.covered)];
        for value in &self.values {
            let finder = memmem::Finder::new(value.as_slice());
            let mut from = 0;
            while let Some(at) = finder.find(self.held.get(from..).unwrap_or_default()) {
                ranges.push((from + at, from + at + value.len()));
                from += at + 1;
            }
        }
        ranges
    }

    /// How many bytes at the end may be the beginning of a value.
    fn beginning(&self) -> usize {
        let longest = |value: &Zeroizing<Vec<u8>>| {
            let most = value.len().saturating_sub(1).min(self.held.len());
            (1..=most).rev().find(|count| {
                let end = self.held.get(self.held.len() - count..).unwrap_or_default();
                value.starts_with(end)
            })
        };
        self.values.iter().filter_map(longest).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn masks(values: &[&str]) -> Masks {
        let mut masks = Masks::default();
        for value in values {
            assert!(masks.add(value.as_bytes()));
        }
        masks
    }

    fn masked(values: &[&str], bytes: &[u8], size: usize) -> Vec<u8> {
        let (mut masks, mut out) = (masks(values), Vec::new());
        for piece in bytes.chunks(size) {
            masks.take(piece, &mut out);
        }
        masks.end(&mut out);
        out
    }

    #[test]
    fn a_value_is_masked_in_any_pieces() {
        for size in 1..40 {
            let out = masked(
                &["s3cr3t-value"],
                b"a: s3cr3t-value\r\nb: s3cr3t-valuS",
                size,
            );
            assert_eq!(out, b"a: ************\r\nb: s3cr3t-valuS", "{size}");
        }
    }

    #[test]
    fn values_that_overlap_are_masked_whole() {
        for size in 1..20 {
            assert_eq!(
                masked(&["abcabcab"], b"abcabcabcab-", size),
                b"***********-"
            );
            let both = masked(
                &["xx-inner-value", "inner-value-yy"],
                b"xx-inner-value-yy",
                size,
            );
            assert_eq!(both, b"*****************", "{size}");
        }
    }

    #[test]
    fn a_short_beginning_is_held_for_a_pause_and_the_rest_is_masked_then() {
        let (mut masks, mut out) = (masks(&["s3cr3t-value"]), Vec::new());
        masks.take(b"it ends in s3c", &mut out);
        assert_eq!(out, b"it ends in ");
        assert!(masks.waits());
        masks.pause(&mut out);
        assert_eq!(out, b"it ends in s3c");
        assert!(!masks.waits());
        masks.take(b"r3t-value!", &mut out);
        assert_eq!(out, b"it ends in s3c*********!");
    }

    #[test]
    fn a_long_beginning_is_held_until_the_end() {
        let (mut masks, mut out) = (masks(&["s3cr3t-value"]), Vec::new());
        masks.take(b"s3cr3t-valu", &mut out);
        assert!(!masks.waits());
        masks.pause(&mut out);
        assert_eq!(out, b"");
        masks.end(&mut out);
        assert_eq!(out, b"s3cr3t-valu");
    }

    #[test]
    fn values_are_bounded() {
        let mut masks = Masks::default();
        for number in 0..MAX_MASKS {
            assert!(masks.add(format!("value-{number}").as_bytes()));
        }
        assert!(!masks.add(b"one more value"));
        assert!(masks.add(b"value-1"));
    }

    proptest! {
        #[test]
        fn no_value_passes_and_nothing_else_changes(
            parts in proptest::collection::vec(prop_oneof![Just("aabaabaa".to_owned()), "[ab]{0,6}", "[a-z]{0,9}"], 0..12),
            size in 1_usize..30,
        ) {
            let text = parts.concat();
            let out = masked(&["aabaabaa", "baabbaab"], text.as_bytes(), size);

            let mut expected = text.clone().into_bytes();
            for value in ["aabaabaa", "baabbaab"] {
                for at in 0..text.len() {
                    if text[at..].starts_with(value) {
                        expected[at..at + value.len()].fill(MASK);
                    }
                }
            }
            prop_assert_eq!(out, expected);
        }
    }
}
