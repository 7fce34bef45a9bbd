//! Writing a file into the guest.

use std::io::{self, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use protocol::content::{self, MAX_PIECE_BYTES};
use protocol::frame::{self, Decoder, MAX_FROM_AGENT_BYTES, MAX_TO_AGENT_BYTES};
use protocol::message::{FileWritten, StreamHeader, StreamKind, WriteFile};

use crate::error::FileError;
use crate::shared::{ANSWER_LIMIT, Shared};
use crate::state::{Over, Refused, Request};
use crate::stream::write_quietly;
use crate::text::one_line;

/// Longest path in bytes (`PATH_MAX` of `limits.h`, with its end).
const MAX_PATH_BYTES: usize = 4095;

/// All bits of a file's mode that can be set.
const MODE_BITS: u32 = 0o7777;

/// How long after a broken stream the supervisor may take to notice that the machine is gone: it reaps it first.
const OVER_GRACE: Duration = Duration::from_secs(2);

/// Where a file goes, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Target(WriteFile);

impl Target {
    pub(crate) fn new(path: &Path, mode: u32, user: Option<&str>) -> Result<Self, FileError> {
        let bytes = path.as_os_str().as_bytes();
        if bytes.is_empty() || bytes.len() > MAX_PATH_BYTES || bytes.contains(&0) {
            return Err(FileError::Invalid(format!(
                "A path in the guest has 1 to {MAX_PATH_BYTES} bytes and none of them is 0"
            )));
        }
        if mode & !MODE_BITS != 0 {
            return Err(FileError::Invalid(format!(
                "{mode:#o} is no mode of a file: {MODE_BITS:#o} at most"
            )));
        }
        Ok(Self(WriteFile {
            path: bytes.to_vec(),
            mode,
            user: user.map(str::to_owned),
        }))
    }
}

/// Streams `content` to its place in the guest and waits until it is there.
///
/// The agent may refuse at any time, and closes the stream then: its answer is looked for before the broken
/// stream is reported.
pub(crate) fn write(
    shared: &Shared,
    target: Target,
    mut content: impl Read,
) -> Result<PathBuf, FileError> {
    let (mut ours, theirs) = UnixStream::pair().map_err(FileError::Stream)?;
    ours.set_write_timeout(Some(ANSWER_LIMIT))
        .map_err(FileError::Stream)?;
    let header = StreamHeader {
        command_id: 0,
        kind: StreamKind::WriteFile(target.0),
    };
    frame::write(&mut ours, &header, MAX_TO_AGENT_BYTES)
        .map_err(|error| FileError::Stream(io::Error::other(error)))?;
    shared.request(Request::Connect(theirs.into()))?;
    let sent = send(&ours, &mut content)?;
    match answer(&ours) {
        Ok(FileWritten { result: Ok(path) }) if sent.is_ok() => {
            Ok(PathBuf::from(std::ffi::OsString::from_vec(path)))
        }
        Ok(FileWritten { result: Ok(_) }) => Err(FileError::Guest(
            "The guest says that the file was written, but did not take all of it".to_owned(),
        )),
        Ok(FileWritten { result: Err(what) }) => Err(FileError::Guest(one_line(what.as_bytes()))),
        Err(broken) => Err(match shared.wait_over(OVER_GRACE) {
            Some(over) => over.into(),
            None => FileError::Stream(sent.err().unwrap_or(broken)),
        }),
    }
}

/// Sends the content and its end. The outer error is the content's own: its end is not sent then, and the agent makes no
/// file.
fn send(ours: &UnixStream, content: &mut impl Read) -> Result<io::Result<()>, FileError> {
    let mut piece = vec![0; MAX_PIECE_BYTES];
    loop {
        let count = match content.read(&mut piece) {
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(FileError::Source(error)),
        };
        let bytes = piece.get(..count).unwrap_or_default();
        let sent = send_all(ours, &content::header(count)).and_then(|()| send_all(ours, bytes));
        if count == 0 || sent.is_err() {
            return Ok(sent);
        }
    }
}

fn send_all(ours: &UnixStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match write_quietly(ours, bytes) {
            Ok(sent) => bytes = bytes.get(sent..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Reads the agent's one answer, all of it within [`ANSWER_LIMIT`].
fn answer(ours: &UnixStream) -> io::Result<FileWritten> {
    let deadline = Instant::now() + ANSWER_LIMIT;
    let mut decoder = Decoder::new(MAX_FROM_AGENT_BYTES);
    let mut chunk = vec![0; 4096];
    loop {
        if let Some(answer) = decoder.next().map_err(io::Error::other)? {
            return Ok(answer);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        ours.set_read_timeout(Some(left))?;
        match (&*ours).read(&mut chunk) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => decoder.push(chunk.get(..count).unwrap_or_default()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

impl From<Over> for FileError {
    fn from(over: Over) -> Self {
        match over {
            Over::Ended => Self::SandboxEnded,
            Over::TimedOut => Self::TimedOut,
            Over::Crashed(crash) => Self::MachineCrashed(crash),
        }
    }
}

impl From<Refused> for FileError {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Over(over) => over.into(),
            Refused::TooManyCommands | Refused::QueueFull => {
                Self::Stream(io::ErrorKind::WouldBlock.into())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_and_modes_that_are_none_are_refused() {
        let long = "x".repeat(MAX_PATH_BYTES + 1);
        for (path, mode) in [("", 0o644), ("a\0b", 0o644), (&long, 0o644), ("a", 0o10000)] {
            assert!(matches!(
                Target::new(Path::new(path), mode, None),
                Err(FileError::Invalid(_))
            ));
        }
        Target::new(Path::new("a"), 0o7777, Some("root")).unwrap();
    }
}
