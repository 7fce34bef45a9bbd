//! What may be said of a prompt.

use std::path::PathBuf;

use clap::Args;

use crate::args::{MachineArgs, NetworkArgs, ProgramArgs, parse_name};
use crate::quantity::Timeout;

/// `sandvmm repl`.
#[derive(Debug, Clone, Args)]
pub(crate) struct ReplArgs {
    /// Longest time for all of it, for example 10m; 0 for none
    #[arg(long, value_name = "DURATION", default_value = "0", allow_hyphen_values = true, value_parser = Timeout::parse)]
    pub(crate) timeout: Timeout,
    /// Longest time for each input; it is interrupted then. 0 for none
    #[arg(long, value_name = "DURATION", default_value = "0", allow_hyphen_values = true, value_parser = Timeout::parse)]
    pub(crate) deadline: Timeout,
    /// Keep figures of matplotlib, and other images, as files of this folder
    #[arg(long, value_name = "FOLDER")]
    pub(crate) figures: Option<PathBuf>,
    /// What the program finds around it.
    #[command(flatten)]
    pub(crate) program: ProgramArgs,
    /// Fork this template [default: boot]
    #[arg(long, value_name = "NAME", value_parser = parse_name, conflicts_with_all = ["kernel", "initrd", "rootfs", "cpus", "memory"])]
    pub(crate) template: Option<String>,
    /// What leaves and enters.
    #[command(flatten)]
    pub(crate) network: NetworkArgs,
    /// The machine.
    #[command(flatten)]
    pub(crate) machine: MachineArgs,
}
