//! The register file: a good driver, a hostile one, and random accesses; with a block device behind it, and the real event loop.

use event_manager::{EventManager, MutEventSubscriber, SubscriberOps};
use proptest::prelude::*;
use virtio_bindings::virtio_blk::{VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO};
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
    event_loop: Loop,
}

fn setup() -> Setup {
    let memory = memory(MEMORY_LEN);
    let line = CountingLine::default();
    let block = Block::new(Box::new(MemoryDisk::new(16)), [0; 20]).unwrap();
    let device = Arc::new(Mutex::new(block));
    let mut event_loop = Loop::new().unwrap();
    event_loop.add_subscriber(device.clone());
    Setup {
        transport: MmioTransport::new(device, memory.clone(), Box::new(line.clone())),
        driver: DriverQueue::new(&memory, RING, 16),
        memory,
        line,
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

#[test]
fn test_identity_registers() {
    let s = setup();
    assert_eq!(s.read(reg::VIRTIO_MMIO_MAGIC_VALUE), 0x7472_6976);
    assert_eq!(s.read(reg::VIRTIO_MMIO_VERSION), 2);
    assert_eq!(s.read(reg::VIRTIO_MMIO_DEVICE_ID), 2);
    assert_eq!(s.read(reg::VIRTIO_MMIO_QUEUE_NUM_MAX), 256);
    assert_eq!(s.read(reg::VIRTIO_MMIO_SHM_LEN_LOW), u32::MAX);
    assert_eq!(s.read(reg::VIRTIO_MMIO_SHM_LEN_HIGH), u32::MAX);
    let features = s.offered_features();
    assert_eq!(features >> VIRTIO_F_VERSION_1 & 1, 1);
    assert_eq!(features >> VIRTIO_RING_F_EVENT_IDX & 1, 1);
    assert_eq!(features >> VIRTIO_BLK_F_FLUSH & 1, 1);
    assert_eq!(features >> VIRTIO_BLK_F_RO & 1, 0);
    assert_eq!(features >> 28 & 1, 0, "indirect descriptors");
    s.write(reg::VIRTIO_MMIO_DEVICE_FEATURES_SEL, 2);
    assert_eq!(s.read(reg::VIRTIO_MMIO_DEVICE_FEATURES), 0);
}

#[test]
fn test_driver_starts_the_device_reads_a_sector_and_gets_an_interrupt() {
    let mut s = setup();
    s.start();

    assert_eq!(s.read_sector(), Some(0));

    let data: [u8; 512] = {
        let mut data = [0; 512];
        s.memory.read_slice(&mut data, GuestAddress(DATA)).unwrap();
        data
    };
    assert_eq!(data, [1; 512]);
    assert_eq!(s.line.count(), 1);
    assert_eq!(s.read(reg::VIRTIO_MMIO_INTERRUPT_STATUS), 1);
    s.write(reg::VIRTIO_MMIO_INTERRUPT_ACK, 1);
    assert_eq!(s.read(reg::VIRTIO_MMIO_INTERRUPT_STATUS), 0);
}

#[test]
fn test_kick_by_descriptor_serves_as_one_by_register() {
    let mut s = setup();
    s.start();
    s.run_loop();
    s.memory
        .write_obj([4_u32, 0, 0, 0], GuestAddress(HEADER))
        .unwrap();
    s.driver
        .add(&[Piece::readable(HEADER, 16), Piece::writable(STATUS_BYTE, 1)]);

    s.transport
        .queue_events()
        .iter()
        .next()
        .unwrap()
        .write(1)
        .unwrap();
    s.run_loop();

    assert!(s.driver.take_used().is_some());
}

#[test]
fn test_buffers_from_before_driver_ok_are_served_without_a_kick() {
    let mut s = setup();
    s.memory
        .write_obj([4_u32, 0, 0, 0], GuestAddress(HEADER))
        .unwrap();
    s.driver
        .add(&[Piece::readable(HEADER, 16), Piece::writable(STATUS_BYTE, 1)]);
    s.start();
    s.run_loop();
    assert!(s.driver.take_used().is_some());
}

#[test]
fn test_kick_before_driver_ok_and_after_reset_is_ignored() {
    let mut s = setup();
    assert_eq!(s.read_sector(), None);
    s.negotiate(s.offered_features());
    s.set_drivers_queue();
    // Also through the ioeventfd, which knows no state.
    s.transport.queue_events().kick(0);
    s.run_loop();
    assert!(s.driver.take_used().is_none());

    s.set_status(RUNNING);
    s.set_status(0);
    s.transport.queue_events().kick(0);
    s.run_loop();

    assert!(s.driver.take_used().is_none());
    assert_eq!(s.line.count(), 0);
}

#[test]
fn test_kick_of_a_queue_that_does_not_exist_is_ignored() {
    let mut s = setup();
    s.start();
    for queue in [1, 2, 0x1_0000, u32::MAX] {
        s.write(reg::VIRTIO_MMIO_QUEUE_NOTIFY, queue);
    }
    assert_eq!(s.read_sector(), Some(0));
}

#[test]
fn test_reset_and_second_start_work() {
    let mut s = setup();
    for _ in 0..3 {
        s.start();
        assert_eq!(s.read_sector(), Some(0));
        s.set_status(0);
        assert_eq!(s.status(), 0);
        assert_eq!(s.read(reg::VIRTIO_MMIO_INTERRUPT_STATUS), 0);
        assert_eq!(s.read(reg::VIRTIO_MMIO_QUEUE_READY), 0);
        assert!(!s.is_active());
        s.driver = DriverQueue::new(&s.memory, RING, 16);
    }
}

#[test]
fn test_reset_waits_for_the_round_in_service() {
    let s = setup();
    s.start();
    let device = s.transport.device().clone();
    let in_service = lock(&device);

    std::thread::scope(|scope| {
        let reset = scope.spawn(|| s.set_status(0));
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert!(!reset.is_finished());
        assert_eq!(s.status(), RUNNING, "the status is read without waiting");
        s.write(reg::VIRTIO_MMIO_INTERRUPT_ACK, 1);
        drop(in_service);
    });

    assert_eq!(s.status(), 0);
    assert!(!s.is_active());
}

#[test]
fn test_broken_ring_needs_reset_and_works_after_it() {
    let mut s = setup();
    s.start();
    s.driver.set_available_index(1000);
    s.write(reg::VIRTIO_MMIO_QUEUE_NOTIFY, 0);
    s.run_loop();
    assert_eq!(s.status(), RUNNING | NEEDS_RESET);
    assert_eq!(s.read(reg::VIRTIO_MMIO_INTERRUPT_STATUS), 2);
    assert_eq!(s.line.count(), 1);

    // Mended, but not reset: not looked at again.
    s.driver = DriverQueue::new(&s.memory, RING, 16);
    assert_eq!(s.read_sector(), None);
    s.set_status(RUNNING);
    assert_eq!(s.status(), RUNNING | NEEDS_RESET);

    s.set_status(0);
    s.driver = DriverQueue::new(&s.memory, RING, 16);
    s.start();
    assert_eq!(s.read_sector(), Some(0));
}

#[test]
fn test_access_of_another_width_or_unaligned_reads_zero_and_writes_nothing() {
    let s = setup();
    for offset in 0..CONFIG_OFFSET {
        for width in [1_usize, 2, 3, 4, 5, 8] {
            if width == 4 && offset % 4 == 0 {
                continue;
            }
            let mut data = vec![0xee; width];
            s.transport.read(offset, &mut data);
            assert!(data.iter().all(|byte| *byte == 0), "{offset:#x} {width}");
            s.transport.write(offset, &vec![1; width]);
        }
    }
    assert_eq!(s.status(), 0);
}

#[test]
fn test_undefined_and_write_only_registers_read_zero() {
    let s = setup();
    s.start();
    for offset in (0..0x100).step_by(4) {
        let is_readable = [
            0x00, 0x04, 0x08, 0x0c, 0x10, 0x34, 0x44, 0x60, 0x70, 0xb0, 0xb4, 0xb8, 0xbc,
        ]
        .contains(&offset);
        if !is_readable {
            assert_eq!(s.read(offset), 0, "{offset:#x}");
        }
    }
}

#[test]
fn test_write_to_read_only_registers_changes_nothing() {
    let s = setup();
    s.negotiate(VERSION_1);
    for offset in [
        0x00, 0x04, 0x08, 0x0c, 0x10, 0x34, 0x60, 0xac, 0xb0, 0xb4, 0xb8, 0xbc, 0xc0, 0xfc,
    ] {
        let before = s.read(offset);
        s.write(offset, 0x1234_5678);
        assert_eq!(s.read(offset), before, "{offset:#x}");
    }
    assert_eq!(s.status(), FEATURES_AGREED);
}

#[test]
fn test_configuration_space_reads_zero_past_its_end_and_drops_writes() {
    let s = setup();
    let mut capacity = [0; 8];
    s.transport.write(CONFIG_OFFSET, &[0xff; 8]);
    s.transport.read(CONFIG_OFFSET, &mut capacity);
    assert_eq!(u64::from_le_bytes(capacity), 16);

    for offset in [60, 61, 0xeff, 0x1000, u64::MAX - CONFIG_OFFSET] {
        let mut data = [0xee; 8];
        s.transport.read(CONFIG_OFFSET + offset, &mut data);
        assert_eq!(data, [0; 8], "{offset:#x}");
        s.transport.write(CONFIG_OFFSET + offset, &[0xff; 8]);
    }
    let mut across = [0xee; 8];
    s.transport.read(CONFIG_OFFSET + 56, &mut across);
    assert_eq!(across, [1, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn test_queue_that_does_not_exist_has_no_registers() {
    let s = setup();
    s.negotiate(VERSION_1);
    for queue in [1, 2, 255, 0x1_0000, u32::MAX] {
        s.write(reg::VIRTIO_MMIO_QUEUE_SEL, queue);
        assert_eq!(s.read(reg::VIRTIO_MMIO_QUEUE_NUM_MAX), 0);
        for offset in (0..0x100).step_by(4) {
            if offset != reg::VIRTIO_MMIO_QUEUE_SEL && offset != reg::VIRTIO_MMIO_STATUS {
                s.write(offset, 1);
            }
        }
        assert_eq!(s.read(reg::VIRTIO_MMIO_QUEUE_READY), 0);
    }
    assert_eq!(s.set_drivers_queue(), 1);
}

#[test]
fn test_illegal_queue_does_not_get_ready_and_is_not_activated() {
    let end = u64::try_from(MEMORY_LEN).unwrap();
    let (table, avail, used) = (0x1000, 0x2000, 0x3000);
    for (size, table, avail, used) in [
        (0, table, avail, used),
        (3, table, avail, used),
        (512, table, avail, used),
        (0x1_0010, table, avail, used),
        (u32::MAX, table, avail, used),
        (16, table + 8, avail, used),
        (16, table, avail + 1, used),
        (16, table, avail, used + 2),
        (16, end, avail, used),
        (16, end - 128, avail, used),
        (16, table, end - 2, used),
        (16, table, avail, end - 4),
        (16, 0xd000_0000, avail, used),
        (16, table, 0xfee0_0000, used),
        (16, u64::MAX - 15, avail, used),
        (16, table, u64::MAX - 1, used),
        (16, table, avail, u64::MAX - 3),
        (16, table, table, used),
        (16, table, table + 0xfe, used),
        (16, table, avail, avail),
        (16, table, avail, avail + 0x24),
        (16, 0, 0, 0),
    ] {
        let s = setup();
        s.negotiate(s.offered_features());

        let ready = s.set_queue(size, table, avail, used);
        s.set_status(RUNNING);

        assert_eq!(ready, 0, "{size} {table:#x} {avail:#x} {used:#x}");
        assert_eq!(s.status(), FEATURES_AGREED | NEEDS_RESET);
        assert!(!s.is_active());
        // There is a way out.
        s.set_status(0);
        s.start();
        assert!(s.is_active());
    }
}

#[test]
fn test_smallest_and_tightest_queues_are_legal() {
    let s = setup();
    s.negotiate(VERSION_1);
    assert_eq!(s.set_queue(1, 0x1000, 0x1010, 0x1018), 1);
    s.write(reg::VIRTIO_MMIO_QUEUE_READY, 0);
    let end = u64::try_from(MEMORY_LEN).unwrap();
    assert_eq!(s.set_queue(256, 0x1000, 0x2000, end - 6 - 2 - 2048), 1);
}

#[test]
fn test_queue_without_ready_is_not_activated() {
    let s = setup();
    s.negotiate(VERSION_1);
    s.set_status(RUNNING);
    assert_eq!(s.status(), FEATURES_AGREED | NEEDS_RESET);
    assert!(!s.is_active());
}

#[test]
fn test_queue_registers_are_frozen_while_ready_and_free_after() {
    let s = setup();
    s.negotiate(VERSION_1);
    assert_eq!(s.set_drivers_queue(), 1);
    // Twice, with nonsense: the first layout stays.
    assert_eq!(s.set_queue(3, 1, 1, 1), 1);
    s.write(reg::VIRTIO_MMIO_QUEUE_READY, 0);
    assert_eq!(s.read(reg::VIRTIO_MMIO_QUEUE_READY), 0);
    assert_eq!(s.set_queue(3, 1, 1, 1), 0);
    assert_eq!(s.set_drivers_queue(), 1);
    s.set_status(RUNNING);
    assert_eq!(s.status(), RUNNING);
}

#[test]
fn test_queue_registers_after_driver_ok_are_ignored() {
    let mut s = setup();
    s.start();
    s.write(reg::VIRTIO_MMIO_QUEUE_READY, 0);
    assert_eq!(s.set_queue(256, 0, 0, 0), 1);
    assert_eq!(s.read(reg::VIRTIO_MMIO_QUEUE_READY), 1);
    assert_eq!(s.read_sector(), Some(0));
}

#[test]
fn test_queue_registers_before_features_ok_are_ignored() {
    let s = setup();
    assert_eq!(s.set_drivers_queue(), 0);
    s.set_status(ACKNOWLEDGED);
    s.set_status(DRIVER_FOUND);
    assert_eq!(s.set_drivers_queue(), 0);
}

#[test]
fn test_features_that_are_not_offered_are_refused() {
    for feature in [0, 5, 28, 33, 40, 63] {
        let s = setup();
        s.negotiate(VERSION_1 | 1 << feature);
        assert_eq!(s.status(), DRIVER_FOUND, "{feature}");
    }
}

#[test]
fn test_features_without_version_1_are_refused() {
    let s = setup();
    s.negotiate(s.offered_features() & !VERSION_1);
    assert_eq!(s.status(), DRIVER_FOUND);
    s.set_features(VERSION_1);
    s.set_status(FEATURES_AGREED);
    assert_eq!(s.status(), FEATURES_AGREED);
}

#[test]
fn test_feature_above_63_is_refused_until_reset() {
    let s = setup();
    s.set_status(ACKNOWLEDGED);
    s.set_status(DRIVER_FOUND);
    s.set_features(VERSION_1);
    s.write(reg::VIRTIO_MMIO_DRIVER_FEATURES_SEL, 2);
    s.write(reg::VIRTIO_MMIO_DRIVER_FEATURES, 1);
    s.set_status(FEATURES_AGREED);
    assert_eq!(s.status(), DRIVER_FOUND);
    s.set_status(0);
    s.negotiate(VERSION_1);
    assert_eq!(s.status(), FEATURES_AGREED);
}

#[test]
fn test_features_changed_after_features_ok_are_ignored() {
    let s = setup();
    s.negotiate(VERSION_1);
    s.set_features(u64::MAX);
    assert_eq!(lock(&s.transport.registers).driver_features, VERSION_1);
}

#[test]
fn test_status_bits_are_added_one_at_a_time_in_order() {
    let steps = [0, ACKNOWLEDGED, DRIVER_FOUND, FEATURES_AGREED];
    for (at, before) in steps.into_iter().enumerate() {
        for value in 1..=u32::from(u8::MAX) {
            let s = setup();
            for step in steps.into_iter().take(at + 1).skip(1) {
                if step == FEATURES_AGREED {
                    s.set_features(VERSION_1);
                }
                s.set_status(step);
            }
            assert_eq!(s.status(), before);
            if before == FEATURES_AGREED {
                s.set_drivers_queue();
            }

            s.set_status(value);

            let driver_bits = value & !NEEDS_RESET;
            let next = match before {
                0 => ACKNOWLEDGED,
                ACKNOWLEDGED => DRIVER_FOUND,
                // No features were accepted: VERSION_1 is missing.
                DRIVER_FOUND => DRIVER_FOUND,
                _ => RUNNING,
            };
            let expected = if driver_bits == next || driver_bits == before | 0x80 {
                driver_bits
            } else {
                before
            };
            assert_eq!(s.status(), expected, "{before:#x} then {value:#x}");
        }
    }
}

#[test]
fn test_failed_driver_can_only_reset() {
    let s = setup();
    s.start();
    s.set_status(RUNNING | 0x80);
    assert_eq!(s.status(), RUNNING | 0x80);
    s.set_status(RUNNING);
    assert_eq!(s.status(), RUNNING | 0x80);
    s.set_status(0);
    s.start();
}

/// One access of a guest.
#[derive(Clone, Debug)]
enum Access {
    Read(u64, usize),
    Write(u64, Vec<u8>),
    Register(u32, u32),
    EventLoop,
}

fn access() -> impl Strategy<Value = Access> {
    let register = prop_oneof![
        Just(reg::VIRTIO_MMIO_STATUS),
        Just(reg::VIRTIO_MMIO_QUEUE_NUM),
        Just(reg::VIRTIO_MMIO_QUEUE_READY),
        Just(reg::VIRTIO_MMIO_QUEUE_DESC_LOW),
        Just(reg::VIRTIO_MMIO_QUEUE_AVAIL_LOW),
        Just(reg::VIRTIO_MMIO_QUEUE_USED_LOW),
        Just(reg::VIRTIO_MMIO_QUEUE_NOTIFY),
        Just(reg::VIRTIO_MMIO_DRIVER_FEATURES),
        Just(reg::VIRTIO_MMIO_DRIVER_FEATURES_SEL),
        (0_u32..64).prop_map(|word| word * 4),
    ];
    let value = prop_oneof![
        Just(ACKNOWLEDGED),
        Just(DRIVER_FOUND),
        Just(FEATURES_AGREED),
        Just(RUNNING),
        0_u32..2,
        (0_u32..0x110).prop_map(|page| page << 12),
        (0_u32..10).prop_map(|shift| 1 << shift),
        any::<u32>(),
    ];
    prop_oneof![
        1 => (any::<u64>(), 0_usize..9).prop_map(|(offset, len)| Access::Read(offset, len)),
        1 => (0_u64..0x1100, proptest::collection::vec(any::<u8>(), 0..9))
            .prop_map(|(offset, data)| Access::Write(offset, data)),
        10 => (register, value).prop_map(|(register, value)| Access::Register(register, value)),
        1 => Just(Access::EventLoop),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// No sequence of accesses panics; the device is active exactly while DRIVER_OK is set; and if it is, then
    /// with a queue that is legal and features that were offered.
    #[test]
    fn prop_random_accesses_keep_the_invariants(
        accesses in proptest::collection::vec(access(), 0..120),
        begin_negotiated in any::<bool>(),
    ) {
        let mut s = setup();
        if begin_negotiated {
            s.negotiate(s.offered_features());
            s.set_drivers_queue();
        }
        for access in accesses {
            match access {
                Access::Read(offset, len) => s.transport.read(offset, &mut vec![0; len]),
                Access::Write(offset, data) => s.transport.write(offset, &data),
                Access::Register(register, value) => s.write(register, value),
                Access::EventLoop => s.run_loop(),
            }
            let status = s.status();
            prop_assert!([0, 1, 3, 11, 15].contains(&(status & !0xc0)), "{status:#x}");
            prop_assert_eq!(s.is_active(), status & 4 != 0);
            let registers = lock(&s.transport.registers);
            if status & 8 != 0 {
                prop_assert_eq!(registers.driver_features & !s.transport.offered_features, 0);
                prop_assert_ne!(registers.driver_features & VERSION_1, 0);
            }
            if status & 4 != 0 {
                let layout = registers.queues[0].ready.unwrap();
                prop_assert!(layout.size().is_power_of_two() && layout.size() <= 256);
                for (from, to) in layout.ranges() {
                    prop_assert!(from < to && to <= MEMORY_LEN as u64);
                }
            }
        }
    }
}
