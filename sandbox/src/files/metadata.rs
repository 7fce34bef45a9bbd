//! What a file in the guest is. All of it is the guest's word.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::time::SystemTime;

use protocol::file::{FileKind, FileMetadata, MODE_BITS, time};

use super::hostile;
use crate::error::FileError;

/// What kind of file it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FileType {
    /// A regular file.
    File,
    /// A folder.
    Dir,
    /// A symbolic link.
    Symlink,
    /// A device, a pipe, a socket.
    Special,
}

/// What a file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Metadata {
    /// Its kind.
    pub file_type: FileType,
    /// Bytes in it.
    pub bytes: u64,
    /// Permission bits, `0o7777` at most.
    pub mode: u32,
    /// Owner's number in the guest.
    pub uid: u32,
    /// Group's number in the guest.
    pub gid: u32,
    /// Last change of its content, by the guest's clock.
    pub modified: SystemTime,
}

/// Something in a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Entry {
    /// Its name: one part of a path, neither `.` nor `..`.
    pub name: OsString,
    /// What it is.
    pub metadata: Metadata,
}

impl Entry {
    /// Refuses a name that is none.
    pub(super) fn checked(name: &[u8], metadata: FileMetadata) -> Result<Self, FileError> {
        if !is_name(name) {
            return Err(hostile("a name that is none"));
        }
        Ok(Self {
            name: OsString::from_vec(name.to_vec()),
            metadata: metadata.into(),
        })
    }
}

/// Whether this is one part of a path (`NAME_MAX` of `limits.h` is 255).
pub(super) fn is_name(name: &[u8]) -> bool {
    (1..=255).contains(&name.len())
        && !name.contains(&b'/')
        && !name.contains(&0)
        && name != b"."
        && name != b".."
}

impl From<FileMetadata> for Metadata {
    fn from(said: FileMetadata) -> Self {
        Self {
            file_type: match said.kind {
                FileKind::File => FileType::File,
                FileKind::Folder => FileType::Dir,
                FileKind::Link => FileType::Symlink,
                _ => FileType::Special,
            },
            bytes: said.bytes,
            mode: said.mode & MODE_BITS,
            uid: said.uid,
            gid: said.gid,
            modified: time(said.modified_ns),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_lead_elsewhere_are_none() {
        let long = [b'x'; 256];
        for name in [&b""[..], b".", b"..", b"a/b", b"/", b"a\0", &long] {
            assert!(!is_name(name), "{name:?}");
        }
        for name in [&b"a"[..], b"...", b"\xff", &long[..255]] {
            assert!(is_name(name), "{name:?}");
        }
    }
}
