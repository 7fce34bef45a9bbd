//! Files that go into the guest before the program starts, and come out of it after it ended.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use sandvmm::{CopyLimits, FileError, Files};

use crate::notice;

/// Why something was not copied.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CopyError {
    /// It is not there.
    #[error("Nothing can be copied from '{}'", .from.display())]
    Source {
        /// What was to be copied, on the host.
        from: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// It is nothing that can be copied.
    #[error("'{}' is a pipe, a socket or a device: files and folders are copied", .0.display())]
    Kind(PathBuf),
    /// It did not come into the guest.
    #[error("'{}' was not copied into the guest", .from.display())]
    Upload {
        /// What was to be copied, on the host.
        from: PathBuf,
        /// Why not.
        #[source]
        source: FileError,
    },
    /// It did not come out of the guest.
    #[error("'{}' was not copied out of the guest", .from.display())]
    Download {
        /// What was to be copied, in the guest.
        from: PathBuf,
        /// Why not.
        #[source]
        source: FileError,
    },
}

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

/// Looks whether there is what is to be copied into the guest, before there is one.
pub(crate) fn check(copies: &[Copy]) -> Result<(), CopyError> {
    copies.iter().try_for_each(|copy| check_source(&copy.from))
}

/// Looks whether there is something that can be copied.
pub(crate) fn check_source(from: &Path) -> Result<(), CopyError> {
    let found = std::fs::metadata(from).map_err(|source| CopyError::Source {
        from: from.to_owned(),
        source,
    })?;
    if !found.is_file() && !found.is_dir() {
        return Err(CopyError::Kind(from.to_owned()));
    }
    Ok(())
}

/// Copies into the guest.
pub(crate) fn upload(files: &Files<'_>, copies: &[Copy], quiet: bool) -> Result<(), CopyError> {
    for copy in copies {
        let copied = files.copy_in(&copy.from, &copy.to);
        let copied = copied.map_err(|source| CopyError::Upload {
            from: copy.from.clone(),
            source,
        })?;
        if let (Some(first), false) = (copied.left_out.first(), quiet) {
            tell_left_out(copied.left_out.len() as u64, &first.display().to_string());
        }
    }
    Ok(())
}

/// Copies out of the guest.
pub(crate) fn download(files: &Files<'_>, copies: &[Copy], quiet: bool) -> Result<(), CopyError> {
    for copy in copies {
        let copied = files.copy_out(&copy.from, &copy.to, CopyLimits::default());
        let copied = copied.map_err(|source| CopyError::Download {
            from: copy.from.clone(),
            source,
        })?;
        if let (Some(first), false) = (copied.left_out.first(), quiet) {
            let first = copy.from.join(first);
            tell_left_out(copied.left_out_count, &first.display().to_string());
        }
    }
    Ok(())
}

/// Says that some files were not copied.
pub(crate) fn tell_left_out(count: u64, first: &str) {
    if count == 1 {
        notice::say(&format!(
            "'{first}' was not copied since it is a link, a device, a pipe or a socket"
        ));
        return;
    }
    notice::say(&format!(
        "{count} files were not copied since they are links, devices, pipes or sockets, the first of them '{first}'"
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_can_not_be_copied_is_told_before_there_is_a_guest() {
        let copies = |from: &str| {
            let to = PathBuf::from("x");
            [Copy {
                from: from.into(),
                to,
            }]
        };

        let missing = check(&copies("/no/such/file")).unwrap_err();
        let device = check(&copies("/dev/null")).unwrap_err();

        assert!(matches!(missing, CopyError::Source { .. }), "{missing}");
        assert!(matches!(device, CopyError::Kind(_)), "{device}");
        check(&copies("/proc/self/exe")).unwrap();
        check(&copies("/")).unwrap();
    }

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
