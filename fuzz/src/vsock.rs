//! Target `vsock`: packets in both directions, from a guest that keeps no rule and a host that reads, writes and closes as it likes.
//!
//! Checked: each packet to the guest is one of the specification's, within the guest's credit and the bounds of the device; memory changes
//! in used rings and in the buffers of the receive and event queues alone; the event loop comes to rest; when the host has let go of all
//! and the device was reset, every descriptor is given back; and then a stream can be opened and carries bytes.

mod guest;
mod header;
mod heard;
mod seeds;

use std::collections::{BTreeMap, VecDeque};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};

use devices::vsock::{Incoming, Refused, Vsock};

use crate::input::Input;
use crate::machine::{EVENT_IDX, Machine, VERSION_1};
use crate::memory::{BUFFERS, Memory, address, length};
use crate::ring::{Descriptor, Ring};
use header::{DATA, HEADER_BYTES, Header, REQUEST, RESPONSE};
use heard::Pair;
pub use seeds::seeds;

/// The guest's context identifier, and the host's (virtio 1.2 §5.10.4).
const GUEST_CID: u64 = 3;
const HOST_CID: u64 = 2;

/// The queues (virtio 1.2 §5.10.2).
const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;
const EVENT: usize = 2;

/// The most steps of one input.
const STEPS_MAX: usize = 96;

/// The most bytes that one step has the host read or write.
const HOST_BYTES_MAX: usize = 64 << 10;

/// The host port at which nobody listens.
const REFUSED_PORT: u32 = 13;

/// Memory for packets that the guest sends, and for those that it receives.
const SENT: u64 = BUFFERS;
const RECEIVED: u64 = BUFFERS + 0x4000;

/// Streams that the device handed out: stream, host port, guest port.
type Accepted = Arc<Mutex<VecDeque<UnixStream>>>;

#[derive(Debug)]
struct Host(Accepted);

impl Incoming for Host {
    fn accept(
        &mut self,
        stream: UnixStream,
        host_port: u32,
        _guest_port: u32,
    ) -> Result<(), Refused> {
        if host_port == REFUSED_PORT {
            return Err(Refused);
        }
        let mut accepted = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        accepted.push_back(stream);
        Ok(())
    }
}

struct World {
    memory: Memory,
    machine: Machine<Vsock>,
    rings: [Ring; 3],
    features: u64,
    accepted: Accepted,
    streams: Vec<UnixStream>,
    pairs: BTreeMap<(u32, u32), Pair>,
    /// Ports of the host that the guest has heard of.
    host_ports: Vec<u32>,
    next_descriptor: [u16; 3],
    seen: u16,
    /// Whether the device wrote to the used rings at the guest's wish: then they tell nothing.
    is_tainted: bool,
    /// Whether some packets could not be looked at, so that nothing is known of credit.
    has_missed_packets: bool,
}

/// Runs the target.
pub fn run(data: &[u8]) {
    crate::outlive_closed_sockets();
    let descriptors_before = open_descriptors();
    let mut input = Input::new(data);
    let mut world = World::new(input.u8());
    for _ in 0..STEPS_MAX {
        if input.is_empty() {
            break;
        }
        world.step(&mut input);
    }
    world.settle();
    world.check_that_a_reset_mends_all();
    drop(world);
    let left = open_descriptors();
    assert!(
        left <= descriptors_before,
        "{left} descriptors are open, {descriptors_before} were"
    );
}

impl World {
    fn new(flags: u8) -> Self {
        let memory = Memory::new();
        let accepted = Accepted::default();
        let host = Box::new(Host(Arc::clone(&accepted)));
        let device = Vsock::new(3, host).expect("descriptors");
        let machine = Machine::new(device, &memory.0);
        let size = if flags & 2 == 0 { 16 } else { 4 };
        let mut world = Self {
            memory,
            machine,
            rings: [
                Ring::at(0x1000, size),
                Ring::at(0x3000, size),
                Ring::at(0x5000, 8),
            ],
            features: VERSION_1 | 1 | if flags & 1 == 0 { EVENT_IDX } else { 0 },
            accepted,
            streams: Vec::new(),
            pairs: BTreeMap::new(),
            host_ports: vec![7, 8, REFUSED_PORT, 0, u32::MAX],
            next_descriptor: [0; 3],
            seen: 0,
            is_tainted: false,
            has_missed_packets: false,
        };
        world.activate();
        world
    }

    fn activate(&mut self) {
        self.machine
            .activate(&self.memory, self.features, &self.rings);
        self.next_descriptor = [0; 3];
        self.seen = 0;
        self.is_tainted = false;
        self.has_missed_packets = false;
        // The guest has forgotten all; its old promises hold for nobody.
        self.pairs.clear();
        self.machine
            .settle(&self.memory, &self.rings, &[RECEIVE, EVENT], || {});
    }

