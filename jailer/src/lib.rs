//! Starts a machine's process and closes its cell.
//!
//! The supervisor calls [`start`]; the new process calls [`enter`] before it does anything else. This crate
//! knows no virtio and no KVM objects. What the cell is made of so far: a process with no environment, no
//! working folder of anybody's, a group of its own, three descriptors, no way to gain privileges, no core
//! dump, no debugger of the same user, and an end that comes with its supervisor's.

mod enter;
mod landlock;
mod process;

pub use enter::{EnterError, enter};
pub use landlock::landlock_abi;
pub use process::{MachineProcess, PROCESS_NAME, ProcessEnd, StartError, start};
