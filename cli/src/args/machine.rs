//! The options of a machine.

use std::path::PathBuf;

use clap::Args;
use sandvmm::cell::Part;

use crate::quantity::{number, parse_memory_mib};

/// The machine that `run` and `bench` make.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Machine")]
pub(crate) struct MachineArgs {
    /// Guest kernel, a vmlinux or bzImage [default: that of the data folder]
    #[arg(long, value_name = "FILE")]
    pub(crate) kernel: Option<PathBuf>,
    /// Initramfs with the guest agent [default: that of the data folder]
    #[arg(long, value_name = "FILE")]
    pub(crate) initrd: Option<PathBuf>,
    /// Raw image of the root file system: erofs, squashfs or ext4 [default: that of the data folder]
    #[arg(long, value_name = "FILE")]
    pub(crate) rootfs: Option<PathBuf>,
    /// Virtual processors
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true, value_parser = number::<u8>(1..=32))]
    pub(crate) cpus: u8,
    /// Memory, for example 256M or 2G
    #[arg(long, value_name = "SIZE", default_value = "256M", allow_hyphen_values = true, value_parser = parse_memory_mib)]
    pub(crate) memory: u32,
    /// Refuse to run without a control group that bounds the machine's processor time and memory; not together with one that is left out
    #[arg(long)]
    pub(crate) require_cgroup: bool,
    /// Leave parts out of the cell around the machine's process: a guest that breaks out of its virtual machine then
    /// meets one wall less for each. namespaces: it sees the host's processes, network and files as their user does;
    /// cgroup: it can use up the host's memory, processors and disks; landlock: one wall less before files, sockets and
    /// signals; seccomp: it can make every system call
    #[arg(long, value_name = "PART,...", value_delimiter = ',', value_parser = parse_part)]
    pub(crate) dangerously_leave_out: Vec<Part>,
}

fn parse_part(name: &str) -> Result<Part, String> {
    Part::ALL
        .into_iter()
        .find(|part| part.name() == name)
        .ok_or_else(|| {
            let names: Vec<&str> = Part::ALL.into_iter().map(Part::name).collect();
            format!("the cell's parts are {}", names.join(", "))
        })
}
