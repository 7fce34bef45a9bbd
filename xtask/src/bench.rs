//! `cargo xtask bench`: instructions of a boot and of a fork, counted phase by phase in the emulated host, of what passes a stream, and of
//! what leaves a sandbox.

mod cell;
mod check;
mod curve;
mod density;
mod egress;
mod fork;
mod picture;

use std::path::PathBuf;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::cache::{self, Cache, CacheError};
use crate::cli::Measurement;
use crate::host::{HostCommand, HostError};
use crate::packages::{self, PackageError};
use crate::progress::Progress;
use crate::reproducible;
use crate::setup::{self, SetupError};
use crate::workspace::Workspace;

/// Where results are kept, below the project's root.
const RESULTS: &str = "benches/results";
/// Files of that folder.
const BOOTS: &str = "boot.json";
const FORKS: &str = "fork.json";
const STREAMS: &str = "streams.json";
const DENSITY: &str = "density.json";
const TRANSFERS: &str = "egress.json";
/// The machine that is measured: the one that published figures of other monitors are for.
const MACHINE: [&str; 4] = ["--cpus", "1", "--memory", "128M"];

/// Where pictures are kept, below the project's root.
const PICTURES: &str = "docs/img";

/// Milliseconds that each boot of a measurement may take on the emulated host's clock (it takes a third), those that each run of what
/// passes streams may (it takes some ten, and the boot before all of them a hundred), and how often a measurement is tried.
const BOOT_MAX_MS: u32 = 250;
const STREAMS_MAX_MS: u32 = 3_000;
const MEASUREMENT_TRIES: usize = 4;

/// Why there is no result.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BenchError {
    /// No kernel, image, agent or command.
    #[error(transparent)]
    Setup(#[from] SetupError),
    /// No emulated host.
    #[error(transparent)]
    Host(#[from] HostError),
    /// A program that serves is missing.
    #[error(transparent)]
    Packages(#[from] PackageError),
    /// A file could not be read or written.
    #[error(transparent)]
    File(#[from] CacheError),
    /// The measurement failed.
    #[error("The measurement ended with exit code {0}; what it said stands above")]
    Failed(u8),
    /// There is nothing to compare with.
    #[error(
        "The kept figures could not be read: {file}; measure without --check once, which keeps them"
    )]
    Kept {
        /// Where they should be.
        file: PathBuf,
        /// What is wrong with them.
        source: std::io::Error,
    },
    /// Slower than what was kept.
    #[error(
        "A phase got worse; if that is meant, measure without --check and commit benches/results"
    )]
    Worse,
    /// The measurement said something else than expected.
    #[error("Could not understand the measurement's result: {output}")]
    Result {
        /// What it said.
        output: String,
        /// What is wrong with that.
        source: serde_json::Error,
    },
}

/// The part of `sandvmm bench boot --json` and its like that the table shows. One microsecond is a thousand instructions.
#[derive(Debug, Deserialize)]
struct Report {
    phases: Vec<Phase>,
}

#[derive(Debug, Deserialize)]
struct Phase {
    name: String,
    reached_us: Option<Summary>,
    took_us: Option<Summary>,
}

#[derive(Debug, Deserialize)]
struct Summary {
    min: u64,
    p50: u64,
    max: u64,
}

