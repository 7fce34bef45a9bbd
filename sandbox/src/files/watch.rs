//! Watching a file or folder of the guest.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::time::{Duration, Instant};

use protocol::file::{WatchItem, WatchedChange};
use protocol::frame::MAX_FROM_AGENT_BYTES;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::exchange::Exchange;
use super::hostile;
use super::metadata::is_name;
use crate::error::FileError;

/// What happened to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ChangeKind {
    /// It was made.
    Created,
    /// It was written to, or cut.
    Modified,
    /// Somebody who could write to it has closed it: a program that writes a file is done with it then.
    Written,
    /// It has other permissions, times, another owner, or more or fewer names.
    Attributes,
    /// It was removed.
    Removed,
    /// It has another name, or is elsewhere.
    MovedAway,
    /// It has this name now, and was there before under another or elsewhere.
    MovedHere,
    /// More happened than is told: look for yourself what there is.
    Lost,
}

/// Something that happened, by the guest's word.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct FileChange {
    /// What.
    pub kind: ChangeKind,
    /// To what in the folder that is watched: one part of a path. Empty for the watched file or folder itself, and where changes were lost.
    pub name: OsString,
}

/// What happens to a file, or to a folder and what is in it, from when it was made on ([`super::Files::watch`]). Dropping it ends it.
///
/// Its end is that of what is watched: removed, renamed, or on a disk that is taken away.
#[derive(Debug)]
pub struct FileWatch<'a> {
    exchange: Exchange<'a>,
    is_over: bool,
}

impl<'a> FileWatch<'a> {
    pub(super) fn new(exchange: Exchange<'a>) -> Self {
        Self {
            exchange,
            is_over: false,
        }
    }

    /// The next change, as [`Iterator::next`] has it, if one comes within `limit`.
    pub fn next_within(&mut self, limit: Duration) -> Option<Result<FileChange, FileError>> {
        // A limit beyond what the clock can count is none.
        self.next_until(Instant::now().checked_add(limit))
    }

    fn next_until(&mut self, deadline: Option<Instant>) -> Option<Result<FileChange, FileError>> {
        if self.is_over {
            return None;
        }
        let next = match wait(&self.exchange, deadline) {
            Ok(true) => self.exchange.receive(MAX_FROM_AGENT_BYTES).and_then(change),
            Ok(false) => return None,
            Err(error) => Err(self.exchange.broken(error)),
        };
        // Behind an error nothing comes that could be understood.
        self.is_over = !matches!(next, Ok(Some(_)));
        next.transpose()
    }
}

impl Iterator for FileWatch<'_> {
    type Item = Result<FileChange, FileError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_until(None)
    }
}

/// Waits until something comes, or the stream's end.
fn wait(exchange: &Exchange<'_>, deadline: Option<Instant>) -> io::Result<bool> {
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        // Longer than the kernel can say is for ever.
        let timeout = left.and_then(|left| Timespec::try_from(left).ok());
        let mut ends = [PollFd::new(exchange.stream(), PollFlags::IN)];
        match poll(&mut ends, timeout.as_ref()) {
            Ok(count) => return Ok(count > 0),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// What the guest says happened; `None` is the end.
fn change(item: WatchItem) -> Result<Option<FileChange>, FileError> {
    let (kind, name) = match item {
        WatchItem::Change { kind, name } => (kind, name),
        WatchItem::End => return Ok(None),
        WatchItem::Failed(failure) => return Err(failure.into()),
    };
    if !name.is_empty() && !is_name(&name) {
        return Err(hostile("a name that is none"));
    }
    let kind = match kind {
        WatchedChange::Created => ChangeKind::Created,
        WatchedChange::Modified => ChangeKind::Modified,
        WatchedChange::Written => ChangeKind::Written,
        WatchedChange::Attributes => ChangeKind::Attributes,
        WatchedChange::Removed => ChangeKind::Removed,
        WatchedChange::MovedAway => ChangeKind::MovedAway,
        WatchedChange::MovedHere => ChangeKind::MovedHere,
        _ => ChangeKind::Lost,
    };
    Ok(Some(FileChange {
        kind,
        name: OsString::from_vec(name),
    }))
}
