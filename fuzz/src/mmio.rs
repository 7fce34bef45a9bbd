//! Target `mmio`: reads and writes of any width to the registers of a disk, a socket device, the serial and the reset port, on the
//! buses that a machine has.
//!
//! Checked: an access changes no guest memory; what is read where nothing is, or with a width that a register has not, is what the
//! specification says; a device is in service only when all its queues are ready and its features are agreed on; it writes to memory only
//! when in service, and to its rings and buffers alone; after a reset it can be taken into service and works.

use std::sync::Arc;

use devices::block::Block;
use devices::bus::{Bus, BusDevice, FLOATING};
use devices::reset::{RESET_BASE, RESET_LEN, ResetPort};
use devices::serial::{SERIAL_LEN, SerialPort, Sink, TAIL_LEN};
use devices::virtio::VirtioDevice;
use devices::virtio::mmio::{CONFIG_OFFSET, MMIO_LEN};
use devices::vsock::{Incoming, Refused, Vsock};
use event_manager::MutEventSubscriber;
use virtio_bindings::virtio_config::VIRTIO_CONFIG_S_NEEDS_RESET;
use virtio_bindings::virtio_mmio as reg;
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::disk::{CheckingDisk, Work, request_first_sector};
use crate::input::Input;
use crate::machine::{FEATURES_AGREED, IN_SERVICE, Machine, VERSION_1};
use crate::memory::{BUFFERS, Memory, address};
use crate::ring::Ring;

/// Where the serial port is.
const SERIAL_BASE: u64 = 0x3f8;

/// The most steps of one input.
const STEPS_MAX: usize = 256;

/// Queues of the device that has most.
const QUEUES_MAX: usize = 3;

#[derive(Debug)]
struct Nobody;

impl Incoming for Nobody {
    fn accept(
        &mut self,
        _stream: std::os::unix::net::UnixStream,
        _host_port: u32,
        _guest_port: u32,
    ) -> Result<(), Refused> {
        Err(Refused)
    }
}

/// A device, and where its driver has put its rings, as far as the device has taken note.
struct Side<D: VirtioDevice + MutEventSubscriber> {
    machine: Machine<D>,
    queue_count: usize,
    selected: u32,
    rings: [Ring; QUEUES_MAX],
    /// The same after a reset.
    first_rings: [Ring; QUEUES_MAX],
    /// Queues whose buffers the device may write to.
    writes_to: &'static [usize],
}

/// Runs the target.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let memory = Memory::new();
    let disk = CheckingDisk::new(16, input.u8() & 1 != 0, &Arc::new(Work::default()));
    let block = Block::new(Box::new(disk), [b'm'; 20]).expect("descriptors");
    let vsock = Vsock::new(3, Box::new(Nobody)).expect("descriptors");
    let mut block = Side::new(block, &memory.0, &[0]);
    let mut vsock = Side::new(vsock, &memory.0, &[0, 2]);
    let (ports, serial) = ports();
    let mut expected = memory.snapshot();
    for _ in 0..STEPS_MAX {
        if input.is_empty() {
            break;
        }
        match input.below(8) {
            0..=2 => block.step(&mut input),
            3..=5 => vsock.step(&mut input),
            6 => {
                memory.check_unchanged_but(&expected, &[]);
                let (to, count) = (address(&mut input), usize::from(input.u8()));
                memory.write(to, input.bytes(count));
                expected = memory.snapshot();
            }
            7 if input.below(4) == 0 => {
                memory.check_unchanged_but(&expected, &[]);
                block.settle(&memory);
                vsock.settle(&memory);
                expected = memory.snapshot();
            }
            _ => port_step(&mut input, &ports, &serial),
        }
    }
    // No access to a register writes to memory by itself.
    memory.check_unchanged_but(&expected, &[]);
    block.settle(&memory);
    vsock.settle(&memory);
    block.check_queues();
    vsock.check_queues();
    block
        .machine
        .activate(&memory, VERSION_1, &[Ring::at(0, 4)]);
    vsock.machine.activate(
        &memory,
        VERSION_1,
        &[
            Ring::at(0x1000, 4),
            Ring::at(0x2000, 4),
            Ring::at(0x3000, 4),
        ],
    );
    check_that_the_disk_is_read(&mut block.machine, &memory);
}

