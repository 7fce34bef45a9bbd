//! The command line of `cargo xtask`.

use std::ffi::OsString;

use clap::{Parser, Subcommand, ValueEnum};

/// Developer tasks of sandvmm.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) task: Task,
}

/// What `bench` measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Measurement {
    /// Machines that boot
    Boot,
    /// Machines that are forked
    Fork,
    /// What passes a command's streams
    Streams,
    /// Machines that live at once
    Density,
    /// What leaves a machine, and comes back
    Egress,
}

/// The tasks.
#[derive(Debug, Subcommand)]
pub(crate) enum Task {
    /// Build kernel, root image and initramfs where needed, and install them to the data folder; on a machine with hardware
    /// virtualization also build the default template
    Setup,
    /// Build the guest's kernel and print its SHA-256 and path
    Kernel {
        /// Build it a second time and fail where the bytes differ
        #[arg(long)]
        verify: bool,
    },
    /// Build the guest's root image and print its SHA-256 and path
    Image {
        /// Build it a second time and fail where the bytes differ
        #[arg(long)]
        verify: bool,
    },
    /// Set everything up and run `sandvmm run` with these arguments on a KVM host
    #[command(disable_help_flag = true)]
    Run {
        /// Arguments of `sandvmm run`
        #[arg(
            required = true,
            trailing_var_arg = true,
            allow_hyphen_values = true,
            value_name = "ARGS"
        )]
        arguments: Vec<OsString>,
    },
    /// Run all tests and checks, in real virtual machines too
    Test {
        /// Run these parts alone
        #[arg(long, value_enum, value_name = "PART")]
        only: Vec<Part>,
        /// Run the whole-machine tests with these words in their names alone
        #[arg(value_name = "FILTER")]
        filters: Vec<OsString>,
    },
    /// Count the instructions of a boot and of a fork, phase by phase, of what passes a stream, of a start beside others, and of a MiB that leaves, and keep them in benches/results
    Bench {
        /// How often to boot, to fork, to send and to transfer
        #[arg(short = 'n', long, default_value_t = 5, value_name = "N")]
        runs: u32,
        /// Measure this alone
        #[arg(long, value_enum)]
        only: Option<Measurement>,
        /// Compare with the figures that are kept instead of keeping new ones, and fail where a phase takes 3 % more
        #[arg(long)]
        check: bool,
    },
    /// Fuzz what reads untrusted bytes, one target after another
    Fuzz {
        /// How long each target is fuzzed
        #[arg(long, default_value_t = 60, value_name = "N")]
        seconds: u32,
        /// Fuzz these targets alone
        #[arg(value_name = "TARGET")]
        targets: Vec<String>,
    },
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

/// The parts of `cargo xtask test`, in the order in which they run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Part {
    /// rustfmt finds nothing to change
    Format,
    /// clippy finds nothing to say
    Lint,
    /// Unit tests beside the code, bare-metal guests where /dev/kvm opens, and examples in the documentation
    Unit,
    /// The documentation builds without a warning
    Doc,
    /// Whole machines on a KVM host
    Machine,
}
