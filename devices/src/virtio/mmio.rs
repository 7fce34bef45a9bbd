//! The virtio-mmio register file (virtio 1.2 §4.2.2, version 2).
//!
//! ```text
//!      ACKNOWLEDGE     DRIVER       FEATURES_OK            DRIVER_OK
//!  0 ────────────► 1 ─────────► 3 ──────────────► 11 ─────────────────► 15
//!                       driver features     queue registers      kicks, configuration
//!  ◄───────────────────────── write 0: reset, from anywhere ──────────────┘
//! ```
//!
//! One bit is added at a time and none is ever cleared but by a reset; what is written in the wrong state, at an undefined
//! offset or with another width than 32 bits is ignored, and such a read gives 0.
//!
//! # Locks
//!
//! `registers` before `device`. The event loop holds `device` alone, while it serves requests; it tells the driver through
//! [`VirtioInterrupt`], which is atomic. So acknowledging an interrupt or kicking a queue takes no lock at all.

use std::sync::{Arc, Mutex};

use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_ACKNOWLEDGE, VIRTIO_CONFIG_S_DRIVER, VIRTIO_CONFIG_S_DRIVER_OK,
    VIRTIO_CONFIG_S_FAILED, VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_CONFIG_S_NEEDS_RESET,
    VIRTIO_F_VERSION_1,
};
use virtio_bindings::virtio_mmio as reg;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use vm_memory::GuestMemoryMmap;

use super::device::{Activation, ActivationError, QueueEvents, VirtioDevice};
use super::interrupt::VirtioInterrupt;
use super::queue::ActiveQueue;
use super::registers::{QueueLayout, QueueRegisters, first_overlap};
use super::state::QueuePosition;
use crate::bus::BusDevice;
use crate::interrupt::Interrupt;
use crate::lock;

mod preserve;

/// Length of the register file with its configuration space, in bytes.
pub const MMIO_LEN: u64 = 0x1000;

/// Offset of the configuration space.
pub const CONFIG_OFFSET: u64 = 0x100;

/// Offset of QueueNotify: where the machine puts its ioeventfds, one for each queue's number.
pub const QUEUE_NOTIFY_OFFSET: u64 = 0x50;

/// "virt", little endian.
const MAGIC: u32 = 0x7472_6976;

/// The register file of virtio 1.0 and later.
const VERSION: u32 = 2;

/// "SVMM", little endian. A driver must not depend on it (virtio 1.2 §4.2.2).
const VENDOR: u32 = 0x4d4d_5653;

/// Features that the transport adds to every device's own.
const TRANSPORT_FEATURES: u64 = 1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_EVENT_IDX;

/// What the Status register holds after each step of virtio 1.2 §3.1.1.
mod step {
    use virtio_bindings::virtio_config as bit;

    pub(super) const ACKNOWLEDGED: u32 = bit::VIRTIO_CONFIG_S_ACKNOWLEDGE;
    pub(super) const DRIVER_FOUND: u32 = ACKNOWLEDGED | bit::VIRTIO_CONFIG_S_DRIVER;
    pub(super) const FEATURES_AGREED: u32 = DRIVER_FOUND | bit::VIRTIO_CONFIG_S_FEATURES_OK;
}

/// A device behind a register file.
#[derive(Debug)]
pub struct MmioTransport<D> {
    registers: Mutex<Registers>,
    device: Arc<Mutex<D>>,
    memory: GuestMemoryMmap,
    interrupt: VirtioInterrupt,
    queue_events: QueueEvents,
    device_type: u32,
    offered_features: u64,
}

/// What the driver has written since the last reset, but for the Status register.
#[derive(Debug)]
struct Registers {
    device_features_sel: u32,
    driver_features_sel: u32,
    driver_features: u64,
    /// Whether the driver wanted a feature above 63, which is never offered.
    wants_unknown_feature: bool,
    queue_sel: u32,
    queues: Vec<QueueSlot>,
}

#[derive(Debug)]
struct QueueSlot {
    registers: QueueRegisters,
    /// There while QueueReady reads 1. The registers are frozen then.
    ready: Option<QueueLayout>,
}

