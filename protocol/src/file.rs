//! Files in the guest: one request is the header of one data stream, which then carries the answer and the content.
//!
//! | operation | the host sends | the agent sends |
//! | --- | --- | --- |
//! | [`FileOperation::Write`] | content ([`crate::content`]) | [`FileAnswer`] |
//! | [`FileOperation::Read`] | | [`FileAnswer`]; after [`FileDone::Metadata`], content |
//! | [`FileOperation::List`] | | [`FileAnswer`]; then [`FolderItem`] frames up to [`FolderItem::End`] |
//! | [`FileOperation::ReadTree`] | | [`FileAnswer`]; then [`TreeItem`] frames up to [`TreeItem::End`], content behind each file's |
//! | [`FileOperation::WriteTree`] | [`TreeItem`] frames, likewise | [`FileAnswer`] |
//! | [`FileOperation::Watch`] | | [`FileAnswer`]; then [`WatchItem`] frames as things happen, until the host closes the stream or [`WatchItem::End`] |
//! | the others | | [`FileAnswer`] |
//!
//! The agent may refuse at any time with an answer, and closes the stream then.

use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

/// All bits of a file's mode that can be set: permissions, and the set-user, set-group and sticky bits.
pub const MODE_BITS: u32 = 0o7777;

/// A moment by its distance from the Unix epoch in nanoseconds, as [`FileMetadata::modified_ns`] has it.
#[must_use]
pub fn time(since_epoch_ns: i64) -> SystemTime {
    let distance = Duration::from_nanos(since_epoch_ns.unsigned_abs());
    if since_epoch_ns < 0 {
        SystemTime::UNIX_EPOCH - distance
    } else {
        SystemTime::UNIX_EPOCH + distance
    }
}

/// Something to do with a file, as a user of the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRequest {
    /// Where; relative to the user's home.
    pub path: Vec<u8>,
    /// Who does it, as in [`crate::message::Spawn::user`].
    pub user: Option<String>,
    /// What.
    pub operation: FileOperation,
}

/// What to do with it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum FileOperation {
    /// Make it, or replace it atomically. Missing folders on the way are made, and are the user's.
    Write {
        /// Permission bits, `0o7777` at most.
        mode: u32,
    },
    /// Read a regular file.
    Read,
    /// What it is; a symbolic link is not followed.
    Metadata,
    /// What is in a folder, in no order.
    List,
    /// Make a folder and those on the way, unless it is there.
    MakeFolder,
    /// Give it another place, atomically, in place of a file that is there.
    Rename {
        /// Where; relative to the user's home.
        to: Vec<u8>,
    },
    /// Remove it, and what is in it if it is a folder. Links are not followed.
    Remove,
    /// Read a file, or a folder with all that is in it.
    ReadTree,
    /// Make a file, or a folder with all that is in it. What is there is replaced where it is no folder.
    WriteTree {
        /// Whether owners and groups are those of the entries, as far as the user may give them: root may. Else all of it is the user's.
        keep_owners: bool,
    },
    /// Say what happens to a file, or to a folder and what is in it, but not in the folders in it.
    Watch,
}

/// How a [`FileRequest`] ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileAnswer {
    /// Where it failed, nothing is left of a file that was to be written, or what was there before.
    pub result: Result<FileDone, FileFailure>,
}

/// What was done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum FileDone {
    /// Written, made, listed, renamed, removed; this is the absolute path.
    At(Vec<u8>),
    /// It is this.
    Metadata(FileMetadata),
}

/// Why it was not done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileFailure {
    /// What kind of failure.
    pub kind: FileFailureKind,
    /// A sentence for the user.
    pub message: String,
}

/// Kinds that a program may want to tell apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum FileFailureKind {
    /// Nothing is there.
    NotFound,
    /// The user may not.
    PermissionDenied,
    /// There is no room for it.
    NoSpace,
    /// It is not what the operation is for: a folder, a device.
    WrongKind,
    /// Anything else.
    Other,
}

/// What a file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileMetadata {
    /// Its kind.
    pub kind: FileKind,
    /// Bytes in it.
    pub bytes: u64,
    /// Permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Last change of the content, in nanoseconds since the Unix epoch.
    pub modified_ns: i64,
}