fn ports() -> (Bus, Arc<SerialPort>) {
    let serial = Arc::new(SerialPort::new(None, Sink::new()));
    let event = EventFd::new(EFD_NONBLOCK).expect("descriptors");
    let mut ports = Bus::new();
    let as_device = Arc::clone(&serial) as Arc<dyn BusDevice>;
    ports
        .insert(SERIAL_BASE, SERIAL_LEN, as_device)
        .expect("the range is free");
    ports
        .insert(RESET_BASE, RESET_LEN, Arc::new(ResetPort::new(event)))
        .expect("the range is free");
    (ports, serial)
}

/// One access to a port.
fn port_step(input: &mut Input<'_>, ports: &Bus, serial: &SerialPort) {
    let port = match input.below(4) {
        0 => u64::from(input.u16()),
        1 => RESET_BASE + u64::from(input.below(6)),
        _ => SERIAL_BASE - 1 + u64::from(input.below(10)),
    };
    let mut bytes = input.u64().to_le_bytes();
    let width = usize::from(input.pick(&[1_u8, 2, 4, 8, 0, 3]));
    let bytes = &mut bytes[..width];
    if input.below(2) == 0 {
        ports.write(port, bytes);
        assert!(serial.tail().len() <= TAIL_LEN);
    } else if !ports.read(port, bytes) {
        assert!(bytes.iter().all(|byte| *byte == FLOATING));
    }
}

impl<D: VirtioDevice + MutEventSubscriber> Side<D> {
    fn new(device: D, memory: &GuestMemoryMmap, writes_to: &'static [usize]) -> Self {
        let sizes = device.queue_max_sizes().to_vec();
        let mut rings = [Ring::default(); QUEUES_MAX];
        for (ring, size) in rings.iter_mut().zip(&sizes) {
            ring.size = *size;
        }
        Self {
            machine: Machine::new(device, memory),
            queue_count: sizes.len(),
            selected: 0,
            rings,
            first_rings: rings,
            writes_to,
        }
    }

    /// One access to a register.
    fn step(&mut self, input: &mut Input<'_>) {
        let offset = match input.below(8) {
            0 => CONFIG_OFFSET + u64::from(input.u8()),
            1 => u64::from(input.u16()) % MMIO_LEN,
            // The steps of the handshake, so that it is found soon.
            2 => return self.next_status(input),
            _ => u64::from(input.below(0x40)) * 4,
        };
        let width = usize::from(input.pick(&[4_u8, 4, 4, 4, 1, 2, 8, 0, 3]));
        let value = match input.below(4) {
            0 => u64::from(input.u8()),
            1 => address(input),
            2 => u64::from(input.pick(&[0_u32, 1, 3, 11, 15, 128, 64, 256, 16, u32::MAX])),
            _ => input.u64(),
        };
        if input.below(4) == 0 {
            self.read(offset, width);
        } else {
            self.write(offset, &value.to_le_bytes()[..width]);
        }
    }

