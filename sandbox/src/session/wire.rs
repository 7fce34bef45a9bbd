//! What the supervisor of a session and its clients say to each other.
//!
//! A client connects to the session's socket, asks for one thing, and is answered; only a command goes on from there. Streams of a command
//! are descriptors, which come with the answer: nothing is relayed by the supervisor.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use protocol::frame::{self, Decoder, MAX_TO_AGENT_BYTES};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::log;
use crate::crash::Crash;
use crate::error::SpawnError;
use crate::limit::Limit;
use crate::outcome::Completion;

/// The version of all below: a session outlives the command that has started it, and may be of an older one.
const VERSION: u32 = 3;

/// Largest message, in bytes without its header: a command's words go on to the agent in one of this size.
const MAX_MESSAGE_BYTES: usize = MAX_TO_AGENT_BYTES;

/// Most descriptors of a message: a command's three streams.
const MAX_DESCRIPTORS: usize = 3;

/// Version and length, in front of each message.
const HEADER_BYTES: usize = 8;

/// How long the other side may take to take a message.
pub(super) const PEER_LIMIT: Duration = Duration::from_secs(10);

/// What a client asks for.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Request {
    /// Start a command.
    Command(NewCommand),
    /// Tell all commands.
    Commands,
    /// Send a signal to a command, or kill it with all that it started.
    Signal { id: u32, signal: Option<i32> },
    /// Copy, between a name in the folder whose descriptor comes along and a path in the guest.
    Copy(Copy),
    /// End.
    Stop,
    /// Put the sandbox on disk under this name, and end.
    Pause { name: String },
    /// Tell where the log ends.
    LogEnd,
}

/// A command, as [`crate::Command`] has it.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct NewCommand {
    pub(super) program: Vec<u8>,
    pub(super) args: Vec<Vec<u8>>,
    pub(super) env: Vec<(Vec<u8>, Vec<u8>)>,
    pub(super) current_dir: Option<Vec<u8>>,
    pub(super) user: Option<String>,
    pub(super) has_stdin: bool,
    /// Columns and rows.
    pub(super) terminal: Option<(u16, u16)>,
    /// Whether it goes on without its client, its output in the session's log.
    pub(super) is_detached: bool,
}

/// A copy.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Copy {
    pub(super) host_name: Vec<u8>,
    pub(super) guest_path: Vec<u8>,
    pub(super) is_out: bool,
    pub(super) user: Option<String>,
}

/// What a client says of its command.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ToCommand {
    Signal(i32),
    Kill,
    Resize { columns: u16, rows: u16 },
}

/// What the supervisor answers.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    /// The command runs. Its streams come along: a terminal, or standard input if it has one, output and error.
    Started { id: u32 },
    /// It does not.
    NotStarted(NotStarted),
    /// It has ended.
    Ended(Box<Completion>),
    /// All commands.
    Commands(Vec<Listed>),
    /// Where the log ends.
    LogEnd(log::End),
    /// What was copied.
    Copied { left_out: u64, first: Vec<u8> },
    /// It is done.
    Done,
    /// It can't be done: a sentence.
    Failed(String),
}

/// A command of the list.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Listed {
    pub(super) id: u32,
    pub(super) words: Vec<Vec<u8>>,
    pub(super) age: Duration,
    pub(super) is_detached: bool,
}

/// A [`SpawnError`].
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum NotStarted {
    NotFound(String),
    NotExecutable(String),
    Invalid(String),
    Exhausted(String),
    MachineCrashed(Crash),
    TimedOut,
    LimitExceeded(Limit),
    SandboxEnded,
}

impl From<SpawnError> for NotStarted {
    fn from(error: SpawnError) -> Self {
        match error {
            SpawnError::NotFound(sentence) => Self::NotFound(sentence),
            SpawnError::NotExecutable(sentence) => Self::NotExecutable(sentence),
            SpawnError::Invalid(sentence) => Self::Invalid(sentence),
            SpawnError::MachineCrashed(crash) => Self::MachineCrashed(crash),
            SpawnError::TimedOut => Self::TimedOut,
            SpawnError::LimitExceeded(limit) => Self::LimitExceeded(limit),
            SpawnError::SandboxEnded => Self::SandboxEnded,
            SpawnError::Exhausted(_) | SpawnError::Streams(_) | SpawnError::Output(_) => {
                Self::Exhausted(error.to_string())
            }
        }
    }
}

