//! Starts a machine's process and closes its cell.
//!
//! The supervisor calls [`fn@start`]; the new process calls [`fn@enter`] before it does anything else, and each of its threads
//! [`Inside::close`] before the guest's first instruction. This crate knows no virtio and no KVM objects.
//!
//! ```text
//!  supervisor                             the machine's process
//!  start: cgroup, clone3 with namespaces ──► waits
//!         maps its ids, lets it begin    ──► new session, four descriptors, executes the program
//!  entered: learns what is on            ◄── enter: empty root, limits, no privileges, Landlock
//!                                            … builds the machine …
//!                                            close, on each thread: the filter of system calls
//! ```
//!
//! Every part, what it stops, and what it needs of the host: `docs/cell.md`.

mod block_device;
mod calls;
mod cell;
mod cgroup;
mod cpu_quota;
mod descriptors;
mod enter;
mod heap;
mod ids;
mod landlock;
mod last_words;
mod limits;
mod precedence;
mod privileges;
mod process;
mod report;
mod rlimits;
mod root;
mod seccomp;
mod spawn;
mod start;

pub use block_device::BlockDevice;
pub use calls::call_name;
pub use cell::{Bounds, Cell, CgroupBounds, Ids, Missing, Namespace, Namespaces, Part, Parts};
pub use cgroup::MEMORY_OVERHEAD_MIB;
pub use cpu_quota::Throttled;
pub use descriptors::keep_descriptors;
pub use enter::{EnterError, Inside, enter};
pub use ids::FIRST_MACHINE_ID;
pub use landlock::landlock_abi;
pub use last_words::exit;
pub use limits::name_limit;
pub use process::{MachineProcess, ProcessEnd};
pub use seccomp::{FilterError, Thread};
pub use start::{Options, PROCESS_NAME, StartError, start};