impl Registers {
    fn new(queue_max_sizes: impl IntoIterator<Item = u16>) -> Self {
        Self {
            device_features_sel: 0,
            driver_features_sel: 0,
            driver_features: 0,
            wants_unknown_feature: false,
            queue_sel: 0,
            queues: queue_max_sizes
                .into_iter()
                .map(|max_size| QueueSlot {
                    registers: QueueRegisters::new(max_size),
                    ready: None,
                })
                .collect(),
        }
    }

    fn reset(&mut self) {
        *self = Self::new(
            self.queues
                .iter()
                .map(|slot| slot.registers.max_size())
                .collect::<Vec<_>>(),
        );
    }

    fn selected(&self) -> Option<&QueueSlot> {
        self.queues.get(usize::try_from(self.queue_sel).ok()?)
    }

    fn selected_mut(&mut self) -> Option<&mut QueueSlot> {
        self.queues.get_mut(usize::try_from(self.queue_sel).ok()?)
    }
}

impl<D: VirtioDevice> MmioTransport<D> {
    /// Puts a register file in front of `device`, which the event loop serves under the same lock.
    #[must_use]
    pub fn new(device: Arc<Mutex<D>>, memory: GuestMemoryMmap, line: Box<dyn Interrupt>) -> Self {
        let locked = lock(&device);
        let registers = Registers::new(locked.queue_max_sizes().iter().copied());
        let queue_events = locked.queue_events().clone();
        let device_type = locked.device_type();
        let offered_features = locked.features() | TRANSPORT_FEATURES;
        drop(locked);
        Self {
            registers: Mutex::new(registers),
            device,
            memory,
            interrupt: VirtioInterrupt::new(line),
            queue_events,
            device_type,
            offered_features,
        }
    }

    /// The event descriptors to be registered as ioeventfds at [`QUEUE_NOTIFY_OFFSET`], the queue's number being the value to match.
    #[must_use]
    pub fn queue_events(&self) -> &QueueEvents {
        &self.queue_events
    }

    /// The device, to be added to the event loop.
    #[must_use]
    pub fn device(&self) -> &Arc<Mutex<D>> {
        &self.device
    }

