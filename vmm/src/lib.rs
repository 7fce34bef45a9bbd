//! One virtual machine: guest memory, vCPUs, boot protocol, event loop.
//!
//! This crate is the inside of a *machine's process*. It takes open descriptors and never a path, holds
//! no policy, and speaks to its supervisor over one socket: see [`control`].

pub mod control;
