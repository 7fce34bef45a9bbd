//! A driver that can do right and is asked to do wrong: registers and rings are open to the cases.

pub(crate) mod block;
pub(crate) mod queue;
pub(crate) mod vsock;

use crate::{memory, same};
pub(crate) use queue::Queue;

/// First address of the devices, and how far they are apart.
const FIRST_DEVICE: u64 = 0xd000_0000;
const DEVICE_BYTES: u64 = 0x1000;

/// Registers (virtio 1.2 §4.2.2).
pub(crate) mod register {
    pub(crate) const MAGIC: u64 = 0x000;
    pub(crate) const VERSION: u64 = 0x004;
    pub(crate) const DEVICE_ID: u64 = 0x008;
    pub(crate) const DEVICE_FEATURES: u64 = 0x010;
    pub(crate) const DEVICE_FEATURES_SEL: u64 = 0x014;
    pub(crate) const DRIVER_FEATURES: u64 = 0x020;
    pub(crate) const DRIVER_FEATURES_SEL: u64 = 0x024;
    pub(crate) const QUEUE_SEL: u64 = 0x030;
    pub(crate) const QUEUE_NUM_MAX: u64 = 0x034;
    pub(crate) const QUEUE_NUM: u64 = 0x038;
    pub(crate) const QUEUE_READY: u64 = 0x044;
    pub(crate) const QUEUE_NOTIFY: u64 = 0x050;
    pub(crate) const INTERRUPT_STATUS: u64 = 0x060;
    pub(crate) const INTERRUPT_ACK: u64 = 0x064;
    pub(crate) const STATUS: u64 = 0x070;
    pub(crate) const QUEUE_DESC: u64 = 0x080;
    pub(crate) const QUEUE_DRIVER: u64 = 0x090;
    pub(crate) const QUEUE_DEVICE: u64 = 0x0a0;
    pub(crate) const CONFIG: u64 = 0x100;
}

/// Bits of the Status register (virtio 1.2 §2.1).
pub(crate) mod status {
    pub(crate) const ACKNOWLEDGE: u32 = 1;
    pub(crate) const DRIVER: u32 = 2;
    pub(crate) const DRIVER_OK: u32 = 4;
    pub(crate) const FEATURES_OK: u32 = 8;
    pub(crate) const NEEDS_RESET: u32 = 64;
    pub(crate) const FAILED: u32 = 128;
}

/// VIRTIO_F_VERSION_1 and VIRTIO_F_RING_EVENT_IDX (virtio 1.2 §6).
pub(crate) const VERSION_1: u64 = 1 << 32;
pub(crate) const EVENT_IDX: u64 = 1 << 29;

/// The bit of InterruptStatus for used buffers, and that for the configuration, which a device that needs a reset sets.
pub(crate) const USED_INTERRUPT: u32 = 1;
pub(crate) const CONFIG_INTERRUPT: u32 = 2;

/// A device's registers.
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct Device(u64);

impl Device {
    /// The device with this number.
    pub(crate) const fn number(number: u64) -> Self {
        Self(FIRST_DEVICE + number * DEVICE_BYTES)
    }

    /// The address of its register.
    pub(crate) fn address(self, offset: u64) -> u64 {
        self.0 + offset
    }

    pub(crate) fn read(self, offset: u64) -> u32 {
        memory::read(self.address(offset))
    }

    pub(crate) fn write(self, offset: u64, value: u32) {
        memory::write(self.address(offset), value);
    }

    pub(crate) fn status(self) -> u32 {
        self.read(register::STATUS)
    }

    pub(crate) fn set_status(self, value: u32) {
        self.write(register::STATUS, value);
    }

    pub(crate) fn kick(self, queue: u32) {
        self.write(register::QUEUE_NOTIFY, queue);
    }

    /// Resets it, and takes it up to the features of its own choice.
    pub(crate) fn negotiate(self, features: u64) {
        self.set_status(0);
        same!(self.status(), 0, "status after a reset");
        self.set_status(status::ACKNOWLEDGE);
        self.set_status(status::ACKNOWLEDGE | status::DRIVER);
        self.write_features(features);
        let agreed = status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK;
        self.set_status(agreed);
        same!(self.status(), agreed, "status after features {features:#x}");
    }

    pub(crate) fn write_features(self, features: u64) {
        for (half, value) in [features as u32, (features >> 32) as u32]
            .into_iter()
            .enumerate()
        {
            self.write(register::DRIVER_FEATURES_SEL, half as u32);
            self.write(register::DRIVER_FEATURES, value);
        }
    }

    /// What it offers.
    pub(crate) fn features(self) -> u64 {
        let [low, high] = [0, 1].map(|half| {
            self.write(register::DEVICE_FEATURES_SEL, half);
            u64::from(self.read(register::DEVICE_FEATURES))
        });
        high << 32 | low
    }

    /// Writes the three addresses and the size of a queue.
    pub(crate) fn describe(self, queue: &Queue) {
        self.write(register::QUEUE_SEL, queue.index);
        self.write(register::QUEUE_NUM, u32::from(queue.size));
        for (at, address) in [
            (register::QUEUE_DESC, queue.table()),
            (register::QUEUE_DRIVER, queue.available()),
            (register::QUEUE_DEVICE, queue.used()),
        ] {
            self.write_address(at, address);
        }
    }

    pub(crate) fn write_address(self, at: u64, address: u64) {
        self.write(at, address as u32);
        self.write(at + 4, (address >> 32) as u32);
    }

    /// Makes a queue ready that is to be accepted.
    pub(crate) fn make_ready(self, queue: &Queue) {
        self.describe(queue);
        self.write(register::QUEUE_READY, 1);
        same!(
            self.read(register::QUEUE_READY),
            1,
            "queue {} ready",
            queue.index
        );
    }

    /// Takes it into service with these queues.
    pub(crate) fn start(self, features: u64, queues: &[&Queue]) {
        self.negotiate(features);
        for queue in queues {
            queue.clear();
            self.make_ready(queue);
        }
        self.go();
    }

    /// The last step: DRIVER_OK, which is to be accepted.
    pub(crate) fn go(self) {
        let all = status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK | status::DRIVER_OK;
        self.set_status(all);
        same!(self.status(), all, "status after DRIVER_OK");
    }

    pub(crate) fn needs_reset(self) -> bool {
        self.status() & status::NEEDS_RESET != 0
    }
}
