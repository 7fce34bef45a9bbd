//! Watching a file or folder of the guest.

use std::ffi::OsString;
use std::io::{self, Read};
use std::os::unix::ffi::OsStringExt;
use std::time::{Duration, Instant};

use protocol::file::{WatchItem, WatchedChange};
use protocol::frame::{Decoder, MAX_FROM_AGENT_BYTES};
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
/// Its end is that of what is watched: removed, renamed, or on a disk that is taken away. A file that has another name, or that a program still
/// has open, is not gone when this name is removed (`IN_DELETE_SELF`, inotify(7)): that is [`ChangeKind::Attributes`], and the end comes with the
/// last of them.
#[derive(Debug)]
pub struct FileWatch<'a> {
    exchange: Exchange<'a>,
    /// What has come of a change that has not come whole.
    decoder: Decoder,
    is_over: bool,
}

impl<'a> FileWatch<'a> {
    pub(super) fn new(exchange: Exchange<'a>) -> Self {
        Self {
            exchange,
            decoder: Decoder::new(MAX_FROM_AGENT_BYTES),
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
        let next = match self.receive(deadline) {
            Ok(Some(item)) => change(item),
            Ok(None) => return None,
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

impl FileWatch<'_> {
    /// What is said next, if all of it comes before the deadline: a guest may send it in pieces as small as it likes.
    fn receive(&mut self, deadline: Option<Instant>) -> io::Result<Option<WatchItem>> {
        loop {
            if let Some(item) = self.decoder.next().map_err(io::Error::other)? {
                return Ok(Some(item));
            }
            if !wait(&self.exchange, deadline)? {
                return Ok(None);
            }
            // No more than is missing, so that one item is held at most.
            let mut chunk = vec![0; self.decoder.wanted()];
            match self.exchange.stream().read(&mut chunk) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => {
                    self.decoder.push(chunk.get(..count).unwrap_or_default());
                    // The rest had not come: a guest that sends byte by byte goes on for ever.
                    let is_late = deadline.is_some_and(|deadline| deadline <= Instant::now());
                    if count < chunk.len() && is_late {
                        return Ok(None);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
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
