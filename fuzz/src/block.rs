//! Target `block`: requests to a disk, from a driver that keeps no rule.
//!
//! Checked: the disk is never asked for bytes that it has not, nor for a change of one that is read-only; memory changes in used rings
//! and writable buffers alone; every chain that was made available comes back, with no more bytes than it has room for and a status that
//! the specification knows; one notification makes a bounded amount of work; a broken ring is left alone until the reset, after which the
//! device works.

use std::sync::Arc;

use devices::block::request::{MAX_DATA_LEN, MAX_RANGES};
use devices::block::{Block, QUEUE_SIZE};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID,
    VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
};

use crate::disk::{CheckingDisk, Work};
use crate::input::Input;
use crate::machine::{EVENT_IDX, Machine, VERSION_1};
use crate::memory::{BUFFERS, Memory, address, length, overlap};
use crate::ring::{Descriptor, Ring};

/// Sectors of the disk.
const SECTORS: u64 = 64;

/// The most steps of one input.
const STEPS_MAX: usize = 64;

/// The most calls of the disk in one turn of the event loop: for each chain its ranges and a flush.
const CALLS_MAX: u64 = QUEUE_SIZE as u64 * (MAX_RANGES as u64 + 1);

/// The most bytes of data that move in one turn.
const BYTES_MAX: u64 = QUEUE_SIZE as u64 * MAX_DATA_LEN;

/// Types of requests, most of which exist.
const KINDS: [u32; 8] = [
    VIRTIO_BLK_T_IN,
    VIRTIO_BLK_T_OUT,
    VIRTIO_BLK_T_FLUSH,
    VIRTIO_BLK_T_GET_ID,
    VIRTIO_BLK_T_DISCARD,
    VIRTIO_BLK_T_WRITE_ZEROES,
    2, // SCSI, of before virtio 1.0.
    u32::MAX,
];

/// The driver.
struct Driver {
    memory: Memory,
    machine: Machine<Block>,
    ring: Ring,
    features: u64,
    work: Arc<Work>,
    next_descriptor: u16,
    /// Whether the driver, or the device at its wish, wrote to the used ring: then it tells nothing.
    is_tainted: bool,
}

/// Runs the target.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let flags = input.u8();
    let size = input.pick(&[16, 1, 2, 4, 8, 32, 64, 256]);
    let mut driver = Driver::new(flags, size);
    for _ in 0..STEPS_MAX {
        if input.is_empty() {
            break;
        }
        driver.step(&mut input);
    }
    driver.settle();
    driver.check_that_a_reset_mends_all();
}

impl Driver {
    fn new(flags: u8, size: u16) -> Self {
        let memory = Memory::new();
        let work = Arc::new(Work::default());
        let disk = CheckingDisk::new(SECTORS, flags & 1 != 0, &work);
        let block = Block::new(Box::new(disk), *b"fuzz                ").expect("descriptors");
        let machine = Machine::new(block, &memory.0);
        let mut features = VERSION_1;
        if flags & 2 == 0 {
            features |= 1 << VIRTIO_BLK_F_FLUSH;
        }
        if flags & 4 == 0 {
            features |= EVENT_IDX;
        }
        let mut driver = Self {
            ring: Ring::at(0x1000, size),
            memory,
            machine,
            features,
            work,
            next_descriptor: 0,
            is_tainted: false,
        };
        driver.activate();
        driver
    }

    fn activate(&mut self) {
        self.machine
            .activate(&self.memory, self.features, &[self.ring]);
        self.next_descriptor = 0;
        self.is_tainted = false;
    }

    /// The driver writes to memory.
    fn write(&mut self, address: u64, bytes: &[u8]) {
        self.memory.write(address, bytes);
        let end = address.saturating_add(bytes.len() as u64);
        self.is_tainted |= overlap(&(address..end), &self.ring.used_range());
    }

