//! The host's ends of the guest's streams.

use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use rustix::event::PollFlags;

/// Ports of the host, as the guest knows them.
const ECHO_PORT: u32 = 7;
const STALLED_PORT: u32 = 9;
pub(crate) const RESUME_PORT: u32 = 11;

/// The most that can be written to a stream which nobody reads: what the system's socket buffers take, and the device's promise to itself
/// that it takes nothing.
const HELD_BYTES_MAX: usize = 1 << 20;

/// A stream, by what the host does with it.
#[derive(Debug)]
pub(crate) enum Stream {
    /// What comes goes back.
    Echo(UnixStream),
    /// Nothing is read.
    Stalled(UnixStream),
    /// The host has connected, and written as much as was taken.
    Connected(UnixStream, usize),
}

impl Stream {
    /// What becomes of a stream that the guest opened to a port; nobody listens at most of them.
    pub(crate) fn to_port(port: u32, stream: UnixStream) -> io::Result<Option<Self>> {
        stream.set_nonblocking(true)?;
        Ok(match port {
            ECHO_PORT => Some(Self::Echo(stream)),
            STALLED_PORT => Some(Self::Stalled(stream)),
            RESUME_PORT => {
                (&stream).write_all(b"!")?;
                Some(Self::Stalled(stream))
            }
            _ => None,
        })
    }

    pub(crate) fn socket(&self) -> &UnixStream {
        match self {
            Self::Echo(stream) | Self::Stalled(stream) | Self::Connected(stream, _) => stream,
        }
    }

    pub(crate) fn interest(&self) -> PollFlags {
        match self {
            Self::Echo(_) => PollFlags::IN,
            Self::Stalled(_) | Self::Connected(..) => PollFlags::empty(),
        }
    }

    /// Does what is to be done; false when it is at its end.
    pub(crate) fn serve(&mut self, events: PollFlags) -> bool {
        if events.intersects(PollFlags::HUP | PollFlags::ERR) && !events.contains(PollFlags::IN) {
            return false;
        }
        let Self::Echo(stream) = self else {
            return true;
        };
        let mut buffer = [0; 16 << 10];
        match stream.read(&mut buffer) {
            Ok(0) => {
                let _ = stream.shutdown(Shutdown::Write);
                false
            }
            // A guest that does not read gets less back: nobody here waits for it.
            Ok(count) => {
                !matches!(stream.write(&buffer[..count]), Err(error) if error.kind() != ErrorKind::WouldBlock)
            }
            Err(error) => error.kind() == ErrorKind::WouldBlock,
        }
    }

    /// For a stream that the host opened: writes as much as is taken, which must end, while the stream stays open.
    pub(crate) fn press(&mut self) -> Result<(), String> {
        let Self::Connected(stream, written) = self else {
            return Ok(());
        };
        loop {
            match stream.write(&[b'p'; 4096]) {
                Ok(count) => *written += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(format!("the host's stream failed: {error}")),
            }
            if *written > HELD_BYTES_MAX {
                return Err(format!(
                    "{written} bytes went to a guest that reads nothing"
                ));
            }
        }
        match stream.read(&mut [0]) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(()),
            other => Err(format!("the host's stream did not stay open: {other:?}")),
        }
    }
}
