//! The register file: a good driver, a hostile one, and random accesses; with a block device behind it, and the real event loop.

use event_manager::{EventManager, MutEventSubscriber, SubscriberOps};
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::block::Block;
use crate::block::testing::MemoryDisk;
use crate::virtio::testing::{CountingLine, DriverQueue, Piece, memory};

const MEMORY_LEN: usize = 0x10_0000;
const RING: u64 = 0x1000;
const HEADER: u64 = 0x8000;
const STATUS_BYTE: u64 = 0x9000;
const DATA: u64 = 0x1_0000;
mod life;
mod preserve;
mod queues;
mod random;
mod registers;

const VERSION_1: u64 = 1 << VIRTIO_F_VERSION_1;

/// Steps of the Status register.
const ACKNOWLEDGED: u32 = 1;
const DRIVER_FOUND: u32 = 3;
const FEATURES_AGREED: u32 = 11;
const RUNNING: u32 = 15;
const NEEDS_RESET: u32 = 0x40;

type Loop = EventManager<Arc<Mutex<dyn MutEventSubscriber + Send>>>;

struct Setup {
    memory: GuestMemoryMmap,
    line: CountingLine,
    transport: MmioTransport<Block>,
    driver: DriverQueue,
    disk: MemoryDisk,
    event_loop: Loop,
}

fn setup() -> Setup {
    let memory = memory(MEMORY_LEN);
    let line = CountingLine::default();
    let disk = MemoryDisk::new(16);
    let block = Block::new(Box::new(disk.clone()), [0; 20]).unwrap();
    let device = Arc::new(Mutex::new(block));
    let mut event_loop = Loop::new().unwrap();
    event_loop.add_subscriber(device.clone());
    Setup {
        transport: MmioTransport::new(device, memory.clone(), Box::new(line.clone())),
        driver: DriverQueue::new(&memory, RING, 16),
        memory,
        line,
        disk,
        event_loop,
    }
}

impl Setup {
    fn read(&self, register: u32) -> u32 {
        let mut data = [0xee; 4];
        self.transport.read(u64::from(register), &mut data);
        u32::from_le_bytes(data)
    }

    fn write(&self, register: u32, value: u32) {
        self.transport
            .write(u64::from(register), &value.to_le_bytes());
    }

    fn status(&self) -> u32 {
        self.read(reg::VIRTIO_MMIO_STATUS)
    }

    fn set_status(&self, status: u32) {
        self.write(reg::VIRTIO_MMIO_STATUS, status);
    }

    fn offered_features(&self) -> u64 {
        self.write(reg::VIRTIO_MMIO_DEVICE_FEATURES_SEL, 0);
        let low = u64::from(self.read(reg::VIRTIO_MMIO_DEVICE_FEATURES));
        self.write(reg::VIRTIO_MMIO_DEVICE_FEATURES_SEL, 1);
        low | u64::from(self.read(reg::VIRTIO_MMIO_DEVICE_FEATURES)) << 32
    }

    fn set_features(&self, features: u64) {
        for selector in [0, 1] {
            self.write(reg::VIRTIO_MMIO_DRIVER_FEATURES_SEL, selector);
            self.write(reg::VIRTIO_MMIO_DRIVER_FEATURES, half(features, selector));
        }
    }

    fn negotiate(&self, features: u64) {
        self.set_status(ACKNOWLEDGED);
        self.set_status(DRIVER_FOUND);
        self.set_features(features);
        self.set_status(FEATURES_AGREED);
    }

    /// Describes the queue and makes it ready. The result is QueueReady.
    fn set_queue(&self, size: u32, table: u64, driver_area: u64, device_area: u64) -> u32 {
        self.write(reg::VIRTIO_MMIO_QUEUE_SEL, 0);
        self.write(reg::VIRTIO_MMIO_QUEUE_NUM, size);
        for (register, address) in [
            (reg::VIRTIO_MMIO_QUEUE_DESC_LOW, table),
            (reg::VIRTIO_MMIO_QUEUE_AVAIL_LOW, driver_area),
            (reg::VIRTIO_MMIO_QUEUE_USED_LOW, device_area),
        ] {
            self.write(register, half(address, 0));
            self.write(register + 4, half(address, 1));
        }
        self.write(reg::VIRTIO_MMIO_QUEUE_READY, 1);
        self.read(reg::VIRTIO_MMIO_QUEUE_READY)
    }

    fn set_drivers_queue(&self) -> u32 {
        self.set_queue(
            u32::from(self.driver.size()),
            self.driver.descriptor_table(),
            self.driver.driver_area(),
            self.driver.device_area(),
        )
    }

    fn start(&self) {
        self.negotiate(self.offered_features());
        assert_eq!(self.set_drivers_queue(), 1);
        self.set_status(RUNNING);
        assert_eq!(self.status(), RUNNING);
    }

    fn is_active(&self) -> bool {
        lock(self.transport.device()).is_active()
    }

    /// Lets the event loop take what is there; does not wait for more.
    fn run_loop(&mut self) {
        while self.event_loop.run_with_timeout(0).unwrap() > 0 {}
    }

    /// Adds a request of this type for the first sector, with this data, and does not kick.
    fn add_request(&mut self, kind: u32, pieces: &[Piece]) {
        self.memory
            .write_obj([kind, 0, 0, 0], GuestAddress(HEADER))
            .unwrap();
        let mut chain = vec![Piece::readable(HEADER, 16)];
        chain.extend_from_slice(pieces);
        chain.push(Piece::writable(STATUS_BYTE, 1));
        self.driver.add(&chain);
    }

    /// Reads the disk's first sector, as a driver does. The result is the status byte, if the chain came back.
    fn read_sector(&mut self) -> Option<u8> {
        self.memory
            .write_obj([0_u64, 0], GuestAddress(HEADER))
            .unwrap();
        self.memory
            .write_obj(0xaa_u8, GuestAddress(STATUS_BYTE))
            .unwrap();
        self.driver.set_used_event(self.driver.used_index());
        self.driver.add(&[
            Piece::readable(HEADER, 16),
            Piece::writable(DATA, 512),
            Piece::writable(STATUS_BYTE, 1),
        ]);
        self.write(reg::VIRTIO_MMIO_QUEUE_NOTIFY, 0);
        self.run_loop();
        self.driver.take_used()?;
        Some(self.memory.read_obj(GuestAddress(STATUS_BYTE)).unwrap())
    }
}
