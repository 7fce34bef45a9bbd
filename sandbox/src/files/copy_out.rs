//! Copying from the guest to the host, of which the guest may know nothing and reach nothing.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use protocol::file::{TreeItem, TreeNode};
use protocol::frame::MAX_FROM_AGENT_BYTES;

use super::exchange::Exchange;
use super::extract::{Attributes, Extraction, Place};
use super::hostile;
use super::metadata::is_name;
use crate::error::FileError;

/// Most paths that [`CopiedOut::left_out`] names.
const MAX_LEFT_OUT: usize = 100;

/// Most folders above a file.
const MAX_DEPTH: usize = 128;

/// Bounds of a copy out of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct CopyLimits {
    /// Most bytes of all files together, holes included: 4 GiB without another value. A file that the guest says to be larger is refused before
    /// any of it has come.
    pub bytes: u64,
    /// Most files and folders together, those left out included: 100 000 without another value.
    pub entries: u64,
}

impl Default for CopyLimits {
    fn default() -> Self {
        Self {
            bytes: 4 << 30,
            entries: 100_000,
        }
    }
}

impl CopyLimits {
    /// These bytes at most.
    #[must_use]
    pub fn bytes(mut self, bytes: u64) -> Self {
        self.bytes = bytes;
        self
    }

    fn too_large(self) -> FileError {
        let bound = match (self.bytes >> 20, self.bytes % (1 << 20)) {
            (mib @ 1.., 0) => format!("{mib} MiB"),
            _ => format!("{} bytes", self.bytes),
        };
        FileError::TooLarge {
            what: "What is to be copied",
            bound,
        }
    }

    /// These files and folders at most.
    #[must_use]
    pub fn entries(mut self, entries: u64) -> Self {
        self.entries = entries;
        self
    }
}

/// What was copied out of the guest.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CopiedOut {
    /// Regular files.
    pub files: u64,
    /// Folders.
    pub folders: u64,
    /// Bytes in the files.
    pub bytes: u64,
    /// Links, devices, pipes and sockets below what was named: none of them was made. The first hundred paths in the tree.
    pub left_out: Vec<PathBuf>,
    /// How many there were of those.
    pub left_out_count: u64,
}

/// Takes the tree that the guest sends of `from`, and makes it at `to`.
pub(super) fn receive(
    exchange: &mut Exchange<'_>,
    from: &Path,
    to: &Path,
    limits: CopyLimits,
    keep_owners: bool,
) -> Result<CopiedOut, FileError> {
    let mut copied = CopiedOut::default();
    let mut extraction = Extraction::begin(to)?;
    let mut entries = 0;
    loop {
        let item: TreeItem = exchange.receive(MAX_FROM_AGENT_BYTES)?;
        let (path, node, attributes) = match item {
            TreeItem::Entry {
                path,
                node,
                mode,
                uid,
                gid,
                modified_ns,
            } => {
                let owner = keep_owners.then_some((uid, gid));
                let attributes = Attributes {
                    mode,
                    owner,
                    modified_ns,
                };
                (path, node, attributes)
            }
            TreeItem::End if entries > 0 => break,
            TreeItem::End => return Err(hostile("an empty tree")),
            TreeItem::Failed(failure) => return Err(failure.into()),
        };
        entries += 1;
        if entries > limits.entries {
            return Err(FileError::TooLarge {
                what: "The tree",
                bound: format!("{} files and folders", limits.entries),
            });
        }
        // The root comes first, and once.
        if path.is_empty() != (entries == 1) || !is_place(&path) {
            return Err(hostile("a place outside the tree"));
        }
        let place = Place {
            path: PathBuf::from(OsStr::from_bytes(&path)),
            attributes,
        };
        match node {
            TreeNode::Folder => {
                extraction.folder(place)?;
                copied.folders += 1;
            }
            TreeNode::File { bytes } => {
                let left = limits.bytes - copied.bytes;
                // What the guest says saves the way; that it holds is seen by what comes.
                if bytes > left {
                    return Err(limits.too_large());
                }
                let content = extraction.file(&place, exchange, left)?;
                copied.bytes += content.ok_or_else(|| limits.too_large())?;
                copied.files += 1;
            }
            TreeNode::Link { .. } | TreeNode::Special if entries == 1 => {
                return Err(FileError::WrongKind(format!(
                    "{from:?} is a link, a device, a pipe or a socket: files and folders are copied"
                )));
            }
            TreeNode::Link { .. } | TreeNode::Special => {
                copied.left_out_count += 1;
                if copied.left_out.len() < MAX_LEFT_OUT {
                    copied.left_out.push(place.path);
                }
            }
        }
    }
    extraction.finish()?;
    Ok(copied)
}

/// Whether this is the root, or names joined by single slashes.
fn is_place(path: &[u8]) -> bool {
    path.is_empty()
        || (path.split(|byte| *byte == b'/').all(is_name)
            && path.iter().filter(|byte| **byte == b'/').count() < MAX_DEPTH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_outside_the_tree_are_none() {
        for path in [
            &b"/"[..],
            b"/a",
            b"a/",
            b"a//b",
            b"..",
            b"a/..",
            b"../a",
            b"a/../b",
            b".",
            b"a\0b",
        ] {
            assert!(!is_place(path), "{path:?}");
        }
        assert!(!is_place(&b"a/".repeat(200)));
        for path in [&b""[..], b"a", b"a/b/c", b"...", b"\xff/\xfe"] {
            assert!(is_place(path), "{path:?}");
        }
    }
}