    /// Writes what may come next to Status, and features or a ring where it is time for them.
    fn next_status(&mut self, input: &mut Input<'_>) {
        let status = self.machine.read(reg::VIRTIO_MMIO_STATUS);
        let next = match status {
            0 => 1,
            1 => 3,
            3 => {
                self.put(reg::VIRTIO_MMIO_DRIVER_FEATURES_SEL, 1);
                self.put(reg::VIRTIO_MMIO_DRIVER_FEATURES, 1);
                11
            }
            FEATURES_AGREED => {
                for queue in 0..self.queue_count {
                    let ring = Ring::at(0x1000 * (1 + queue as u64), input.pick(&[4, 8, 128]));
                    let words = [
                        (reg::VIRTIO_MMIO_QUEUE_SEL, queue as u64),
                        (reg::VIRTIO_MMIO_QUEUE_NUM, ring.size.into()),
                        (reg::VIRTIO_MMIO_QUEUE_DESC_LOW, ring.descriptors),
                        (reg::VIRTIO_MMIO_QUEUE_AVAIL_LOW, ring.available),
                        (reg::VIRTIO_MMIO_QUEUE_USED_LOW, ring.used),
                        (reg::VIRTIO_MMIO_QUEUE_READY, 1),
                    ];
                    for (register, value) in words {
                        self.put(register, crate::machine::low(value));
                    }
                }
                15
            }
            _ => 0,
        };
        self.put(reg::VIRTIO_MMIO_STATUS, next);
    }

    fn put(&mut self, register: u32, value: u32) {
        self.write(register.into(), &value.to_le_bytes());
    }

    fn read(&self, offset: u64, width: usize) {
        let mut bytes = [0xa5; 8];
        self.machine.transport.read(offset, &mut bytes[..width]);
        assert!(
            bytes[width..].iter().all(|byte| *byte == 0xa5),
            "a read beyond its width"
        );
        if offset < CONFIG_OFFSET && (width != 4 || !offset.is_multiple_of(4)) {
            assert!(bytes[..width].iter().all(|byte| *byte == 0));
        }
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) {
        let status = self.machine.read(reg::VIRTIO_MMIO_STATUS);
        let is_ready = self.machine.read(reg::VIRTIO_MMIO_QUEUE_READY) == 1;
        self.machine.transport.write(offset, bytes);
        let now = self.machine.read(reg::VIRTIO_MMIO_STATUS);
        let is_reset = offset == u64::from(reg::VIRTIO_MMIO_STATUS) && bytes == [0; 4];
        assert!(
            now & status == status || is_reset,
            "{status:#x} became {now:#x}"
        );
        let Ok(value) = <[u8; 4]>::try_from(bytes).map(u32::from_le_bytes) else {
            return;
        };
        let Ok(offset) = u32::try_from(offset) else {
            return;
        };
        if is_reset {
            self.selected = 0;
            self.rings = self.first_rings;
        }
        if offset == reg::VIRTIO_MMIO_QUEUE_SEL {
            self.selected = value;
        }
        if status & !VIRTIO_CONFIG_S_NEEDS_RESET == FEATURES_AGREED && !is_ready {
            self.note(offset, value);
        }
        // QueueReady tells of a layout that was checked.
        if offset == reg::VIRTIO_MMIO_QUEUE_READY
            && self.machine.read(reg::VIRTIO_MMIO_QUEUE_READY) == 1
            && let Some(ring) = self.ring()
        {
            assert!(ring.size.is_power_of_two());
            for part in ring.ranges() {
                let is_memory = [(0, 0x1_0000), (0x2_0000, 0x2_4000)]
                    .iter()
                    .any(|(start, end)| part.start >= *start && part.end <= *end);
                assert!(is_memory, "{part:x?} is a ring");
            }
        }
    }

    fn ring(&self) -> Option<&Ring> {
        self.rings[..self.queue_count].get(usize::try_from(self.selected).ok()?)
    }

