//! `sandvmm bench density`: more and more machines that live at once.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use sandvmm::{Sandbox, Template};
use serde::Serialize;

use super::args::BenchDensityArgs;
use super::footprint::{self, Footprint};
use super::statistics::Summary;
use super::{FAILED, millis};
use crate::{machine, notice, output};

/// The object of `--json`.
#[derive(Debug, Serialize)]
struct Report {
    cpus: u8,
    memory_mib: u32,
    template: Option<String>,
    /// One for each doubling of the machines, in their order.
    levels: Vec<Level>,
    /// Why there are no more machines; null where as many live as were asked for.
    ended_by: Option<String>,
}

/// So many machines that live at once and do nothing.
#[derive(Debug, Serialize)]
struct Level {
    alive: u32,
    /// From the call until the machine takes commands, for those that were started since the level before.
    ready_us: Option<Summary>,
    /// Of these machines, one after another.
    starts_per_second: f64,
    /// Pages of guest memory that are there, of all that live; null where that may not be looked into.
    guest_kib: Option<Spread>,
    /// What their processes alone have beside it.
    own_kib: Option<Spread>,
    /// By how much less memory the host has for something else than before the first, for each.
    host_kib_each: Option<u64>,
}

/// Figures of many machines.
#[derive(Debug, Serialize)]
struct Spread {
    p50: u64,
    max: u64,
}

/// Measures, prints, and gives the exit code.
pub(crate) fn density(args: &BenchDensityArgs) -> u8 {
    let template = args.template.as_deref().map(Template::open).transpose();
    let template = match template {
        Ok(template) => template,
        Err(error) => {
            notice::say(&notice::sentence(&error));
            return FAILED;
        }
    };
    let inputs = template
        .as_ref()
        .map(|template| &template.manifest().inputs);
    let mut report = Report {
        cpus: inputs.map_or(args.machine.cpus, |inputs| inputs.cpus),
        memory_mib: inputs.map_or(args.machine.memory, |inputs| inputs.memory_mib),
        template: args.template.clone(),
        levels: Vec::new(),
        ended_by: None,
    };
    let available_kib = footprint::available_kib();
    let mut alive = Vec::new();
    let mut wanted = 1;
    while report.ended_by.is_none() && alive.len() < args.machines as usize {
        let level = wanted.min(args.machines);
        let begun = Instant::now();
        let mut took = Vec::new();
        while alive.len() < level as usize && report.ended_by.is_none() {
            match start(args, template.as_ref()) {
                Ok((sandbox, ready)) => {
                    alive.push(sandbox);
                    took.push(ready);
                }
                Err(sentence) => report.ended_by = Some(sentence),
            }
        }
        if !took.is_empty() {
            let lived = begun.elapsed();
            report
                .levels
                .push(level_of(alive.len(), &took, lived, available_kib));
        }
        wanted = wanted.saturating_mul(2);
    }
    drop(alive);
    let code = if report.levels.is_empty() { FAILED } else { 0 };
    if let Some(sentence) = &report.ended_by {
        notice::say(&format!("No more machines: {sentence}"));
    }
    let text = if args.json {
        // Numbers and sentences alone can't fail to be JSON.
        format!("{}\n", serde_json::to_string(&report).unwrap_or_default())
    } else {
        table(&report)
    };
    output::print(&text, code)
}

/// Starts one more; it takes commands when this returns.
fn start(
    args: &BenchDensityArgs,
    template: Option<&Template>,
) -> Result<(Sandbox, Duration), String> {
    let called_at = Instant::now();
    let builder = match template {
        Some(template) => machine::with_cell(template.sandbox(), &args.machine, called_at),
        None => machine::builder(&args.machine, called_at),
    };
    let sandbox = builder
        .timeout(None)
        .start()
        .map_err(|error| notice::sentence(&error))?;
    let ready = sandbox.clocks().agent_ready;
    let ready = ready.ok_or("A machine is ready that did not say so")?;
    Ok((sandbox, ready))
}

fn level_of(
    alive: usize,
    took: &[Duration],
    lived: Duration,
    available_before_kib: Option<u64>,
) -> Level {
    let footprints: Option<Vec<Footprint>> = footprint::children()
        .into_iter()
        .map(footprint::of)
        .collect();
    let spread = |figure: fn(&Footprint) -> u64| {
        let mut figures: Vec<u64> = footprints.as_ref()?.iter().map(figure).collect();
        figures.sort_unstable();
        Some(Spread {
            p50: *figures.get((figures.len().checked_sub(1)?) / 2)?,
            max: *figures.last()?,
        })
    };
    let machines = u32::try_from(alive).unwrap_or(u32::MAX);
    let lost_kib = available_before_kib
        .zip(footprint::available_kib())
        .map(|(before, now)| before.saturating_sub(now));
    Level {
        alive: machines,
        ready_us: Summary::of(took),
        starts_per_second: f64::from(u32::try_from(took.len()).unwrap_or(u32::MAX))
            / lived.as_secs_f64().max(f64::MIN_POSITIVE),
        guest_kib: spread(|footprint| footprint.guest_kib),
        own_kib: spread(|footprint| footprint.own_kib),
        host_kib_each: lost_kib.map(|lost| lost / u64::from(machines.max(1))),
    }
}

fn table(report: &Report) -> String {
    let mut text = format!(
        "Machines that live at once; {} vCPU, {} MiB; milliseconds to readiness, KiB of memory a machine (median)\n\n\
         {:>8}{:>12}{:>12}{:>12}{:>12}{:>12}{:>12}{:>12}\n",
        report.cpus,
        report.memory_mib,
        "alive",
        "p50",
        "p99",
        "max",
        "starts/s",
        "guest's",
        "process's",
        "host's"
    );
    for level in &report.levels {
        let dash = || "-".to_owned();
        let figure = |micros: Option<u64>| micros.map_or_else(dash, millis);
        let kib = |spread: &Option<Spread>| {
            spread
                .as_ref()
                .map_or_else(dash, |spread| spread.p50.to_string())
        };
        let ready = level.ready_us;
        // Writing to a String does not fail.
        let _ = writeln!(
            text,
            "{:>8}{:>12}{:>12}{:>12}{:>12.1}{:>12}{:>12}{:>12}",
            level.alive,
            figure(ready.map(|ready| ready.p50)),
            figure(ready.and_then(|ready| ready.p99)),
            figure(ready.map(|ready| ready.max)),
            level.starts_per_second,
            kib(&level.guest_kib),
            kib(&level.own_kib),
            level.host_kib_each.map_or_else(dash, |kib| kib.to_string()),
        );
    }
    text
}
