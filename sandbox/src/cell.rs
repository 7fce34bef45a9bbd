//! The cell around a machine's process: what a guest that breaks out of its virtual machine finds itself in.
//!
//! It has all its parts unless the host lacks one or the builder leaves it out
//! ([`crate::SandboxBuilder::dangerously_leave_out`]); [`crate::Sandbox::cell`] says which are on.

pub use jailer::{Cell, CgroupBounds, Ids, Missing, Namespace, Namespaces, Part, Parts};
