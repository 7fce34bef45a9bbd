//! PID 1 of the guest: it makes the root file system, runs commands and carries their streams.
//!
//! The binary plays one of three roles, told apart by its name. As `/init` it is the *agent*, one event loop
//! in [`agent`]. For each command, and for each file to be written, the agent starts its own binary again as
//! a *stage* ([`stage`]): a process with one thread that joins the command's cgroup, becomes its user, and
//! then becomes its program. All that depends on the image's files or the user's rights happens there, so
//! that no such file can harm the agent. So does the bridge that carries calls of the host's functions ([`calls`]), which stays.
//! Commands that are `python3` may instead be forked from a *warm interpreter*
//! ([`warm`]), which was itself started by a stage. Where the host wants connections to leave or enter, the agent starts
//! its binary as the *gate* ([`gate`]).
#![forbid(unsafe_code)]

pub mod agent;
pub mod boot;
pub mod calls;
pub mod cgroup;
pub mod commands;
pub mod control;
pub mod files;
pub mod gate;
pub mod identity;
pub mod kmsg;
pub mod limits;
pub mod network;
pub mod poll;
pub mod program;
pub mod reaper;
pub mod relay;
pub mod relays;
pub mod renew;
pub mod root;
pub mod spawn;
pub mod stage;
pub mod streams;
pub mod users;
pub mod warm;
