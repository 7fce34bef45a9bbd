//! All connections of a device: which packet is for which, and whose turn it is to send one.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use vm_memory::{GuestMemoryMmap, VolatileSlice};
use vmm_sys_util::epoll::{Epoll, EpollEvent};

use super::connection::{Connection, Outgoing};
use super::limits::{FIRST_HOST_PORT, LAST_HOST_PORT, Limits, SOCKETS_PER_TURN};
use super::packet::{
    GuestPacket, HEADER_BYTES, HOST_CID, Header, Op, PAYLOAD_OFFSET, Ports, TYPE_STREAM,
};
use super::watched::Watched;
use super::{ConnectError, Incoming};
use crate::virtio::{Buffers, StateError};

/// Names a connection for as long as the device lives; never used twice, so a late event finds nobody.
type Id = u64;

/// What became of a buffer that the guest gave to be filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Filled {
    /// There is nothing to send; the buffer was not touched.
    Nothing,
    /// It holds a packet of this many bytes, header included.
    Packet(u32),
    /// It has no room for a header and a byte, or is not memory.
    Unusable,
}

#[derive(Debug)]
struct Entry {
    connection: Connection,
    /// Whether it is in [`Muxer::turns`].
    has_turn: bool,
}

/// The connections.
#[derive(Debug)]
pub(super) struct Muxer {
    limits: Limits,
    guest_cid: u64,
    incoming: Box<dyn Incoming>,
    /// An epoll set of its own inside the event loop's: connections come and go on any thread that holds the
    /// device's lock, and the event manager, which panics at a descriptor that it does not know, never meets them.
    poller: Arc<Epoll>,
    connections: HashMap<Id, Entry>,
    /// The connections that the guest knows of.
    by_ports: HashMap<Ports, Id>,
    /// Who may have a packet for the guest, each once, served in turn.
    turns: VecDeque<Id>,
    /// Resets for ports that are no connection; they take turns with `turns` as a whole.
    resets: VecDeque<Header>,
    resets_had_turn: bool,
    /// What is left of [`Limits::buffer_budget_bytes`].
    budget_bytes: u32,
    next_id: Id,
    next_host_port: u32,
}

impl Muxer {
    pub(super) fn new(
        guest_cid: u32,
        incoming: Box<dyn Incoming>,
        limits: Limits,
    ) -> io::Result<Self> {
        Ok(Self {
            limits,
            guest_cid: u64::from(guest_cid),
            incoming,
            poller: Arc::new(Epoll::new()?),
            connections: HashMap::new(),
            by_ports: HashMap::new(),
            turns: VecDeque::new(),
            resets: VecDeque::new(),
            resets_had_turn: false,
            budget_bytes: limits.buffer_budget_bytes,
            next_id: 0,
            next_host_port: FIRST_HOST_PORT,
        })
    }

    /// Readable when a socket has something to do.
    pub(super) fn poller_fd(&self) -> RawFd {
        self.poller.as_raw_fd()
    }

    /// Whether [`Self::fill`] may have something to send.
    pub(super) fn wants_buffer(&self) -> bool {
        !self.turns.is_empty() || !self.resets.is_empty()
    }

    /// Opens a connection to `guest_port`.
    pub(super) fn connect(
        &mut self,
        guest_port: u32,
        stream: UnixStream,
    ) -> Result<(), ConnectError> {
        if self.connections.len() >= self.limits.connections {
            return Err(ConnectError::TooMany {
                limit: self.limits.connections,
            });
        }
        let ports = Ports {
            host: self.free_host_port(guest_port),
            guest: guest_port,
        };
        let id = self.new_id();
        let socket = Watched::new(stream, &self.poller, id).map_err(ConnectError::Stream)?;
        let buf_alloc = self.take_budget();
        self.insert(id, Connection::from_host(ports, socket, buf_alloc));
        Ok(())
    }

