//! Whole machines in a KVM host: each sentence of the README's promises, tried for real.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::cast_possible_truncation,
    reason = "a test and its helpers fail by panicking"
)]

mod bad_input;
mod bench;
mod cell;
mod clients;
mod crash;
mod doctor;
mod egress;
mod environment;
mod events;
mod exit_status;
mod files;
mod fork;
mod host_functions;
mod input;
mod json;
mod language;
mod left_behind;
mod limits;
mod load;
mod logs;
mod network;
mod output;
mod programs;
mod repl;
mod secrets;
mod session;
mod soak;
mod template;
mod terminal;
mod workspace;