impl From<NotStarted> for SpawnError {
    fn from(error: NotStarted) -> Self {
        match error {
            NotStarted::NotFound(sentence) => Self::NotFound(sentence),
            NotStarted::NotExecutable(sentence) => Self::NotExecutable(sentence),
            NotStarted::Invalid(sentence) => Self::Invalid(sentence),
            NotStarted::Exhausted(sentence) => Self::Exhausted(sentence),
            NotStarted::MachineCrashed(crash) => Self::MachineCrashed(crash),
            NotStarted::TimedOut => Self::TimedOut,
            NotStarted::LimitExceeded(limit) => Self::LimitExceeded(limit),
            NotStarted::SandboxEnded => Self::SandboxEnded,
        }
    }
}

/// Why nothing was said or heard.
#[derive(Debug, thiserror::Error)]
pub(super) enum WireError {
    /// The other side is gone.
    #[error("The other side has closed the connection")]
    Closed,
    /// It speaks another version.
    #[error("The other side speaks version {0}, and this one {VERSION}")]
    Version(u32),
    /// What it says is no message.
    #[error("What the other side says is no message")]
    Malformed,
    /// A message above the bound.
    #[error("A message has more than {} MiB", MAX_MESSAGE_BYTES >> 20)]
    TooLarge,
    /// The system's error.
    #[error("The connection failed")]
    Io(#[from] io::Error),
}

/// One connection, either side of it.
#[derive(Debug)]
pub(super) struct Connection(UnixStream);

impl Connection {
    /// Over this socket.
    ///
    /// # Errors
    /// What the system says.
    pub(super) fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_write_timeout(Some(PEER_LIMIT))?;
        Ok(Self(stream))
    }

    /// Has a message that does not come for so long be an error.
    ///
    /// # Errors
    /// What the system says.
    pub(super) fn answers_within(&self, limit: Duration) -> io::Result<()> {
        self.0.set_read_timeout(Some(limit))
    }

    /// Hears nothing more: a thread that waits for a message is told that the other side is gone.
    pub(super) fn stop_hearing(&self) {
        // One that is closed needs no closing.
        let _ = self.0.shutdown(Shutdown::Read);
    }

    /// Says something, with descriptors, of which the caller keeps its own.
    ///
    /// # Errors
    /// See [`WireError`].
    pub(super) fn send<T: Serialize>(
        &self,
        message: &T,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), WireError> {
        let body = frame::encode(message, MAX_MESSAGE_BYTES).map_err(|_| WireError::TooLarge)?;
        let mut bytes = VERSION.to_le_bytes().to_vec();
        bytes.extend(body);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors))
        {
            return Err(WireError::TooLarge);
        }
        // They go with the first byte; the rest of a long message follows without them.
        let sent = rustix::io::retry_on_intr(|| {
            rustix::net::sendmsg(
                &self.0,
                &[IoSlice::new(&bytes)],
                &mut ancillary,
                SendFlags::NOSIGNAL,
            )
        })
        .map_err(gone)?;
        Quiet(&self.0)
            .write_all(bytes.get(sent..).unwrap_or_default())
            .map_err(|error| match error.kind() {
                io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => WireError::Closed,
                _ => WireError::Io(error),
            })
    }

    /// Waits for a message, as long as it takes to come.
    ///
    /// # Errors
    /// See [`WireError`].
    pub(super) fn receive<T: DeserializeOwned>(&self) -> Result<(T, Vec<OwnedFd>), WireError> {
        let mut header = [0; HEADER_BYTES];
        let mut descriptors = Vec::new();
        let mut held = 0;
        while held < HEADER_BYTES {
            let count =
                self.receive_some(header.get_mut(held..).unwrap_or_default(), &mut descriptors)?;
            held += count;
        }
        let [a, b, c, d, e, f, g, h] = header;
        let version = u32::from_le_bytes([a, b, c, d]);
        if version != VERSION {
            return Err(WireError::Version(version));
        }
        let length = u32::from_le_bytes([e, f, g, h]);
        if length as usize > MAX_MESSAGE_BYTES {
            return Err(WireError::TooLarge);
        }
        let mut decoder = Decoder::new(MAX_MESSAGE_BYTES);
        decoder.push(&[e, f, g, h]);
        let mut body = Vec::new();
        (&self.0).take(u64::from(length)).read_to_end(&mut body)?;
        if body.len() < length as usize {
            return Err(WireError::Closed);
        }
        decoder.push(&body);
        match decoder.next() {
            Ok(Some(message)) => Ok((message, descriptors)),
            _ => Err(WireError::Malformed),
        }
    }

    fn receive_some(
        &self,
        buffer: &mut [u8],
        descriptors: &mut Vec<OwnedFd>,
    ) -> Result<usize, WireError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let received = rustix::io::retry_on_intr(|| {
            rustix::net::recvmsg(
                &self.0,
                &mut [IoSliceMut::new(buffer)],
                &mut ancillary,
                RecvFlags::CMSG_CLOEXEC,
            )
        })
        .map_err(gone)?;
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                descriptors.extend(fds);
            }
        }
        if received.bytes == 0 {
            return Err(WireError::Closed);
        }
        Ok(received.bytes)
    }
}

