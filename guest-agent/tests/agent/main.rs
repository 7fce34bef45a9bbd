//! The agent's whole loop with real stages and programs, on this host's sockets instead of vsock, and on plain
//! folders instead of cgroups. It needs no rights: commands run as the tests' own user.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests fail as tests do"
)]

mod calls;
mod files;
mod host;
mod late;
mod programs;
mod streams;
mod terminals;
