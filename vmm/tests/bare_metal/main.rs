//! Bare-metal guests of a few hundred instructions, on this machine's `/dev/kvm`, hardware-backed or not.
//!
//! Each is entered by the machine's own boot path, from an ELF file that the test makes. Where `/dev/kvm` can't be opened, every test
//! says that it was skipped, by name.

mod guest;
mod payload;
mod script;

mod devices;
mod lifecycle;
