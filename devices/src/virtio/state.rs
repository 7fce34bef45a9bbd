//! What a snapshot keeps of a virtio device, and what is wrong with one that can't be.
//!
//! A [`TransportState`] comes from a file and is as hostile as a guest: [`Preserve::restore`] puts it through the same checks that
//! the driver's own writes go through, and then into a device that is new.

use serde::{Deserialize, Serialize};

use super::device::ActivationError;
use super::registers::LayoutError;

/// The most bytes of a configuration space that are kept: those of the largest, a disk's, are 60.
pub const MAX_CONFIG_BYTES: usize = 64;

/// How far a queue in service is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueuePosition {
    /// Chains that were taken and given back since the queue was taken into service, modulo 2¹⁶.
    pub served: u16,
    /// Whether the driver broke the ring.
    pub is_retired: bool,
}

/// The registers of one queue, as the driver wrote them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueState {
    /// QueueNum.
    pub size: u32,
    /// QueueDesc.
    pub descriptor_table: u64,
    /// QueueDriver.
    pub driver_area: u64,
    /// QueueDevice.
    pub device_area: u64,
    /// QueueReady.
    pub is_ready: bool,
}

/// A register file and the queues behind it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransportState {
    /// DeviceID.
    pub device_type: u32,
    /// What the device offered. Another device at a restore offers something else, and is refused.
    pub offered_features: u64,
    /// The configuration space, up to [`MAX_CONFIG_BYTES`], padded with zeros. The same.
    pub config: Vec<u8>,
    /// Status.
    pub device_status: u32,
    /// InterruptStatus.
    pub interrupt_status: u32,
    /// DeviceFeaturesSel.
    pub device_features_sel: u32,
    /// DriverFeaturesSel.
    pub driver_features_sel: u32,
    /// DriverFeatures, both words.
    pub driver_features: u64,
    /// Whether the driver wanted a feature above 63.
    pub wants_unknown_feature: bool,
    /// QueueSel.
    pub queue_sel: u32,
    /// Every queue's registers.
    pub queues: Vec<QueueState>,
    /// How far every queue is; none where the device is not in service.
    pub positions: Vec<QueuePosition>,
}

/// Why a device can't go on from a state.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// It is of another kind of device.
    #[error("The state is of a device of type {saved}, and the device is of type {device_type}")]
    DeviceType {
        /// In the state.
        saved: u32,
        /// The device's.
        device_type: u32,
    },
    /// The device offers something else than when the snapshot was taken.
    #[error(
        "The device offers features {offered:#x}, and offered {saved:#x} when the snapshot was taken"
    )]
    Features {
        /// In the state.
        saved: u64,
        /// The device's.
        offered: u64,
    },
    /// The device's configuration is another: a disk of another size, for example.
    #[error(
        "The device is configured otherwise than when the snapshot was taken: a disk has another size or is another"
    )]
    Config,
    /// No sequence of writes leads to these registers.
    #[error("The device's registers can't be so: {what}")]
    Registers {
        /// Which.
        what: &'static str,
    },
    /// A queue that is ready has a layout that could not have been made ready.
    #[error("Queue {index} can't be so")]
    Layout {
        /// Which queue.
        index: usize,
        /// Why.
        source: LayoutError,
    },
    /// The device in service could not be.
    #[error("The device can't be taken into service")]
    Activation(#[from] ActivationError),
    /// A port that the device never gives.
    #[error("A connection from the host can't come from port {port}")]
    HostPort {
        /// Which.
        port: u32,
    },
    /// More than the port's buffer holds.
    #[error("A serial port can't hold {bytes} bytes of input")]
    SerialInput {
        /// How many.
        bytes: usize,
    },
}

/// A device with its register file, as a snapshot sees it.
///
/// All calls are made while no processor runs and on the event loop's thread, so that no request is in service.
pub trait Preserve: std::fmt::Debug + Send + Sync {
    /// The state.
    fn save(&self) -> TransportState;

    /// Goes on from a state. The device must be new; after an error it is to be dropped.
    ///
    /// # Errors
    ///
    /// [`StateError`].
    fn restore(&self, state: &TransportState) -> Result<(), StateError>;

    /// The last step of a restore, when the interrupt controller is there: what may have been under way between driver and
    /// device is repeated, a kick for each queue and the interrupt that is pending.
    fn repeat_signals(&self);
}
