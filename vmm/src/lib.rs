//! One virtual machine: guest memory, vCPUs, boot protocol, event loop.
//!
//! This crate is the inside of a *machine's process*. It takes open descriptors and never a path, holds
//! no policy, and speaks to its supervisor over one socket: see [`control`]. [`fn@serve`] is all of it:
//!
//! ```text
//!  serve ── receives Start ──► builder: memory → slots → interrupt controller → kernel → devices → vCPUs
//!    │                            │
//!    │◄───────── Machine ─────────┘          vCPU threads ── exits ──► devices
//!    └─ event loop: control socket, end of the machine, devices
//! ```

pub mod boot;
pub mod builder;
pub mod cmdline;
pub mod control;
pub mod cpuid;
pub mod disk;
pub mod end;
mod event_loop;
pub mod host;
pub mod kernel;
pub mod layout;
mod line;
mod machine;
pub mod memory;
pub mod mptable;
pub mod registers;
pub mod restore;
mod serve;
mod shell;
pub mod snapshot;
pub mod vcpu;
mod volatile_io;
mod wiring;

pub use serve::{Hooks, Served, ThreadKind, serve, serve_with};
