//! One connection, as a state machine between the guest's packets and the host's socket.
//!
//! ```text
//!   host connects                               guest connects
//!        │                                            │
//!        ▼             RESPONSE                       ▼
//!    Requested ───────────────────────────────────► Open
//!        │                                            │ both directions have ended, RST, or a broken rule
//!        └──────────────────┬─────────────────────────┘
//!                           ▼
//!                         Over ─► the last bytes are flushed, a reset that is owed is sent ─► gone
//! ```
//!
//! The two directions end by themselves ([`ToGuest`], [`FromGuest`]). Packets for the guest are not queued but owed:
//! each kind is a flag, so that what a connection has to say is bounded, and can't be lost while the guest's receive
//! queue is full (CVE-2020-16843).

use std::io::{self, ErrorKind};

use event_manager::EventSet;
use vm_memory::{ReadVolatile, VolatileMemoryError, VolatileSlice, WriteVolatile};

use super::backlog::Backlog;
use super::credit::{Allowance, Promise};
use super::packet::{Header, Op, Ports, SHUTDOWN_RECEIVE, SHUTDOWN_SEND};
use super::watched::Watched;

/// Where the connection stands with the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The host connects; the guest has not answered.
    Requested,
    /// Bytes flow.
    Open,
    /// The guest has nothing to do with it any more, or only has yet to take the reset.
    Over,
}

/// Bytes from the host's socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ToGuest {
    Open,
    /// The peer ended them, and all were sent; or the guest takes no more.
    Ended,
}

/// Bytes from the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FromGuest {
    Open,
    /// The guest ended them; the socket has not taken all.
    Flushing,
    /// The guest ended them, and the peer was told.
    Ended,
    /// The peer takes no more. What the guest sends until it hears of it is dropped.
    Refused,
}

/// Packets that the guest is to get.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Owed {
    request: bool,
    response: bool,
    shutdown_receive: bool,
    shutdown_send: bool,
    credit_request: bool,
    credit_update: bool,
    reset: bool,
}

/// A packet for the guest, but for addresses and credit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Outgoing {
    pub(super) op: Op,
    pub(super) flags: u32,
    /// Bytes of payload; they are in the guest's buffers already.
    pub(super) len: u32,
}

/// A connection.
#[derive(Debug)]
pub(super) struct Connection {
    ports: Ports,
    phase: Phase,
    to_guest: ToGuest,
    from_guest: FromGuest,
    /// None once it is closed, which happens in [`Phase::Over`] only.
    socket: Option<Watched>,
    /// Whether a read may give something. Level-triggered epoll says so once; then it is not asked until a read came up empty.
    readable: bool,
    /// Whether epoll said that the peer is gone: no byte will ever be added to what can be read. It can't be told
    /// not to say so again, so the socket is not watched any more.
    hung_up: bool,
    promise: Promise,
    allowance: Allowance,
    backlog: Backlog,
    owed: Owed,
    /// Whether a request for credit was sent and not answered with any.
    credit_asked: bool,
}

impl Connection {
    /// The host connects through `socket`: the guest will be asked.
    pub(super) fn from_host(ports: Ports, socket: Watched, buf_alloc: u32) -> Self {
        let owed = Owed {
            request: true,
            ..Owed::default()
        };
        Self::new(ports, Phase::Requested, socket, buf_alloc, owed)
    }

    /// The guest connects with the request `header`: it will be told that the host accepts.
    pub(super) fn from_guest(header: &Header, socket: Watched, buf_alloc: u32) -> Self {
        let owed = Owed {
            response: true,
            ..Owed::default()
        };
        let ports = header.ports_from_guest();
        let mut connection = Self::new(ports, Phase::Open, socket, buf_alloc, owed);
        connection.take_credit(header);
        connection
    }

    fn new(ports: Ports, phase: Phase, socket: Watched, buf_alloc: u32, owed: Owed) -> Self {
        Self {
            ports,
            phase,
            to_guest: ToGuest::Open,
            from_guest: FromGuest::Open,
            socket: Some(socket),
            readable: false,
            hung_up: false,
            promise: Promise::new(buf_alloc),
            allowance: Allowance::default(),
            backlog: Backlog::default(),
            owed,
            credit_asked: false,
        }
    }

