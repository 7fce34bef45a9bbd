//! The host's ends of a command's streams: thin owners of one end of a socket pair each. Nothing relays
//! between them and the machine's process.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::SendFlags;

use crate::meter::Meter;

/// A command's standard input. Dropping it is the command's end of file.
#[derive(Debug)]
pub struct ChildStdin {
    stream: UnixStream,
    meter: Arc<Meter>,
}

/// A command's standard output. Dropping it closes the command's pipe: its next write ends in `SIGPIPE`.
#[derive(Debug)]
pub struct ChildStdout(Reader);

/// A command's standard error, like [`ChildStdout`].
#[derive(Debug)]
pub struct ChildStderr(Reader);

/// A command's terminal: what is typed is written, what is shown is read.
#[derive(Debug)]
pub struct ChildTerminal(Reader);

/// Writes without the `SIGPIPE` that a program may not have switched off: a guest that closes a stream is an
/// error here, never the end of the program.
pub(crate) fn write_quietly(stream: &UnixStream, buffer: &[u8]) -> io::Result<usize> {
    Ok(rustix::net::send(stream, buffer, SendFlags::NOSIGNAL)?)
}

#[derive(Debug)]
struct Reader {
    stream: UnixStream,
    meter: Arc<Meter>,
}

impl Reader {
    fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = (&self.stream).read(buffer)?;
        self.meter.read(count);
        Ok(count)
    }
}

impl ChildStdin {
    pub(crate) fn new(stream: UnixStream, meter: Arc<Meter>) -> Self {
        Self { stream, meter }
    }
}

impl ChildStdin {
    #[cfg(feature = "tokio")]
    pub(crate) fn meter(&self) -> Arc<Meter> {
        Arc::clone(&self.meter)
    }

    /// Has a write fail that takes longer.
    pub(crate) fn limit_writes(&self, limit: Duration) -> io::Result<()> {
        self.stream.set_write_timeout(Some(limit))
    }
}

impl Write for ChildStdin {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let count = write_quietly(&self.stream, buffer)?;
        self.meter.wrote(count);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsFd for ChildStdin {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl From<ChildStdin> for OwnedFd {
    fn from(stdin: ChildStdin) -> Self {
        stdin.stream.into()
    }
}

macro_rules! reading_end {
    ($name:ident) => {
        impl $name {
            pub(crate) fn new(stream: UnixStream, meter: Arc<Meter>) -> Self {
                Self(Reader { stream, meter })
            }

            #[cfg(feature = "tokio")]
            pub(crate) fn meter(&self) -> Arc<Meter> {
                Arc::clone(&self.0.meter)
            }
        }

        impl Read for $name {
            fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
                self.0.read(buffer)
            }
        }

        impl AsFd for $name {
            fn as_fd(&self) -> BorrowedFd<'_> {
                self.0.stream.as_fd()
            }
        }

        /// The descriptor alone: what is read from it no longer counts for
        /// [`crate::CommandClocks::first_output`].
        impl From<$name> for OwnedFd {
            fn from(end: $name) -> Self {
                end.0.stream.into()
            }
        }
    };
}

reading_end!(ChildStdout);
reading_end!(ChildStderr);
reading_end!(ChildTerminal);

impl ChildTerminal {
    /// A second owner of the same terminal, so that one thread types and another reads.
    ///
    /// # Errors
    /// When the process is out of descriptors.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self(Reader {
            stream: self.0.stream.try_clone()?,
            meter: Arc::clone(&self.0.meter),
        }))
    }

    /// Ends what is typed, for all owners, while what is shown can still be read.
    ///
    /// # Errors
    /// When the machine is gone already.
    pub fn close_input(&self) -> io::Result<()> {
        self.0.stream.shutdown(Shutdown::Write)
    }
}

impl Write for ChildTerminal {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let count = write_quietly(&self.0.stream, buffer)?;
        self.0.meter.wrote(count);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
