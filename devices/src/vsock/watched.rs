//! A non-blocking socket that an epoll set may watch.

use std::io::{self, Read};
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use event_manager::EventSet;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent};

use super::limits::{DISCARD_CHUNK_BYTES, DISCARD_READS};

/// A stream and its place in the epoll set of the device. It leaves the set before it is closed, always: the
/// peer might hold a copy of the descriptor, and the set would go on to report a socket that nobody knows.
#[derive(Debug)]
pub(super) struct Watched {
    stream: UnixStream,
    poller: Arc<Epoll>,
    token: u64,
    watched: Option<EventSet>,
}

impl Watched {
    /// Makes the stream non-blocking; nothing is watched yet. Events will carry `token`.
    pub(super) fn new(stream: UnixStream, poller: &Arc<Epoll>, token: u64) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self {
            stream,
            poller: Arc::clone(poller),
            token,
            watched: None,
        })
    }

    pub(super) fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Watches for exactly these events from now on. With an empty set, that the peer hung up is still reported (epoll
    /// can't be told otherwise); with `None` nothing is.
    pub(super) fn watch(&mut self, wanted: Option<EventSet>) -> io::Result<()> {
        let operation = match (self.watched, wanted) {
            (now, then) if now == then => return Ok(()),
            (None, _) => ControlOperation::Add,
            (_, None) => ControlOperation::Delete,
            (Some(_), Some(_)) => ControlOperation::Modify,
        };
        let event = EpollEvent::new(wanted.unwrap_or(EventSet::empty()), self.token);
        self.poller.ctl(operation, self.stream.as_raw_fd(), event)?;
        self.watched = wanted;
        Ok(())
    }

    /// Takes no more from the peer: its writes fail with EPIPE.
    pub(super) fn shut_read(&self) {
        // Fails only where the peer is gone, which comes to the same.
        let _ = self.stream.shutdown(Shutdown::Read);
    }

    /// Sends no more to the peer: it reads what it has, then the end of file.
    pub(super) fn shut_write(&self) {
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// Closes the stream so that the peer reads what it has and then a plain end of file: a socket that is closed with bytes unread
    /// makes the peer's read fail with ECONNRESET.
    pub(super) fn close(self) {
        self.shut_read();
        let mut chunk = [0; DISCARD_CHUNK_BYTES];
        for _ in 0..DISCARD_READS {
            match (&self.stream).read(&mut chunk) {
                Ok(0) | Err(_) => break,
                Ok(_) => {}
            }
        }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        // Removing what is in the set does not fail.
        let _ = self.watch(None);
    }
}
