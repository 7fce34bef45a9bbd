//! The options of what a program finds around it.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;

/// The largest number of a user or group: the one above is nobody's, system calls take it for "no change" (chown(2)).
const MAX_ID: u64 = u32::MAX as u64 - 1;

/// What a program finds around it.
#[derive(Debug, Clone, Args)]
pub(crate) struct ProgramArgs {
    /// Set a variable, or hand on the host's when only KEY is given, if it has one; may be repeated
    #[arg(short = 'e', long = "env", value_name = "KEY[=VALUE]")]
    pub(crate) env: Vec<OsString>,
    /// Set the variables of a file, one KEY=VALUE a line; may be repeated
    #[arg(long, value_name = "FILE")]
    pub(crate) env_file: Vec<PathBuf>,
    /// Working folder in the guest [default: the user's home]
    #[arg(short = 'w', long = "workdir", value_name = "DIR")]
    pub(crate) workdir: Option<PathBuf>,
    /// Who runs it, by name or number [default: an unprivileged user]
    #[arg(short = 'u', long = "user", value_name = "USER[:GROUP]", value_parser = parse_user)]
    pub(crate) user: Option<String>,
}

/// `USER[:GROUP]`; whether the image has them only the guest knows.
pub(crate) fn parse_user(text: &str) -> Result<String, String> {
    for word in text.splitn(2, ':') {
        let is_number = word.bytes().all(|byte| byte.is_ascii_digit());
        if word.is_empty() {
            return Err("say USER or USER:GROUP, each by name or number".to_owned());
        }
        if is_number && !word.parse::<u64>().is_ok_and(|id| id <= MAX_ID) {
            return Err(format!("users and groups have the numbers 0 to {MAX_ID}"));
        }
    }
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_no_user_can_have_is_refused() {
        for text in ["root", "0", "4294967294", "1000:4294967294", "a:b", "1x"] {
            assert_eq!(parse_user(text).as_deref(), Ok(text));
        }
        for text in ["4294967295", "0:4294967295", "99999999999999999999999"] {
            let said = parse_user(text).unwrap_err();
            assert!(said.ends_with("0 to 4294967294"), "{text}: {said}");
        }
        for text in ["", ":", "root:", ":root"] {
            let said = parse_user(text).unwrap_err();
            assert!(said.starts_with("say USER"), "{text}: {said}");
        }
    }
}