    /// Takes note of what the driver wrote to a queue's registers while they count.
    fn note(&mut self, offset: u32, value: u32) {
        let Ok(selected) = usize::try_from(self.selected) else {
            return;
        };
        let Some(ring) = self.rings[..self.queue_count].get_mut(selected) else {
            return;
        };
        let set = |half: &mut u64, is_high: bool| {
            let shift = if is_high { 32 } else { 0 };
            *half = *half & !(u64::from(u32::MAX) << shift) | u64::from(value) << shift;
        };
        match offset {
            // A size that does not fit is none that can become ready.
            reg::VIRTIO_MMIO_QUEUE_NUM => ring.size = u16::try_from(value).unwrap_or(0),
            reg::VIRTIO_MMIO_QUEUE_DESC_LOW => set(&mut ring.descriptors, false),
            reg::VIRTIO_MMIO_QUEUE_DESC_HIGH => set(&mut ring.descriptors, true),
            reg::VIRTIO_MMIO_QUEUE_AVAIL_LOW => set(&mut ring.available, false),
            reg::VIRTIO_MMIO_QUEUE_AVAIL_HIGH => set(&mut ring.available, true),
            reg::VIRTIO_MMIO_QUEUE_USED_LOW => set(&mut ring.used, false),
            reg::VIRTIO_MMIO_QUEUE_USED_HIGH => set(&mut ring.used, true),
            _ => {}
        }
    }

    /// Lets the device work: without effect on memory where it is not in service.
    fn settle(&mut self, memory: &Memory) {
        let rings = if self.machine.is_in_service() {
            &self.rings[..self.queue_count]
        } else {
            &[]
        };
        self.machine.settle(memory, rings, self.writes_to, || {});
    }

    /// A device is in service only if all its queues are ready.
    fn check_queues(&self) {
        if self.machine.read(reg::VIRTIO_MMIO_STATUS) & IN_SERVICE != IN_SERVICE {
            return;
        }
        for queue in (0..).take(self.queue_count) {
            self.machine.write(reg::VIRTIO_MMIO_QUEUE_SEL, queue);
            assert_eq!(self.machine.read(reg::VIRTIO_MMIO_QUEUE_READY), 1);
        }
    }
}

/// Reads the first sector through the ring that the disk was just taken into service with.
fn check_that_the_disk_is_read(machine: &mut Machine<Block>, memory: &Memory) {
    let ring = Ring::at(0, 4);
    request_first_sector(memory, &ring);
    machine.kick(0);
    machine.settle(memory, &[ring], &[0], || {});
    assert_eq!(ring.used_element(memory, 0), (0, 513));
    assert_eq!(memory.read(BUFFERS + 0x400), [0], "the status is OK");
}

/// Inputs to begin with.
#[must_use]
pub fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    // Side, and the next step of its handshake; with the sizes of its queues.
    let disk_up = [0, 2, 0, 2, 0, 2, 0, 2, 0];
    let socket_up = [3, 2, 3, 2, 3, 2, 3, 2, 0, 1, 2];
    // Side; kind of offset and offset; width; kind of value and value; whether it is a write.
    let read_magic = [0, 4, 0, 0, 0, 0, 0];
    let read_config = [0, 0, 0, 6, 0, 0, 0];
    let kick = [0, 4, 20, 0, 0, 0, 1];
    let settle = [7, 0];
    let odd_width = [3, 4, 28, 4, 2, 4, 1];
    let select_far = [0, 4, 12, 0, 2, 9, 1];
    let reset = [0, 4, 28, 0, 2, 0, 1];
    // Kind of port and port; value; width; whether it is a write.
    let serial = [7, 1, 2, 1, b'x', 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let reset_port = [7, 1, 1, 4, 0xfe, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let begin = |steps: &[&[u8]]| {
        let mut bytes = vec![0];
        steps.iter().for_each(|step| bytes.extend_from_slice(step));
        bytes
    };
    vec![
        ("disk_up", begin(&[&disk_up, &kick, &settle])),
        ("socket_up", begin(&[&socket_up, &settle])),
        (
            "reads",
            begin(&[&read_magic, &read_config, &disk_up, &read_config]),
        ),
        (
            "odd",
            begin(&[&odd_width, &select_far, &disk_up, &select_far, &settle]),
        ),
        (
            "reset",
            begin(&[&disk_up, &kick, &reset, &settle, &disk_up, &settle]),
        ),
        ("ports", begin(&[&serial, &reset_port, &serial])),
    ]
}
