//! The guest kernel's configuration fragment: one symbol a line, each with its reason, none of them lost on the way.

use std::collections::BTreeMap;
use std::fmt;

/// What begins a symbol's name, in the fragment and in `.config`.
const NAME_PREFIX: &str = "CONFIG_";
/// What separates a value from the reason for it.
const REASON_MARK: &str = "  # ";

/// What is wrong with a line of the fragment.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum FragmentError {
    /// Not empty, not a comment, and not a symbol either.
    #[error(
        "Line {line} of the kernel's configuration is not `CONFIG_NAME=value  # reason`: {text}"
    )]
    NotASymbol {
        /// Its number, from 1.
        line: usize,
        /// Its text.
        text: String,
    },
    /// Nothing says why the symbol has its value.
    #[error(
        "Line {line} of the kernel's configuration gives no reason for {name}: add `  # reason`"
    )]
    NoReason {
        /// Its number, from 1.
        line: usize,
        /// The symbol.
        name: String,
    },
    /// Neither y, n, a number nor a quoted text. `m` is none of them: the kernel has no modules.
    #[error(
        "Line {line} of the kernel's configuration sets {name} to {value}: use y, n, a number or a quoted text"
    )]
    BadValue {
        /// Its number, from 1.
        line: usize,
        /// The symbol.
        name: String,
        /// What stands there.
        value: String,
    },
    /// The symbol has a line already.
    #[error(
        "Line {line} of the kernel's configuration sets {name} a second time: remove one of the two"
    )]
    Twice {
        /// Its number, from 1.
        line: usize,
        /// The symbol.
        name: String,
    },
}

/// A symbol that did not get the value it was to have.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct NotKept {
    name: String,
    wanted: String,
    found: Option<String>,
}

impl fmt::Display for NotKept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            name,
            wanted,
            found,
        } = self;
        match found {
            Some(found) => write!(f, "{name} is {found} instead of {wanted}"),
            None => write!(f, "{name} is unknown or hidden, instead of {wanted}"),
        }
    }
}

/// The symbols of a fragment, by name.
#[derive(Debug)]
pub(crate) struct Fragment {
    values: BTreeMap<String, String>,
}

impl Fragment {
    /// Reads a fragment's text.
    pub(crate) fn parse(text: &str) -> Result<Self, FragmentError> {
        let mut values = BTreeMap::new();
        let numbered = text
            .lines()
            .enumerate()
            .map(|(index, text)| (index + 1, text));
        for (line, text) in numbered.filter(|(_, text)| !text.is_empty() && !text.starts_with('#'))
        {
            let (name, value) = symbol(line, text)?;
            if values.insert(name.clone(), value).is_some() {
                return Err(FragmentError::Twice { line, name });
            }
        }
        Ok(Self { values })
    }

    /// The symbols as Kconfig reads them: without the reasons, which it would take for a part of numbers.
    pub(crate) fn for_kconfig(&self) -> String {
        self.values
            .iter()
            .map(|(name, value)| format!("{name}={value}\n"))
            .collect()
    }

    /// The symbols that have another value in `config`, the text of a finished `.config`.
    ///
    /// A symbol that is to be `n` must be there as "not set": one that is missing is hidden or does not exist, and its line says
    /// nothing.
    pub(crate) fn not_kept(&self, config: &str) -> Vec<NotKept> {
        let found = final_values(config);
        self.values
            .iter()
            .filter(|(name, wanted)| found.get(name.as_str()) != Some(&wanted.as_str()))
            .map(|(name, wanted)| NotKept {
                name: name.clone(),
                wanted: wanted.clone(),
                found: found.get(name.as_str()).map(|&value| value.to_owned()),
            })
            .collect()
    }
}

/// Takes a line apart: name and value.
fn symbol(line: usize, text: &str) -> Result<(String, String), FragmentError> {
    let (setting, reason) = text.split_once(REASON_MARK).unwrap_or((text, ""));
    let Some((name, value)) = setting.split_once('=').filter(|(name, _)| is_name(name)) else {
        return Err(FragmentError::NotASymbol {
            line,
            text: text.to_owned(),
        });
    };
    let name = name.to_owned();
    if reason.trim().is_empty() {
        return Err(FragmentError::NoReason { line, name });
    }
    if !is_value(value) {
        let value = value.to_owned();
        return Err(FragmentError::BadValue { line, name, value });
    }
    Ok((name, value.to_owned()))
}

fn is_name(text: &str) -> bool {
    text.strip_prefix(NAME_PREFIX).is_some_and(|rest| {
        let is_legal =
            |byte: u8| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_';
        !rest.is_empty() && rest.bytes().all(is_legal)
    })
}

