//! What a file is.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use protocol::file::{FileFailure, FileKind, FileMetadata, MODE_BITS};

use super::failed;

/// Nanoseconds in a second.
pub(super) const SECOND_NS: i64 = 1_000_000_000;

/// What is at `path`; a symbolic link is not followed.
pub(super) fn of(path: &Path) -> Result<FileMetadata, FileFailure> {
    let metadata = fs::symlink_metadata(path).map_err(failed("looked at", path))?;
    Ok(from(&metadata))
}

pub(super) fn from(metadata: &fs::Metadata) -> FileMetadata {
    let kind = metadata.file_type();
    FileMetadata {
        kind: if kind.is_file() {
            FileKind::File
        } else if kind.is_dir() {
            FileKind::Folder
        } else if kind.is_symlink() {
            FileKind::Link
        } else {
            FileKind::Special
        },
        bytes: metadata.len(),
        mode: metadata.mode() & MODE_BITS,
        uid: metadata.uid(),
        gid: metadata.gid(),
        modified_ns: metadata
            .mtime()
            .saturating_mul(SECOND_NS)
            .saturating_add(metadata.mtime_nsec()),
    }
}
