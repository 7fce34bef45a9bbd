//! Single registers, features and the Status register's steps.

use virtio_bindings::virtio_blk::{VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO};

use super::*;

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
