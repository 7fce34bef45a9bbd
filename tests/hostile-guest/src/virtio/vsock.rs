//! Packets of the socket device (virtio 1.2 §5.10.6).

use core::cell::Cell;

use super::queue::{Descriptor, Queue, WRITE};
use super::{Device, VERSION_1};
use crate::{check, memory, same, time};

/// The machine's third device.
pub(crate) const SOCKETS: Device = Device::number(2);

/// Its queues.
pub(crate) const RECEIVE: Queue = Queue::new(SOCKETS, 0, 64, 2);
pub(crate) const TRANSMIT: Queue = Queue::new(SOCKETS, 1, 64, 3);
pub(crate) const EVENT: Queue = Queue::new(SOCKETS, 2, 8, 4);

/// Context identifiers.
pub(crate) const HOST: u64 = 2;
pub(crate) const GUEST: u64 = 3;

/// Ports of the suite: what comes to the first goes back; the second is taken, and never read; the third has the suite read the console
/// again, and say so; at others nobody listens.
pub(crate) const ECHO_PORT: u32 = 7;
pub(crate) const STALLED_PORT: u32 = 9;
pub(crate) const RESUME_PORT: u32 = 11;
pub(crate) const NOBODYS_PORT: u32 = 1234;

/// Operations.
pub(crate) const REQUEST: u16 = 1;
pub(crate) const RESPONSE: u16 = 2;
pub(crate) const RESET: u16 = 3;
pub(crate) const SHUTDOWN: u16 = 4;
pub(crate) const DATA: u16 = 5;
pub(crate) const CREDIT_UPDATE: u16 = 6;
pub(crate) const CREDIT_REQUEST: u16 = 7;

/// Bytes of a header.
pub(crate) const HEADER_BYTES: u64 = 44;

/// Where packets are: one outgoing packet, and a page for each receive buffer.
pub(crate) const OUTGOING: u64 = 0xb0_0000;
const INCOMING: u64 = 0xb8_0000;
const INCOMING_BYTES: u32 = 0x1000;

/// A header.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Header {
    pub(crate) src_cid: u64,
    pub(crate) dst_cid: u64,
    pub(crate) src_port: u32,
    pub(crate) dst_port: u32,
    pub(crate) len: u32,
    pub(crate) kind: u16,
    pub(crate) op: u16,
    pub(crate) flags: u32,
    pub(crate) buf_alloc: u32,
    pub(crate) fwd_cnt: u32,
}

/// A packet of a stream from a guest port to a host port, with 64 KiB of credit.
pub(crate) fn packet(from: u32, to: u32, op: u16) -> Header {
    Header {
        src_cid: GUEST,
        dst_cid: HOST,
        src_port: from,
        dst_port: to,
        len: 0,
        kind: 1,
        op,
        flags: 0,
        buf_alloc: 0x1_0000,
        fwd_cnt: 0,
    }
}

impl Header {
    pub(crate) fn store(&self, at: u64) {
        memory::write(at, self.src_cid);
        memory::write(at + 8, self.dst_cid);
        memory::write(at + 16, self.src_port);
        memory::write(at + 20, self.dst_port);
        memory::write(at + 24, self.len);
        memory::write(at + 28, self.kind);
        memory::write(at + 30, self.op);
        memory::write(at + 32, self.flags);
        memory::write(at + 36, self.buf_alloc);
        memory::write(at + 40, self.fwd_cnt);
    }

    fn load(at: u64) -> Self {
        Self {
            src_cid: memory::read(at),
            dst_cid: memory::read(at + 8),
            src_port: memory::read(at + 16),
            dst_port: memory::read(at + 20),
            len: memory::read(at + 24),
            kind: memory::read(at + 28),
            op: memory::read(at + 30),
            flags: memory::read(at + 32),
            buf_alloc: memory::read(at + 36),
            fwd_cnt: memory::read(at + 40),
        }
    }
}

/// The socket device in service.
pub(crate) struct Sockets {
    /// Packets that were taken from the receive queue.
    taken: Cell<u16>,
}

impl Sockets {
    /// Takes the device into service, with all receive buffers on offer.
    pub(crate) fn start() -> Self {
        let sockets = Self::start_without_buffers();
        sockets.offer_buffers();
        sockets
    }