    fn step(&mut self, input: &mut Input<'_>) {
        match input.below(12) {
            0..=4 => self.request(input),
            5 => {
                let descriptor = Descriptor {
                    address: address(input),
                    len: length(input),
                    flags: input.u16(),
                    next: input.u16(),
                };
                self.ring
                    .set_descriptor(&self.memory, input.u16(), descriptor);
            }
            6 => {
                let (to, count) = (address(input), usize::from(input.u8()));
                self.write(to, input.bytes(count));
            }
            7 => self.ring.publish(&self.memory, input.u16()),
            8 => self.ring.set_available_index(&self.memory, input.u16()),
            9 => {
                // used_event, behind the available ring's entries; then its flags.
                let at = self.ring.available + 4 + u64::from(self.ring.size) * 2;
                self.memory.write(at, &input.u16().to_le_bytes());
                self.memory
                    .write(self.ring.available, &input.u16().to_le_bytes());
            }
            10 => self.settle(),
            _ => self.activate(),
        }
    }

    /// Makes a request available: header, data, status, split over descriptors as the input says.
    fn request(&mut self, input: &mut Input<'_>) {
        let kind = input.pick(&KINDS);
        let sector = match input.below(4) {
            0 => input.u64(),
            _ => u64::from(input.below(72)),
        };
        let header_at = BUFFERS + u64::from(input.u8()) * 16;
        let mut header = [0; 16];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        self.write(header_at, &header);
        let mut pieces = match input.below(8) {
            0 => vec![(header_at, 7, false), (header_at + 7, 9, false)],
            1 => vec![(header_at, length(input), false)],
            _ => vec![(header_at, 16, false)],
        };
        let is_written = matches!(kind, VIRTIO_BLK_T_IN | VIRTIO_BLK_T_GET_ID);
        for _ in 0..input.below(4) {
            let at = address(input);
            match kind {
                VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES => {
                    // One range: sector, sectors, flags.
                    let mut range = [0; 16];
                    range[0] = input.below(72);
                    range[8..12].copy_from_slice(&length(input).to_le_bytes());
                    range[12] = input.below(4);
                    self.write(at, &range);
                    pieces.push((at, 16, false));
                }
                _ => {
                    let writable = is_written != (input.below(8) == 0);
                    pieces.push((at, length(input), writable));
                }
            }
        }
        match input.below(8) {
            0 => {}
            1 => pieces.push((address(input), length(input), input.below(2) == 0)),
            _ => pieces.push((BUFFERS + 0x7000 + u64::from(input.u8()), 1, true)),
        }
        let head = self.next_descriptor;
        self.next_descriptor = self.ring.set_chain(&self.memory, head, &pieces);
        self.ring.publish(&self.memory, head);
    }

    /// Kicks, lets the device work, and checks what came of it.
    fn settle(&mut self) {
        let was_broken = self.machine.needs_reset();
        let used_before = self.ring.used_index(&self.memory);
        // What the last chain looked like before, when the device has read it.
        let available = self.ring.available_index(&self.memory);
        let last =
            self.ring.available + 4 + u64::from(available.wrapping_sub(1) % self.ring.size) * 2;
        let last_head = self.memory.read_u16(last);
        let last_parts = self.ring.writable_parts(&self.memory, last_head);
        self.machine.kick(0);
        let work = Arc::clone(&self.work);
        let ring = [self.ring];
        // Of a broken ring nothing may change.
        let rings: &[Ring] = if was_broken { &[] } else { &ring };
        let is_plain = self.machine.settle(&self.memory, rings, &[0], || {
            let (calls, bytes) = work.take();
            assert!(calls <= CALLS_MAX, "{calls} calls of the disk in one turn");
            assert!(bytes <= BYTES_MAX, "{bytes} bytes in one turn");
        });
        self.is_tainted |= !is_plain;
        if self.is_tainted {
            return;
        }
        let used_after = self.ring.used_index(&self.memory);
        if self.machine.needs_reset() {
            return;
        }
        assert_eq!(used_after, available, "every chain comes back");
        if used_after == used_before {
            return;
        }
        let (head, written) = self
            .ring
            .used_element(&self.memory, used_after.wrapping_sub(1));
        assert_eq!(head, u32::from(last_head), "chains come back in order");
        let parts = last_parts.expect("a chain that came back is one");
        let room: u64 = parts.iter().map(|part| part.end - part.start).sum();
        assert!(u64::from(written) <= room, "{written} bytes in {room}");
        if written > 0 {
            let end = parts
                .iter()
                .rfind(|part| !part.is_empty())
                .map_or(0, |part| part.end);
            let [status] = self.memory.read(end - 1);
            assert!(status <= 2, "status {status} is unknown");
        }
    }

