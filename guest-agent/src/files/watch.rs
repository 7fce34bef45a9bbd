//! Watching: what the kernel says of a file or folder goes to the host (inotify(7)).

use std::ffi::CStr;
use std::fs::File;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::Path;

use protocol::file::{FileAnswer, FileFailure, WatchItem, WatchedChange};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::io::Errno;

use super::{answer, at, failed, say};

/// Bytes of events that are taken from the kernel at once: sixteen with the longest names (`struct inotify_event` and `NAME_MAX`) at
/// least. What it keeps until then is bounded by `fs.inotify.max_queued_events`; what comes above is told as lost.
const BUFFER_BYTES: usize = 16 * (16 + 256);

/// What is watched for; not what is done to a file that has no name in the folder, of which the kernel tells one that it makes up
/// (`O_TMPFILE`, which the agent's own stages write with).
const WATCHED: WatchFlags = WatchFlags::CREATE
    .union(WatchFlags::MODIFY)
    .union(WatchFlags::CLOSE_WRITE)
    .union(WatchFlags::ATTRIB)
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MOVE)
    .union(WatchFlags::DELETE_SELF)
    .union(WatchFlags::MOVE_SELF)
    .union(WatchFlags::EXCL_UNLINK);

/// The kernel's names for what the host is told.
const CHANGES: [(ReadFlags, WatchedChange); 8] = [
    (ReadFlags::CREATE, WatchedChange::Created),
    (ReadFlags::MODIFY, WatchedChange::Modified),
    (ReadFlags::CLOSE_WRITE, WatchedChange::Written),
    (ReadFlags::ATTRIB, WatchedChange::Attributes),
    (ReadFlags::DELETE, WatchedChange::Removed),
    (ReadFlags::MOVED_FROM, WatchedChange::MovedAway),
    (ReadFlags::MOVED_TO, WatchedChange::MovedHere),
    (ReadFlags::QUEUE_OVERFLOW, WatchedChange::Lost),
];

/// Events after which nothing more comes.
const LAST: ReadFlags = ReadFlags::DELETE_SELF
    .union(ReadFlags::MOVE_SELF)
    .union(ReadFlags::UNMOUNT)
    .union(ReadFlags::IGNORED);

/// Answers, then says what happens, until that is over or the host closes the stream.
pub(super) fn send(stream: &File, path: &Path) {
    let watch = match begin(path) {
        Ok(watch) => watch,
        Err(failure) => return answer(stream, Err(failure)),
    };
    let done = FileAnswer {
        result: Ok(at(path)),
    };
    // From here on what happens is seen.
    if say(stream, &done).is_err() {
        return;
    }
    if let Err(error) = pass_on(stream, &watch) {
        let failure = failed("watched", path)(error.into());
        let _ = say(stream, &WatchItem::Failed(failure));
    }
}

fn begin(path: &Path) -> Result<OwnedFd, FileFailure> {
    inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)
        .and_then(|watch| {
            inotify::add_watch(&watch, path, WATCHED)?;
            Ok(watch)
        })
        .map_err(|error| failed("watched", path)(error.into()))
}

fn pass_on(stream: &File, watch: &OwnedFd) -> Result<(), Errno> {
    let mut buffer = [MaybeUninit::uninit(); BUFFER_BYTES];
    let mut events = Reader::new(watch, &mut buffer);
    loop {
        let (item, is_last) = match events.next() {
            Ok(event) => (
                item(event.events(), event.file_name()),
                event.events().intersects(LAST),
            ),
            Err(Errno::INTR) => continue,
            Err(Errno::AGAIN) if wait(stream, watch)? => continue,
            // The host has heard enough.
            Err(Errno::AGAIN) => return Ok(()),
            Err(error) => return Err(error),
        };
        // A file that is removed while it is open changes its number of links first: that is told before the end.
        let said = item.map_or(Ok(()), |item| say(stream, &item));
        if said.is_err() {
            return Ok(());
        }
        if is_last {
            let _ = say(stream, &WatchItem::End);
            return Ok(());
        }
    }
}

fn item(events: ReadFlags, name: Option<&CStr>) -> Option<WatchItem> {
    let (_, kind) = CHANGES.iter().find(|(flag, _)| events.contains(*flag))?;
    Some(WatchItem::Change {
        kind: *kind,
        name: name
            .map(|name| name.to_bytes().to_vec())
            .unwrap_or_default(),
    })
}

/// Waits for an event; `false` when the host says anything, which it does by closing alone.
fn wait(stream: &File, watch: &OwnedFd) -> Result<bool, Errno> {
    let mut ends = [
        PollFd::new(stream, PollFlags::IN | PollFlags::RDHUP),
        PollFd::new(watch, PollFlags::IN),
    ];
    match poll(&mut ends, None) {
        Ok(_) => Ok(ends
            .first()
            .is_some_and(|stream| stream.revents().is_empty())),
        Err(Errno::INTR) => Ok(true),
        Err(error) => Err(error),
    }
}