    /// Reads a register, or configuration space.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let Some(config_offset) = offset.checked_sub(CONFIG_OFFSET) {
            lock(&self.device).read_config(config_offset, data);
        } else if let Some(offset) = register_offset(offset)
            && let Ok(register) = <&mut [u8; 4]>::try_from(data)
        {
            *register = self.read_register(offset).to_le_bytes();
        }
    }

    /// Writes a register. Configuration space is read-only.
    pub fn write(&self, offset: u64, data: &[u8]) {
        if let Some(offset) = register_offset(offset)
            && let Ok(bytes) = <[u8; 4]>::try_from(data)
        {
            self.write_register(offset, u32::from_le_bytes(bytes));
        }
    }

    fn read_register(&self, offset: u32) -> u32 {
        match offset {
            reg::VIRTIO_MMIO_INTERRUPT_STATUS => return self.interrupt.interrupt_status(),
            reg::VIRTIO_MMIO_STATUS => return self.interrupt.device_status(),
            _ => {}
        }
        let registers = lock(&self.registers);
        match offset {
            reg::VIRTIO_MMIO_MAGIC_VALUE => MAGIC,
            reg::VIRTIO_MMIO_VERSION => VERSION,
            reg::VIRTIO_MMIO_DEVICE_ID => self.device_type,
            reg::VIRTIO_MMIO_VENDOR_ID => VENDOR,
            reg::VIRTIO_MMIO_DEVICE_FEATURES => {
                half(self.offered_features, registers.device_features_sel)
            }
            reg::VIRTIO_MMIO_QUEUE_NUM_MAX => registers
                .selected()
                .map_or(0, |slot| u32::from(slot.registers.max_size())),
            reg::VIRTIO_MMIO_QUEUE_READY => registers
                .selected()
                .map_or(0, |slot| u32::from(slot.ready.is_some())),
            // A region that does not exist has length and base −1 (virtio 1.2 §4.2.2).
            reg::VIRTIO_MMIO_SHM_LEN_LOW
            | reg::VIRTIO_MMIO_SHM_LEN_HIGH
            | reg::VIRTIO_MMIO_SHM_BASE_LOW
            | reg::VIRTIO_MMIO_SHM_BASE_HIGH => u32::MAX,
            // ConfigGeneration with them: the configuration never changes.
            _ => 0,
        }
    }

    fn write_register(&self, offset: u32, value: u32) {
        match offset {
            reg::VIRTIO_MMIO_INTERRUPT_ACK => return self.interrupt.acknowledge(value),
            reg::VIRTIO_MMIO_QUEUE_NOTIFY => return self.notify(value),
            _ => {}
        }
        let mut registers = lock(&self.registers);
        match offset {
            reg::VIRTIO_MMIO_STATUS => self.write_status(&mut registers, value),
            reg::VIRTIO_MMIO_DEVICE_FEATURES_SEL => registers.device_features_sel = value,
            reg::VIRTIO_MMIO_DRIVER_FEATURES_SEL => registers.driver_features_sel = value,
            reg::VIRTIO_MMIO_DRIVER_FEATURES => self.write_driver_features(&mut registers, value),
            reg::VIRTIO_MMIO_QUEUE_SEL => registers.queue_sel = value,
            _ => self.write_queue_register(&mut registers, offset, value),
        }
    }

    /// A kick that came as a plain write: the machine's ioeventfd usually takes it before.
    fn notify(&self, queue: u32) {
        if self.interrupt.device_status() & VIRTIO_CONFIG_S_DRIVER_OK != 0
            && let Ok(index) = usize::try_from(queue)
        {
            self.queue_events.kick(index);
        }
    }

    /// Driver features count between DRIVER and FEATURES_OK.
    fn write_driver_features(&self, registers: &mut Registers, value: u32) {
        if self.driver_status() != step::DRIVER_FOUND {
            return;
        }
        let shift = match registers.driver_features_sel {
            0 => 0,
            1 => 32,
            _ => {
                registers.wants_unknown_feature |= value != 0;
                return;
            }
        };
        registers.driver_features &= !(u64::from(u32::MAX) << shift);
        registers.driver_features |= u64::from(value) << shift;
    }

    /// Queue registers count between FEATURES_OK and DRIVER_OK, and while the queue is not ready.
    fn write_queue_register(&self, registers: &mut Registers, offset: u32, value: u32) {
        if self.driver_status() != step::FEATURES_AGREED {
            return;
        }
        let Some(slot) = registers.selected_mut() else {
            return;
        };
        if offset == reg::VIRTIO_MMIO_QUEUE_READY {
            // A layout that fails its check leaves the queue not ready, as the driver can read.
            slot.ready = match value {
                1 => slot
                    .ready
                    .or_else(|| QueueLayout::check(&slot.registers, &self.memory).ok()),
                _ => None,
            };
            return;
        }
        if slot.ready.is_some() {
            return;
        }
        let queue = &mut slot.registers;
        match offset {
            reg::VIRTIO_MMIO_QUEUE_NUM => queue.size = value,
            reg::VIRTIO_MMIO_QUEUE_DESC_LOW => set_low(&mut queue.descriptor_table, value),
            reg::VIRTIO_MMIO_QUEUE_DESC_HIGH => set_high(&mut queue.descriptor_table, value),
            reg::VIRTIO_MMIO_QUEUE_AVAIL_LOW => set_low(&mut queue.driver_area, value),
            reg::VIRTIO_MMIO_QUEUE_AVAIL_HIGH => set_high(&mut queue.driver_area, value),
            reg::VIRTIO_MMIO_QUEUE_USED_LOW => set_low(&mut queue.device_area, value),
            reg::VIRTIO_MMIO_QUEUE_USED_HIGH => set_high(&mut queue.device_area, value),
            _ => {}
        }
    }

    /// One step of the handshake of virtio 1.2 §3.1.1, or a reset.
    fn write_status(&self, registers: &mut Registers, value: u32) {
        if value == 0 {
            // Waits for the requests in service, then nothing of the device touches memory.
            lock(&self.device).reset();
            registers.reset();
            self.interrupt.reset();
            return;
        }
        let before = self.driver_status();
        // A driver writes back what it reads, so the device's own bit may be in it.
        let after = value & !VIRTIO_CONFIG_S_NEEDS_RESET;
        if before & VIRTIO_CONFIG_S_FAILED != 0 || after & before != before {
            return;
        }
        match (before, after & !before) {
            (0, VIRTIO_CONFIG_S_ACKNOWLEDGE)
            | (step::ACKNOWLEDGED, VIRTIO_CONFIG_S_DRIVER)
            | (_, VIRTIO_CONFIG_S_FAILED) => self.interrupt.add_device_status(after),
            (step::DRIVER_FOUND, VIRTIO_CONFIG_S_FEATURES_OK) if self.acceptable(registers) => {
                self.interrupt.add_device_status(after);
            }
            (step::FEATURES_AGREED, VIRTIO_CONFIG_S_DRIVER_OK) if !self.interrupt.needs_reset() => {
                self.driver_ok(registers);
            }
            _ => {}
        }
    }

    fn acceptable(&self, registers: &Registers) -> bool {
        let wanted = registers.driver_features;
        wanted & !self.offered_features == 0
            && !registers.wants_unknown_feature
            && wanted & (1 << VIRTIO_F_VERSION_1) != 0
    }

    /// Turns the queue registers into queues and hands them to the device, or says that it needs a reset.
    fn driver_ok(&self, registers: &Registers) {
        let beginnings = vec![QueuePosition::default(); registers.queues.len()];
        if self.activate(registers, &beginnings).is_ok() {
            self.interrupt.add_device_status(VIRTIO_CONFIG_S_DRIVER_OK);
            // A driver may have made buffers available before; and the device begins on the event loop.
            (0..self.queue_events.len()).for_each(|index| self.queue_events.kick(index));
        } else {
            // A line that can't be raised costs an interrupt: the status register says it all the same.
            let _ = self.interrupt.set_needs_reset();
        }
    }

    /// Takes the device into service with its queues at these positions, one for each.
    fn activate(
        &self,
        registers: &Registers,
        positions: &[QueuePosition],
    ) -> Result<(), ActivationError> {
        let layouts = registers
            .queues
            .iter()
            .enumerate()
            .map(|(index, slot)| slot.ready.ok_or(ActivationError::QueueNotReady { index }))
            .collect::<Result<Vec<_>, _>>()?;
        let ranges = layouts.iter().flat_map(QueueLayout::ranges).collect();
        if let Some(address) = first_overlap(ranges) {
            return Err(ActivationError::RingsOverlap { address });
        }
        let features = registers.driver_features;
        let event_idx = features & (1 << VIRTIO_RING_F_EVENT_IDX) != 0;
        let queues = layouts
            .into_iter()
            .zip(positions)
            .enumerate()
            .map(|(index, (layout, position))| {
                ActiveQueue::new(
                    layout,
                    *position,
                    event_idx,
                    self.memory.clone(),
                    self.interrupt.clone(),
                )
                .map_err(|source| ActivationError::Queue { index, source })
            })
            .collect::<Result<Vec<_>, _>>()?;
        lock(&self.device).activate(Activation {
            memory: self.memory.clone(),
            queues,
            interrupt: self.interrupt.clone(),
            features,
        })
    }

    /// The Status register without the device's bit.
    fn driver_status(&self) -> u32 {
        self.interrupt.device_status() & !VIRTIO_CONFIG_S_NEEDS_RESET
    }
}

impl<D: VirtioDevice> BusDevice for MmioTransport<D> {
    fn read(&self, offset: u64, data: &mut [u8]) {
        MmioTransport::read(self, offset, data);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        MmioTransport::write(self, offset, data);
    }
}

/// The offset of a register: aligned, and below the configuration space.
fn register_offset(offset: u64) -> Option<u32> {
    (offset.is_multiple_of(4) && offset < CONFIG_OFFSET)
        .then_some(offset)
        .and_then(|offset| u32::try_from(offset).ok())
}

/// The low 32 bits for selector 0, the high ones for 1, and 0 for features that can't exist.
fn half(features: u64, selector: u32) -> u32 {
    let [a, b, c, d, e, f, g, h] = features.to_le_bytes();
    match selector {
        0 => u32::from_le_bytes([a, b, c, d]),
        1 => u32::from_le_bytes([e, f, g, h]),
        _ => 0,
    }
}

fn set_low(address: &mut u64, value: u32) {
    *address = *address & !u64::from(u32::MAX) | u64::from(value);
}

fn set_high(address: &mut u64, value: u32) {
    *address = *address & u64::from(u32::MAX) | u64::from(value) << 32;
}

#[cfg(test)]
mod tests;
