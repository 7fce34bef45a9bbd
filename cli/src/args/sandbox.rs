//! The options of a sandbox: its machine and its network, and what is kept, handed in and told.

use std::path::PathBuf;

use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser};

use super::{MachineArgs, NetworkArgs, parse_name};
use crate::quantity::{Timeout, number, parse_disk_mib, parse_share_percent};
use crate::run::{Copy, HostFunction};

/// What a guest has at most, however much memory is in it.
const MAX_PROCESSES: u32 = 4096;

/// The sandbox that `run` and `start` make.
#[derive(Debug, Clone, Args)]
pub(crate) struct SandboxArgs {
    /// Most processor time of the machine's process, boot included, for example 10s; 0 for no bound
    #[arg(long, value_name = "DURATION", default_value = "0", allow_hyphen_values = true, value_parser = Timeout::parse)]
    pub(crate) cpu_time: Timeout,
    /// The machine's share of the host's processors in percent of one, for example 50% or 150%; serving it counts too, the boot
    /// included. It needs a control group, and nothing runs without [default: all of its processors and one more]
    #[arg(long, value_name = "PERCENT", allow_hyphen_values = true, value_parser = parse_share_percent)]
    pub(crate) cpu_quota: Option<u32>,
    /// Most processes and threads in the guest at one time [default: one for 256 KiB of memory, 4096 at most; no more than that is
    /// possible]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = number::<u32>(1..=MAX_PROCESSES))]
    pub(crate) max_processes: Option<u32>,
    /// Write what happens in the sandbox to FILE as it happens, one JSON object a line
    #[arg(long, value_name = "FILE")]
    pub(crate) events: Option<PathBuf>,
    /// Copy a file or folder into the guest before the program starts: the copy gets GUEST as its path; may be repeated
    #[arg(long, value_name = "HOST:GUEST", value_parser = copy_parser())]
    pub(crate) upload: Vec<Copy>,
    /// Let the guest call PROGRAM as `host.NAME(...)` of Python's module `sandvmm`, or as `sandvmm-call NAME JSON`: it is started
    /// here for each call, gets the arguments as JSON on its standard input, and prints the result as JSON; may be
    /// repeated
    #[arg(long, value_name = "NAME=PROGRAM", value_parser = host_function_parser())]
    pub(crate) host_function: Vec<HostFunction>,
    /// Keep all that is written in the workspace NAME, which is made if there is none; the next run with it finds
    /// everything again
    #[arg(long, value_name = "NAME", value_parser = parse_name)]
    pub(crate) workspace: Option<String>,
    /// Keep what is written on a disk of the host of this size, for example 1G, instead of in the guest's memory; it is gone at the
    /// end
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, value_parser = parse_disk_mib, conflicts_with = "workspace")]
    pub(crate) disk: Option<u32>,
    /// How much a workspace that is made can hold
    #[arg(long, value_name = "SIZE", default_value = "8G", allow_hyphen_values = true, value_parser = parse_disk_mib, requires = "workspace")]
    pub(crate) workspace_size: u32,
    /// Fork this template [default: `default`, where it exists and has the processors, memory and images that are asked for]
    #[arg(long, value_name = "NAME", value_parser = parse_name,
          conflicts_with_all = ["cold", "kernel", "initrd", "rootfs", "cpus", "memory", "workspace", "disk"])]
    pub(crate) template: Option<String>,
    /// Boot a machine, and fork no template
    #[arg(long)]
    pub(crate) cold: bool,
    /// Let the run have the secrets that its template was built with
    #[arg(long)]
    pub(crate) share_secrets: bool,
    /// What leaves and enters.
    #[command(flatten)]
    pub(crate) network: NetworkArgs,
    /// The machine.
    #[command(flatten)]
    pub(crate) machine: MachineArgs,
}

pub(crate) fn copy_parser() -> impl TypedValueParser<Value = Copy> {
    OsStringValueParser::new().try_map(|word| Copy::parse(&word))
}

fn host_function_parser() -> impl TypedValueParser<Value = HostFunction> {
    OsStringValueParser::new().try_map(|word| HostFunction::parse(&word))
}