    pub(crate) fn start_without_buffers() -> Self {
        SOCKETS.start(VERSION_1, &[&RECEIVE, &TRANSMIT, &EVENT]);
        Self {
            taken: Cell::new(0),
        }
    }

    pub(crate) fn offer_buffers(&self) {
        for index in 0..RECEIVE.size {
            let address = INCOMING + u64::from(index) * u64::from(INCOMING_BYTES);
            RECEIVE.set(index, Descriptor(address, INCOMING_BYTES, WRITE, 0));
            RECEIVE.offer(index);
        }
        RECEIVE.kick();
    }

    /// Sends a header and its payload, in one descriptor, and waits until it was taken.
    pub(crate) fn send(&self, header: &Header, payload: &[u8]) {
        header.store(OUTGOING);
        memory::store(OUTGOING + HEADER_BYTES, payload);
        self.send_parts(&[Descriptor(
            OUTGOING,
            HEADER_BYTES as u32 + payload.len() as u32,
            0,
            0,
        )]);
    }

    /// Sends whatever these parts hold.
    pub(crate) fn send_parts(&self, parts: &[Descriptor]) {
        TRANSMIT.chain(0, parts);
        let used = TRANSMIT.serve(0);
        same!((used.id, used.bytes), (0, 0), "what came back of a packet");
    }

    /// Packets that were taken.
    pub(crate) fn taken(&self) -> u16 {
        self.taken.get()
    }

    /// The next packet, if one has come; its buffer is on offer again.
    pub(crate) fn try_receive(&self) -> Option<(Header, &'static [u8])> {
        let number = self.taken.get();
        if RECEIVE.done() == number {
            return None;
        }
        self.taken.set(number.wrapping_add(1));
        let used = RECEIVE.entry(number);
        let at = INCOMING + u64::from(used.id) * u64::from(INCOMING_BYTES);
        let header = Header::load(at);
        same!(
            used.bytes,
            HEADER_BYTES as u32 + header.len,
            "bytes of a packet"
        );
        // Good until the queue has gone round once.
        let payload = memory::view(at + HEADER_BYTES, u64::from(header.len));
        RECEIVE.offer(used.id as u16);
        RECEIVE.kick();
        Some((header, payload))
    }

    /// Waits for the next packet.
    pub(crate) fn receive(&self) -> (Header, &'static [u8]) {
        let mut packet = None;
        time::until(|| {
            packet = self.try_receive();
            packet.is_some()
        });
        let Some(packet) = packet else {
            crate::report::fail(format_args!(
                "no packet came, status {:#x}",
                SOCKETS.status()
            ));
        };
        packet
    }

    /// The next packet is this operation, for this connection.
    pub(crate) fn expect(&self, op: u16, from: u32, to: u32) -> (Header, &'static [u8]) {
        let (header, payload) = self.receive();
        same!(
            (
                header.op,
                header.src_cid,
                header.dst_cid,
                header.src_port,
                header.dst_port
            ),
            (op, HOST, GUEST, to, from),
            "packet"
        );
        (header, payload)
    }

    /// No packet comes.
    pub(crate) fn expect_nothing(&self) {
        let before = self.taken.get();
        check!(
            !time::soon(|| RECEIVE.done() != before),
            "a packet came: {:x?}",
            self.try_receive()
        );
    }

    /// A connection from this guest port is accepted.
    pub(crate) fn connect(&self, from: u32, to: u32) {
        self.send(&packet(from, to, REQUEST), b"");
        self.expect(RESPONSE, from, to);
    }

    /// A stream works, from its beginning to its end.
    pub(crate) fn echo_works(&self, from: u32) {
        self.connect(from, ECHO_PORT);
        self.send(
            &Header {
                len: 5,
                ..packet(from, ECHO_PORT, DATA)
            },
            b"alive",
        );
        let (_, payload) = self.expect(DATA, from, ECHO_PORT);
        same!(payload, b"alive", "what came back");
        self.send(&packet(from, ECHO_PORT, RESET), b"");
        self.expect_nothing();
    }
}
