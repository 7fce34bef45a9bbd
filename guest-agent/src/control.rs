//! The control stream: dialled by the agent, frames both ways, never blocking the loop.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread::sleep;

use protocol::frame::{self, Decoder, FrameError, MAX_FROM_AGENT_BYTES, MAX_TO_AGENT_BYTES};
use protocol::message::{FromAgent, ToAgent};
use protocol::port;
use rustix::io::Errno;
use socket2::{Domain, SockAddr, Socket, Type};

use crate::limits::{
    CONTROL_DIAL_FIRST_WAIT, CONTROL_DIAL_WAIT, CONTROL_DIALS, LISTEN_BACKLOG,
    MAX_CONTROL_BACKLOG_BYTES, RELAY_BYTES,
};
use crate::relay::set_nonblocking;

/// Any context identifier (`VMADDR_CID_ANY`, `linux/vm_sockets.h`).
const ANY_CID: u32 = u32::MAX;

/// Why the control stream is of no more use.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    /// The host closed it.
    #[error("The host closed the control stream")]
    Closed,
    /// The host does not read what it is sent.
    #[error("The host does not read the control stream")]
    Stalled,
    /// The stream failed.
    #[error("The control stream failed: {0}")]
    Stream(#[source] io::Error),
    /// What came is no message.
    #[error("The host sent no message of this protocol: {0}")]
    Frame(#[source] FrameError),
}

/// The agent's end.
#[derive(Debug)]
pub struct Control {
    /// None once it was closed.
    stream: Option<OwnedFd>,
    decoder: Decoder,
    backlog: Vec<u8>,
}

impl Control {
    /// Takes over a stream.
    ///
    /// # Errors
    /// When it can't be made non-blocking.
    pub fn new(stream: OwnedFd) -> io::Result<Self> {
        set_nonblocking(&stream)?;
        Ok(Self {
            stream: Some(stream),
            decoder: Decoder::new(MAX_TO_AGENT_BYTES),
            backlog: Vec::new(),
        })
    }

    /// Closes it and takes over the one that `dial` then gives, which may come from the same port. What was not sent or
    /// not read whole is forgotten.
    ///
    /// # Errors
    /// That of `dial`, or when the stream can't be made non-blocking. There is none then.
    pub fn replace(&mut self, dial: fn() -> io::Result<OwnedFd>) -> io::Result<()> {
        self.stream = None;
        *self = Self::new(dial()?)?;
        Ok(())
    }

    /// Its descriptor.
    ///
    /// # Errors
    /// When there is none.
    pub fn descriptor(&self) -> io::Result<BorrowedFd<'_>> {
        let stream = self.stream.as_ref().map(AsFd::as_fd);
        stream.ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Reads what is there and returns the messages in it.
    ///
    /// # Errors
    /// See [`ControlError`].
    pub fn receive(&mut self, buffer: &mut [u8]) -> Result<Vec<ToAgent>, ControlError> {
        let mut messages = Vec::new();
        // Level-triggered: what is left is read in the next round.
        let buffer = buffer.get_mut(..RELAY_BYTES).unwrap_or_default();
        let stream = self.stream.as_ref().ok_or(ControlError::Closed)?;
        match rustix::io::read(stream, &mut *buffer) {
            Ok(0) => return Err(ControlError::Closed),
            Ok(count) => self.decoder.push(buffer.get(..count).unwrap_or_default()),
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(errno) => return Err(ControlError::Stream(errno.into())),
        }
        while let Some(message) = self.decoder.next().map_err(ControlError::Frame)? {
            messages.push(message);
        }
        Ok(messages)
    }

    /// Sends a message, or keeps it until [`Self::flush`].
    ///
    /// # Errors
    /// See [`ControlError`].
    pub fn send(&mut self, message: &FromAgent) -> Result<(), ControlError> {
        let bytes = frame::encode(message, MAX_FROM_AGENT_BYTES).map_err(ControlError::Frame)?;
        self.backlog.extend_from_slice(&bytes);
        self.flush()?;
        if self.backlog.len() > MAX_CONTROL_BACKLOG_BYTES {
            return Err(ControlError::Stalled);
        }
        Ok(())
    }

    /// Sends what was kept.
    ///
    /// # Errors
    /// See [`ControlError`].
    pub fn flush(&mut self) -> Result<(), ControlError> {
        let stream = self.stream.as_ref().ok_or(ControlError::Closed)?;
        while !self.backlog.is_empty() {
            match rustix::io::write(stream, &self.backlog) {
                Ok(count) => drop(self.backlog.drain(..count)),
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(ControlError::Closed),
                Err(errno) => return Err(ControlError::Stream(errno.into())),
            }
        }
        Ok(())
    }

    /// Whether messages wait until the host reads.
    #[must_use]
    pub fn has_backlog(&self) -> bool {
        !self.backlog.is_empty()
    }
}

/// Dials the host from the privileged source port, several times if need be.
///
/// # Errors
/// That of the last try.
pub fn dial() -> io::Result<OwnedFd> {
    let mut tries = 1;
    let mut wait = CONTROL_DIAL_FIRST_WAIT;
    loop {
        match dial_once() {
            Err(_) if tries < CONTROL_DIALS => {
                tries += 1;
                sleep(wait);
                wait = (2 * wait).min(CONTROL_DIAL_WAIT);
            }
            result => return result,
        }
    }
}

fn dial_once() -> io::Result<OwnedFd> {
    let socket = Socket::new(Domain::VSOCK, Type::STREAM, None)?;
    socket.bind(&SockAddr::vsock(ANY_CID, port::CONTROL))?;
    socket.connect(&SockAddr::vsock(port::HOST_CID, port::CONTROL))?;
    Ok(socket.into())
}

/// Listens for data streams.
///
/// # Errors
/// When there is no vsock device, or the port is taken.
pub fn listen() -> io::Result<OwnedFd> {
    let socket = Socket::new(Domain::VSOCK, Type::STREAM, None)?;
    socket.bind(&SockAddr::vsock(ANY_CID, port::STREAMS))?;
    socket.listen(LISTEN_BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;

    fn control() -> (UnixStream, Control) {
        let (host, agent) = UnixStream::pair().unwrap();
        (host, Control::new(agent.into()).unwrap())
    }

    #[test]
    fn messages_come_in_order_and_a_close_is_told() {
        let (mut host, mut control) = control();
        let mut buffer = vec![0; RELAY_BYTES];
        let kill = |command_id| ToAgent::Kill { command_id };
        for id in [1, 2] {
            frame::write(&mut host, &kill(id), MAX_TO_AGENT_BYTES).unwrap();
        }

        assert_eq!(control.receive(&mut buffer).unwrap(), [kill(1), kill(2)]);
        assert_eq!(control.receive(&mut buffer).unwrap(), []);
        drop(host);
        assert!(matches!(
            control.receive(&mut buffer),
            Err(ControlError::Closed)
        ));
        assert!(matches!(
            control.send(&FromAgent::Spawned {
                command_id: 1,
                warm: false
            }),
            Err(ControlError::Closed)
        ));
    }

    #[test]
    fn a_host_that_does_not_read_counts_as_gone_at_the_bound() {
        let (mut host, mut control) = control();
        let message = FromAgent::Fatal {
            message: "x".repeat(60 << 10),
        };

        let error = (0..1000)
            .find_map(|_| control.send(&message).err())
            .unwrap();

        assert!(matches!(error, ControlError::Stalled));
        assert!(control.has_backlog());
        host.set_nonblocking(true).unwrap();
        let mut sink = vec![0; 1 << 20];
        while host.read(&mut sink).is_ok() {
            control.flush().unwrap();
        }
        assert!(!control.has_backlog());
    }

    #[test]
    fn test_receive_garbage_returns_frame_error() {
        let (mut host, mut control) = control();
        host.write_all(&[0xff; 16]).unwrap();

        assert!(matches!(
            control.receive(&mut vec![0; RELAY_BYTES]),
            Err(ControlError::Frame(_))
        ));
    }
}
