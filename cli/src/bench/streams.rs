//! `sandvmm bench streams`: a command's streams, between a program of the guest and one of the host.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use sandvmm::{Sandbox, Stdio};

use super::args::BenchStreamsArgs;
use super::statistics::Summary;
use super::{FAILED, PhaseReport, millis};
use crate::{machine, notice, output};

/// MiB that pass for one figure, which is of one of them: what begins and ends a stream hardly counts.
const MIB: u32 = 16;
const BYTES: usize = (MIB as usize) << 20;

/// Round trips for one figure, likewise.
const ROUND_TRIPS: u32 = 200;

/// Bytes that are read and written at once.
const PIECE_BYTES: usize = 64 << 10;

/// A way through the streams: its name, what the guest runs, and what is measured of it.
type Way = (
    &'static str,
    &'static str,
    fn(&mut Ends) -> Result<Duration, String>,
);

/// All of them. Each program says `.` when it is ready.
const WAYS: [Way; 3] = [
    ("1 MiB out", "printf .; head -c 16777216 /dev/zero", out),
    (
        "1 MiB in",
        "printf .; head -c 16777216 > /dev/null; printf .",
        into,
    ),
    ("round trip", "printf .; exec cat", round_trip),
];

/// The host's ends of a command's streams.
struct Ends {
    to: Box<dyn Write>,
    from: Box<dyn Read>,
}

impl Ends {
    fn read_one(&mut self) -> Result<(), String> {
        let read = self.from.read_exact(&mut [0]);
        read.map_err(|error| format!("The guest's program ended early: {error}"))
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), String> {
        let written = self.to.write_all(bytes);
        written.map_err(|error| format!("The guest's program stopped reading: {error}"))
    }
}

/// From the guest.
fn out(ends: &mut Ends) -> Result<Duration, String> {
    let begun = Instant::now();
    let mut piece = vec![0; PIECE_BYTES];
    let mut left = BYTES;
    while left > 0 {
        match ends.from.read(&mut piece) {
            Ok(0) => return Err("The guest's program ended early".to_owned()),
            Ok(count) => left = left.saturating_sub(count),
            Err(error) => return Err(format!("The guest's program ended early: {error}")),
        }
    }
    Ok(begun.elapsed() / MIB)
}

/// To the guest, until its program has read the last byte.
fn into(ends: &mut Ends) -> Result<Duration, String> {
    let begun = Instant::now();
    let piece = vec![0; PIECE_BYTES];
    for _ in 0..BYTES / PIECE_BYTES {
        ends.write(&piece)?;
    }
    ends.read_one()?;
    Ok(begun.elapsed() / MIB)
}

/// A byte to the guest's program and back from it.
fn round_trip(ends: &mut Ends) -> Result<Duration, String> {
    let begun = Instant::now();
    for _ in 0..ROUND_TRIPS {
        ends.write(b"x")?;
        ends.read_one()?;
    }
    Ok(begun.elapsed() / ROUND_TRIPS)
}

/// Measures, prints, and gives the exit code.
pub(crate) fn streams(args: &BenchStreamsArgs) -> u8 {
    match measured(args) {
        Ok(phases) if args.json => output::print(&json(args, &phases), 0),
        Ok(phases) => output::print(&table(args, &phases), 0),
        Err(sentence) => {
            notice::say(&sentence);
            FAILED
        }
    }
}

fn measured(args: &BenchStreamsArgs) -> Result<Vec<PhaseReport>, String> {
    let sandbox = machine::builder(&args.machine, Instant::now())
        .timeout(None)
        .start()
        .map_err(|error| notice::sentence(&error))?;
    let mut phases = Vec::new();
    for (name, script, measure) in WAYS {
        let samples: Vec<Duration> = (0..args.runs)
            .map(|_| once(&sandbox, script, measure))
            .collect::<Result<_, _>>()?;
        phases.push(PhaseReport {
            name,
            reached_us: None,
            took_us: Summary::of(&samples),
        });
    }
    Ok(phases)
}

fn once(
    sandbox: &Sandbox,
    script: &str,
    measure: fn(&mut Ends) -> Result<Duration, String>,
) -> Result<Duration, String> {
    let mut command = sandbox.command("sh");
    let mut child = command
        .args(["-c", script])
        .stdin(Stdio::piped())
        .spawn()
        .map_err(|error| notice::sentence(&error))?;
    let (Some(to), Some(from)) = (child.stdin.take(), child.stdout.take()) else {
        return Err("The command has no streams".to_owned());
    };
    let mut ends = Ends {
        to: Box::new(to),
        from: Box::new(from),
    };
    ends.read_one()?;
    let took = measure(&mut ends)?;
    drop(ends);
    child.wait();
    Ok(took)
}

fn json(args: &BenchStreamsArgs, phases: &[PhaseReport]) -> String {
    let report = serde_json::json!({
        "runs": args.runs,
        "cpus": args.machine.cpus,
        "memory_mib": args.machine.memory,
        "phases": phases,
    });
    format!("{report}\n")
}

fn table(args: &BenchStreamsArgs, phases: &[PhaseReport]) -> String {
    let mut text = format!(
        "{} of each, one after another; {} vCPU, {} MiB; milliseconds\n\n{:<16}{:>10}{:>10}{:>10}\n",
        args.runs, args.machine.cpus, args.machine.memory, "", "p50", "p95", "max"
    );
    for phase in phases {
        if let Some(took) = phase.took_us {
            let [p50, p95, max] = [took.p50, took.p95, took.max].map(millis);
            text.push_str(&format!("{:<16}{p50:>10}{p95:>10}{max:>10}\n", phase.name));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guests_programs_pass_as_many_bytes_as_are_measured() {
        for (_, script, _) in &WAYS[..2] {
            assert!(script.contains(&format!("head -c {BYTES} ")), "{script}");
        }
    }
}
