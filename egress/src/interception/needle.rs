//! What must not come back over any connection of a sandbox: its secrets, and the credentials that one was put into.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use memchr::memchr;
use zeroize::Zeroizing;

/// Most different credentials with a secret in them, in the life of a sandbox.
pub(super) const MAX_FORMS: usize = 128;

/// Most bytes of all of them together.
pub(super) const MAX_FORM_BYTES: usize = 256 << 10;

/// A value that is looked for in a stream, whatever pieces it comes in (Knuth, Morris, Pratt): its bytes and, for each number of
/// them that were found, what is found still if the next is another. Each byte is looked at once, by each needle.
pub(super) struct Needle {
    value: Zeroizing<Vec<u8>>,
    /// The length of the longest beginning of the value that is an end of its first so many bytes.
    borders: Vec<usize>,
}

impl Needle {
    /// For a value that is not empty.
    pub(super) fn new(value: &[u8]) -> Self {
        let mut needle = Self {
            value: Zeroizing::new(value.to_vec()),
            borders: vec![0, 0],
        };
        let mut border = 0;
        for byte in value.iter().skip(1) {
            border = needle.next(border, *byte);
            needle.borders.push(border);
        }
        needle
    }

    pub(super) fn len(&self) -> usize {
        self.value.len()
    }

    /// How much of the value the bytes so far end in, when they ended in `found` of it before this one.
    fn next(&self, found: usize, byte: u8) -> usize {
        let mut found = found;
        loop {
            if self.value.get(found) == Some(&byte) {
                return found + 1;
            }
            if found == 0 {
                return 0;
            }
            found = self.borders.get(found).copied().unwrap_or(0);
        }
    }

    /// Looks at bytes that follow some that ended in `found` of the value: how much of it they end in. `ends` hears behind which of
    /// them the whole value ends.
    pub(super) fn look(&self, found: usize, bytes: &[u8], mut ends: impl FnMut(usize)) -> usize {
        let Some(first) = self.value.first() else {
            return 0;
        };
        let (mut found, mut at) = (found, 0);
        while let Some(rest) = bytes.get(at..).filter(|rest| !rest.is_empty()) {
            if found == 0 {
                match memchr(*first, rest) {
                    Some(count) => at += count,
                    None => return 0,
                }
            }
            let Some(byte) = bytes.get(at) else {
                break;
            };
            found = self.next(found, *byte);
            at += 1;
            if found == self.value.len() {
                ends(at);
                found = self.borders.get(found).copied().unwrap_or(0);
            }
        }
        found
    }
}

/// The credentials of a sandbox that a secret was put into, as they were sent. Grows alone.
#[derive(Default)]
pub(super) struct Forms {
    all: Mutex<Vec<Arc<Needle>>>,
    count: AtomicUsize,
}

impl Forms {
    /// One more, looked for from now on in what comes over every connection: false where there is no room for it.
    #[must_use]
    pub(super) fn add(&self, form: &[u8]) -> bool {
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        if all.iter().any(|known| known.value.as_slice() == form) {
            return true;
        }
        let bytes: usize = all.iter().map(|known| known.len()).sum();
        if all.len() >= MAX_FORMS || bytes + form.len() > MAX_FORM_BYTES {
            return false;
        }
        all.push(Arc::new(Needle::new(form)));
        self.count.store(all.len(), Ordering::Release);
        true
    }

    /// Those behind the first `known`.
    pub(super) fn behind(&self, known: usize) -> Vec<Arc<Needle>> {
        if self.count.load(Ordering::Acquire) == known {
            return Vec::new();
        }
        let all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        all.get(known..).unwrap_or_default().to_vec()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn forms_are_bounded_in_number_and_bytes() {
        let forms = Forms::default();
        for number in 0..MAX_FORMS {
            assert!(forms.add(format!("value-{number}").as_bytes()));
        }
        assert!(!forms.add(b"one more value"));
        assert!(forms.add(b"value-1"));
        assert_eq!(forms.behind(MAX_FORMS - 1).len(), 1);

        let forms = Forms::default();
        assert!(forms.add(&vec![b'a'; MAX_FORM_BYTES - 7]));
        assert!(!forms.add(b"value-12"));
        assert!(forms.add(b"value-1"));
    }

    proptest! {
        #[test]
        fn every_place_is_found_in_any_pieces(value in "[ab]{1,9}", text in "[ab]{0,60}", size in 1_usize..20) {
            let needle = Needle::new(value.as_bytes());
            let (mut found, mut ends, mut at) = (0, Vec::new(), 0);
            for piece in text.as_bytes().chunks(size) {
                found = needle.look(found, piece, |end| ends.push(at + end));
                at += piece.len();
            }
            let expected: Vec<usize> = (value.len()..=text.len())
                .filter(|end| text[..*end].ends_with(&value))
                .collect();
            prop_assert_eq!(ends, expected);
            let begun = (0..value.len()).rev().find(|count| text.ends_with(&value[..*count]));
            prop_assert_eq!(Some(found), begun);
        }
    }
}
