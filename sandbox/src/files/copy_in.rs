//! Copying from the host into the guest.

use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use protocol::file::{MODE_BITS, TreeItem, TreeNode};
use rustix::fs::OFlags;

use super::exchange::Exchange;
use crate::error::FileError;

/// What was copied into the guest.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CopiedIn {
    /// Regular files and symbolic links.
    pub files: u64,
    /// Folders.
    pub folders: u64,
    /// Bytes in the files.
    pub bytes: u64,
    /// Devices, pipes and sockets below what was named, which were left out.
    pub left_out: Vec<PathBuf>,
}

/// What is to be copied.
#[derive(Debug)]
pub(super) struct Source<'a> {
    root: &'a Path,
}

impl<'a> Source<'a> {
    /// Sees that it is there, before the guest is asked for anything.
    pub(super) fn open(root: &'a Path) -> Result<Self, FileError> {
        let found = fs::metadata(root).map_err(host(root))?;
        if found.is_file() || found.is_dir() {
            return Ok(Self { root });
        }
        Err(FileError::WrongKind(format!(
            "'{}' is a device, a pipe or a socket: files and folders are copied",
            root.display()
        )))
    }

    /// Sends all of it: folders before what is in them. The root may be a link, and is followed. The inner result is the stream's.
    pub(super) fn send(
        &self,
        exchange: &mut Exchange<'_>,
    ) -> Result<(CopiedIn, io::Result<()>), FileError> {
        let mut copied = CopiedIn::default();
        let mut left = vec![PathBuf::new()];
        while let Some(inner) = left.pop() {
            let is_root = inner.as_os_str().is_empty();
            let path = if is_root {
                self.root.to_owned()
            } else {
                self.root.join(&inner)
            };
            let found = if is_root {
                fs::metadata(&path)
            } else {
                fs::symlink_metadata(&path)
            }
            .map_err(host(&path))?;
            let kind = found.file_type();
            let mut content = None;
            let node = if kind.is_dir() {
                for entry in fs::read_dir(&path).map_err(host(&path))? {
                    left.push(inner.join(entry.map_err(host(&path))?.file_name()));
                }
                copied.folders += 1;
                TreeNode::Folder
            } else if kind.is_symlink() {
                copied.files += 1;
                let target = fs::read_link(&path).map_err(host(&path))?;
                TreeNode::Link {
                    target: target.as_os_str().as_bytes().to_vec(),
                }
            } else if kind.is_file() {
                copied.files += 1;
                copied.bytes += found.len();
                content = Some(open(&path).map_err(host(&path))?);
                TreeNode::File { bytes: found.len() }
            } else {
                copied.left_out.push(path);
                continue;
            };
            let entry = TreeItem::Entry {
                path: inner.as_os_str().as_bytes().to_vec(),
                node,
                mode: found.mode() & MODE_BITS,
                uid: found.uid(),
                gid: found.gid(),
                modified_ns: found
                    .mtime()
                    .saturating_mul(1_000_000_000)
                    .saturating_add(found.mtime_nsec()),
            };
            let mut sent = exchange.send(&entry);
            if let (Ok(()), Some(content)) = (&sent, content) {
                sent = exchange.send_content(content)?;
            }
            if sent.is_err() {
                return Ok((copied, sent));
            }
        }
        let sent = exchange.send(&TreeItem::End);
        Ok((copied, sent))
    }
}

/// Without waiting for a pipe's writer, if the file was swapped for one.
fn open(path: &Path) -> io::Result<File> {
    File::options()
        .read(true)
        .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
        .open(path)
}

fn host(path: &Path) -> impl Fn(io::Error) -> FileError + '_ {
    |source| FileError::Host {
        path: path.to_owned(),
        source,
    }
}
