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
