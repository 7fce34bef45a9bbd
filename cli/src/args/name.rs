//! The names of sandboxes that stay, of templates and of workspaces.

use sandvmm::{MAX_NAME_BYTES, is_name};

/// A name that a sandbox, a template or a workspace can have. One that is none is wrong usage, whatever is to be done with it.
pub(crate) fn parse_name(text: &str) -> Result<String, String> {
    if is_name(text) {
        return Ok(text.to_owned());
    }
    Err(format!(
        "a name has 1 to {MAX_NAME_BYTES} letters, digits, `.`, `_` and `-`, the first of them a letter or digit"
    ))
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use clap::error::ErrorKind;

    use super::*;
    use crate::args::Cli;

    #[test]
    fn names_that_lead_elsewhere_are_none() {
        for text in ["a", "0", "a.b_C-1", &"x".repeat(MAX_NAME_BYTES)] {
            assert_eq!(parse_name(text).as_deref(), Ok(text));
        }
        let long = "x".repeat(MAX_NAME_BYTES + 1);
        for text in [
            "", ".", "..", ".x", "-x", "_x", "a/b", "a b", "a:b", "ä", "a\n", &long,
        ] {
            parse_name(text).unwrap_err();
        }
    }

    #[test]
    fn a_bad_name_is_wrong_usage_wherever_it_is_said() {
        for line in [
            "run --workspace ../x -c 1",
            "run --template ../x -c 1",
            "repl --template ../x",
            "start --name ../x",
            "exec ../x -- ls",
            "shell ../x",
            "ps ../x",
            "kill ../x 1",
            "logs ../x",
            "stop a ../x",
            "pause ../x",
            "resume ../x",
            "template build ../x",
            "template inspect ../x",
            "template verify ../x",
            "template rm a ../x",
            "workspace rm ../x",
            "bench fork --template ../x",
            "bench density --template ../x",
        ] {
            let words = ["sandvmm"].into_iter().chain(line.split(' '));
            let words: Vec<OsString> = words.map(OsString::from).collect();

            let error = Cli::read(&words).unwrap_err();

            assert_eq!(error.kind(), ErrorKind::ValueValidation, "{line}");
            assert!(error.to_string().contains("a name has 1 to 64"), "{error}");
        }
    }
}