fn is_value(text: &str) -> bool {
    let is_text = text.len() >= 2 && text.starts_with('"') && text.ends_with('"');
    let is_hexadecimal = text
        .strip_prefix("0x")
        .is_some_and(|digits| u64::from_str_radix(digits, 16).is_ok());
    matches!(text, "y" | "n") || is_text || is_hexadecimal || text.parse::<i64>().is_ok()
}

/// The symbols of a `.config`, by name; `n` for one that is "not set".
fn final_values(config: &str) -> BTreeMap<&str, &str> {
    config
        .lines()
        .filter_map(|line| {
            let unset = line
                .strip_prefix("# ")
                .and_then(|rest| rest.strip_suffix(" is not set"));
            unset
                .map(|name| (name, "n"))
                .or_else(|| line.split_once('='))
        })
        .filter(|(name, _)| name.starts_with(NAME_PREFIX))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn not_kept(fragment: &str, config: &str) -> Vec<String> {
        let fragment = Fragment::parse(fragment).unwrap();
        fragment
            .not_kept(config)
            .iter()
            .map(ToString::to_string)
            .collect()
    }

    #[test]
    fn reasons_and_headings_do_not_reach_kconfig() {
        let text = "# About\n\n## Subject\n\nCONFIG_B=y  # It is needed.\nCONFIG_A=-1  # The same, # twice.\n";

        let fragment = Fragment::parse(text).unwrap();

        assert_eq!(fragment.for_kconfig(), "CONFIG_A=-1\nCONFIG_B=y\n");
    }

    #[test]
    fn test_parse_missing_reason_is_refused() {
        for text in ["CONFIG_A=y", "CONFIG_A=y  # ", "CONFIG_A=y  #  "] {
            let refused = Fragment::parse(&format!("CONFIG_B=y  # Fine.\n{text}\n")).unwrap_err();

            let name = "CONFIG_A".to_owned();
            assert_eq!(refused, FragmentError::NoReason { line: 2, name }, "{text}");
        }
    }

    #[test]
    fn test_parse_repeated_symbol_is_refused() {
        let refused = Fragment::parse("CONFIG_A=y  # One.\nCONFIG_A=n  # Another.\n").unwrap_err();

        let name = "CONFIG_A".to_owned();
        assert_eq!(refused, FragmentError::Twice { line: 2, name });
    }

    #[test]
    fn test_parse_unusable_value_is_refused() {
        for value in ["m", "", "yes", "\"", "0x", "1 2"] {
            let refused = Fragment::parse(&format!("CONFIG_A={value}  # Reason.\n")).unwrap_err();

            assert!(
                matches!(refused, FragmentError::BadValue { line: 1, .. }),
                "{value}: {refused}"
            );
        }
    }

    #[test]
    fn test_parse_other_text_is_refused() {
        for text in [
            "A=y  # Reason.",
            "CONFIG_=y  # Reason.",
            "CONFIG_a=y  # Reason.",
            " CONFIG_A=y  # Reason.",
            "CONFIG_A",
        ] {
            let refused = Fragment::parse(text).unwrap_err();

            assert!(
                matches!(refused, FragmentError::NotASymbol { line: 1, .. }),
                "{text}: {refused}"
            );
        }
    }

    #[test]
    fn symbols_that_kept_their_values_are_not_reported() {
        let fragment = "CONFIG_A=y  # r\nCONFIG_B=n  # r\nCONFIG_C=\"\"  # r\nCONFIG_D=32  # r\n";
        let config = "# Heading\nCONFIG_A=y\n# CONFIG_B is not set\nCONFIG_C=\"\"\nCONFIG_D=32\nCONFIG_E=y\n";

        assert_eq!(not_kept(fragment, config), Vec::<String>::new());
    }

    #[test]
    fn a_symbol_with_another_value_is_reported() {
        let fragment = "CONFIG_A=y  # r\nCONFIG_B=n  # r\nCONFIG_D=32  # r\n";
        let config = "# CONFIG_A is not set\nCONFIG_B=y\nCONFIG_D=3\n";

        let reported = not_kept(fragment, config);

        let expected = [
            "CONFIG_A is n instead of y",
            "CONFIG_B is y instead of n",
            "CONFIG_D is 3 instead of 32",
        ];
        assert_eq!(reported, expected);
    }

    #[test]
    fn a_symbol_that_is_not_there_at_all_is_reported_even_when_it_was_to_be_off() {
        let reported = not_kept(
            "CONFIG_A=y  # r\nCONFIG_B=n  # r\n",
            "CONFIG_AB=y\n# CONFIG_BB is not set\n",
        );

        assert_eq!(reported.len(), 2, "{reported:?}");
        assert!(
            reported
                .iter()
                .all(|line| line.contains("unknown or hidden")),
            "{reported:?}"
        );
    }
}
