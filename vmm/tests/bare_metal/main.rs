//! Bare-metal guests of a few hundred instructions, on this machine's `/dev/kvm`, hardware-backed or not.
//!
//! Each is entered by the machine's own boot path, from an ELF file that the test makes. Where `/dev/kvm` can't be opened, every test
//! says that it was skipped, by name.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "an expectation that is not met is a failed test"
)]

mod elf;
mod guest;
mod payload;
mod script;
mod snapshot;

mod devices;
mod forks;
mod lifecycle;
mod refusals;
