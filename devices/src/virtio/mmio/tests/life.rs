//! Start, service, reset, and start again.

use virtio_bindings::virtio_blk::{VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_OUT};

use super::*;

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
    s.add_request(VIRTIO_BLK_T_FLUSH, &[]);

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
    s.add_request(VIRTIO_BLK_T_FLUSH, &[]);
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

/// A full ring uses up the round; the device comes back by itself and then asks for the next kick.
#[test]
fn test_full_ring_is_served_and_the_next_chain_kicked_for() {
    let mut s = setup();
    s.start();
    s.run_loop();
    // One descriptor each: no status byte, so nothing is done but the chain comes back.
    for _ in 0..16 {
        s.driver.add(&[Piece::readable(HEADER, 16)]);
    }

    s.write(reg::VIRTIO_MMIO_QUEUE_NOTIFY, 0);
    s.run_loop();

    assert_eq!(s.driver.used_index(), 16);
    assert_eq!(s.driver.avail_event(), 16);
}

#[test]
fn test_driver_without_flush_gets_durable_writes() {
    for (without, flushes) in [(0, 0), (1 << VIRTIO_BLK_F_FLUSH, 1)] {
        let mut s = setup();
        s.negotiate(s.offered_features() & !without);
        s.set_drivers_queue();
        s.set_status(RUNNING);

        s.add_request(VIRTIO_BLK_T_OUT, &[Piece::readable(DATA, 512)]);
        s.run_loop();

        assert!(s.driver.take_used().is_some());
        assert_eq!(s.disk.flushes(), flushes);
    }
}
