//! The bytes of a connection, between guest memory and its socket, without a copy in between but for the backlog.

use std::io::{self, ErrorKind};

use vm_memory::{ReadVolatile, VolatileMemoryError, VolatileSlice, WriteVolatile};

use super::{Connection, FromGuest, Phase, ToGuest};

impl Connection {
    /// Passes a piece of a packet on: to the socket, or what it does not take to the backlog.
    pub(super) fn write(&mut self, slice: &VolatileSlice<'_>) {
        let mut rest = *slice;
        while !rest.is_empty() {
            if self.from_guest == FromGuest::Refused {
                self.promise.forward(clamp(rest.len()));
                return;
            }
            if !self.backlog.is_empty() {
                self.backlog.push(&rest);
                return;
            }
            let Some(socket) = &self.socket else {
                return;
            };
            match socket.stream().write_volatile(&rest).map_err(io_error) {
                Ok(count) => {
                    self.promise.forward(clamp(count));
                    rest = rest.offset(count).unwrap_or(rest);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.backlog.push(&rest);
                    return;
                }
                Err(_) => self.refuse(),
            }
        }
    }

    /// The socket takes bytes again.
    pub(super) fn flush(&mut self) {
        let Some(socket) = &self.socket else {
            return;
        };
        match self.backlog.flush(socket.stream()) {
            Ok(count) => self.promise.forward(clamp(count)),
            Err(_) => self.refuse(),
        }
        self.close_if_flushed();
    }

    /// Reads from the socket into `room`, as much as the guest's credit allows. The result is the number of bytes.
    pub(super) fn read(&mut self, room: &[VolatileSlice<'_>]) -> u32 {
        if !self.wants_read() {
            return 0;
        }
        let credit = self.allowance.available();
        if credit == 0 {
            if !self.credit_asked {
                self.credit_asked = true;
                self.owed.credit_request = true;
            }
            return 0;
        }
        let mut len = 0;
        for slice in room {
            let wanted = slice.len().min(credit.saturating_sub(len) as usize);
            let Ok(part) = slice.subslice(0, wanted) else {
                break;
            };
            let count = if part.is_empty() {
                break;
            } else {
                self.read_once(part, len > 0)
            };
            len += clamp(count);
            if count < wanted {
                break;
            }
        }
        self.allowance.send(len);
        len
    }

    /// One read. `more` says that bytes came before in the same packet: an end of file then waits for the next.
    fn read_once(&mut self, mut part: VolatileSlice<'_>, more: bool) -> usize {
        loop {
            let Some(socket) = &self.socket else {
                return 0;
            };
            match socket.stream().read_volatile(&mut part).map_err(io_error) {
                Ok(0) if more => return 0,
                Ok(0) => {
                    self.to_guest = ToGuest::Ended;
                    self.owed.shutdown_send = true;
                    return 0;
                }
                Ok(count) => {
                    // Less than asked for: there is no more now. When the peer is gone, no event would
                    // come for its end of file.
                    self.readable = self.hung_up || count == part.len();
                    self.muted &= self.readable;
                    return count;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock && !self.hung_up => {
                    (self.readable, self.muted) = (false, false);
                    return 0;
                }
                // The peer closed with bytes of the guest unread. The next read gives the end of file.
                Err(error) if error.kind() == ErrorKind::ConnectionReset && !self.hung_up => {
                    self.hang_up();
                }
                Err(_) => {
                    self.hang_up();
                    self.to_guest = ToGuest::Ended;
                    self.owed.shutdown_send = true;
                    return 0;
                }
            }
        }
    }

    /// The peer closed its end, or both of its directions. What it sent before is still to be read.
    pub(super) fn hang_up(&mut self) {
        self.hung_up = true;
        self.readable = true;
        self.refuse();
    }

    /// The peer takes no more.
    fn refuse(&mut self) {
        let dropped = self.backlog.clear();
        self.promise.forward(clamp(dropped));
        self.from_guest = match self.from_guest {
            FromGuest::Open => {
                // Before the guest has answered it knows of no connection; it hears of this when it has.
                self.owed.shutdown_receive = self.phase != Phase::Over;
                FromGuest::Refused
            }
            FromGuest::Flushing => FromGuest::Ended,
            ended => ended,
        };
        self.close_if_flushed();
    }
}

/// Counts of bytes here are bounded by credit, which is a `u32`.
fn clamp(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

fn io_error(error: VolatileMemoryError) -> io::Error {
    match error {
        VolatileMemoryError::IOError(error) => error,
        other => io::Error::other(other),
    }
}