    pub(super) fn ports(&self) -> Ports {
        self.ports
    }

    /// The room that the guest was promised; with [`Self::tell_forwarded`], what every packet to it carries.
    pub(super) fn buf_alloc(&self) -> u32 {
        self.promise.buf_alloc()
    }

    /// The count to write into a packet that the guest is about to get.
    pub(super) fn tell_forwarded(&mut self) -> u32 {
        self.owed.credit_update = false;
        self.promise.tell()
    }

    /// Whether the guest can have nothing more to do with it: the ports are free.
    pub(super) fn is_forgotten(&self) -> bool {
        self.phase == Phase::Over && !self.owed.reset
    }

    /// Whether nothing is left to do.
    pub(super) fn is_gone(&self) -> bool {
        self.is_forgotten() && self.socket.is_none()
    }

    /// Whether nobody on the host holds the other end any more, and it lives on for the guest alone, which has yet to take the last bytes.
    pub(super) fn is_abandoned(&self) -> bool {
        self.hung_up && self.phase != Phase::Over
    }

    /// Whether [`Self::next_packet`] may have something.
    pub(super) fn wants_turn(&self) -> bool {
        self.owed != Owed::default() && self.phase != Phase::Requested
            || self.owed.request
            || self.wants_read() && (self.allowance.available() > 0 || !self.credit_asked)
    }

