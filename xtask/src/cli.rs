//! The command line of `cargo xtask`.

use std::ffi::OsString;

use clap::{Parser, Subcommand};

/// Developer tasks of sandvmm.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) task: Task,
}

/// The tasks.
#[derive(Debug, Subcommand)]
pub(crate) enum Task {
    /// Run a command on a KVM host: this machine where it has hardware virtualization, else an emulated one
    Host {
        /// Use the emulated host, with one processor, and let one instruction be one nanosecond of every clock
        #[arg(long)]
        count_instructions: bool,
        /// Program and arguments
        #[arg(required = true, last = true, value_name = "COMMAND")]
        command: Vec<OsString>,
    },
    /// (internal) Serve as the emulated host's first process
    #[command(hide = true)]
    HostAgent,
}
