//! A guest's driver with its queues, and the host around the device.
//!
//! The driver is as sparing as Linux's: it kicks only where the device asked for it (EVENT_IDX), and looks at used
//! buffers only after an interrupt. So a wake-up that is lost makes a test hang at its assertion.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fs;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use event_manager::{EventManager, SubscriberOps};
use socket2::SockRef;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::super::limits::Limits;
use super::super::packet::{HEADER_BYTES, HEADER_LEN, HOST_CID, Header, Op, TYPE_STREAM};
use super::super::{Incoming, Refused, Vsock};
use crate::virtio::VirtioDevice;
use crate::virtio::testing::{self, CountingLine, DRIVER_QUEUE_LEN, DriverQueue, Piece, memory};

pub(super) const GUEST_CID: u32 = 3;
pub(super) const RX: usize = 0;
pub(super) const TX: usize = 1;
pub(super) const EVENTS: usize = 2;

const MEMORY_LEN: usize = 48 << 20;
const RX_BUFFERS: u64 = 1 << 20;
const TX_BUFFERS: u64 = 20 << 20;
/// Memory for each descriptor's buffer.
const SLOT_LEN: u64 = 80 << 10;
/// Life of a machine after which its test counts as hanging.
const MAX_LIFE: Duration = Duration::from_secs(100);
/// Turns of the event loop after which it counts as spinning.
const MAX_TURNS: usize = 5_000;

/// Streams that the device handed out: stream, host port, guest port.
pub(super) type Accepted = (UnixStream, u32, u32);

#[derive(Debug, Default)]
pub(super) struct Host {
    pub(super) accepted: VecDeque<Accepted>,
    pub(super) refuse: HashSet<u32>,
    pub(super) drop_at_once: bool,
}

#[derive(Debug)]
struct Handler(Arc<Mutex<Host>>);

impl Incoming for Handler {
    fn accept(
        &mut self,
        stream: UnixStream,
        host_port: u32,
        guest_port: u32,
    ) -> Result<(), Refused> {
        let mut host = self.0.lock().unwrap();
        if host.refuse.contains(&host_port) {
            return Err(Refused);
        }
        if !host.drop_at_once {
            host.accepted.push_back((stream, host_port, guest_port));
        }
        Ok(())
    }
}

/// One of the driver's queues, with what Linux remembers of it.
#[derive(Debug)]
struct Ring {
    queue: DriverQueue,
    available: u16,
    available_at_last_kick: u16,
    used: u16,
    in_flight: usize,
}

/// A machine with nothing in it but a socket device.
pub(super) struct Machine {
    pub(super) memory: GuestMemoryMmap,
    pub(super) device: Arc<Mutex<Vsock>>,
    pub(super) host: Arc<Mutex<Host>>,
    pub(super) line: CountingLine,
    manager: EventManager<Arc<Mutex<Vsock>>>,
    rings: [Ring; 3],
    rx_slots: HashMap<u16, u64>,
    rx_buffer_len: u32,
    /// Bytes in the first of two descriptors of each receive buffer; all in one where it is 0.
    pub(super) rx_cut: u32,
    interrupts_seen: usize,
    started: Instant,
    kicks: usize,
}

impl Machine {
    /// A machine whose receive queue is filled, and stays so.
    pub(super) fn new() -> Self {
        Self::with(Limits::DEFAULT, 128, 4096 + HEADER_BYTES)
    }

    pub(super) fn with(limits: Limits, queue_size: u16, rx_buffer_len: u32) -> Self {
        let memory = memory(MEMORY_LEN);
        let host = Arc::new(Mutex::new(Host::default()));
        let handler = Box::new(Handler(Arc::clone(&host)));
        let mut vsock = Vsock::with_limits(GUEST_CID, handler, limits).unwrap();
        let rings = [0, 1, 2].map(|index: u64| Ring {
            queue: DriverQueue::new(&memory, 0x1000 + index * DRIVER_QUEUE_LEN, queue_size),
            available: 0,
            available_at_last_kick: 0,
            used: 0,
            in_flight: 0,
        });
        let line = CountingLine::default();
        let queues = [&rings[0].queue, &rings[1].queue, &rings[2].queue];
        testing::activate(&mut vsock, &memory, &queues, &line.interrupt()).unwrap();
        let device = Arc::new(Mutex::new(vsock));
        let mut manager = EventManager::new().unwrap();
        manager.add_subscriber(Arc::clone(&device));
        let mut machine = Self {
            memory,
            device,
            host,
            line,
            manager,
            rings,
            rx_slots: HashMap::new(),
            rx_buffer_len,
            rx_cut: 0,
            interrupts_seen: 0,
            started: Instant::now(),
            kicks: 0,
        };
        machine.settle();
        machine
    }

