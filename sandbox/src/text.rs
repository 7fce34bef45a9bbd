//! Text that a guest, or a process that a guest may have taken over, wrote: made fit for a sentence.

/// Most characters that a sentence takes of such text.
pub(crate) const MAX_QUOTED_CHARS: usize = 400;

/// The text on one line: no control or formatting character (an escape sequence for the terminal, a switch
/// of the writing direction), runs of white space as one space, at most [`MAX_QUOTED_CHARS`], the rest as `…`.
pub(crate) fn one_line(bytes: &[u8]) -> String {
    // A character has at most four bytes: what is looked at is bounded before it is decoded.
    let cut = bytes.get(..MAX_QUOTED_CHARS * 8).unwrap_or(bytes);
    let text = String::from_utf8_lossy(cut);
    let words: Vec<String> = text
        .split(|character: char| character.is_whitespace() || character.is_control())
        .map(|word| word.chars().filter(|one| !is_format(*one)).collect())
        .filter(|word: &String| !word.is_empty())
        .collect();
    let joined = words.join(" ");
    let mut line: String = joined.chars().take(MAX_QUOTED_CHARS).collect();
    if line.len() < joined.len() || cut.len() < bytes.len() {
        line.push('…');
    }
    line
}

/// Characters that are invisible or turn the writing direction (Unicode 16, general category Cf, those
/// that matter in a line of text).
fn is_format(character: char) -> bool {
    matches!(character,
        '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn escape_sequences_and_line_ends_do_not_survive() {
        assert_eq!(one_line(b"a\x1b[31m red\r\n\tb\0"), "a [31m red b");
    }

    #[test]
    fn the_writing_direction_is_not_turned() {
        assert_eq!(one_line("a\u{202e}b".as_bytes()), "ab");
    }

    #[test]
    fn long_text_is_cut_and_says_so() {
        let line = one_line(&vec![b'x'; 1 << 20]);
        assert_eq!(line.chars().count(), MAX_QUOTED_CHARS + 1);
        assert!(line.ends_with('…'));
    }

    proptest! {
        #[test]
        fn any_bytes_become_one_bounded_line(bytes in proptest::collection::vec(any::<u8>(), 0..4096)) {
            let line = one_line(&bytes);
            prop_assert!(line.chars().count() <= MAX_QUOTED_CHARS + 1);
            prop_assert!(!line.chars().any(|c| c.is_control() || is_format(c)));
        }
    }
}