fn gone(error: rustix::io::Errno) -> WireError {
    match error {
        rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET => WireError::Closed,
        error => WireError::Io(error.into()),
    }
}

/// Writes without `SIGPIPE`.
struct Quiet<'a>(&'a UnixStream);

impl Write for Quiet<'_> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        crate::stream::write_quietly(self.0, buffer)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    fn pair() -> (Connection, Connection) {
        let (one, two) = UnixStream::pair().unwrap();
        (Connection::new(one).unwrap(), Connection::new(two).unwrap())
    }

    #[test]
    fn a_long_message_arrives_whole_and_its_descriptors_with_it() {
        let (client, server) = pair();
        let (mut written, read) = UnixStream::pair().unwrap();
        let words = vec![vec![7; 1 << 20]; 3];
        let sent = words.clone();
        let sender = std::thread::spawn(move || {
            let request = Request::Command(NewCommand {
                args: sent,
                ..NewCommand::default()
            });
            client.send(&request, &[read.as_fd()]).unwrap();
            client
        });

        let (request, descriptors): (Request, _) = server.receive().unwrap();

        let client = sender.join().unwrap();
        let Request::Command(command) = request else {
            panic!("{request:?}");
        };
        assert_eq!(command.args, words);
        let [descriptor] = <[OwnedFd; 1]>::try_from(descriptors).unwrap();
        written.write_all(b"x").unwrap();
        let mut byte = [0];
        UnixStream::from(descriptor).read_exact(&mut byte).unwrap();
        assert_eq!(byte, *b"x");
        drop(client);
        assert!(matches!(
            server.receive::<Request>(),
            Err(WireError::Closed)
        ));
    }

    #[test]
    fn another_version_is_told_from_nonsense() {
        let (client, server) = pair();
        client.0.write_all_quietly(&[9, 0, 0, 0, 1, 0, 0, 0, 0]);
        assert!(matches!(
            server.receive::<Request>(),
            Err(WireError::Version(9))
        ));

        let (client, server) = pair();
        let ours = VERSION.to_le_bytes();
        client
            .0
            .write_all_quietly(&[&ours[..], &[1, 0, 0, 0, 0xff]].concat());
        assert!(matches!(
            server.receive::<Request>(),
            Err(WireError::Malformed)
        ));

        let (client, server) = pair();
        client.0.write_all_quietly(&[ours, [0xff; 4]].concat());
        assert!(matches!(
            server.receive::<Request>(),
            Err(WireError::TooLarge)
        ));
    }

    trait WriteQuietly {
        fn write_all_quietly(&self, bytes: &[u8]);
    }

    impl WriteQuietly for UnixStream {
        fn write_all_quietly(&self, bytes: &[u8]) {
            Quiet(self).write_all(bytes).unwrap();
        }
    }

    #[test]
    fn what_can_not_be_started_is_the_same_error_on_the_other_side() {
        for error in [
            SpawnError::NotFound("a".into()),
            SpawnError::NotExecutable("b".into()),
            SpawnError::Invalid("c".into()),
            SpawnError::Exhausted("d".into()),
            SpawnError::TimedOut,
            SpawnError::LimitExceeded(Limit::CpuTime),
            SpawnError::SandboxEnded,
        ] {
            let text = format!("{error:?}");
            let told = SpawnError::from(NotStarted::from(error));
            assert_eq!(format!("{told:?}"), text);
        }
    }
}
