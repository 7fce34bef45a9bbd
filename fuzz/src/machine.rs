//! One device behind its registers, with guest memory and an event loop: what a machine has around it, but for the processor.

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use devices::interrupt::Interrupt;
use devices::virtio::{MmioTransport, VirtioDevice};
use event_manager::{EventManager, MutEventSubscriber, SubscriberOps};
use virtio_bindings::virtio_config::VIRTIO_CONFIG_S_NEEDS_RESET;
use virtio_bindings::virtio_mmio as reg;
use vm_memory::GuestMemoryMmap;

use crate::memory::Memory;
use crate::ring::{Ring, feeds_itself};

/// The Status register of a device in service (virtio 1.2 §2.1).
pub(crate) const IN_SERVICE: u32 = 15;

/// The Status register once the features are agreed on.
pub(crate) const FEATURES_AGREED: u32 = 11;

/// VIRTIO_F_VERSION_1, and VIRTIO_F_RING_EVENT_IDX.
pub(crate) const VERSION_1: u64 = 1 << 32;
pub(crate) const EVENT_IDX: u64 = 1 << 29;

/// The most turns of the event loop after which nothing may be left to do, for one device with small queues that is left alone.
const TURNS_MAX: usize = 400;

/// Turns after which a driver that lets the device feed its own ring is left alone.
const TURNS_OF_RING_THAT_FEEDS_ITSELF: usize = 64;

/// An interrupt line that nobody listens to.
#[derive(Debug)]
struct Line;

impl Interrupt for Line {
    fn trigger(&self) -> io::Result<()> {
        Ok(())
    }
}

/// The device with what is around it.
#[derive(Debug)]
pub(crate) struct Machine<D: MutEventSubscriber> {
    pub(crate) device: Arc<Mutex<D>>,
    pub(crate) transport: MmioTransport<D>,
    manager: EventManager<Arc<Mutex<D>>>,
}

impl<D: VirtioDevice + MutEventSubscriber> Machine<D> {
    pub(crate) fn new(device: D, memory: &GuestMemoryMmap) -> Self {
        let device = Arc::new(Mutex::new(device));
        let mut manager = EventManager::new().expect("an epoll set");
        manager.add_subscriber(Arc::clone(&device));
        Self {
            transport: MmioTransport::new(Arc::clone(&device), memory.clone(), Box::new(Line)),
            device,
            manager,
        }
    }

    pub(crate) fn read(&self, register: u32) -> u32 {
        let mut bytes = [0; 4];
        self.transport.read(register.into(), &mut bytes);
        u32::from_le_bytes(bytes)
    }

    pub(crate) fn write(&self, register: u32, value: u32) {
        self.transport.write(register.into(), &value.to_le_bytes());
    }

    pub(crate) fn kick(&self, queue: u32) {
        self.write(reg::VIRTIO_MMIO_QUEUE_NOTIFY, queue);
    }

    pub(crate) fn needs_reset(&self) -> bool {
        self.read(reg::VIRTIO_MMIO_STATUS) & VIRTIO_CONFIG_S_NEEDS_RESET != 0
    }

    pub(crate) fn is_in_service(&self) -> bool {
        self.read(reg::VIRTIO_MMIO_STATUS) & IN_SERVICE == IN_SERVICE
    }

    /// Resets the device and takes it into service as virtio 1.2 §3.1.1 has it. Fails where the device does not agree.
    pub(crate) fn activate(&self, memory: &Memory, features: u64, rings: &[Ring]) {
        self.write(reg::VIRTIO_MMIO_STATUS, 0);
        self.write(reg::VIRTIO_MMIO_STATUS, 1);
        self.write(reg::VIRTIO_MMIO_STATUS, 3);
        for (select, half) in [(0, features), (1, features >> 32)] {
            self.write(reg::VIRTIO_MMIO_DRIVER_FEATURES_SEL, select);
            self.write(reg::VIRTIO_MMIO_DRIVER_FEATURES, low(half));
        }
        self.write(reg::VIRTIO_MMIO_STATUS, FEATURES_AGREED);
        for (index, ring) in (0..).zip(rings) {
            let zeros = vec![0; usize::from(ring.size) * 32];
            for part in ring.ranges() {
                let len = usize::try_from(part.end - part.start).expect("small");
                memory.write(part.start, &zeros[..len]);
            }
            self.write(reg::VIRTIO_MMIO_QUEUE_SEL, index);
            self.write(reg::VIRTIO_MMIO_QUEUE_NUM, ring.size.into());
            for (low_register, high_register, address) in [
                (
                    reg::VIRTIO_MMIO_QUEUE_DESC_LOW,
                    reg::VIRTIO_MMIO_QUEUE_DESC_HIGH,
                    ring.descriptors,
                ),
                (
                    reg::VIRTIO_MMIO_QUEUE_AVAIL_LOW,
                    reg::VIRTIO_MMIO_QUEUE_AVAIL_HIGH,
                    ring.available,
                ),
                (
                    reg::VIRTIO_MMIO_QUEUE_USED_LOW,
                    reg::VIRTIO_MMIO_QUEUE_USED_HIGH,
                    ring.used,
                ),
            ] {
                self.write(low_register, low(address));
                self.write(high_register, low(address >> 32));
            }
            self.write(reg::VIRTIO_MMIO_QUEUE_READY, 1);
        }
        self.write(reg::VIRTIO_MMIO_STATUS, IN_SERVICE);
        assert_eq!(
            self.read(reg::VIRTIO_MMIO_STATUS),
            IN_SERVICE,
            "a driver that keeps the rules is taken into service"
        );
    }

    /// One turn of the event loop; whether there was something to do.
    pub(crate) fn turn(&mut self) -> bool {
        self.manager
            .run_with_timeout(0)
            .expect("the event loop goes on")
            > 0
    }

    /// Runs the event loop until nothing is to be done, and checks that this comes soon, and that the device writes to nothing but used
    /// rings and what descriptors of the queues `writes_to` name as writable. `after_turn` is called after each turn.
    ///
    /// The result is false where a ring feeds itself: then only the turns were checked.
    pub(crate) fn settle(
        &mut self,
        memory: &Memory,
        rings: &[Ring],
        writes_to: &[usize],
        mut after_turn: impl FnMut(),
    ) -> bool {
        // A queue that is broken is left alone; the others of the device go on.
        let was_serving = self.is_in_service();
        let before = memory.snapshot();
        let buffers = |allowed: &mut Vec<Range<u64>>| {
            for index in writes_to {
                allowed.extend(
                    rings
                        .get(*index)
                        .into_iter()
                        .flat_map(|ring| ring.writable_buffers(memory)),
                );
            }
        };
        let mut allowed: Vec<Range<u64>> = Vec::new();
        if was_serving {
            allowed.extend(rings.iter().map(Ring::used_range));
            buffers(&mut allowed);
        }
        let messy = feeds_itself(memory, rings);
        let most = if messy {
            TURNS_OF_RING_THAT_FEEDS_ITSELF
        } else {
            TURNS_MAX
        };
        let mut turns = 0;
        while turns < most && self.turn() {
            after_turn();
            turns += 1;
        }
        assert!(messy || turns < most, "the event loop spins");
        if !messy {
            memory.check_unchanged_but(&before, &allowed);
        }
        !messy
    }
}

/// The low 32 bits.
pub(crate) fn low(value: u64) -> u32 {
    let [a, b, c, d, ..] = value.to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}
