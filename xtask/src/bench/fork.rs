//! What a fork takes until each of its four clocks, beside what it may.

use serde::Deserialize;
use serde_json::{Value, json};

use super::{MACHINE, Report, millions};

/// The measurements: a name, and the options of `sandvmm bench fork`. The first is what a user gets.
const VARIANTS: [(&str, &str); 3] = [
    ("the whole cell", ""),
    (
        "without the cell",
        " --dangerously-leave-out namespaces,cgroup,landlock,seccomp",
    ),
    ("from a pool", " --pool 1"),
];

/// The four clocks, as `sandvmm bench fork` calls them.
const CLOCKS: [&str; 4] = ["vCPU running", "agent ready", "first output", "all gone"];

/// What each may take from the call, in thousands of instructions, by measurement: the project's goals.
const GOALS: [[Option<u64>; 4]; 3] = [
    [Some(6_000), Some(10_000), Some(20_000), Some(25_000)],
    [None; 4],
    [None, None, Some(8_000), None],
];

/// All measurements, one after the other, or the first alone: an object of JSON each.
pub(super) fn commands(runs: u32, first_alone: bool) -> String {
    let machine = MACHINE.join(" ");
    let wanted = if first_alone { 1 } else { VARIANTS.len() };
    let commands = VARIANTS
        .iter()
        .take(wanted)
        .map(|(_, options)| format!("sandvmm bench fork --json -n {runs} {machine}{options}"));
    commands.collect::<Vec<_>>().join(" && ")
}

/// The rows of the table, and what is kept of them; `reports` are of [`VARIANTS`], in their order.
pub(super) fn rows(reports: &[Value]) -> (String, Value) {
    let mut text = format!("\n{:<20}", "fork, p50 of each");
    for clock in CLOCKS {
        text.push_str(&format!("{clock:>20}"));
    }
    text.push('\n');
    let mut kept = Vec::new();
    for (((name, options), goals), report) in VARIANTS.into_iter().zip(GOALS).zip(reports) {
        let figures = CLOCKS.map(|clock| reached(report, clock));
        text.push_str(&format!("{name:<20}"));
        for (figure, goal) in figures.into_iter().zip(goals) {
            text.push_str(&format!("{:>20}", beside(figure, goal)));
        }
        text.push('\n');
        kept.push(json!({ "options": options.trim(), "p50": figures, "goals": goals }));
    }
    (text, Value::Array(kept))
}

/// The median of a clock; none where it was not reached.
fn reached(report: &Value, clock: &str) -> Option<u64> {
    let report = Report::deserialize(report).ok()?;
    let phase = report.phases.iter().find(|phase| phase.name == clock)?;
    Some(phase.reached_us.as_ref()?.p50)
}

/// A figure in millions, and what it may be.
fn beside(figure: Option<u64>, goal: Option<u64>) -> String {
    let figure = figure.map_or_else(|| "-".to_owned(), millions);
    match goal {
        Some(goal) => format!("{figure} (<= {})", goal / 1000),
        None => figure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_clock_stands_beside_its_goal() {
        let summary = |value| json!({ "min": value, "p50": value, "max": value });
        let report = json!({ "phases": [
            { "name": "vCPU running", "reached_us": summary(7_250), "took_us": null },
            { "name": "all gone", "reached_us": summary(24_000), "took_us": null },
        ] });

        let (text, kept) = rows(&[report.clone(), report]);

        let lines: Vec<_> = text.lines().collect();
        assert!(lines[2].contains("7.25 (<= 6)") && lines[2].contains("24.00 (<= 25)"));
        assert!(lines[2].contains("- (<= 10)"), "{text}");
        assert!(lines[3].starts_with("without the cell") && !lines[3].contains("<="));
        assert_eq!(kept[0]["p50"], json!([7_250, null, null, 24_000]));
        assert_eq!(kept[0]["goals"][3], 25_000);
    }
}
