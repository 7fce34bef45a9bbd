//! The steps to a device in service, out of order: features, status, kicks.

use super::AGREED;
use crate::virtio::block::{self, DATA, DISK, QUEUE, READ};
use crate::virtio::queue::{Descriptor, WRITE};
use crate::virtio::{Device, EVENT_IDX, VERSION_1, register, status, vsock};
use crate::{check, memory, same, time};

pub(crate) fn features_not_offered() {
    let offered = DISK.features();
    same!(offered >> 32 & 1, 1, "VERSION_1 on offer");
    let refused = |device: Device, features: u64, beyond: u32| {
        device.set_status(0);
        device.set_status(status::ACKNOWLEDGE);
        device.set_status(status::ACKNOWLEDGE | status::DRIVER);
        device.write_features(features);
        device.write(register::DRIVER_FEATURES_SEL, 2);
        device.write(register::DRIVER_FEATURES, beyond);
        device.set_status(AGREED);
        same!(
            device.status(),
            status::ACKNOWLEDGE | status::DRIVER,
            "status after features {features:#x}"
        );
        // Nor can it be gone round.
        device.set_status(AGREED | status::DRIVER_OK);
        check!(
            device.status() & status::DRIVER_OK == 0,
            "DRIVER_OK after features {features:#x}"
        );
    };
    for bit in 0..64 {
        if offered >> bit & 1 == 0 {
            refused(DISK, VERSION_1 | 1 << bit, 0);
        }
    }
    refused(DISK, VERSION_1, 1);
    refused(DISK, u64::MAX, u32::MAX);
    // The read-only disk offers nothing that writes.
    refused(
        block::READ_ONLY_DISK,
        VERSION_1 | block::DISCARD_FEATURES,
        0,
    );
    refused(vsock::SOCKETS, VERSION_1 | 1 << 28, 0);
    block::serves_again(&QUEUE);
}

pub(crate) fn no_version_1() {
    for features in [0, EVENT_IDX, block::FLUSH_FEATURE] {
        DISK.set_status(0);
        DISK.set_status(status::ACKNOWLEDGE);
        DISK.set_status(status::ACKNOWLEDGE | status::DRIVER);
        DISK.write_features(features);
        DISK.set_status(AGREED);
        check!(
            DISK.status() & status::FEATURES_OK == 0,
            "FEATURES_OK with {features:#x}"
        );
    }
    block::serves_again(&QUEUE);
}

pub(crate) fn features_after_features_ok() {
    // Without FLUSH and EVENT_IDX agreed, they are asked for when it is too late: with EVENT_IDX in force a poisoned used_event would
    // hold interrupts back.
    DISK.negotiate(VERSION_1);
    DISK.write_features(u64::MAX);
    QUEUE.clear();
    DISK.make_ready(&QUEUE);
    DISK.write_features(u64::MAX);
    DISK.go();
    DISK.write_features(0);
    memory::write::<u16>(QUEUE.used_event(), 0x7000);
    DISK.write(register::INTERRUPT_ACK, 3);
    block::reads_right(&QUEUE, 9);
    let raised =
        time::until(|| DISK.read(register::INTERRUPT_STATUS) & crate::virtio::USED_INTERRUPT != 0);
    check!(raised, "no interrupt: EVENT_IDX came into force");
}

pub(crate) fn status_out_of_order() {
    let legal = [
        0,
        status::ACKNOWLEDGE,
        status::ACKNOWLEDGE | status::DRIVER,
        AGREED,
    ];
    // From each step, every value: what is no next step changes nothing, FAILED apart.
    for (step, &from) in legal.iter().enumerate() {
        for value in 1..=0xffu32 {
            DISK.set_status(0);
            for &step in &legal[1..=step] {
                if step == AGREED {
                    DISK.write_features(VERSION_1);
                }
                DISK.set_status(step);
            }
            same!(DISK.status(), from, "the step");
            let next = legal
                .get(step + 1)
                .copied()
                .unwrap_or(AGREED | status::DRIVER_OK);
            DISK.set_status(value);
            let after = DISK.status();
            let driver = value & !status::NEEDS_RESET;
            let is_next = driver == next || driver == from | status::FAILED;
            // Without features FEATURES_OK is refused, without a queue DRIVER_OK is.
            check!(
                after & !status::NEEDS_RESET == from || is_next,
                "status {from:#x} became {after:#x} by {value:#x}"
            );
            check!(
                after & status::DRIVER_OK == 0,
                "DRIVER_OK by {value:#x} without a queue"
            );
        }
    }
    for value in [0x100, 0xffff_ffff, 0x8000_000f, 0x1_0000 | AGREED] {
        DISK.set_status(value);
    }
    block::serves_again(&QUEUE);
    // In service: bits that are cleared, and all set.
    for value in 1..status::FAILED {
        DISK.set_status(value);
        same!(
            DISK.status(),
            AGREED | status::DRIVER_OK,
            "status in service after {value:#x}"
        );
    }
    block::reads_right(&QUEUE, 10);
    DISK.set_status(0xffff_ffff);
    DISK.set_status(AGREED | status::DRIVER_OK | status::FAILED);
    check!(DISK.status() & status::FAILED != 0, "FAILED was not taken");
    block::serves_again(&QUEUE);
}

pub(crate) fn early_and_late_kicks() {
    let is_silent = |when: &str| {
        for queue in [0, 1, 255, 0xffff, 0xffff_ffff] {
            DISK.kick(queue);
        }
        check!(
            !time::soon(|| QUEUE.done() != 0),
            "a request was served {when}"
        );
    };
    QUEUE.clear();
    block::header(READ, 0);
    QUEUE.chain(
        0,
        &[
            block::HEADER_PART,
            Descriptor(DATA, 512, WRITE, 0),
            block::STATUS_PART,
        ],
    );
    QUEUE.offer(0);
    DISK.set_status(0);
    is_silent("before anything");
    DISK.negotiate(VERSION_1);
    is_silent("before there was a queue");
    DISK.make_ready(&QUEUE);
    is_silent("before DRIVER_OK");
    same!(block::status(), block::NO_STATUS, "status byte");
    // It was on offer before: no kick is needed.
    DISK.go();
    QUEUE.await_done(1);
    same!(block::status(), block::OK, "status byte");
    DISK.set_status(0);
    QUEUE.clear();
    block::header(READ, 0);
    QUEUE.offer(0);
    is_silent("after a reset");
    block::serves_again(&QUEUE);
}