    fn step(&mut self, input: &mut Input<'_>) {
        match input.below(16) {
            0..=4 => self.guest_sends(input),
            5 | 6 => self.guest_gives_buffers(input),
            7 => self.with_stream(input, |stream, bytes| {
                let mut sink = vec![0; bytes];
                let _ = stream.read(&mut sink);
            }),
            8 => self.with_stream(input, |stream, bytes| {
                let _ = stream.write(&vec![b'h'; bytes]);
            }),
            9 => {
                let how = input.pick(&[Shutdown::Write, Shutdown::Read, Shutdown::Both]);
                self.with_stream(input, |stream, _| {
                    let _ = stream.shutdown(how);
                });
            }
            10 => {
                let which = usize::from(input.u8());
                if !self.streams.is_empty() {
                    self.streams.swap_remove(which % self.streams.len());
                }
            }
            11 => self.host_connects(input),
            12 => {
                self.settle();
            }
            13 => {
                let queue = usize::from(input.below(3));
                let descriptor = Descriptor {
                    address: address(input),
                    len: length(input),
                    flags: input.u16(),
                    next: input.u16(),
                };
                self.rings[queue].set_descriptor(&self.memory, input.u16(), descriptor);
                self.rings[queue].publish(&self.memory, input.u16());
            }
            14 => {
                let queue = usize::from(input.below(3));
                self.rings[queue].set_available_index(&self.memory, input.u16());
            }
            _ if input.below(2) == 0 => self.activate(),
            _ => {
                let device = Arc::clone(&self.machine.device);
                let mut device = device.lock().unwrap_or_else(PoisonError::into_inner);
                device.reset_transport();
            }
        }
    }

    /// Does something with one of the host's streams, and some bytes.
    fn with_stream(&mut self, input: &mut Input<'_>, action: impl FnOnce(&mut UnixStream, usize)) {
        let which = usize::from(input.u8());
        let bytes = usize::try_from(length(input)).expect("64 bits") % HOST_BYTES_MAX;
        if self.streams.is_empty() {
            return;
        }
        let which = which % self.streams.len();
        action(&mut self.streams[which], bytes);
    }

    fn host_connects(&mut self, input: &mut Input<'_>) {
        let (ours, theirs) = UnixStream::pair().expect("descriptors");
        ours.set_nonblocking(true).expect("a socket");
        let port = input.pick(&[1024, 1025, 0, u32::MAX]);
        let device = Arc::clone(&self.machine.device);
        let mut device = device.lock().unwrap_or_else(PoisonError::into_inner);
        if device.connect(port, theirs).is_ok() {
            self.streams.push(ours);
        }
    }

    /// Kicks all queues, lets the device work, and looks at what the guest has got.
    fn settle(&mut self) {
        let was_broken = self.machine.needs_reset();
        let before = self.rings.map(|ring| ring.used_index(&self.memory));
        (0..3).for_each(|queue| self.machine.kick(queue));
        let is_plain = self
            .machine
            .settle(&self.memory, &self.rings, &[RECEIVE, EVENT], || {});
        let accepted =
            std::mem::take(&mut *self.accepted.lock().unwrap_or_else(PoisonError::into_inner));
        for stream in accepted {
            stream.set_nonblocking(true).expect("a socket");
            self.streams.push(stream);
        }
        self.is_tainted |= !is_plain;
        if self.is_tainted || was_broken {
            return;
        }
        let [_, sent_before, _] = before;
        let sent = self.rings[TRANSMIT].used_index(&self.memory);
        for index in 0..sent
            .wrapping_sub(sent_before)
            .min(self.rings[TRANSMIT].size)
        {
            let at = sent.wrapping_sub(1).wrapping_sub(index);
            let (_, written) = self.rings[TRANSMIT].used_element(&self.memory, at);
            assert_eq!(written, 0, "a sent packet comes back as it was");
        }
        self.hear();
    }

    /// Whatever was done: after a reset all is given back, and a stream can be opened and carries bytes.
    fn check_that_a_reset_mends_all(&mut self) {
        self.streams.clear();
        self.activate();
        self.settle();
        let header = Header {
            src_cid: GUEST_CID,
            dst_cid: HOST_CID,
            src_port: 4000,
            dst_port: 7,
            len: 0,
            kind: 1,
            op: REQUEST,
            flags: 0,
            buf_alloc: 1 << 16,
            fwd_cnt: 0,
        };
        self.publish(RECEIVE, &[(RECEIVED, 4096, true)]);
        self.send(header, b"");
        self.settle();
        assert_eq!(self.received().op, RESPONSE);
        let mut stream = self.streams.pop().expect("the host has got a stream");
        self.send(
            Header {
                op: DATA,
                len: 3,
                ..header
            },
            b"abc",
        );
        self.settle();
        let mut got = [0; 4];
        assert_eq!(stream.read(&mut got).ok(), Some(3));
        assert_eq!(&got[..3], b"abc");
        stream.write_all(b"xyz").expect("the socket has room");
        self.publish(RECEIVE, &[(RECEIVED, 4096, true)]);
        self.settle();
        assert_eq!((self.received().op, self.received().len), (DATA, 3));
        let at = RECEIVED + u64::from(HEADER_BYTES);
        assert_eq!(&self.memory.read::<3>(at), b"xyz");
    }

    fn received(&self) -> Header {
        Header::from_bytes(&self.memory.read::<44>(RECEIVED))
    }
}

/// Descriptors of this process.
fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}
