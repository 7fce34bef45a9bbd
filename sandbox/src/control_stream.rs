//! The control stream to the agent, without waiting.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use protocol::frame::{Decoder, FrameError, MAX_FROM_AGENT_BYTES};
use protocol::message::FromAgent;
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::net::SendFlags;

/// Most bytes taken from the agent at one time, so that one that floods does not keep the thread from its
/// deadlines.
const CHUNK_BYTES: usize = 16 << 10;

/// The host's end of a control stream.
#[derive(Debug)]
pub(crate) struct ControlStream {
    stream: OwnedFd,
    decoder: Decoder,
    outgoing: VecDeque<u8>,
}

/// What came of looking for a message.
#[derive(Debug)]
pub(crate) enum Received {
    Message(FromAgent),
    /// Nothing whole is there now.
    Nothing,
    /// The agent closed the stream, or its machine is gone.
    Ended,
    /// What the agent sent is no message: the stream is of no more use.
    Garbage(FrameError),
}

impl ControlStream {
    pub(crate) fn new(stream: OwnedFd) -> io::Result<Self> {
        rustix::fs::fcntl_setfl(&stream, OFlags::NONBLOCK)?;
        Ok(Self {
            stream,
            decoder: Decoder::new(MAX_FROM_AGENT_BYTES),
            outgoing: VecDeque::new(),
        })
    }

    /// Takes bytes to send; [`Self::flush`] sends them.
    pub(crate) fn queue(&mut self, frame: &[u8]) {
        self.outgoing.extend(frame);
    }

    pub(crate) fn wants_to_send(&self) -> bool {
        !self.outgoing.is_empty()
    }

    /// Sends what the stream takes now, and says how many bytes that was. A stream that is closed takes all:
    /// reading tells of its end.
    pub(crate) fn flush(&mut self) -> usize {
        let mut sent = 0;
        while !self.outgoing.is_empty() {
            let (front, _) = self.outgoing.as_slices();
            match rustix::net::send(&self.stream, front, SendFlags::NOSIGNAL) {
                Ok(count) => {
                    self.outgoing.drain(..count);
                    sent += count;
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(_) => {
                    sent += self.outgoing.len();
                    self.outgoing.clear();
                }
            }
        }
        sent
    }

    /// The next message, reading at most one piece of the stream.
    pub(crate) fn receive(&mut self) -> Received {
        match self.decoder.next() {
            Ok(Some(message)) => return Received::Message(message),
            Ok(None) => {}
            Err(error) => return Received::Garbage(error),
        }
        let mut chunk = [0; CHUNK_BYTES];
        match rustix::io::read(&self.stream, &mut chunk) {
            Ok(0) => return Received::Ended,
            Ok(count) => self.decoder.push(chunk.get(..count).unwrap_or_default()),
            Err(Errno::INTR | Errno::AGAIN) => return Received::Nothing,
            Err(_) => return Received::Ended,
        }
        match self.decoder.next() {
            Ok(Some(message)) => Received::Message(message),
            Ok(None) => Received::Nothing,
            Err(error) => Received::Garbage(error),
        }
    }
}

impl AsFd for ControlStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}