    /// Takes a packet that the guest sent. Nothing that is in it fails the device.
    pub(super) fn receive(&mut self, memory: &GuestMemoryMmap, readable: &Buffers) {
        let Ok(packet) = GuestPacket::read(memory, readable) else {
            return;
        };
        let header = packet.header;
        // Whoever claims to be someone else gets no answer: it would go to someone else.
        if header.src_cid != self.guest_cid {
            return;
        }
        let op = header.operation();
        let id = self.by_ports.get(&header.ports_from_guest()).copied();
        let is_ours = header.dst_cid == HOST_CID && header.socket_type == TYPE_STREAM;
        match (op, id.filter(|_| is_ours), packet.payload) {
            (Some(op), Some(id), Some(payload)) => {
                self.with(id, |connection| connection.receive(op, &header, &payload));
            }
            // The header promises a payload that is not there, or makes no sense.
            (_, Some(id), _) => self.with(id, Connection::abort),
            (Some(Op::Reset), None, _) => {}
            (Some(Op::Request), None, _) if is_ours => self.accept(&header),
            (_, None, _) => self.reset(&header),
        }
    }

    /// Puts the next packet for the guest into a buffer of the guest.
    pub(super) fn fill(&mut self, memory: &GuestMemoryMmap, writable: &Buffers) -> Filled {
        let room_len = writable
            .len()
            .saturating_sub(PAYLOAD_OFFSET)
            .min(self.limits.packet_bytes);
        // The header's place is checked with the room, so that writing it can't fail when bytes were read from a socket.
        let (Ok(_), Ok(room), true) = (
            writable.slices(memory, 0, PAYLOAD_OFFSET),
            writable.slices(memory, PAYLOAD_OFFSET, room_len),
            room_len > 0,
        ) else {
            return Filled::Unusable;
        };
        let Some(header) = self.next_header(&room) else {
            return Filled::Nothing;
        };
        match writable.write_at(memory, 0, &header.to_bytes()) {
            Ok(()) => Filled::Packet(header.len.saturating_add(HEADER_BYTES)),
            Err(_) => Filled::Unusable,
        }
    }

    /// Asks the sockets: which have bytes, take bytes, or are closed. Never waits.
    pub(super) fn poll_sockets(&mut self) {
        let mut events = [EpollEvent::default(); SOCKETS_PER_TURN];
        // Interrupted at worst: then the event loop comes again.
        let count = self.poller.wait(0, &mut events).unwrap_or(0);
        for event in events.iter().take(count) {
            self.with(event.data(), |connection| {
                connection.socket_ready(event.event_set());
            });
        }
    }

    /// The guest has forgotten all: it began anew. The peers read what it sent before, then the end of file.
    pub(super) fn forget_guest(&mut self) {
        let ids: Vec<Id> = self.connections.keys().copied().collect();
        for id in ids {
            self.with(id, |connection| connection.end(false));
        }
        self.resets.clear();
        // `next_host_port` goes on, so that no connection comes from a port that the guest has just known.
    }

    /// The host port that the next connection to the guest has.
    pub(super) fn next_host_port(&self) -> u32 {
        self.next_host_port
    }

    /// Goes on counting host ports from here.
    pub(super) fn set_next_host_port(&mut self, port: u32) -> Result<(), StateError> {
        if !(FIRST_HOST_PORT..=LAST_HOST_PORT).contains(&port) {
            return Err(StateError::HostPort { port });
        }
        self.next_host_port = port;
        Ok(())
    }

    /// Connections that are held for the guest or for the host.
    #[cfg(test)]
    pub(super) fn connection_count(&self) -> usize {
        self.connections.len()
    }

    /// Bytes of budget that no connection holds.
    #[cfg(test)]
    pub(super) fn budget_bytes(&self) -> u32 {
        self.budget_bytes
    }

    fn accept(&mut self, request: &Header) {
        match self.try_accept(request) {
            Some(connection) => self.insert_next(connection),
            None => self.reset(request),
        }
    }

    fn try_accept(&mut self, request: &Header) -> Option<Connection> {
        if self.connections.len() >= self.limits.connections {
            return None;
        }
        // Out of descriptors: as good as a port where nobody listens.
        let (ours, theirs) = UnixStream::pair().ok()?;
        let socket = Watched::new(ours, &self.poller, self.next_id).ok()?;
        self.incoming
            .accept(theirs, request.dst_port, request.src_port)
            .ok()?;
        let buf_alloc = self.take_budget();
        Some(Connection::from_guest(request, socket, buf_alloc))
    }

