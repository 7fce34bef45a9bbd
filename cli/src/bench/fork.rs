//! `sandvmm bench fork`: forks of a template with a warm interpreter.

use std::time::Instant;

use sandvmm::{Clocks, Pool, Sandbox, Template, TemplateError};

use super::args::BenchForkArgs;
use super::{FAILED, GREETING, Measured, check, measure};
use crate::args::MachineArgs;
use crate::{machine, notice};

/// What each fork runs.
const INTERPRETER: &str = "python3";

/// Code that warms the template which is made for the measurement: an interpreter without any imports.
const WARM_CODE: &str = "pass";

/// What the agent's first word in a fork is called.
const FORK_GREETING: &str = "agent greets";

/// Forks, prints, and gives the exit code.
pub(crate) fn fork(args: &BenchForkArgs) -> u8 {
    let template = match template(args) {
        Ok(template) => template,
        Err(error) => {
            notice::say(&notice::sentence(&error));
            return FAILED;
        }
    };
    let inputs = &template.manifest().inputs;
    let measured = Measured {
        what: "forks",
        cpus: inputs.cpus,
        memory_mib: inputs.memory_mib,
        greeting: FORK_GREETING,
    };
    let Some(ready) = args.pool else {
        return measure(measured, args.runs, args.json, || {
            fork_once(&template, &args.machine)
        });
    };
    let (ready, machine) = (usize::from(ready), args.machine.clone());
    let pool = Pool::builder(&template)
        .ready(ready)
        // No room for a next one: it would be made while the one that is measured runs.
        .ceiling(ready)
        .options(move |builder| machine::with_cell(builder, &machine, Instant::now()))
        .build();
    match pool {
        Ok(pool) => measure(measured, args.runs, args.json, || take_once(&pool)),
        Err(error) => {
            notice::say(&notice::sentence(&error));
            FAILED
        }
    }
}

/// The named template, or one that is made for this and has no name any more when it is returned.
fn template(args: &BenchForkArgs) -> Result<Template, TemplateError> {
    if let Some(name) = &args.template {
        return Template::open(name);
    }
    let name = format!("bench-{}", std::process::id());
    let template = Template::builder(&name)
        .sandbox(machine::builder(&args.machine, Instant::now()))
        .warm(WARM_CODE)
        .build()?;
    Template::remove(&name)?;
    Ok(template)
}

fn fork_once(template: &Template, args: &MachineArgs) -> Result<Clocks, String> {
    let sandbox = machine::with_cell(template.sandbox(), args, Instant::now())
        .begin()
        .map_err(|error| notice::sentence(&error))?;
    // Asked for before the machine is there, as `run` does: it need not wait for an answer then.
    greet(&sandbox)
}

fn take_once(pool: &Pool) -> Result<Clocks, String> {
    pool.wait_filled()
        .map_err(|error| notice::sentence(&error))?;
    let sandbox = pool.take().map_err(|error| notice::sentence(&error))?;
    greet(&sandbox)
}

fn greet(sandbox: &Sandbox) -> Result<Clocks, String> {
    let output = sandbox
        .command(INTERPRETER)
        .arg("-c")
        .arg(format!("print({GREETING:?})"))
        .output()
        .map_err(|error| why(sandbox, &notice::sentence(&error)))?;
    check(&output)?;
    if !output.completion.warm {
        return Err("The template has no warm interpreter: build it with --warm".to_owned());
    }
    Ok(sandbox.end().clocks)
}

/// Why nothing ran: that the machine did not start says more than that it is gone.
fn why(sandbox: &Sandbox, spawn_failure: &str) -> String {
    match sandbox.wait_ready() {
        Err(error) => notice::sentence(&error),
        Ok(()) => spawn_failure.to_owned(),
    }
}
