//! Whole trees, to the host and from it.

use std::ffi::OsStr;
use std::fs::{self, File, FileTimes, OpenOptions, Permissions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, fchown, lchown, symlink};
use std::path::{Component, Path, PathBuf};

use protocol::content::ContentReader;
use protocol::file::{
    FileAnswer, FileDone, FileFailure, FileKind, MODE_BITS, TreeItem, TreeNode, time,
};
use protocol::frame::{self, MAX_TO_AGENT_BYTES};
use rustix::fs::{AtFlags, CWD, OFlags, Timespec, Timestamps, utimensat};

use super::metadata::SECOND_NS;
use super::{answer, at, failed, metadata, other, read, say, write, wrong_kind};
use crate::limits::MAX_PATH_BYTES;
use crate::program::quoted;

/// What could not be done, in the words of a failure.
const ATTRIBUTES: &str = "given its owner, mode and time";

/// Answers, then sends the tree whose root is `path`: its folders before what is in them. Links are sent as links.
pub(super) fn send(stream: &File, path: &Path) {
    if let Err(failure) = metadata::of(path) {
        return answer(stream, Err(failure));
    }
    let done = FileAnswer {
        result: Ok(at(path)),
    };
    if say(stream, &done).is_err() {
        return;
    }
    let last = match send_all(stream, path) {
        Ok(()) => TreeItem::End,
        Err(failure) => TreeItem::Failed(failure),
    };
    // A host that is gone needs no end.
    let _ = say(stream, &last);
}

/// Walks with a list of its own: a tree may be deeper than a stack.
fn send_all(stream: &File, root: &Path) -> Result<(), FileFailure> {
    let mut left = vec![PathBuf::new()];
    while let Some(inner) = left.pop() {
        let path = if inner.as_os_str().is_empty() {
            root.to_owned()
        } else {
            root.join(&inner)
        };
        let mut found = match fs::symlink_metadata(&path) {
            Ok(found) => metadata::from(&found),
            // Removed meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(failed("read", &path)(error)),
        };
        let reading = failed("read", &path);
        let mut content = None;
        let node = match found.kind {
            FileKind::Folder => {
                for entry in fs::read_dir(&path).map_err(&reading)? {
                    left.push(inner.join(entry.map_err(&reading)?.file_name()));
                }
                TreeNode::Folder
            }
            FileKind::Link => TreeNode::Link {
                target: fs::read_link(&path)
                    .map_err(&reading)?
                    .as_os_str()
                    .as_bytes()
                    .to_vec(),
            },
            FileKind::File => {
                let (file, opened) =
                    read::open_regular(&path, OFlags::NOFOLLOW).map_err(&reading)?;
                found = metadata::from(&opened);
                content = Some(file);
                TreeNode::File {
                    bytes: opened.len(),
                }
            }
            _ => TreeNode::Special,
        };
        let entry = TreeItem::Entry {
            path: inner.as_os_str().as_bytes().to_vec(),
            node,
            mode: found.mode,
            uid: found.uid,
            gid: found.gid,
            modified_ns: found.modified_ns,
        };
        let gone = |error: io::Error| other(format!("The host takes no more: {error}"));
        say(stream, &entry).map_err(|error| gone(io::Error::other(error)))?;
        if let Some(content) = content {
            read::send_content(stream, &content).map_err(gone)?;
        }
    }
    Ok(())
}

/// What a copy has of the original beside its content.
struct Attributes {
    mode: u32,
    /// User and group, where they are kept.
    owner: Option<(u32, u32)>,
    modified_ns: i64,
}

impl Attributes {
    fn give(&self, file: &File) -> io::Result<()> {
        if let Some((uid, gid)) = self.owner {
            as_far_as_may_be(fchown(file, Some(uid), Some(gid)))?;
        }
        // Another owner takes set-user and set-group bits away (chown(2)).
        file.set_permissions(Permissions::from_mode(self.mode & MODE_BITS))?;
        file.set_times(FileTimes::new().set_modified(time(self.modified_ns)))
    }

    /// A link has no mode.
    fn give_link(&self, path: &Path) -> io::Result<()> {
        if let Some((uid, gid)) = self.owner {
            as_far_as_may_be(lchown(path, Some(uid), Some(gid)))?;
        }
        let modified = Timespec {
            tv_sec: self.modified_ns.div_euclid(SECOND_NS),
            tv_nsec: self.modified_ns.rem_euclid(SECOND_NS),
        };
        let times = Timestamps {
            last_access: modified,
            last_modification: modified,
        };
        Ok(utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW)?)
    }
}

/// Who may not give a file away keeps it.
fn as_far_as_may_be(given: io::Result<()>) -> io::Result<()> {
    match given {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
        given => given,
    }
}

/// Makes the tree that the host sends at `root`; the owners of its entries are kept where that is asked for and the user may.
pub(super) fn receive(
    mut stream: &File,
    root: &Path,
    keep_owners: bool,
) -> Result<FileDone, FileFailure> {
    if let Some(folder) = root.parent() {
        fs::create_dir_all(folder).map_err(failed("written", root))?;
    }
    // Folders get theirs once nothing more comes into them.
    let mut folders = Vec::new();
    loop {
        let item: TreeItem = frame::read(&mut stream, MAX_TO_AGENT_BYTES)
            .map_err(|error| other(format!("The tree broke off: {error}")))?;
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
            TreeItem::End => break,
            TreeItem::Failed(failure) => return Err(failure),
        };
        let path = beneath(root, &path)?;
        match node {
            TreeNode::Folder => {
                super::folder::make(&path)?;
                folders.push((path, attributes));
            }
            TreeNode::File { .. } => {
                let file = write::replace(&path, attributes.mode, ContentReader::new(stream))?;
                attributes.give(&file).map_err(failed(ATTRIBUTES, &path))?;
            }
            TreeNode::Link { target } => {
                let _ = fs::remove_file(&path);
                symlink(OsStr::from_bytes(&target), &path).map_err(failed("made", &path))?;
                attributes
                    .give_link(&path)
                    .map_err(failed(ATTRIBUTES, &path))?;
            }
            TreeNode::Special => {
                return Err(wrong_kind(format!(
                    "{:?} would be a device, a pipe or a socket",
                    path.display()
                )));
            }
        }
    }
    for (path, attributes) in folders.into_iter().rev() {
        // What a program has put in its place, a pipe above all, is not waited for.
        OpenOptions::new()
            .read(true)
            .custom_flags(OFlags::DIRECTORY.bits().cast_signed())
            .open(&path)
            .and_then(|folder| attributes.give(&folder))
            .map_err(failed(ATTRIBUTES, &path))?;
    }
    Ok(at(root))
}

/// The place of a tree's node: plain names only.
fn beneath(root: &Path, inner: &[u8]) -> Result<PathBuf, FileFailure> {
    if inner.is_empty() {
        return Ok(root.to_owned());
    }
    let inner = Path::new(OsStr::from_bytes(inner));
    let plain = inner
        .components()
        .all(|part| matches!(part, Component::Normal(_)));
    let path = root.join(inner);
    if plain && path.as_os_str().len() <= MAX_PATH_BYTES {
        Ok(path)
    } else {
        let name = quoted(inner.as_os_str().as_bytes());
        Err(other(format!("The path {name:?} is no place in the tree")))
    }
}