    /// Runs the event loop until nothing is ready.
    pub(super) fn settle(&mut self) {
        assert!(self.started.elapsed() < MAX_LIFE, "The machine hangs");
        for _ in 0..MAX_TURNS {
            if self.manager.run_with_timeout(0).unwrap() == 0 {
                return;
            }
        }
        panic!("The event loop spins");
    }

    /// Runs the event loop; the result is how many turns had something to do.
    pub(super) fn turns(&mut self, most: usize) -> usize {
        (0..most)
            .take_while(|_| self.manager.run_with_timeout(0).unwrap() > 0)
            .count()
    }

    /// Makes up to `count` receive buffers available, as the queue has room.
    pub(super) fn post(&mut self, count: usize) {
        let size = self.rings[RX].queue.size();
        let room = (usize::from(size) - self.rings[RX].in_flight) / self.rx_pieces();
        for _ in 0..count.min(room) {
            let slot = RX_BUFFERS + u64::from(self.rings[RX].available % size) * SLOT_LEN;
            let (cut, len) = (self.rx_cut, self.rx_buffer_len);
            let head = match cut {
                0 => self.add(RX, &[Piece::writable(slot, len)]),
                cut => {
                    let second = Piece::writable(slot + u64::from(cut), len - cut);
                    self.add(RX, &[Piece::writable(slot, cut), second])
                }
            };
            self.rx_slots.insert(head, slot);
        }
        self.kick(RX);
    }

    fn rx_pieces(&self) -> usize {
        1 + usize::from(self.rx_cut > 0)
    }

    pub(super) fn add(&mut self, ring: usize, pieces: &[Piece]) -> u16 {
        let ring = &mut self.rings[ring];
        ring.available = ring.available.wrapping_add(1);
        ring.in_flight += pieces.len();
        ring.queue.add(pieces)
    }

    /// Makes a head available that is no descriptor.
    pub(super) fn publish_raw(&mut self, ring: usize, head: u16) {
        self.rings[ring].available = self.rings[ring].available.wrapping_add(1);
        self.rings[ring].queue.publish(head);
        self.kick(ring);
    }

