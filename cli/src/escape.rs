//! Text that a guest chose, made fit for a terminal.

use std::fmt::Write;

/// Most characters of one message that are shown; the rest is left out, and said to be.
const MAX_MESSAGE_CHARS: usize = 2000;

/// Makes text safe to show on a terminal, on one line: control characters and those that turn the direction
/// of writing are spelled out, and what is above [`MAX_MESSAGE_CHARS`] is cut.
pub(crate) fn escape(text: &str) -> String {
    let mut shown = String::with_capacity(text.len().min(MAX_MESSAGE_CHARS));
    for (count, character) in text.chars().enumerate() {
        if count == MAX_MESSAGE_CHARS {
            shown.push('…');
            break;
        }
        if character.is_control() || turns_direction(character) {
            // Writing to a String does not fail.
            let _ = write!(shown, "{}", character.escape_default());
        } else {
            shown.push(character);
        }
    }
    shown
}

/// Unicode's explicit directional formatting characters (UAX #9, table 1 and 2) and line separators.
fn turns_direction(character: char) -> bool {
    matches!(
        character,
        '\u{061c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
    )
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn text_stays_and_controls_are_spelled_out() {
        assert_eq!(escape("Grüße, 世界"), "Grüße, 世界");
        assert_eq!(
            escape("a\x1b[2Jb\r\n\t\u{9b}"),
            "a\\u{1b}[2Jb\\r\\n\\t\\u{9b}"
        );
        assert_eq!(escape("x\u{202e}y"), "x\\u{202e}y");
    }

    #[test]
    fn a_long_message_is_cut() {
        let shown = escape(&"x".repeat(MAX_MESSAGE_CHARS + 1));

        assert_eq!(shown.chars().count(), MAX_MESSAGE_CHARS + 1);
        assert!(shown.ends_with('…'));
        assert!(!escape(&"x".repeat(MAX_MESSAGE_CHARS)).ends_with('…'));
    }

    proptest! {
        #[test]
        fn nothing_shown_is_a_control(text in any::<String>()) {
            prop_assert!(!escape(&text).chars().any(char::is_control));
        }
    }
}
