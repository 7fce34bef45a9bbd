//! Queue registers: what becomes a queue, and when.

use super::*;

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
        (512, 0x4000, 0x1_0000, 0x2_0000),
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
        // Mending it without a reset does not help; a reset does.
        s.set_drivers_queue();
        s.set_status(RUNNING);
        assert_eq!(s.status(), FEATURES_AGREED | NEEDS_RESET);
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
    // Twice, with nonsense: layout and registers stay.
    assert_eq!(s.set_queue(3, 1, 1, 1), 1);
    s.write(reg::VIRTIO_MMIO_QUEUE_READY, 0);
    assert_eq!(s.read(reg::VIRTIO_MMIO_QUEUE_READY), 0);
    s.write(reg::VIRTIO_MMIO_QUEUE_READY, 1);
    assert_eq!(s.read(reg::VIRTIO_MMIO_QUEUE_READY), 1);
    s.write(reg::VIRTIO_MMIO_QUEUE_READY, 0);
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

/// A device with two queues that does nothing.
#[derive(Debug)]
struct Idle {
    queue_events: QueueEvents,
    active_queues: usize,
}

impl VirtioDevice for Idle {
    fn device_type(&self) -> u32 {
        42
    }

    fn queue_max_sizes(&self) -> &[u16] {
        &[16, 16]
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_events(&self) -> &QueueEvents {
        &self.queue_events
    }

    fn read_config(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivationError> {
        let queues: [ActiveQueue; 2] = activation.into_queues()?;
        self.active_queues = queues.len();
        Ok(())
    }

    fn reset(&mut self) {
        self.active_queues = 0;
    }

    fn positions(&self) -> Vec<QueuePosition> {
        vec![QueuePosition::default(); self.active_queues]
    }
}

/// Starts a device with two queues, the second one `distance` bytes behind the first. The result is the status and
/// the number of queues that the device was given.
fn start_two_queues(distance: u32) -> (u32, usize) {
    let device = Arc::new(Mutex::new(Idle {
        queue_events: QueueEvents::new(2).unwrap(),
        active_queues: 0,
    }));
    let line = CountingLine::default();
    let transport = MmioTransport::new(device.clone(), memory(MEMORY_LEN), Box::new(line));
    let write = |register: u32, value: u32| {
        transport.write(u64::from(register), &value.to_le_bytes());
    };
    for status in [ACKNOWLEDGED, DRIVER_FOUND] {
        write(reg::VIRTIO_MMIO_STATUS, status);
    }
    write(reg::VIRTIO_MMIO_DRIVER_FEATURES_SEL, 1);
    write(reg::VIRTIO_MMIO_DRIVER_FEATURES, half(VERSION_1, 1));
    write(reg::VIRTIO_MMIO_STATUS, FEATURES_AGREED);
    for queue in [0, 1] {
        let base = 0x1000 + queue * distance;
        write(reg::VIRTIO_MMIO_QUEUE_SEL, queue);
        write(reg::VIRTIO_MMIO_QUEUE_NUM, 16);
        write(reg::VIRTIO_MMIO_QUEUE_DESC_LOW, base);
        write(reg::VIRTIO_MMIO_QUEUE_AVAIL_LOW, base + 0x100);
        write(reg::VIRTIO_MMIO_QUEUE_USED_LOW, base + 0x200);
        write(reg::VIRTIO_MMIO_QUEUE_READY, 1);
    }
    write(reg::VIRTIO_MMIO_STATUS, RUNNING);
    let mut status = [0; 4];
    transport.read(u64::from(reg::VIRTIO_MMIO_STATUS), &mut status);
    (u32::from_le_bytes(status), lock(&device).active_queues)
}

#[test]
fn test_queues_that_overlap_each_other_are_not_activated() {
    assert_eq!(start_two_queues(0x1000), (RUNNING, 2));
    for distance in [0, 0xf0, 0x100, 0x280] {
        assert_eq!(
            start_two_queues(distance),
            (FEATURES_AGREED | NEEDS_RESET, 0),
            "{distance:#x}"
        );
    }
}
