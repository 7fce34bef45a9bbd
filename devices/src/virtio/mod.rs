//! The virtio-mmio transport, and what virtio devices share.
//!
//! A queue exists as two types. [`registers::QueueRegisters`] is what the driver writes, free to be nonsense;
//! [`queue::ActiveQueue`] has passed every check and is what a device serves. Setting DRIVER_OK turns
//! all of a device's queues from the one into the other, or none of them.

pub mod chain;
pub mod device;
pub mod interrupt;
pub mod mmio;
pub mod queue;
pub mod registers;
pub mod state;
#[cfg(test)]
pub(crate) mod testing;

pub use chain::{BufferError, Buffers, Chain, Segment};
pub use device::{Activation, ActivationError, QueueEvents, VirtioDevice, read_config_bytes};
pub use interrupt::VirtioInterrupt;
pub use mmio::MmioTransport;
pub use queue::{ActiveQueue, Drained, QueueError, Served};
pub use state::{Preserve, QueuePosition, StateError, TransportState};