    /// Remembers to answer a packet that belongs to no connection.
    fn reset(&mut self, packet: &Header) {
        if self.resets.len() < self.limits.resets {
            self.resets.push_back(packet.reset_in_answer());
        }
    }

    fn next_header(&mut self, room: &[VolatileSlice<'_>]) -> Option<Header> {
        let guest_cid = self.guest_cid;
        // Each has one try, and one more is the resets'.
        for _ in 0..=self.turns.len() {
            let had_turn = std::mem::replace(&mut self.resets_had_turn, true);
            if (!had_turn || self.turns.is_empty())
                && let Some(reset) = self.resets.pop_front()
            {
                return Some(reset);
            }
            self.resets_had_turn = false;
            let id = self.turns.pop_front()?;
            if let Some(entry) = self.connections.get_mut(&id) {
                entry.has_turn = false;
            }
            let mut header = None;
            self.with(id, |connection| {
                header = connection
                    .next_packet(room)
                    .map(|packet| complete(connection, packet, guest_cid));
            });
            if header.is_some() {
                return header;
            }
        }
        None
    }

    /// Does something with a connection, and then whatever follows from it.
    fn with(&mut self, id: Id, action: impl FnOnce(&mut Connection)) {
        let Some(entry) = self.connections.get_mut(&id) else {
            return;
        };
        let connection = &mut entry.connection;
        action(connection);
        connection.settle();
        let ports = connection.ports();
        if connection.is_forgotten() && self.by_ports.get(&ports) == Some(&id) {
            self.by_ports.remove(&ports);
        }
        if connection.is_gone() {
            self.budget_bytes += connection.buf_alloc() - self.limits.min_buffer_bytes;
            if entry.has_turn {
                self.turns.retain(|other| *other != id);
            }
            self.connections.remove(&id);
        } else if connection.wants_turn() && !entry.has_turn {
            entry.has_turn = true;
            self.turns.push_back(id);
        }
    }

    fn insert_next(&mut self, connection: Connection) {
        let id = self.new_id();
        self.insert(id, connection);
    }

    fn insert(&mut self, id: Id, connection: Connection) {
        self.by_ports.insert(connection.ports(), id);
        let entry = Entry {
            connection,
            has_turn: false,
        };
        self.connections.insert(id, entry);
        self.with(id, |_| {});
    }

    /// A host port that makes a new pair with `guest_port`. One of as many as there are connections, and one more, is free.
    fn free_host_port(&mut self, guest_port: u32) -> u32 {
        loop {
            let host = self.next_host_port;
            self.next_host_port = if host >= LAST_HOST_PORT {
                FIRST_HOST_PORT
            } else {
                host + 1
            };
            let ports = Ports {
                host,
                guest: guest_port,
            };
            if !self.by_ports.contains_key(&ports) {
                return host;
            }
        }
    }

    fn new_id(&mut self) -> Id {
        let id = self.next_id;
        self.next_id += 1;
        id
    }

    fn take_budget(&mut self) -> u32 {
        let extra = (self.budget_bytes / 8).min(
            self.limits
                .max_buffer_bytes
                .saturating_sub(self.limits.min_buffer_bytes),
        );
        self.budget_bytes -= extra;
        self.limits.min_buffer_bytes + extra
    }
}

fn header_to_guest(ports: Ports, guest_cid: u64) -> Header {
    Header {
        src_cid: HOST_CID,
        dst_cid: guest_cid,
        src_port: ports.host,
        dst_port: ports.guest,
        socket_type: TYPE_STREAM,
        ..Header::default()
    }
}

/// Adds addresses and credit: from here on the guest is told.
fn complete(connection: &mut Connection, packet: Outgoing, guest_cid: u64) -> Header {
    Header {
        len: packet.len,
        op: packet.op as u16,
        flags: packet.flags,
        buf_alloc: connection.buf_alloc(),
        fwd_cnt: connection.tell_forwarded(),
        ..header_to_guest(connection.ports(), guest_cid)
    }
}
