//! Target `snapshot`: state files of machines, and devices that go on from a state which no driver led to.
//!
//! Checked: a file that is read can be written and read again; a device refuses a state or goes on from it, and then writes to its rings and
//! buffers alone, when it is in service; whatever it went on from, after a reset it works.

use std::sync::Arc;

use devices::block::Block;
use devices::serial::{SerialPort, SerialState, Sink};
use devices::virtio::{Preserve, TransportState};
use virtio_bindings::virtio_blk::VIRTIO_BLK_F_FLUSH;
use vmm::snapshot::format::{encode, parse};

use crate::disk::{CheckingDisk, Work, request_first_sector};
use crate::input::Input;
use crate::machine::{EVENT_IDX, Machine, VERSION_1};
use crate::memory::{Memory, address};
use crate::ring::Ring;

/// How a state file begins, and its format's version.
const MAGIC: [u8; 8] = *b"SVMMSNAP";
const FORMAT: u16 = 1;

/// The most steps of one input.
const STEPS_MAX: usize = 32;

/// Runs the target.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    match input.below(4) {
        0 => read(input.rest()),
        1 => read(&file(input)),
        2 => disk(input),
        _ => serial(input),
    }
}

fn read(bytes: &[u8]) {
    if let Ok(state) = parse(bytes) {
        let again = encode(&state).expect("what was read can be written");
        let second = parse(&again).expect("what was written can be read");
        assert_eq!(encode(&second), Some(again));
    }
}

/// A file whose lengths and checksums are right: one part after another, each with the payload that the input gives.
fn file(mut input: Input<'_>) -> Vec<u8> {
    let mut parts = Vec::new();
    let mut count = 0_u16;
    while !input.is_empty() && count < 8 {
        let kind = u16::from(input.u8());
        let length = usize::from(input.u16());
        let payload = input.bytes(length);
        let mut header = kind.to_le_bytes().to_vec();
        header.extend_from_slice(&1_u16.to_le_bytes());
        header.extend_from_slice(&u32::try_from(payload.len()).expect("short").to_le_bytes());
        let mut crc = crc32fast::Hasher::new();
        crc.update(&header);
        crc.update(payload);
        parts.extend_from_slice(&header);
        parts.extend_from_slice(&crc.finalize().to_le_bytes());
        parts.extend_from_slice(payload);
        count += 1;
    }
    let bytes = u32::try_from(parts.len() + 16).expect("short");
    [
        MAGIC.as_slice(),
        &FORMAT.to_le_bytes(),
        &count.to_le_bytes(),
        &bytes.to_le_bytes(),
        &parts,
    ]
    .concat()
}

/// A disk in service is saved, its state changed, and another goes on from that.
fn disk(mut input: Input<'_>) {
    let memory = Memory::new();
    let work = Arc::new(Work::default());
    let new = || {
        let disk = CheckingDisk::new(16, false, &work);
        let block = Block::new(Box::new(disk), [b's'; 20]).expect("descriptors");
        Machine::new(block, &memory.0)
    };
    let ring = Ring::at(0x1000, 8);
    let first = new();
    let features = VERSION_1 | EVENT_IDX | 1 << VIRTIO_BLK_F_FLUSH;
    first.activate(&memory, features, &[ring]);
    request_first_sector(&memory, &ring);
    let mut state = first.transport.save();
    drop(first);
    for _ in 0..STEPS_MAX {
        if input.is_empty() {
            break;
        }
        change(&mut state, &mut input, &memory);
    }

    let mut machine = new();
    let before = memory.snapshot();
    let restored = machine.transport.restore(&state);
    memory.check_unchanged_but(&before, &[]);
    if restored.is_ok() {
        machine.transport.repeat_signals();
        let rings: Vec<Ring> = state
            .queues
            .iter()
            .filter(|queue| queue.is_ready)
            .map(|queue| Ring {
                size: u16::try_from(queue.size).expect("a size that was checked"),
                descriptors: queue.descriptor_table,
                available: queue.driver_area,
                used: queue.device_area,
            })
            .collect();
        machine.settle(&memory, &rings, &[0], || {});
    } else {
        // "After an error it is to be dropped."
        machine = new();
    }
    machine.activate(&memory, features, &[ring]);
    request_first_sector(&memory, &ring);
    machine.kick(0);
    machine.settle(&memory, &[ring], &[0], || {});
    assert_eq!(ring.used_element(&memory, 0), (0, 513));
}

/// Changes one thing of a state, or of memory.
fn change(state: &mut TransportState, input: &mut Input<'_>, memory: &Memory) {
    let kind = input.below(16);
    let which = usize::from(input.below(2));
    match (kind, state.queues.get_mut(which)) {
        (0, _) => state.device_status = input.pick(&[0, 1, 3, 11, 15, 79, 128, 75, 8, u32::MAX]),
        (1, _) => state.interrupt_status = input.u32(),
        (2, _) => state.driver_features = input.u64(),
        (3, _) => state.queue_sel = input.u32(),
        (4, _) => state.wants_unknown_feature = input.below(2) == 1,
        (5, Some(queue)) => queue.size = input.pick(&[8, 1, 2, 256, 0, 3, 512, u32::MAX]),
        (6, Some(queue)) => queue.descriptor_table = address(input),
        (7, Some(queue)) => queue.driver_area = address(input),
        (8, Some(queue)) => queue.device_area = address(input),
        (9, Some(queue)) => queue.is_ready = input.below(2) == 1,
        (10, _) => {
            if let Some(position) = state.positions.get_mut(which) {
                position.served = input.u16();
                position.is_retired = input.below(2) == 1;
            }
        }
        (11, _) => state.positions.truncate(which),
        (12, _) => state.positions.extend(state.positions.clone().first()),
        (13, _) => state.queues.extend(state.queues.clone().first()),
        (14, _) => {
            state.device_type = input.pick(&[2, 19, 0]);
            state.offered_features ^= input.u64() & input.u64() & input.u64();
        }
        _ => {
            let (to, count) = (address(input), usize::from(input.u8()));
            memory.write(to, input.bytes(count));
        }
    }
}

/// A serial port goes on from any state, or refuses it.
fn serial(mut input: Input<'_>) {
    let Ok(state) = postcard::from_bytes::<SerialState>(input.rest()) else {
        return;
    };
    if let Ok(port) = SerialPort::restore(None, Sink::new(), &state) {
        let saved = port.save();
        assert!(saved.in_buffer.len() <= 64);
        let again = SerialPort::restore(None, Sink::new(), &saved).expect("it was saved");
        assert_eq!(again.save(), saved);
    }
}

/// Inputs to begin with.
#[must_use]
pub fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let header = [MAGIC.as_slice(), &[1, 0, 3, 0, 16, 0, 0, 0]].concat();
    vec![
        ("header", [&[0], header.as_slice()].concat()),
        // A part: its kind, length, and payload. The first has processors, memory, identifier, and no CPUID.
        ("shape", vec![1, 1, 4, 0, 1, 64, 3, 0, 2, 1, 0, 0]),
        ("disk_goes_on", vec![2]),
        ("disk_in_the_middle", vec![2, 0, 0, 3, 10, 0, 1, 0, 0]),
        ("disk_elsewhere", vec![2, 6, 0, 0, 0, 1, 8, 0, 6, 0, 48]),
        ("disk_retired", vec![2, 10, 0, 0, 0, 1]),
        (
            "serial",
            vec![3, 12, 0, 0, 1, 3, 0x60, 8, 0xb0, 0, 2, b'a', b'b'],
        ),
    ]
}
