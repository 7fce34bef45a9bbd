//! What comes back from a server, with every secret in it made unreadable, as long as it was: so no length in it changes.
//!
//! A secret may come in pieces: what could be the beginning of one is held until the next bytes tell, as long as so many can come in
//! this message as it takes to be whole. A message that goes on may pause so, and its last bytes can't be held for ever: after
//! [`PAUSE`] a short beginning is let through, and what follows it is still seen to be the rest.

use std::sync::Arc;
use std::time::Duration;

use super::needle::{Forms, Needle};

/// How long the beginning of a secret is held for the rest.
pub(super) const PAUSE: Duration = Duration::from_millis(20);

/// Most bytes of a secret's beginning that a pause lets through, and never more than a third of it.
const MAX_BEGINNING_BYTES: usize = 8;

/// What stands for each byte.
const MASK: u8 = b'*';

/// The values that don't come back over one connection, and how much of each has come.
pub(super) struct Masks {
    values: Vec<Watched>,
    forms: Arc<Forms>,
    /// So many of the forms are among the values.
    known_forms: usize,
    /// What may belong to a value; what belongs to one is masked.
    held: Vec<u8>,
    /// So many of them at the front were let through.
    passed: usize,
}

struct Watched {
    needle: Arc<Needle>,
    /// So much of it ends what has come.
    found: usize,
}

impl Masks {
    /// For these values, and all forms, whenever they are added.
    pub(super) fn new(values: impl IntoIterator<Item = Arc<Needle>>, forms: &Arc<Forms>) -> Self {
        let watched = |needle| Watched { needle, found: 0 };
        Self {
            values: values.into_iter().map(watched).collect(),
            forms: Arc::clone(forms),
            known_forms: 0,
            held: Vec::new(),
            passed: 0,
        }
    }

    /// Takes what came next in a message of which at most `left` bytes follow, and appends to `out` what may pass.
    pub(super) fn take(&mut self, bytes: &[u8], left: u64, out: &mut Vec<u8>) {
        for needle in self.forms.behind(self.known_forms) {
            self.known_forms += 1;
            self.values.push(Watched { needle, found: 0 });
        }
        let before = self.held.len();
        self.held.extend_from_slice(bytes);
        for Watched { needle, found } in &mut self.values {
            let held = &mut self.held;
            let mut masked = 0;
            *found = needle.look(*found, bytes, |end| {
                let end = before + end;
                let start = end.saturating_sub(needle.len()).max(masked);
                if let Some(value) = held.get_mut(start..end) {
                    value.fill(MASK);
                }
                masked = end;
            });
        }
        let count = self.held.len() - self.beginning(left).min(self.held.len());
        self.pass(count, out);
        self.passed = self.passed.saturating_sub(count);
        self.held.drain(..count);
    }

    /// Whether something is held that a pause lets through.
    pub(super) fn waits(&self) -> bool {
        let lengths = self.values.iter().map(|value| value.needle.len());
        let most = (lengths.min().unwrap_or(0) / 3).min(MAX_BEGINNING_BYTES);
        self.passed < self.held.len() && self.held.len() <= most
    }

    /// Nothing came for [`PAUSE`].
    pub(super) fn pause(&mut self, out: &mut Vec<u8>) {
        if self.waits() {
            self.pass(self.held.len(), out);
            self.passed = self.held.len();
        }
    }

    /// The message is over: what is held is no value.
    pub(super) fn end(&mut self, out: &mut Vec<u8>) {
        self.pass(self.held.len(), out);
        self.held.clear();
        self.passed = 0;
        for value in &mut self.values {
            value.found = 0;
        }
    }

    /// A message that came whole.
    pub(super) fn whole(&mut self, text: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(text.len());
        self.take(text, 0, &mut out);
        self.end(&mut out);
        out
    }

    /// Appends the first bytes that are held, but for those that were let through.
    fn pass(&self, count: usize, out: &mut Vec<u8>) {
        out.extend_from_slice(self.held.get(self.passed..count).unwrap_or_default());
    }

    /// How many bytes at the end may be the beginning of a value that is whole within `left` more.
    fn beginning(&self, left: u64) -> usize {
        let may_be_whole = |value: &&Watched| {
            let missing = value.needle.len().saturating_sub(value.found);
            u64::try_from(missing).is_ok_and(|missing| missing <= left)
        };
        let begun = self.values.iter().filter(may_be_whole);
        begun.map(|value| value.found).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn masks(values: &[&str]) -> Masks {
        let needle = |value: &&str| Arc::new(Needle::new(value.as_bytes()));
        Masks::new(values.iter().map(needle), &Arc::default())
    }

    fn masked(values: &[&str], bytes: &[u8], size: usize) -> Vec<u8> {
        let (mut masks, mut out) = (masks(values), Vec::new());
        for piece in bytes.chunks(size) {
            masks.take(piece, u64::MAX, &mut out);
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
        masks.take(b"it ends in s3c", u64::MAX, &mut out);
        assert_eq!(out, b"it ends in ");
        assert!(masks.waits());
        masks.pause(&mut out);
        assert_eq!(out, b"it ends in s3c");
        assert!(!masks.waits());
        masks.take(b"r3t-value!", u64::MAX, &mut out);
        assert_eq!(out, b"it ends in s3c*********!");
    }

    #[test]
    fn a_long_beginning_is_held_until_the_end() {
        let (mut masks, mut out) = (masks(&["s3cr3t-value"]), Vec::new());
        masks.take(b"s3cr3t-valu", u64::MAX, &mut out);
        assert!(!masks.waits());
        masks.pause(&mut out);
        assert_eq!(out, b"");
        masks.end(&mut out);
        assert_eq!(out, b"s3cr3t-valu");
    }

    #[test]
    fn what_can_no_longer_be_whole_in_its_message_is_not_held() {
        let (mut masks, mut out) = (masks(&["s3cr3t-value"]), Vec::new());
        masks.take(b"a s3cr3t-v", 4, &mut out);
        assert_eq!(out, b"a ");
        masks.take(b"a", 2, &mut out);
        assert_eq!(out, b"a s3cr3t-va");
        masks.take(b"lu", 0, &mut out);
        masks.end(&mut out);
        masks.take(b"e", u64::MAX, &mut out);
        assert_eq!(out, b"a s3cr3t-value");
    }

    #[test]
    fn a_value_within_the_beginning_of_another_is_masked_at_the_end() {
        for size in 1..20 {
            let out = masked(
                &["longer-inner-value-end", "inner-value"],
                b"longer-inner-value-e",
                size,
            );
            assert_eq!(out, b"longer-***********-e", "{size}");
        }
    }

    #[test]
    fn a_form_that_is_added_on_another_connection_is_masked() {
        let forms = Arc::new(Forms::default());
        let (mut masks, mut out) = (Masks::new([], &forms), Vec::new());
        masks.take(b"a form", u64::MAX, &mut out);
        assert!(forms.add(b"a form of it"));
        masks.take(b": a form of it", u64::MAX, &mut out);
        assert_eq!(out, b"a form: ************");
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
