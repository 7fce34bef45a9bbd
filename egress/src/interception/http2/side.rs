//! One side of a connection: a socket, and the TLS that is spoken over it. HTTP/2 reads and writes what is within the TLS; the socket is
//! served when it is ready.

use std::cell::RefCell;
use std::fmt;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use rustix::event::PollFlags;
use rustls::Connection;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::super::session::is_later;
use crate::relay::wanted;

/// TLS, and how far its socket has come to its end.
struct Tls {
    connection: Connection,
    /// Nothing more comes.
    has_ended: bool,
    /// Nothing more is taken: what is written is dropped, as the other may have said why, which is still read.
    is_gone: bool,
}

/// One side. Its words are read and written by what [`Side::words`] gives.
pub(super) struct Side<'a, S> {
    socket: &'a S,
    tls: Rc<RefCell<Tls>>,
}

impl<S> fmt::Debug for Side<'_, S> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Side").finish_non_exhaustive()
    }
}

impl<'a, S> Side<'a, S>
where
    S: AsFd,
    for<'b> &'b S: Read + Write,
{
    pub(super) fn new(socket: &'a S, connection: impl Into<Connection>) -> Self {
        let tls = Tls {
            connection: connection.into(),
            has_ended: false,
            is_gone: false,
        };
        Self {
            socket,
            tls: Rc::new(RefCell::new(tls)),
        }
    }

    pub(super) fn words(&self) -> Words {
        Words(Rc::clone(&self.tls))
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// What the socket is waited for.
    pub(super) fn wanted(&self) -> PollFlags {
        let tls = self.tls.borrow();
        wanted(
            !tls.has_ended && tls.connection.wants_read(),
            !tls.is_gone && tls.connection.wants_write(),
        )
    }

    /// Takes bytes that were read from the socket elsewhere.
    ///
    /// # Errors
    /// Those of TLS; the other side was told.
    pub(super) fn take(&self, mut bytes: &[u8]) -> Result<(), rustls::Error> {
        while !bytes.is_empty() {
            let read = self.tls.borrow_mut().connection.read_tls(&mut bytes);
            if read.is_err() {
                break;
            }
            self.understand()?;
        }
        Ok(())
    }

    /// Serves the socket, which is ready for something of what was wanted of it; how many bytes came.
    ///
    /// # Errors
    /// Those of TLS; the other side was told.
    pub(super) fn serve(&self, is: PollFlags, wanted: PollFlags) -> Result<usize, rustls::Error> {
        let gone = PollFlags::HUP | PollFlags::ERR;
        if wanted.contains(PollFlags::OUT) && is.intersects(PollFlags::OUT | gone) {
            self.write();
        }
        if !wanted.contains(PollFlags::IN) || !is.intersects(PollFlags::IN | gone) {
            return Ok(0);
        }
        let mut tls = self.tls.borrow_mut();
        let count = match tls.connection.read_tls(&mut &*self.socket) {
            Ok(count) => count,
            Err(error) if is_later(&error) => return Ok(0),
            Err(_) => 0,
        };
        tls.has_ended = count == 0;
        drop(tls);
        self.understand()?;
        Ok(count)
    }

    /// Whether there is something that the socket has not taken.
    pub(super) fn holds(&self) -> bool {
        let tls = self.tls.borrow();
        !tls.is_gone && tls.connection.wants_write()
    }

    /// Writes as much as the socket takes now.
    pub(super) fn write(&self) {
        let tls = &mut *self.tls.borrow_mut();
        while !tls.is_gone && tls.connection.wants_write() {
            match tls.connection.write_tls(&mut &*self.socket) {
                Ok(1..) => {}
                Err(error) if is_later(&error) => return,
                Ok(0) | Err(_) => tls.is_gone = true,
            }
        }
    }

    /// Tells the other side that all was said, as far as it takes that now.
    pub(super) fn close(&self, shutdown: impl FnOnce(&S, Shutdown) -> io::Result<()>) {
        self.tls.borrow_mut().connection.send_close_notify();
        self.write();
        let _ = shutdown(self.socket, Shutdown::Write);
    }

    fn understand(&self) -> Result<(), rustls::Error> {
        let processed = self.tls.borrow_mut().connection.process_new_packets();
        if let Err(error) = processed {
            self.write();
            return Err(error);
        }
        Ok(())
    }
}

/// What is said within the TLS of one side. Whoever has it is polled again when the socket was served.
pub(super) struct Words(Rc<RefCell<Tls>>);

impl AsyncRead for Words {
    fn poll_read(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let tls = &mut *self.0.borrow_mut();
        match tls.connection.reader().read(buffer.initialize_unfilled()) {
            Ok(count) => {
                buffer.advance(count);
                Poll::Ready(Ok(()))
            }
            Err(error) if is_later(&error) && !tls.has_ended => Poll::Pending,
            // An end without a word of it: HTTP/2 says by itself what is whole.
            Err(_) => Poll::Ready(Ok(())),
        }
    }
}

impl AsyncWrite for Words {
    fn poll_write(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let tls = &mut *self.0.borrow_mut();
        if tls.is_gone {
            return Poll::Ready(Ok(bytes.len()));
        }
        match tls.connection.writer().write(bytes) {
            Ok(0) if !bytes.is_empty() => Poll::Pending,
            written => Poll::Ready(written),
        }
    }

    /// What TLS has is written when the socket takes it.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.borrow_mut().connection.send_close_notify();
        Poll::Ready(Ok(()))
    }
}
