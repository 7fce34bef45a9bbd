//! One request on one stream: sending content, waiting for the answer.
//!
//! The agent may refuse at any time, and closes the stream then: its answer is looked for before a broken stream is
//! reported.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use protocol::content::{self, ContentReader, MAX_PIECE_BYTES};
use protocol::file::{FileAnswer, FileDone, FileRequest};
use protocol::frame::{self, FrameError, MAX_FROM_AGENT_BYTES, MAX_TO_AGENT_BYTES};
use protocol::message::{StreamHeader, StreamKind};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::hostile;
use super::metadata::Metadata;
use crate::error::FileError;
use crate::limit::Limit;
use crate::shared::{ANSWER_LIMIT, Shared};
use crate::state::{Over, Refused, Request};
use crate::stream::write_quietly;

/// How long after a broken stream the supervisor may take to notice that the machine is gone: it reaps it first.
const OVER_GRACE: Duration = Duration::from_secs(2);

/// A request under way.
#[derive(Debug)]
pub(super) struct Exchange<'a> {
    shared: &'a Shared,
    stream: UnixStream,
}

impl<'a> Exchange<'a> {
    /// Opens a stream and sends the request.
    pub(super) fn open(shared: &'a Shared, request: FileRequest) -> Result<Self, FileError> {
        let (stream, theirs) = UnixStream::pair().map_err(FileError::Stream)?;
        stream
            .set_write_timeout(Some(ANSWER_LIMIT))
            .map_err(FileError::Stream)?;
        let mut exchange = Self { shared, stream };
        let header = StreamHeader {
            command_id: 0,
            kind: StreamKind::File(request),
        };
        exchange.send(&header).map_err(FileError::Stream)?;
        shared.request(Request::Connect(theirs.into()))?;
        Ok(exchange)
    }

    /// Sends one frame.
    pub(super) fn send<T: Serialize>(&mut self, message: &T) -> io::Result<()> {
        frame::write(&mut Quiet(&self.stream), message, MAX_TO_AGENT_BYTES)
            .map_err(io::Error::other)
    }

    /// Sends the content and its end. The outer error is the content's own: its end is not sent then, and the agent makes
    /// no file.
    pub(super) fn send_content(
        &mut self,
        mut content: impl Read,
    ) -> Result<io::Result<()>, FileError> {
        let mut piece = vec![0; MAX_PIECE_BYTES];
        loop {
            let count = match content.read(&mut piece) {
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(FileError::Source(error)),
            };
            let bytes = piece.get(..count).unwrap_or_default();
            let mut to = Quiet(&self.stream);
            let sent = to
                .write_all(&content::header(count))
                .and_then(|()| to.write_all(bytes));
            if count == 0 || sent.is_err() {
                return Ok(sent);
            }
        }
    }

    /// Receives one frame, all of it within [`ANSWER_LIMIT`].
    pub(super) fn receive<T: DeserializeOwned>(&mut self, bound: usize) -> Result<T, FileError> {
        let mut from = Patient {
            stream: &self.stream,
            deadline: Instant::now() + ANSWER_LIMIT,
        };
        frame::read(&mut from, bound).map_err(|error| {
            self.broken(match error {
                FrameError::Stream(error) => error,
                FrameError::Ended => io::ErrorKind::UnexpectedEof.into(),
                other => io::Error::other(other),
            })
        })
    }

    /// The content that comes now; each piece of it within [`ANSWER_LIMIT`].
    pub(super) fn content(&self) -> Result<ContentReader<&UnixStream>, FileError> {
        self.stream
            .set_read_timeout(Some(ANSWER_LIMIT))
            .map_err(FileError::Stream)?;
        Ok(ContentReader::new(&self.stream))
    }

    /// The answer.
    pub(super) fn done(&mut self) -> Result<FileDone, FileError> {
        let answer: FileAnswer = self.receive(MAX_FROM_AGENT_BYTES)?;
        Ok(answer.result?)
    }

    /// The answer to what was sent, or to what could not be sent whole.
    pub(super) fn done_after(&mut self, sent: io::Result<()>) -> Result<FileDone, FileError> {
        match (self.done(), sent) {
            (Ok(done), Ok(())) => Ok(done),
            (Ok(_), Err(_)) => Err(hostile("that it has all, and did not take all of it")),
            (Err(FileError::Stream(_)), Err(sent)) => Err(FileError::Stream(sent)),
            (Err(failure), _) => Err(failure),
        }
    }

    /// A stream that broke, or the reason: the machine's end.
    pub(super) fn broken(&self, error: io::Error) -> FileError {
        match self.shared.wait_over(OVER_GRACE) {
            Some(over) => over.into(),
            None => FileError::Stream(error),
        }
    }

    /// A number that no other request of this process has at this time.
    pub(super) fn number(&self) -> i32 {
        self.stream.as_raw_fd()
    }

    pub(super) fn stream(&self) -> &UnixStream {
        &self.stream
    }

    pub(super) fn into_stream(self) -> UnixStream {
        self.stream
    }
}

/// The path that was done.
pub(super) fn path(done: FileDone) -> Result<PathBuf, FileError> {
    match done {
        FileDone::At(path) => Ok(PathBuf::from(OsString::from_vec(path))),
        _ => Err(hostile("something else than a path")),
    }
}

/// What was found.
pub(super) fn metadata(done: &FileDone) -> Result<Metadata, FileError> {
    match done {
        FileDone::Metadata(metadata) => Ok((*metadata).into()),
        _ => Err(hostile("something else than what a file is")),
    }
}

/// Writes to the stream without `SIGPIPE`.
struct Quiet<'a>(&'a UnixStream);

impl Write for Quiet<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        write_quietly(self.0, bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Reads from the stream until a moment.
struct Patient<'a> {
    stream: &'a UnixStream,
    deadline: Instant,
}

impl Read for Patient<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        (&mut &*self.stream).read(buffer)
    }
}

impl From<Over> for FileError {
    fn from(over: Over) -> Self {
        match over {
            Over::Ended => Self::SandboxEnded,
            Over::Limit(Limit::WallTime) => Self::TimedOut,
            Over::Limit(limit) => Self::LimitExceeded(limit),
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
