//! How a start's cost and a machine's memory change with the number of machines that live.

use serde::Deserialize;
use serde_json::Value;

use super::{MACHINE, Summary, millions};

/// How many machines are kept alive at most: the emulated host has memory for them.
const MACHINES: u32 = 64;

/// Milliseconds that each may take on the emulated host's clock until it is ready and gone again (it takes a tenth).
const MACHINE_MAX_MS: u32 = 1_000;

/// One row of `sandvmm bench density --json`.
#[derive(Debug, Deserialize)]
pub(super) struct Level {
    pub(super) alive: u32,
    pub(super) ready_us: Summary,
    guest_kib: Option<Spread>,
    own_kib: Option<Spread>,
    host_kib_each: Option<u64>,
}

#[derive(Debug, Deserialize)]
struct Spread {
    p50: u64,
}

/// The measurement, and the milliseconds that it may take.
pub(super) fn command() -> (String, u32) {
    let machine = MACHINE.join(" ");
    let command = format!("sandvmm bench density --json -n {MACHINES} {machine}");
    (command, MACHINES * MACHINE_MAX_MS)
}

/// The rows of what was measured.
pub(super) fn levels(report: &Value) -> Result<Vec<Level>, serde_json::Error> {
    Vec::deserialize(report.get("levels").unwrap_or(&Value::Null))
}

/// The table of them.
pub(super) fn table(levels: &[Level]) -> String {
    let mut text = format!(
        "machines that live at once ({}): millions of instructions until the next is ready, KiB of memory a machine\n\n\
         {:>8}{:>12}{:>12}{:>12}{:>12}{:>12}\n",
        MACHINE.join(" "),
        "alive",
        "p50",
        "max",
        "guest's",
        "process's",
        "host's"
    );
    for level in levels {
        let figure = |kib: Option<u64>| kib.map_or_else(|| "-".to_owned(), |kib| kib.to_string());
        let median = |spread: &Option<Spread>| figure(spread.as_ref().map(|spread| spread.p50));
        text.push_str(&format!(
            "{:>8}{:>12}{:>12}{:>12}{:>12}{:>12}\n",
            level.alive,
            millions(level.ready_us.p50),
            millions(level.ready_us.max),
            median(&level.guest_kib),
            median(&level.own_kib),
            figure(level.host_kib_each)
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_may_not_be_looked_into_has_no_figure() {
        let report = json!({ "levels": [
            { "alive": 1, "ready_us": { "min": 1, "p50": 40_000, "max": 41_500 },
              "guest_kib": { "p50": 20_000, "max": 20_001 }, "own_kib": null, "host_kib_each": 23_000 },
        ] });

        let text = table(&levels(&report).unwrap());

        let row: Vec<_> = text.lines().last().unwrap().split_whitespace().collect();
        assert_eq!(row, ["1", "40.00", "41.50", "20000", "-", "23000"]);
        levels(&json!({})).unwrap_err();
    }
}