/// Boots, forks and sends `runs` times each, prints tables and keeps the figures; with `compares`, compares them with those that are kept instead.
pub(crate) fn bench(
    workspace: &Workspace,
    runs: u32,
    only: Option<Measurement>,
    compares: bool,
    progress: &Progress,
) -> Result<(), BenchError> {
    let data = setup::setup(workspace, &Cache::open()?, progress)?;
    setup::build_command(workspace, progress)?;
    let files = ["vmlinux", "initramfs.cpio", "rootfs.erofs"].map(|name| data.path().join(name));
    let measure = |what: &str, commands: String| {
        let _step = progress.begin(&format!("Counting the instructions of a {what}"));
        let program = workspace.release_folder().join("sandvmm");
        let command = HostCommand {
            command: vec!["sh".into(), "-c".into(), commands.into()],
            environment: vec![("SANDVMM_HOME".into(), data.path().into())],
            count_instructions: true,
            resident: files.iter().cloned().chain([program]).collect(),
        };
        reports(&command, workspace, progress)
    };
    // Of what has one report: prints it, and compares or keeps it; whether it is worse.
    let passed = |reports: &[Value], what: &str, benchmark: &str, file: &str| {
        let whole = reports.first().unwrap_or(&Value::Null);
        let report = understand(whole)?;
        print!("\n{}", table(what, &report, runs));
        if compares {
            return compare(workspace, file, &report);
        }
        let kept = json!({ "benchmark": benchmark, "report": whole });
        keep(workspace, &files, file, kept)?;
        Ok(false)
    };
    let mut is_worse = false;
    if only.is_none_or(|only| only == Measurement::Boot) {
        let boots = measure("boot", boots(runs, compares))?;
        let whole = boots.first().unwrap_or(&Value::Null);
        let report = understand(whole)?;
        print!("{}", table("boots", &report, runs));
        if compares {
            is_worse |= compare(workspace, BOOTS, &report)?;
        } else {
            let (rows, cell) = cell::rows(&boots);
            print!("{rows}");
            let kept = json!({ "benchmark": "boot", "report": whole, "cell": cell });
            keep(workspace, &files, BOOTS, kept)?;
        }
    }
    if only.is_none_or(|only| only == Measurement::Fork) {
        let forks = measure("fork", fork::commands(runs, compares))?;
        let whole = forks.first().unwrap_or(&Value::Null);
        let report = understand(whole)?;
        print!("\n{}", table("forks", &report, runs));
        if compares {
            is_worse |= compare(workspace, FORKS, &report)?;
        } else {
            let (rows, variants) = fork::rows(&forks);
            print!("{rows}");
            let kept = json!({ "benchmark": "fork", "report": whole, "variants": variants });
            keep(workspace, &files, FORKS, kept)?;
        }
    }
    if only.is_none_or(|only| only == Measurement::Streams) {
        let machine = MACHINE.join(" ");
        let command = format!("sandvmm bench streams --json -n {runs} {machine}");
        let streams = measure("stream", tried(&command, runs * STREAMS_MAX_MS))?;
        is_worse |= passed(&streams, "of each", "streams", STREAMS)?;
    }
    // A curve is looked at; what of it could get worse is in the figures of a boot.
    if !compares && only.is_none_or(|only| only == Measurement::Density) {
        let (command, max_ms) = density::command();
        let density = measure("machine beside others", tried(&command, max_ms))?;
        let whole = density.first().unwrap_or(&Value::Null);
        let levels = levels(whole)?;
        print!("\n{}", density::table(&levels));
        let kept = json!({ "benchmark": "density", "report": whole });
        keep(workspace, &files, DENSITY, kept)?;
    }
    if only.is_none_or(|only| only == Measurement::Egress) {
        packages::ensure(&[egress::NEED], progress)?;
        let transfers = measure("transfer", egress::command(runs))?;
        is_worse |= passed(&transfers, "transfers", "egress", TRANSFERS)?;
    }
    if is_worse {
        return Err(BenchError::Worse);
    }
    if !compares {
        draw(workspace)?;
    }
    Ok(())
}

/// What is kept in a file of the results folder.
fn kept(workspace: &Workspace, name: &str) -> Result<Value, BenchError> {
    let file = workspace.root().join(RESULTS).join(name);
    let read = std::fs::read(&file)
        .and_then(|content| serde_json::from_slice(&content).map_err(std::io::Error::other));
    read.map_err(|source| BenchError::Kept { file, source })
}

/// Prints what was measured beside what is kept; whether it is worse.
fn compare(workspace: &Workspace, name: &str, report: &Report) -> Result<bool, BenchError> {
    let (text, is_worse) = check::compare(&kept(workspace, name)?, report);
    print!("{text}");
    Ok(is_worse)
}

/// Draws what is kept of both ways to a machine.
fn draw(workspace: &Workspace) -> Result<(), BenchError> {
    let read = |name| understand(kept(workspace, name)?.get("report").unwrap_or(&Value::Null));
    let (boot, fork) = (read(BOOTS)?, read(FORKS)?);
    let density = kept(workspace, DENSITY)?;
    let density = levels(density.get("report").unwrap_or(&Value::Null))?;
    let pictures = [
        ("boot.svg", "A machine that boots, echo", "boot", &boot),
        (
            "fork.svg",
            "A machine that is forked, print()",
            "fork",
            &fork,
        ),
    ];
    let folder = workspace.root().join(PICTURES);
    std::fs::create_dir_all(&folder).map_err(CacheError::io("create the folder", &folder))?;
    let machine = MACHINE.join(" ");
    for (name, what, bar, report) in pictures {
        let title = format!("{what}: millions of instructions by phase ({machine})");
        let svg = picture::stacked(&title, &[(bar, report)]);
        cache::replace(&folder.join(name), svg.as_bytes())?;
    }
    let title =
        format!("The next machine's start: millions of instructions by how many live ({machine})");
    let svg = curve::curve(&title, &density);
    cache::replace(&folder.join("density.svg"), svg.as_bytes())?;
    println!("drawn in {}", folder.display());
    Ok(())
}

