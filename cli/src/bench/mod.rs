//! `sandvmm bench`: machines, one after another, and when each phase of their lives was reached; what passes their streams; and how many live
//! at once.

pub(crate) mod args;
mod boot;
mod density;
mod footprint;
mod fork;
mod statistics;
mod streams;

use std::fmt::Write;
use std::time::Duration;

use sandvmm::{Clocks, Outcome, Output};
use serde::Serialize;

use crate::run::Timeline;
use crate::{machine, notice, output};
pub(crate) use boot::boot;
pub(crate) use density::density;
pub(crate) use fork::fork;
use statistics::Summary;
pub(crate) use streams::streams;

/// Exit code when a machine did not do what it was to do.
const FAILED: u8 = 125;

/// What each machine says, and nothing else.
const GREETING: &str = "hello";

/// The machines that were measured.
#[derive(Debug, Clone, Copy)]
struct Measured {
    /// What they were, in the plural.
    what: &'static str,
    cpus: u8,
    memory_mib: u32,
    /// What the first word of the guest's agent is called: it ends a boot, and begins a fork's renewal.
    greeting: &'static str,
}

/// The object of `--json`.
#[derive(Debug, Serialize)]
struct Report {
    runs: usize,
    cpus: u8,
    memory_mib: u32,
    phases: Vec<PhaseReport>,
    /// One for each run, in their order.
    samples: Vec<Timeline>,
}

#[derive(Debug, Serialize)]
struct PhaseReport {
    name: &'static str,
    /// From the call to the phase's end.
    reached_us: Option<Summary>,
    /// From the end of the phase before.
    took_us: Option<Summary>,
}

/// Makes a machine and has it greet, so many times; prints, and gives the exit code.
fn measure(
    measured: Measured,
    runs: u32,
    as_json: bool,
    mut once: impl FnMut() -> Result<Clocks, String>,
) -> u8 {
    let mut samples = Vec::new();
    for run in 1..=runs {
        match once() {
            Ok(clocks) => samples.push(clocks),
            Err(sentence) => {
                notice::say(&format!("Run {run} of {runs} failed: {sentence}"));
                return FAILED;
            }
        }
    }
    let phases = phases(&samples, measured.greeting);
    let text = if as_json {
        json(measured, &samples, phases)
    } else {
        table(measured, samples.len(), &phases)
    };
    output::print(&text, 0)
}

/// Whether the guest's program said what it was to say.
fn check(output: &Output) -> Result<(), String> {
    let said = String::from_utf8_lossy(&output.stdout);
    if output.completion.outcome == Outcome::Exited(0) && said.trim_end() == GREETING {
        return Ok(());
    }
    Err(format!(
        "The guest's program ended with {:?} and said {said:?}",
        output.completion.outcome
    ))
}

fn phases(samples: &[Clocks], greeting: &'static str) -> Vec<PhaseReport> {
    let mut reached: Vec<(&'static str, Vec<Duration>, Vec<Duration>)> = Vec::new();
    for clocks in samples {
        let mut before = Duration::ZERO;
        for (index, (name, at)) in machine::phases(clocks, greeting).into_iter().enumerate() {
            if reached.len() <= index {
                reached.push((name, Vec::new(), Vec::new()));
            }
            if let (Some(at), Some((_, at_all, took_all))) = (at, reached.get_mut(index)) {
                at_all.push(at);
                took_all.push(at.saturating_sub(before));
                before = at;
            }
        }
    }
    reached
        .into_iter()
        .map(|(name, at, took)| PhaseReport {
            name,
            reached_us: Summary::of(&at),
            took_us: Summary::of(&took),
        })
        .collect()
}

fn json(measured: Measured, samples: &[Clocks], phases: Vec<PhaseReport>) -> String {
    let report = Report {
        runs: samples.len(),
        cpus: measured.cpus,
        memory_mib: measured.memory_mib,
        phases,
        samples: samples.iter().copied().map(Timeline::from).collect(),
    };
    // Numbers and names alone can't fail to be JSON.
    let mut line = serde_json::to_string(&report).unwrap_or_default();
    line.push('\n');
    line
}

fn table(measured: Measured, runs: usize, phases: &[PhaseReport]) -> String {
    let has_p99 = phases.iter().any(|phase| {
        phase
            .reached_us
            .is_some_and(|summary| summary.p99.is_some())
    });
    let last = if has_p99 { "p99" } else { "max" };
    let mut text = format!(
        "{runs} {}, one after another; {} vCPU, {} MiB; milliseconds{}\n\n",
        measured.what,
        measured.cpus,
        measured.memory_mib,
        if has_p99 {
            ""
        } else {
            " (a p99 needs 100 runs)"
        },
    );
    // Writing to a String does not fail.
    let _ = writeln!(
        text,
        "{:<16}{:>30}{:>30}",
        "", "since the call", "of the phase alone"
    );
    let _ = write!(text, "{:<16}", "phase");
    for _ in 0..2 {
        let _ = write!(text, "{:>10}{:>10}{last:>10}", "p50", "p95");
    }
    text.push('\n');
    for phase in phases {
        let _ = write!(text, "{:<16}", phase.name);
        for summary in [phase.reached_us, phase.took_us] {
            match summary {
                Some(summary) => {
                    let last = summary.p99.unwrap_or(summary.max);
                    for value in [summary.p50, summary.p95, last] {
                        let _ = write!(text, "{:>10}", millis(value));
                    }
                }
                None => {
                    let _ = write!(text, "{:>30}", "not reached");
                }
            }
        }
        text.push('\n');
    }
    text
}

/// Microseconds as milliseconds with two decimals.
fn millis(micros: u64) -> String {
    format!("{}.{:02}", micros / 1000, micros % 1000 / 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_takes_what_lies_between_it_and_the_one_before() {
        let mut clocks = Clocks::default();
        clocks.process_started = Some(Duration::from_millis(2));
        clocks.vcpu_running = Some(Duration::from_millis(7));
        clocks.agent_ready = Some(Duration::from_millis(50));

        let phases = phases(&[clocks], "guest init");

        let took = |index: usize| phases[index].took_us.map(|summary| summary.p50);
        assert_eq!(took(0), Some(2_000));
        assert_eq!(took(1), Some(5_000));
        assert_eq!(took(2), None);
        assert_eq!(took(3), Some(43_000));
    }

    #[test]
    fn milliseconds_keep_two_decimals() {
        assert_eq!(millis(0), "0.00");
        assert_eq!(millis(12_345), "12.34");
        assert_eq!(millis(7_090), "7.09");
    }
}
