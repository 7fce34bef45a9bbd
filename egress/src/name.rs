//! Host names, normalised once: what is compared later is compared byte for byte.

use std::fmt;

/// Longest text that is looked at, in bytes: a name of the longest length in its longest spelling.
const MAX_TEXT_BYTES: usize = 1024;

/// Longest name in bytes, without a dot at its end (RFC 1035 §2.3.4, 255 octets on the wire).
pub const MAX_NAME_BYTES: usize = 253;

/// Longest label in bytes (RFC 1035 §2.3.4).
const MAX_LABEL_BYTES: usize = 63;

/// A host name in its one spelling: lower case, ASCII (IDNs in Punycode), no dot at its end, no label that is empty.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostName(String);

/// Why a text is no host name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NameError {
    /// It has no characters, or too many, or a label has.
    #[error(
        "A host name has 1 to {MAX_NAME_BYTES} characters, and 1 to {MAX_LABEL_BYTES} between two dots"
    )]
    Length,
    /// A character that host names do not have.
    #[error("A host name has letters, digits, hyphens, underscores and dots alone")]
    Character,
    /// Its last label is a number, so that programs take it for an address (WHATWG URL §3.5, "ends in a number").
    #[error("A name whose last part is a number is an address in disguise")]
    Number,
}

impl HostName {
    /// Normalises a text: case, one dot at the end, and IDNs by UTS #46.
    ///
    /// # Errors
    /// See [`NameError`].
    pub fn parse(text: &str) -> Result<Self, NameError> {
        if text.is_empty() || text.len() > MAX_TEXT_BYTES {
            return Err(NameError::Length);
        }
        let ascii = idna::domain_to_ascii(text).map_err(|_| NameError::Character)?;
        // After the mapping, which makes ideographic full stops to dots.
        let name = ascii.strip_suffix('.').unwrap_or(&ascii);
        if name.is_empty() || name.len() > MAX_NAME_BYTES {
            return Err(NameError::Length);
        }
        for label in name.split('.') {
            if label.is_empty() || label.len() > MAX_LABEL_BYTES {
                return Err(NameError::Length);
            }
            let is_letter = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_');
            if !label.bytes().all(is_letter) {
                return Err(NameError::Character);
            }
        }
        if name.rsplit('.').next().is_some_and(is_number) {
            return Err(NameError::Number);
        }
        Ok(Self(name.to_owned()))
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether it lies below `domain`, by one label or more.
    #[must_use]
    pub fn is_below(&self, domain: &Self) -> bool {
        self.0
            .strip_suffix(domain.as_str())
            .is_some_and(|front| front.len() > 1 && front.ends_with('.'))
    }
}

impl fmt::Display for HostName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// What `inet_aton` takes for a number: decimal, octal or hexadecimal.
fn is_number(label: &str) -> bool {
    let hexadecimal = label
        .strip_prefix("0x")
        .is_some_and(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()));
    hexadecimal || label.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn name(text: &str) -> HostName {
        HostName::parse(text).unwrap()
    }

    #[test]
    fn one_name_has_one_spelling() {
        for text in [
            "example.com",
            "EXAMPLE.com",
            "example.com.",
            "example。com",
            "ｅxample.com",
        ] {
            assert_eq!(name(text).as_str(), "example.com", "{text}");
        }
        for text in [
            "bücher.example",
            "BÜCHER.example",
            "xn--bcher-kva.example",
            "bu\u{308}cher.example",
        ] {
            assert_eq!(name(text).as_str(), "xn--bcher-kva.example", "{text}");
        }
        assert_eq!(name("_dmarc.example.com").as_str(), "_dmarc.example.com");
    }

    #[test]
    fn addresses_in_any_spelling_are_no_names() {
        for text in [
            "127.0.0.1",
            "127.1",
            "0x7f000001",
            "0x7f.1",
            "2130706433",
            "017700000001",
            "1.2.3.4.",
            "１２７.0.0.1",
            "example.1",
            "example.0x",
            "a.0xff",
        ] {
            assert_eq!(HostName::parse(text), Err(NameError::Number), "{text}");
        }
    }

    #[test]
    fn what_is_no_name_is_refused() {
        for text in [
            "",
            ".",
            "..",
            "a..b",
            ".a",
            "a..",
            "a b",
            "a\0b",
            "a/b",
            "a@b",
            "a:80",
            "[::1]",
            "::1",
            "a\r\nb",
            "a%b",
            "*.a",
            "a\u{202e}b",
            "xn--a",
        ] {
            assert!(HostName::parse(text).is_err(), "{text:?}");
        }
        assert_eq!(HostName::parse(&"a".repeat(64)), Err(NameError::Length));
        assert_eq!(HostName::parse(&"a.".repeat(200)), Err(NameError::Length));
        assert_eq!(HostName::parse(&"a".repeat(5000)), Err(NameError::Length));
    }

    #[test]
    fn below_means_by_a_label_at_least() {
        let domain = name("example.com");
        assert!(name("a.example.com").is_below(&domain));
        assert!(name("a.b.example.com").is_below(&domain));
        assert!(!name("example.com").is_below(&domain));
        assert!(!name("badexample.com").is_below(&domain));
        assert!(!name("example.com.evil.net").is_below(&domain));
    }

    proptest! {
        #[test]
        fn any_text_is_a_name_in_one_spelling_or_none(text in ".{0,80}") {
            if let Ok(name) = HostName::parse(&text) {
                prop_assert_eq!(HostName::parse(name.as_str()), Ok(name.clone()));
                prop_assert!(name.as_str().len() <= MAX_NAME_BYTES);
                prop_assert!(name.as_str().parse::<std::net::IpAddr>().is_err());
                prop_assert!(name.as_str().bytes().all(|byte| byte.is_ascii_graphic() && !byte.is_ascii_uppercase()));
            }
        }

        #[test]
        fn case_and_a_last_dot_make_no_difference(text in "[a-zA-Z0-9-]{1,20}(\\.[a-zA-Z]{2,10}){1,3}") {
            let plain = HostName::parse(&text);
            prop_assert_eq!(HostName::parse(&text.to_uppercase()), plain.clone());
            prop_assert_eq!(HostName::parse(&format!("{text}.")), plain);
        }
    }
}