/// Kinds of files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum FileKind {
    /// A regular file.
    File,
    /// A folder.
    Folder,
    /// A symbolic link.
    Link,
    /// A device, a pipe, a socket.
    Special,
}

/// One step through a folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FolderItem {
    /// Something in it.
    Entry {
        /// Its name: no slash, no zero.
        name: Vec<u8>,
        /// What it is.
        metadata: FileMetadata,
    },
    /// All was said.
    End,
    /// Reading the folder failed on the way.
    Failed(FileFailure),
}

/// Something that happened to what is watched.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum WatchItem {
    /// This.
    Change {
        /// What.
        kind: WatchedChange,
        /// To what in the folder: no slash, no zero. Empty for the watched file or folder itself.
        name: Vec<u8>,
    },
    /// It is gone, or has another name: nothing more is seen of it.
    End,
    /// Watching failed on the way.
    Failed(FileFailure),
}

/// What may happen to a file, in inotify(7)'s terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum WatchedChange {
    /// Made (`IN_CREATE`).
    Created,
    /// Written to, or cut (`IN_MODIFY`).
    Modified,
    /// Closed by somebody who could write to it (`IN_CLOSE_WRITE`).
    Written,
    /// Other permissions, times, owner, or number of links (`IN_ATTRIB`).
    Attributes,
    /// Removed (`IN_DELETE`).
    Removed,
    /// Given a name elsewhere, or another one here (`IN_MOVED_FROM`).
    MovedAway,
    /// Given this name (`IN_MOVED_TO`).
    MovedHere,
    /// More happened than was told (`IN_Q_OVERFLOW`).
    Lost,
}

/// One step through a tree: a folder comes before what is in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum TreeItem {
    /// A folder or a file. A file's content follows, as [`crate::content`] puts it.
    Entry {
        /// Names from the tree's root on, joined by slashes; empty for the root itself.
        path: Vec<u8>,
        /// What it is.
        node: TreeNode,
        /// Permission bits.
        mode: u32,
        /// Owner.
        uid: u32,
        /// Group.
        gid: u32,
        /// Last change of the content, in nanoseconds since the Unix epoch.
        modified_ns: i64,
    },
    /// All was said.
    End,
    /// Reading failed on the way.
    Failed(FileFailure),
}

/// What a tree is made of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum TreeNode {
    /// A folder.
    Folder,
    /// A regular file.
    File {
        /// Bytes of its content when it was opened: what follows may be more or less, where it is written to.
        bytes: u64,
    },
    /// A symbolic link.
    Link {
        /// Where it points.
        target: Vec<u8>,
    },
    /// A device, a pipe, a socket: told so that it can be reported; nothing follows.
    Special,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the words of commands: who changes these on purpose raises [`crate::VERSION`] and this table.
    #[test]
    fn a_trees_words_have_the_bytes_that_version_10_gives_them() {
        let bytes = |item: &TreeItem| postcard::to_extend(item, Vec::new()).unwrap();
        let entry = TreeItem::Entry {
            path: b"a".to_vec(),
            node: TreeNode::File { bytes: 2 },
            mode: 3,
            uid: 4,
            gid: 5,
            modified_ns: -1,
        };
        assert_eq!(crate::VERSION, 10);
        // A signed number is in zigzag.
        assert_eq!(bytes(&entry), [0, 1, b'a', 1, 2, 3, 4, 5, 1]);
        assert_eq!(bytes(&TreeItem::End), [1]);
        let write = FileOperation::WriteTree { keep_owners: true };
        assert_eq!(postcard::to_extend(&write, Vec::new()).unwrap(), [8, 1]);
    }

    #[test]
    fn any_moment_that_may_be_named_is_one() {
        for since_epoch_ns in [i64::MIN, -1, 0, i64::MAX] {
            let moment = time(since_epoch_ns);
            let distance = match moment.duration_since(SystemTime::UNIX_EPOCH) {
                Ok(after) => i128::try_from(after.as_nanos()).unwrap(),
                Err(before) => -i128::try_from(before.duration().as_nanos()).unwrap(),
            };
            assert_eq!(distance, i128::from(since_epoch_ns));
        }
    }
}
