//! A guest's side of a device, for measuring the device's: memory, rings, and the event loop around one device.
//!
//! It keeps the rules of virtio 1.2; whoever breaks them is in `fuzz/`.
#![forbid(unsafe_code)]
#![allow(
    clippy::expect_used,
    reason = "a measurement of what does not work is none"
)]

use std::io;
use std::sync::{Arc, Mutex};

use devices::interrupt::Interrupt;
use devices::virtio::{MmioTransport, VirtioDevice};
use event_manager::{EventManager, MutEventSubscriber, SubscriberOps};
use virtio_bindings::virtio_mmio as register;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// Descriptors of each ring: as many as the smallest of all queues may have.
const RING_SIZE: u16 = 8;

/// Guest memory, where rings begin, and bytes of each.
const MEMORY_BYTES: usize = 1 << 20;
const RINGS: u64 = 0x1000;
const RING_BYTES: u64 = 0x1000;

/// From a ring's start: the available ring, and the used ring behind it.
const AVAILABLE: u64 = 0x400;
const USED: u64 = 0x800;

/// VIRTIO_F_VERSION_1 and the Status register's steps (virtio 1.2 §2.1, §3.1.1).
const VERSION_1_HIGH: u32 = 1;
const STATUS_STEPS: [u32; 2] = [1, 3];
const FEATURES_OK: u32 = 11;
const DRIVER_OK: u32 = 15;

/// Descriptor flags (virtio 1.2 §2.7.5).
const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// Where buffers may lie.
pub const BUFFERS: u64 = 0x1_0000;

/// A piece of a chain: address, length, and whether the device writes there.
pub type Piece = (u64, u32, bool);

#[derive(Debug)]
struct Line;

impl Interrupt for Line {
    fn trigger(&self) -> io::Result<()> {
        Ok(())
    }
}

/// One device in service.
#[derive(Debug)]
pub struct Guest<D: MutEventSubscriber> {
    memory: GuestMemoryMmap,
    transport: MmioTransport<D>,
    manager: EventManager<Arc<Mutex<D>>>,
    /// For each queue: chains that were made available.
    published: Vec<u16>,
}

impl<D: VirtioDevice + MutEventSubscriber> Guest<D> {
    /// Takes a device with so many queues into service; `features` are those of its own kind, of the lower 32.
    #[must_use]
    pub fn new(device: D, features: u32, queues: u16) -> Self {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY_BYTES)])
            .expect("memory can be mapped");
        let device = Arc::new(Mutex::new(device));
        let mut manager = EventManager::new().expect("an epoll set");
        manager.add_subscriber(Arc::clone(&device));
        let mut guest = Self {
            transport: MmioTransport::new(device, memory.clone(), Box::new(Line)),
            memory,
            manager,
            published: vec![0; usize::from(queues)],
        };
        guest.activate(features, queues);
        guest
    }

    fn activate(&mut self, features: u32, queues: u16) {
        for status in STATUS_STEPS {
            self.set(register::VIRTIO_MMIO_STATUS, status);
        }
        self.set(register::VIRTIO_MMIO_DRIVER_FEATURES_SEL, 0);
        self.set(register::VIRTIO_MMIO_DRIVER_FEATURES, features);
        self.set(register::VIRTIO_MMIO_DRIVER_FEATURES_SEL, 1);
        self.set(register::VIRTIO_MMIO_DRIVER_FEATURES, VERSION_1_HIGH);
        self.set(register::VIRTIO_MMIO_STATUS, FEATURES_OK);
        for queue in 0..u32::from(queues) {
            let base = u32::try_from(RINGS + u64::from(queue) * RING_BYTES).expect("small");
            let available = u32::try_from(AVAILABLE).expect("small");
            let used = u32::try_from(USED).expect("small");
            self.set(register::VIRTIO_MMIO_QUEUE_SEL, queue);
            self.set(register::VIRTIO_MMIO_QUEUE_NUM, RING_SIZE.into());
            self.set(register::VIRTIO_MMIO_QUEUE_DESC_LOW, base);
            self.set(register::VIRTIO_MMIO_QUEUE_AVAIL_LOW, base + available);
            self.set(register::VIRTIO_MMIO_QUEUE_USED_LOW, base + used);
            self.set(register::VIRTIO_MMIO_QUEUE_READY, 1);
        }
        self.set(register::VIRTIO_MMIO_STATUS, DRIVER_OK);
        let mut status = [0; 4];
        self.transport
            .read(register::VIRTIO_MMIO_STATUS.into(), &mut status);
        assert_eq!(
            u32::from_le_bytes(status),
            DRIVER_OK,
            "the device is in service"
        );
        while self.turn() {}
    }

    fn set(&self, register: u32, value: u32) {
        self.transport.write(register.into(), &value.to_le_bytes());
    }

    /// Writes to guest memory.
    pub fn write(&self, address: u64, bytes: &[u8]) {
        self.memory
            .write_slice(bytes, GuestAddress(address))
            .expect("an address in memory");
    }

    /// Makes one chain available; it lies in the same descriptors each time, so that one at a time is on its way.
    pub fn publish(&mut self, queue: u16, pieces: &[Piece]) {
        let base = RINGS + u64::from(queue) * RING_BYTES;
        for (index, (address, len, writable)) in (0_u16..).zip(pieces) {
            let is_last = usize::from(index) + 1 == pieces.len();
            let flags = if is_last { 0 } else { NEXT } | if *writable { WRITE } else { 0 };
            let mut descriptor = [0; 16];
            descriptor[..8].copy_from_slice(&address.to_le_bytes());
            descriptor[8..12].copy_from_slice(&len.to_le_bytes());
            descriptor[12..14].copy_from_slice(&flags.to_le_bytes());
            descriptor[14..].copy_from_slice(&(index + 1).to_le_bytes());
            self.write(base + u64::from(index) * 16, &descriptor);
        }
        let count = self
            .published
            .get_mut(usize::from(queue))
            .expect("a queue of the device");
        let slot = base + AVAILABLE + 4 + u64::from(*count % RING_SIZE) * 2;
        *count = count.wrapping_add(1);
        let count = *count;
        self.write(slot, &0_u16.to_le_bytes());
        self.write(base + AVAILABLE + 2, &count.to_le_bytes());
    }

    /// Kicks a queue and lets the device work until it rests.
    pub fn serve(&mut self, queue: u16) {
        self.set(register::VIRTIO_MMIO_QUEUE_NOTIFY, queue.into());
        while self.turn() {}
    }

    /// One turn of the event loop; whether there was something to do.
    pub fn turn(&mut self) -> bool {
        self.manager
            .run_with_timeout(0)
            .expect("the event loop goes on")
            > 0
    }

    /// Whether all chains of a queue have come back: the next may be published.
    #[must_use]
    pub fn is_all_back(&self, queue: u16) -> bool {
        self.published.get(usize::from(queue)) == Some(&self.used(queue))
    }

    /// How many chains of a queue have come back, modulo 2¹⁶.
    #[must_use]
    pub fn used(&self, queue: u16) -> u16 {
        let index = RINGS + u64::from(queue) * RING_BYTES + USED + 2;
        self.memory
            .read_obj(GuestAddress(index))
            .expect("an address in memory")
    }
}
