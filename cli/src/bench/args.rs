//! What may be said of a measurement.

use clap::{Args, Subcommand};

use crate::args::{MachineArgs, parse_name};
use crate::quantity::number;

/// Runs that `bench` makes unless told otherwise.
const DEFAULT_BENCH_RUNS: u32 = 20;

/// Machines that `bench density` keeps alive unless told otherwise, and at most: each has a process and some descriptors.
const DEFAULT_DENSITY_MACHINES: u32 = 16;
const MAX_DENSITY_MACHINES: u32 = 10_000;

/// Most runs of one `bench`: their samples are kept until the end, 64 bytes each.
const MAX_BENCH_RUNS: u32 = 1_000_000;

/// What to measure.
#[derive(Debug, Subcommand)]
pub(crate) enum Bench {
    /// Boot fresh machines one after another and print when each phase was reached
    Boot(BenchBootArgs),
    /// Fork a template one after another, have each fork's warm interpreter print, and print when each phase was reached
    Fork(BenchForkArgs),
    /// Pass bytes through a command's streams, out of a machine and in, and one byte to and fro
    Streams(BenchStreamsArgs),
    /// Keep more and more machines alive, and print at each doubling how long the next took to be ready and what each holds of memory
    Density(BenchDensityArgs),
}

/// `sandvmm bench boot`.
#[derive(Debug, Args)]
pub(crate) struct BenchBootArgs {
    /// How many machines to boot
    #[arg(short = 'n', long = "runs", value_name = "N", default_value_t = DEFAULT_BENCH_RUNS,
          allow_negative_numbers = true, value_parser = number::<u32>(1..=MAX_BENCH_RUNS))]
    pub(crate) runs: u32,
    /// Print one JSON object with every sample
    #[arg(long)]
    pub(crate) json: bool,
    /// The machine.
    #[command(flatten)]
    pub(crate) machine: MachineArgs,
}

/// `sandvmm bench fork`.
#[derive(Debug, Args)]
pub(crate) struct BenchForkArgs {
    /// How many forks to make
    #[arg(short = 'n', long = "runs", value_name = "N", default_value_t = DEFAULT_BENCH_RUNS,
          allow_negative_numbers = true, value_parser = number::<u32>(1..=MAX_BENCH_RUNS))]
    pub(crate) runs: u32,
    /// Print one JSON object with every sample
    #[arg(long)]
    pub(crate) json: bool,
    /// Fork this template, built with --warm [default: one of the machine below, built for the measurement and removed]
    #[arg(long, value_name = "NAME", value_parser = parse_name, conflicts_with_all = ["kernel", "initrd", "rootfs", "cpus", "memory"])]
    pub(crate) template: Option<String>,
    /// Take each fork from a pool of so many that wait; clocks begin with the taking
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = number::<u16>(1..=65_535))]
    pub(crate) pool: Option<u16>,
    /// The machine.
    #[command(flatten)]
    pub(crate) machine: MachineArgs,
}

/// `sandvmm bench streams`.
#[derive(Debug, Args)]
pub(crate) struct BenchStreamsArgs {
    /// How often each is measured
    #[arg(short = 'n', long = "runs", value_name = "N", default_value_t = DEFAULT_BENCH_RUNS,
          allow_negative_numbers = true, value_parser = number::<u32>(1..=MAX_BENCH_RUNS))]
    pub(crate) runs: u32,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// The machine.
    #[command(flatten)]
    pub(crate) machine: MachineArgs,
}

/// `sandvmm bench density`.
#[derive(Debug, Args)]
pub(crate) struct BenchDensityArgs {
    /// How many machines to keep alive, as far as they start
    #[arg(short = 'n', long = "machines", value_name = "N", default_value_t = DEFAULT_DENSITY_MACHINES,
          allow_negative_numbers = true, value_parser = number::<u32>(1..=MAX_DENSITY_MACHINES))]
    pub(crate) machines: u32,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Fork this template instead of booting
    #[arg(long, value_name = "NAME", value_parser = parse_name, conflicts_with_all = ["kernel", "initrd", "rootfs", "cpus", "memory"])]
    pub(crate) template: Option<String>,
    /// The machine.
    #[command(flatten)]
    pub(crate) machine: MachineArgs,
}
