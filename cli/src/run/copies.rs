//! Files that go into the guest before the program starts, and come out of it after it ended.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use sandvmm::{CopyLimits, FileError, Files};

use crate::notice;

/// One copy, from one side to the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Copy {
    /// What is copied.
    pub(crate) from: PathBuf,
    /// The copy's own path.
    pub(crate) to: PathBuf,
}

impl Copy {
    /// `FROM:TO`, at the last colon.
    pub(crate) fn parse(word: &OsStr) -> Result<Self, String> {
        let bytes = word.as_bytes();
        let colon = bytes.iter().rposition(|byte| *byte == b':');
        let (from, to) = colon
            .and_then(|at| Some((bytes.get(..at)?, bytes.get(at + 1..)?)))
            .unwrap_or_default();
        if from.is_empty() || to.is_empty() {
            return Err("two paths with a colon between them are needed".into());
        }
        let path = |bytes| PathBuf::from(OsString::from(OsStr::from_bytes(bytes)));
        Ok(Self {
            from: path(from),
            to: path(to),
        })
    }
}

/// Copies into the guest.
pub(crate) fn upload(files: &Files<'_>, copies: &[Copy], quiet: bool) -> Result<(), FileError> {
    for copy in copies {
        let copied = files.copy_in(&copy.from, &copy.to)?;
        if let (Some(first), false) = (copied.left_out.first(), quiet) {
            tell_left_out(copied.left_out.len() as u64, &first.display().to_string());
        }
    }
    Ok(())
}

/// Copies out of the guest.
pub(crate) fn download(files: &Files<'_>, copies: &[Copy], quiet: bool) -> Result<(), FileError> {
    for copy in copies {
        let copied = files.copy_out(&copy.from, &copy.to, CopyLimits::default())?;
        if let (Some(first), false) = (copied.left_out.first(), quiet) {
            let first = copy.from.join(first);
            tell_left_out(copied.left_out_count, &first.display().to_string());
        }
    }
    Ok(())
}

/// Says that some files were not copied.
pub(crate) fn tell_left_out(count: u64, first: &str) {
    notice::say(&format!(
        "{count} files were not copied since they are links, devices, pipes or sockets, the first of them '{first}'"
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_two_paths() {
        let copy = Copy::parse(OsStr::new("a:b/c:/d")).unwrap();

        assert_eq!(copy.from, PathBuf::from("a:b/c"));
        assert_eq!(copy.to, PathBuf::from("/d"));
        for word in ["", ":", "a", "a:", ":b"] {
            Copy::parse(OsStr::new(word)).unwrap_err();
        }
    }
}
