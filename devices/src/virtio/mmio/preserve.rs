//! A register file into a snapshot and out of it.

use super::{MmioTransport, Registers, lock, reg, step};
use crate::virtio::device::VirtioDevice;
use crate::virtio::registers::QueueLayout;
use crate::virtio::state::{MAX_CONFIG_BYTES, Preserve, QueueState, StateError, TransportState};
use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_FAILED, VIRTIO_CONFIG_S_NEEDS_RESET,
};

/// All reasons for an interrupt.
const INTERRUPTS: u32 = reg::VIRTIO_MMIO_INT_VRING | reg::VIRTIO_MMIO_INT_CONFIG;

impl<D: VirtioDevice> Preserve for MmioTransport<D> {
    fn save(&self) -> TransportState {
        let registers = lock(&self.registers);
        let device = lock(&self.device);
        let mut config = vec![0; MAX_CONFIG_BYTES];
        device.read_config(0, &mut config);
        TransportState {
            device_type: self.device_type,
            offered_features: self.offered_features,
            config,
            device_status: self.interrupt.device_status(),
            interrupt_status: self.interrupt.interrupt_status(),
            device_features_sel: registers.device_features_sel,
            driver_features_sel: registers.driver_features_sel,
            driver_features: registers.driver_features,
            wants_unknown_feature: registers.wants_unknown_feature,
            queue_sel: registers.queue_sel,
            queues: registers
                .queues
                .iter()
                .map(|slot| QueueState {
                    size: slot.registers.size,
                    descriptor_table: slot.registers.descriptor_table,
                    driver_area: slot.registers.driver_area,
                    device_area: slot.registers.device_area,
                    is_ready: slot.ready.is_some(),
                })
                .collect(),
            positions: device.positions(),
        }
    }

    fn restore(&self, state: &TransportState) -> Result<(), StateError> {
        self.check_device(state)?;
        check_status(state)?;
        let mut registers = lock(&self.registers);
        self.restore_registers(&mut registers, state)?;
        // The status first: a queue that is found broken in between may add to it.
        self.interrupt
            .restore(state.device_status, state.interrupt_status);
        if !state.positions.is_empty() {
            self.activate(&registers, &state.positions)?;
        }
        Ok(())
    }

    fn repeat_signals(&self) {
        (0..self.queue_events.len()).for_each(|index| self.queue_events.kick(index));
        self.interrupt.repeat();
    }
}

impl<D: VirtioDevice> MmioTransport<D> {
    /// Whether the state is of a device like this one.
    fn check_device(&self, state: &TransportState) -> Result<(), StateError> {
        if state.device_type != self.device_type {
            return Err(StateError::DeviceType {
                saved: state.device_type,
                device_type: self.device_type,
            });
        }
        if state.offered_features != self.offered_features {
            return Err(StateError::Features {
                saved: state.offered_features,
                offered: self.offered_features,
            });
        }
        let mut config = vec![0; MAX_CONFIG_BYTES];
        lock(&self.device).read_config(0, &mut config);
        if state.config == config {
            Ok(())
        } else {
            Err(StateError::Config)
        }
    }

    /// Sets what the driver wrote, checked as if it did so now.
    fn restore_registers(
        &self,
        registers: &mut Registers,
        state: &TransportState,
    ) -> Result<(), StateError> {
        let invalid = |what| Err(StateError::Registers { what });
        let count = registers.queues.len();
        if state.queues.len() != count {
            return invalid("another number of queues");
        }
        let is_active = state.device_status & VIRTIO_CONFIG_S_DRIVER_OK != 0;
        if state.positions.len() != if is_active { count } else { 0 } {
            return invalid("a device in service has a position for each queue, another has none");
        }
        registers.device_features_sel = state.device_features_sel;
        registers.driver_features_sel = state.driver_features_sel;
        registers.driver_features = state.driver_features;
        registers.wants_unknown_feature = state.wants_unknown_feature;
        registers.queue_sel = state.queue_sel;
        let agreed = state.device_status & step::FEATURES_AGREED == step::FEATURES_AGREED;
        if agreed && !self.acceptable(registers) {
            return invalid("features were agreed on that are not offered");
        }
        for (index, (slot, saved)) in registers.queues.iter_mut().zip(&state.queues).enumerate() {
            slot.registers.size = saved.size;
            slot.registers.descriptor_table = saved.descriptor_table;
            slot.registers.driver_area = saved.driver_area;
            slot.registers.device_area = saved.device_area;
            if saved.is_ready {
                if !agreed {
                    return invalid("a queue is ready before features were agreed on");
                }
                let layout = QueueLayout::check(&slot.registers, &self.memory)
                    .map_err(|source| StateError::Layout { index, source })?;
                slot.ready = Some(layout);
            }
        }
        Ok(())
    }
}

/// Whether the handshake leads to these registers.
fn check_status(state: &TransportState) -> Result<(), StateError> {
    let invalid = |what| Err(StateError::Registers { what });
    let driver = state.device_status & !(VIRTIO_CONFIG_S_NEEDS_RESET | VIRTIO_CONFIG_S_FAILED);
    let steps = [
        0,
        step::ACKNOWLEDGED,
        step::DRIVER_FOUND,
        step::FEATURES_AGREED,
        step::FEATURES_AGREED | VIRTIO_CONFIG_S_DRIVER_OK,
    ];
    if !steps.contains(&driver) {
        return invalid("a device status that no handshake leads to");
    }
    if state.interrupt_status & !INTERRUPTS != 0 {
        return invalid("an interrupt without a reason");
    }
    let needs_reset = state.device_status & VIRTIO_CONFIG_S_NEEDS_RESET != 0;
    if state.positions.iter().any(|position| position.is_retired) && !needs_reset {
        return invalid("a queue has retired, and the driver was not told");
    }
    Ok(())
}