/// Runs the command and takes the objects that it prints.
fn reports(
    command: &HostCommand,
    workspace: &Workspace,
    progress: &Progress,
) -> Result<Vec<Value>, BenchError> {
    let (code, output) = command.capture(workspace, progress)?;
    if code != 0 {
        return Err(BenchError::Failed(code));
    }
    serde_json::Deserializer::from_slice(&output)
        .into_iter()
        .collect::<Result<_, _>>()
        .map_err(|source| BenchError::Result {
            output: String::from_utf8_lossy(&output).into_owned(),
            source,
        })
}

fn levels(report: &Value) -> Result<Vec<density::Level>, BenchError> {
    density::levels(report).map_err(|source| BenchError::Result {
        output: report.to_string(),
        source,
    })
}

fn understand(report: &Value) -> Result<Report, BenchError> {
    Report::deserialize(report).map_err(|source| BenchError::Result {
        output: report.to_string(),
        source,
    })
}

/// A command that boots so many times with the whole cell, and unless it is that alone that is wanted, as often without each of its parts:
/// an object of JSON each.
fn boots(runs: u32, whole_alone: bool) -> String {
    let machine = MACHINE.join(" ");
    let wanted = if whole_alone { 1 } else { cell::VARIANTS.len() };
    let boots = cell::VARIANTS.iter().take(wanted).map(|(_, left_out)| {
        let option = match *left_out {
            "" => String::new(),
            parts => format!(" --dangerously-leave-out {parts}"),
        };
        let measurement = format!("sandvmm bench boot --json -n {runs} {machine}{option}");
        let boots = tried(&measurement, runs * BOOT_MAX_MS);
        format!("{{ {boots}; }}")
    });
    boots.collect::<Vec<_>>().join(" && ")
}

/// A command for the emulated host that runs `measurement` again where it does not end in time.
///
/// Where QEMU could not be mended (`crate::host`), about one boot in forty hangs while instructions are counted.
fn tried(measurement: &str, max_ms: u32) -> String {
    let again = format!(
        "timeout {}.{:03} {measurement}",
        max_ms / 1000,
        max_ms % 1000
    );
    [again.as_str(); MEASUREMENT_TRIES].join(" || ")
}

/// Writes the figures, with the hashes of what was booted, to the results folder.
fn keep(
    workspace: &Workspace,
    files: &[PathBuf],
    name: &str,
    figures: Value,
) -> Result<(), BenchError> {
    let mut booted = serde_json::Map::new();
    for file in files {
        let name = file
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        booted.insert(name, Value::String(reproducible::sha256(file)?));
    }
    let mut kept = json!({
        "unit": "thousands of instructions: in the emulated host a microsecond is a thousand",
        "sha256": booted,
    });
    if let (Some(kept), Value::Object(figures)) = (kept.as_object_mut(), figures) {
        kept.extend(figures);
    }
    let folder = workspace.root().join(RESULTS);
    std::fs::create_dir_all(&folder).map_err(CacheError::io("create the folder", &folder))?;
    let file = folder.join(name);
    cache::replace(&file, format!("{kept:#}\n").as_bytes())?;
    println!("\nkept in {}", file.display());
    Ok(())
}

fn table(what: &str, report: &Report, runs: u32) -> String {
    let mut text = format!(
        "{runs} {what} ({}), millions of instructions\n\n{:<18}{:>12}{:>12}{:>12}{:>12}\n",
        MACHINE.join(" "),
        "phase",
        "min",
        "p50",
        "max",
        "p50 in all"
    );
    for phase in &report.phases {
        let (min, p50, max) = match &phase.took_us {
            Some(took) => (millions(took.min), millions(took.p50), millions(took.max)),
            None => ("-".into(), "-".into(), "-".into()),
        };
        let reached = match &phase.reached_us {
            Some(reached) => millions(reached.p50),
            None => "-".into(),
        };
        text.push_str(&format!(
            "{:<18}{min:>12}{p50:>12}{max:>12}{reached:>12}\n",
            phase.name
        ));
    }
    text
}

/// Thousands as millions with two decimals.
fn millions(thousands: u64) -> String {
    format!("{}.{:02}", thousands / 1000, thousands % 1000 / 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_that_was_not_reached_has_no_figures() {
        let report: Report = serde_json::from_value(json!({ "runs": 1, "phases": [
            { "name": "vCPU running", "reached_us": { "min": 1, "p50": 20_450, "max": 3 },
              "took_us": { "min": 19_001, "p50": 19_999, "max": 20_000 } },
            { "name": "agent ready", "reached_us": null, "took_us": null },
        ] }))
        .unwrap();

        let text = table("boots", &report, 1);

        let lines: Vec<_> = text
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>())
            .collect();
        assert_eq!(
            lines[3],
            ["vCPU", "running", "19.00", "19.99", "20.00", "20.45"]
        );
        assert_eq!(lines[4], ["agent", "ready", "-", "-", "-", "-"]);
    }
}
