//! `sandvmm bench boot`: fresh machines.

use std::time::Instant;

use sandvmm::Clocks;

use super::args::BenchBootArgs;
use super::{GREETING, Measured, check, measure};
use crate::args::MachineArgs;
use crate::{machine, notice};

/// Boots, prints, and gives the exit code.
pub(crate) fn boot(args: &BenchBootArgs) -> u8 {
    let measured = Measured {
        what: "boots",
        cpus: args.machine.cpus,
        memory_mib: args.machine.memory,
        greeting: machine::GUEST_INIT,
    };
    measure(measured, args.runs, args.json, || boot_once(&args.machine))
}

fn boot_once(args: &MachineArgs) -> Result<Clocks, String> {
    let sandbox = machine::builder(args, Instant::now())
        .start()
        .map_err(|error| notice::sentence(&error))?;
    let output = sandbox
        .command("echo")
        .arg(GREETING)
        .output()
        .map_err(|error| notice::sentence(&error))?;
    check(&output)?;
    Ok(sandbox.end().clocks)
}
