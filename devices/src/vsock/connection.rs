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

mod flow;

use event_manager::EventSet;
use vm_memory::VolatileSlice;

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
    /// Whether a read may give something: said by epoll, until a read comes up short.
    readable: bool,
    /// Whether epoll said it again while nothing could be read, for lack of credit or of the guest's buffers. Then it
    /// is not asked until a read comes up short. Not at once: most often bytes are read before it would, and
    /// two system calls are saved each time.
    muted: bool,
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
            muted: false,
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
            self.muted = self.readable;
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

    fn wants_read(&self) -> bool {
        self.phase == Phase::Open && self.to_guest == ToGuest::Open && self.readable
    }

    /// The events to watch for: exactly those that would change something, so that none comes again and again.
    fn interest(&self) -> Option<EventSet> {
        if self.hung_up {
            return None;
        }
        let mut interest = EventSet::empty();
        if self.phase == Phase::Open && self.to_guest == ToGuest::Open && !self.muted {
            interest |= EventSet::IN;
        }
        if !self.backlog.is_empty() {
            interest |= EventSet::OUT;
        }
        Some(interest)
    }
}