    /// Whatever was done: after a reset the next request is served.
    fn check_that_a_reset_mends_all(&mut self) {
        self.ring = Ring::at(0x1000, 8);
        self.activate();
        self.memory.write(BUFFERS, &[0; 16]);
        self.memory.write(BUFFERS + 0x400, &[0xff]);
        let pieces = [
            (BUFFERS, 16, false),
            (BUFFERS + 0x200, 512, true),
            (BUFFERS + 0x400, 1, true),
        ];
        self.ring.set_chain(&self.memory, 0, &pieces);
        self.ring.publish(&self.memory, 0);
        self.settle();
        assert_eq!(self.ring.used_element(&self.memory, 0), (0, 513));
        assert_eq!(self.memory.read(BUFFERS + 0x400), [0], "the status is OK");
    }
}

/// Inputs to begin with.
#[must_use]
pub fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    // A request: step; type; kind of sector and sector; place and form of the header; how many pieces. A piece: kind of address and
    // address; whether it is as it should be; kind of length and length. Then form and place of the status.
    let read = [0, 0, 1, 5, 3, 2, 1, 0, 0, 1, 1, 1, 2, 2, 9];
    let write = [1, 1, 1, 7, 4, 2, 1, 0, 0, 2, 1, 1, 1, 2, 9];
    let flush = [2, 2, 1, 0, 5, 2, 0, 2, 9];
    let identify = [3, 3, 1, 0, 6, 2, 1, 0, 0, 3, 1, 0, 20, 2, 9];
    // Here a piece is: kind of address and address; sector; kind of length and length in sectors; flags.
    let discard = [4, 4, 1, 0, 7, 2, 1, 0, 0, 4, 8, 0, 1, 0, 2, 9];
    let zeroes = [0, 5, 1, 0, 8, 2, 1, 0, 0, 5, 8, 0, 1, 1, 2, 9];
    let settle = [10];
    let begin = |flags, size, steps: &[&[u8]]| {
        let mut bytes = vec![flags, size];
        steps.iter().for_each(|step| bytes.extend_from_slice(step));
        bytes
    };
    let all: [&[u8]; 6] = [&read, &write, &flush, &identify, &discard, &zeroes];
    let mut steps = Vec::new();
    for step in all {
        steps.push(step);
        steps.push(&settle);
    }
    let loop_of_descriptors = [5, 0, 0, 0, 0, 16, 1, 0, 0, 0, 0, 0, 7, 0, 0, 10, 11];
    vec![
        ("every_request", begin(0, 0, &steps)),
        ("every_request_at_once", begin(0, 0, &all)),
        ("read_only", begin(1, 0, &steps)),
        ("write_through", begin(2, 0, &steps)),
        ("no_event_index", begin(4, 1, &steps)),
        ("loop", begin(0, 2, &[&loop_of_descriptors, &read])),
        ("index_ahead", begin(0, 3, &[&[8, 0, 1, 10], &read])),
        (
            "heads_outside",
            begin(0, 0, &[&[7, 0xff, 0xff, 10, 11], &read]),
        ),
    ]
}