    /// A packet of the guest for this connection.
    pub(super) fn receive(&mut self, op: Op, header: &Header, payload: &[VolatileSlice<'_>]) {
        if op == Op::Reset {
            self.end(false);
            return;
        }
        if self.phase == Phase::Over {
            return;
        }
        self.take_credit(header);
        match (self.phase, op) {
            (Phase::Requested, Op::Response) => {
                self.phase = Phase::Open;
                self.readable = true;
            }
            (Phase::Open, Op::Data) => self.take_data(header.len, payload),
            (Phase::Open, Op::Shutdown) => self.take_shutdown(header.flags),
            (Phase::Open, Op::CreditUpdate) => {}
            (Phase::Open, Op::CreditRequest) => self.owed.credit_update = true,
            // `Over` when the credit was wrong. Else a connect on ports in use, data before the answer, a second answer.
            _ => self.abort(),
        }
    }

    /// What epoll said of the socket.
    pub(super) fn socket_ready(&mut self, events: EventSet) {
        if events.intersects(EventSet::HANG_UP | EventSet::ERROR) {
            self.hang_up();
        } else if events.contains(EventSet::IN) {
            self.readable = true;
        }
        if events.contains(EventSet::OUT) {
            self.flush();
        }
    }

    /// The next packet for the guest. Payload is read from the socket straight into `room`.
    pub(super) fn next_packet(&mut self, room: &[VolatileSlice<'_>]) -> Option<Outgoing> {
        let bare = |op, flags| Some(Outgoing { op, flags, len: 0 });
        let take = |flag: &mut bool| std::mem::take(flag);
        if take(&mut self.owed.request) {
            return bare(Op::Request, 0);
        }
        if take(&mut self.owed.response) {
            return bare(Op::Response, 0);
        }
        if self.phase == Phase::Open {
            // First, because the guest may be waiting for it alone: `yes | head` with more bytes to the guest than it reads.
            if take(&mut self.owed.shutdown_receive) {
                return bare(Op::Shutdown, SHUTDOWN_RECEIVE);
            }
            let len = self.read(room);
            if len > 0 {
                return Some(Outgoing {
                    op: Op::Data,
                    flags: 0,
                    len,
                });
            }
            self.end_if_done();
        }
        if take(&mut self.owed.reset) {
            return bare(Op::Reset, 0);
        }
        if take(&mut self.owed.shutdown_send) {
            return bare(Op::Shutdown, SHUTDOWN_SEND);
        }
        if take(&mut self.owed.credit_request) {
            return bare(Op::CreditRequest, 0);
        }
        if take(&mut self.owed.credit_update) {
            return bare(Op::CreditUpdate, 0);
        }
        None
    }

    /// To be called after any of the above: ends what is done and has the right events watched.
    pub(super) fn settle(&mut self) {
        self.end_if_done();
        if self.phase == Phase::Open && self.from_guest == FromGuest::Open && self.promise.is_news()
        {
            self.owed.credit_update = true;
        }
        let interest = self.interest();
        if let Some(socket) = &mut self.socket
            && socket.watch(interest).is_err()
        {
            // The system's limit on watched descriptors. A socket that can't be watched would hang.
            self.abort();
        }
    }

    /// Ends the connection: a rule was broken, or its room is needed. What the guest sent and the socket has not taken is dropped.
    pub(super) fn abort(&mut self) {
        self.backlog.clear();
        self.end(true);
    }

    /// Ends the connection as if the guest had: nothing is owed to it.
    pub(super) fn forget(&mut self) {
        self.backlog.clear();
        self.end(false);
    }

    fn end_if_done(&mut self) {
        if self.from_guest == FromGuest::Flushing && self.backlog.is_empty() {
            self.from_guest = FromGuest::Ended;
            if let Some(socket) = &self.socket {
                socket.shut_write();
            }
        }
        let from_guest_done = matches!(self.from_guest, FromGuest::Ended | FromGuest::Refused);
        if self.phase == Phase::Open && from_guest_done && self.to_guest == ToGuest::Ended {
            self.end(true);
        }
    }

    /// It is over for the guest. The socket is closed when it has taken what the guest sent.
    pub(super) fn end(&mut self, owes_reset: bool) {
        let reset_was_sent = self.phase == Phase::Over && !self.owed.reset;
        self.owed = Owed {
            reset: owes_reset && !reset_was_sent,
            ..Owed::default()
        };
        self.phase = Phase::Over;
        self.to_guest = ToGuest::Ended;
        self.close_if_flushed();
        if let Some(socket) = &self.socket {
            socket.shut_read();
        }
    }

    fn close_if_flushed(&mut self) {
        if self.phase == Phase::Over
            && self.backlog.is_empty()
            && let Some(socket) = self.socket.take()
        {
            socket.close();
        }
    }

    fn take_credit(&mut self, header: &Header) {
        if self
            .allowance
            .update(header.buf_alloc, header.fwd_cnt)
            .is_err()
        {
            self.abort();
        } else if self.allowance.available() > 0 {
            self.credit_asked = false;
            self.owed.credit_request = false;
        }
    }

    fn take_shutdown(&mut self, flags: u32) {
        if flags & SHUTDOWN_RECEIVE != 0 && self.to_guest == ToGuest::Open {
            self.to_guest = ToGuest::Ended;
            if let Some(socket) = &self.socket {
                socket.shut_read();
            }
        }
        if flags & SHUTDOWN_SEND != 0 {
            self.from_guest = match self.from_guest {
                FromGuest::Open => FromGuest::Flushing,
                FromGuest::Refused => FromGuest::Ended,
                ended => ended,
            };
        }
        // The guest closed: it need not wait for the host's reader.
        if self.to_guest == ToGuest::Ended && self.from_guest != FromGuest::Open {
            self.end(true);
        }
    }

    fn take_data(&mut self, len: u32, payload: &[VolatileSlice<'_>]) {
        if matches!(self.from_guest, FromGuest::Flushing | FromGuest::Ended)
            || self.promise.receive(len).is_err()
        {
            self.abort();
            return;
        }
        for slice in payload {
            self.write(slice);
        }
    }

    /// Passes a piece of a packet on: to the socket, or what it does not take to the backlog.
    fn write(&mut self, slice: &VolatileSlice<'_>) {
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

    fn flush(&mut self) {
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
    fn read(&mut self, room: &[VolatileSlice<'_>]) -> u32 {
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
                    return count;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock && !self.hung_up => {
                    self.readable = false;
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
    fn hang_up(&mut self) {
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

    fn wants_read(&self) -> bool {
        self.phase == Phase::Open && self.to_guest == ToGuest::Open && self.readable
    }

    /// The events to watch for: exactly those that would change something, so that none comes again and again.
    fn interest(&self) -> Option<EventSet> {
        if self.hung_up {
            return None;
        }
        let mut interest = EventSet::empty();
        if self.phase == Phase::Open && self.to_guest == ToGuest::Open && !self.readable {
            interest |= EventSet::IN;
        }
        if !self.backlog.is_empty() {
            interest |= EventSet::OUT;
        }
        Some(interest)
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