    /// Kicks as virtio 1.2 §2.7.7.2 has it: only if the device's event index was passed.
    pub(super) fn kick(&mut self, index: usize) {
        let ring = &mut self.rings[index];
        let (new, old) = (ring.available, ring.available_at_last_kick);
        ring.available_at_last_kick = new;
        let event = ring.queue.avail_event();
        if new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old) {
            self.kicks += 1;
            self.force_kick(index);
        }
    }

    pub(super) fn force_kick(&self, index: usize) {
        self.device.lock().unwrap().queue_events().kick(index);
    }

    pub(super) fn kicks(&self) -> usize {
        self.kicks
    }

    /// What the device gave back, if it interrupted since the last look.
    fn used(&mut self, index: usize) -> Vec<(u16, u32)> {
        let ring = &mut self.rings[index];
        let mut all = Vec::new();
        loop {
            while let Some(used) = ring.queue.take_used() {
                ring.used = ring.used.wrapping_add(1);
                all.push(used);
            }
            // Ask for the next interrupt, and look once more.
            ring.queue.set_used_event(ring.used);
            if ring.queue.used_index() == ring.used {
                return all;
            }
        }
    }

    fn interrupted(&mut self) -> bool {
        let count = self.line.count();
        std::mem::replace(&mut self.interrupts_seen, count) != count
    }

    /// All packets that the guest has got. Its buffers are not given back to the device: see [`Self::post`].
    pub(super) fn packets(&mut self) -> Vec<(Header, Vec<u8>)> {
        self.settle();
        if !self.interrupted() {
            return Vec::new();
        }
        let _ = self.used(EVENTS);
        let transmitted = self.used(TX);
        assert!(transmitted.iter().all(|(_, written)| *written == 0));
        self.rings[TX].in_flight = 0;
        let received = self.used(RX);
        self.rings[RX].in_flight -= received.len() * self.rx_pieces();
        received
            .into_iter()
            .filter(|(_, written)| *written > 0)
            .map(|(head, written)| self.read_packet(head, written))
            .collect()
    }

    /// As [`Self::packets`], with the receive queue refilled until nothing more comes.
    pub(super) fn all_packets(&mut self) -> Vec<(Header, Vec<u8>)> {
        let mut all = Vec::new();
        loop {
            self.post(usize::MAX);
            let packets = self.packets();
            if packets.is_empty() {
                return all;
            }
            all.extend(packets);
        }
    }

    fn read_packet(&mut self, head: u16, written: u32) -> (Header, Vec<u8>) {
        let slot = self.rx_slots[&head];
        let mut bytes = vec![0; usize::try_from(written).unwrap()];
        self.memory
            .read_slice(&mut bytes, GuestAddress(slot))
            .unwrap();
        let payload = bytes.split_off(HEADER_LEN);
        let header = Header::from_bytes(bytes.try_into().unwrap());
        assert_eq!(header.len as usize, payload.len());
        assert_eq!(header.dst_cid, u64::from(GUEST_CID));
        (header, payload)
    }

    /// Sends a packet whose payload is split over descriptors as `pieces` says (the last takes the rest), header apart.
    pub(super) fn transmit_pieces(&mut self, header: &Header, payload: &[u8], pieces: &[usize]) {
        let count = pieces.len() + 2;
        if self.rings[TX].in_flight + count > usize::from(self.rings[TX].queue.size()) {
            self.settle();
            let _ = self.used(TX);
            self.rings[TX].in_flight = 0;
        }
        let slot = TX_BUFFERS
            + u64::from(self.rings[TX].available % self.rings[TX].queue.size()) * SLOT_LEN * 2;
        self.memory
            .write_slice(&header.to_bytes(), GuestAddress(slot))
            .unwrap();
        let mut at = slot + HEADER_LEN as u64;
        self.memory.write_slice(payload, GuestAddress(at)).unwrap();
        let mut chain = vec![Piece::readable(slot, HEADER_BYTES)];
        let mut rest = payload.len();
        for piece in pieces.iter().copied().chain([usize::MAX]) {
            let len = piece.min(rest);
            if len > 0 {
                chain.push(Piece::readable(at, u32::try_from(len).unwrap()));
            }
            at += len as u64;
            rest -= len;
        }
        self.add(TX, &chain);
        self.kick(TX);
    }

    pub(super) fn transmit(&mut self, header: &Header, payload: &[u8]) {
        self.transmit_pieces(header, payload, &[]);
    }

    /// Sends `bytes` as one packet like `header`.
    pub(super) fn transmit_data(&mut self, header: Header, bytes: &[u8]) {
        let header = Header {
            op: Op::Data as u16,
            len: u32::try_from(bytes.len()).unwrap(),
            ..header
        };
        self.transmit(&header, bytes);
    }

    pub(super) fn connection_count(&self) -> usize {
        self.device.lock().unwrap().muxer().connection_count()
    }

    pub(super) fn budget_bytes(&self) -> u32 {
        self.device.lock().unwrap().muxer().budget_bytes()
    }

    /// The guest connects; the result is the host's end.
    pub(super) fn guest_connects(&mut self, guest_port: u32, host_port: u32) -> UnixStream {
        self.transmit(&packet(Op::Request, guest_port, host_port), b"");
        let packets = self.all_packets();
        assert_eq!(ops(&packets), [Op::Response]);
        let (stream, to, from) = self.host.lock().unwrap().accepted.pop_front().unwrap();
        assert_eq!((to, from), (host_port, guest_port));
        stream
    }

    /// The host connects and is not answered; the results are its end and its port.
    pub(super) fn host_connects(&mut self, guest_port: u32) -> (UnixStream, u32) {
        let (ours, theirs) = narrow_pair();
        self.device
            .lock()
            .unwrap()
            .connect(guest_port, theirs)
            .unwrap();
        let packets = self.all_packets();
        assert_eq!(ops(&packets), [Op::Request]);
        assert_eq!(packets[0].0.dst_port, guest_port);
        (ours, packets[0].0.src_port)
    }
}

/// A socket pair whose second end, the device's, takes a handful of writes before it is full.
pub(super) fn narrow_pair() -> (UnixStream, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    // The system rounds up to its least.
    SockRef::from(&theirs).set_send_buffer_size(1).unwrap();
    (ours, theirs)
}

/// What the packets are for.
pub(super) fn ops(packets: &[(Header, Vec<u8>)]) -> Vec<Op> {
    packets
        .iter()
        .map(|(header, _)| header.operation().unwrap())
        .collect()
}

/// What the packets carry.
pub(super) fn data(packets: &[(Header, Vec<u8>)]) -> Vec<u8> {
    packets
        .iter()
        .flat_map(|(_, payload)| payload.clone())
        .collect()
}

/// A packet of the guest from `guest_port` to `host_port`, with plenty of credit.
pub(super) fn packet(op: Op, guest_port: u32, host_port: u32) -> Header {
    Header {
        src_cid: u64::from(GUEST_CID),
        dst_cid: HOST_CID,
        src_port: guest_port,
        dst_port: host_port,
        socket_type: TYPE_STREAM,
        op: op as u16,
        buf_alloc: 1 << 20,
        ..Header::default()
    }
}

/// Descriptors that this process holds.
pub(super) fn open_descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}
