//! The two streams of a context: requests to it, frames from it.

use std::io::{self, Read};
use std::os::fd::AsFd;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::frame::{self, Frame, HEADER_BYTES};
use crate::shared::ANSWER_LIMIT;
use crate::stream::{ChildStdin, ChildStdout};

/// Bytes of a frame that are waited for at one time.
const CHUNK_BYTES: usize = 1 << 20;

#[derive(Debug)]
pub(super) struct Streams {
    pub(super) requests: ChildStdin,
    pub(super) frames: ChildStdout,
}

impl Streams {
    /// The next frame; `None` where it has not begun by the deadline. One that has begun is waited for, as long as it goes on.
    pub(super) fn receive(&mut self, deadline: Option<Instant>) -> io::Result<Option<Frame>> {
        if !self.wait(deadline)? {
            return Ok(None);
        }
        let mut header = [0; HEADER_BYTES];
        self.fill(&mut header)?;
        let invalid = || io::Error::from(io::ErrorKind::InvalidData);
        let (kind, length) = frame::header(header).ok_or_else(invalid)?;
        let mut body = Vec::new();
        // Memory is taken as bytes come, not as they are announced.
        while body.len() < length {
            let had = body.len();
            body.resize(length.min(had + CHUNK_BYTES), 0);
            self.fill(body.get_mut(had..).unwrap_or_default())?;
        }
        Frame::decode(kind, body).map(Some).ok_or_else(invalid)
    }

    fn fill(&mut self, mut bytes: &mut [u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            if !self.wait(Instant::now().checked_add(ANSWER_LIMIT))? {
                return Err(io::ErrorKind::TimedOut.into());
            }
            match self.frames.read(bytes) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => bytes = bytes.get_mut(count..).unwrap_or_default(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Whether there is something to read, or the end, before the deadline.
    fn wait(&self, deadline: Option<Instant>) -> io::Result<bool> {
        loop {
            let timeout = deadline.map(|at| {
                let left = at.saturating_duration_since(Instant::now());
                Timespec::try_from(left).unwrap_or(Timespec {
                    tv_sec: i64::MAX,
                    tv_nsec: 0,
                })
            });
            let frames = self.frames.as_fd();
            match poll(
                &mut [PollFd::from_borrowed_fd(frames, PollFlags::IN)],
                timeout.as_ref(),
            ) {
                Ok(ready) => return Ok(ready > 0),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}
