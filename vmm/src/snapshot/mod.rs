//! A machine into two files, and what is needed to take it out of them again.
//!
//! The *memory file* holds the guest's memory, range after range, as it is: a restored machine maps it privately. The *state file* is
//! everything else, in checked parts ([`mod@format`]). Both are opened by the supervisor.
//!
//! Taking a snapshot (`take`), on the event loop's thread:
//!
//! 1. All processors leave the guest and wait. What a device was asked for before is done: requests are served whole on this
//!    very thread.
//! 2. The devices are saved, before anything of KVM's: serving them could raise an interrupt.
//! 3. Each processor saves its registers on its own thread (`vcpu`).
//! 4. The interrupt controllers and the clock (`chips`).
//! 5. The memory (`memory`), then the state.
//!
//! An interrupt may be on its way from a device to the interrupt controller through a worker of the host's kernel during all this,
//! and then is in neither. The device knows that it is pending, and a restored one raises it again
//! ([`devices::virtio::Preserve::repeat_signals`]).
//!
//! A restore is [`crate::restore`].

pub(crate) mod chips;
pub mod format;
pub(crate) mod memory;
mod raw;
pub mod state;
mod take;
pub(crate) mod tsc;
pub mod vcpu;
pub mod working_set;

pub use take::TakeError;
pub(crate) use take::{Files, take};
