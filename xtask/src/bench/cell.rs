//! What the cell around a machine's process costs: boots without it, beside those with it.

use serde::Deserialize;
use serde_json::{Value, json};

use super::{Report, millions};

/// What is left out, a list for each measurement, and its name; the first is the whole cell. What can't be left out (descriptors,
/// environment, limits, no capability, no new privileges) is in all of them.
pub(super) const VARIANTS: [(&str, &str); 6] = [
    ("the whole cell", ""),
    ("without namespaces", "namespaces"),
    ("without cgroup", "cgroup"),
    ("without landlock", "landlock"),
    ("without seccomp", "seccomp"),
    ("without all four", "namespaces,cgroup,landlock,seccomp"),
];

/// What all parts together may cost until the first processor starts, in thousands of instructions: the project's goal.
const GOAL: i64 = 3_000;

/// The phases whose ends the cell moves: it is closed before the one, and taken down before the other.
const BEGUN: &str = "vCPU running";
const GONE: &str = "all gone";

/// One measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Figures {
    /// From the call to the first processor's start, in thousands of instructions.
    begun: u64,
    /// From the program's exit until all is gone.
    gone: u64,
}

impl Figures {
    /// The least of a report, since first uses are paid by the first boots; `None` where a phase was not reached.
    fn of(report: &Value) -> Option<Self> {
        let report = Report::deserialize(report).ok()?;
        let phase = |name| report.phases.iter().find(|phase| phase.name == name);
        Some(Self {
            begun: phase(BEGUN)?.reached_us.as_ref()?.min,
            gone: phase(GONE)?.took_us.as_ref()?.min,
        })
    }
}

/// The rows of the table, and what is kept of them; `reports` are of [`VARIANTS`], in their order.
pub(super) fn rows(reports: &[Value]) -> (String, Value) {
    let mut text = format!(
        "\n{:<24}{:>14}{:>12}{:>16}{:>12}\n",
        "cell", BEGUN, "costs", "exit to gone", "costs"
    );
    let figures: Vec<Option<Figures>> = reports.iter().map(Figures::of).collect();
    let whole = figures.first().copied().flatten();
    let figures_of_last =
        (figures.len() == VARIANTS.len()).then(|| figures.last().copied().flatten());
    let mut kept = Vec::new();
    for ((name, left_out), figures) in VARIANTS.into_iter().zip(figures) {
        let (Some(figures), Some(whole)) = (figures, whole) else {
            text.push_str(&format!("{name:<24}{:>14}\n", "-"));
            continue;
        };
        let begun = signed(whole.begun, figures.begun);
        let gone = signed(whole.gone, figures.gone);
        text.push_str(&format!(
            "{name:<24}{:>14}{:>12}{:>16}{:>12}\n",
            millions(figures.begun),
            difference(begun),
            millions(figures.gone),
            difference(gone),
        ));
        kept.push(json!({
            "left_out": left_out,
            "vcpu_running_min": figures.begun,
            "vcpu_running_less_min": begun,
            "exit_to_gone_min": figures.gone,
            "exit_to_gone_less_min": gone,
        }));
    }
    // The last is the machine without any part.
    if let (Some(whole), Some(Some(without))) = (whole, figures_of_last) {
        let cost = signed(whole.begun, without.begun);
        let verdict = if cost <= GOAL {
            ""
        } else {
            ", which is too much"
        };
        text.push_str(&format!(
            "the cell costs {} of {} until {BEGUN} (<= {}){verdict}\n",
            difference(cost),
            millions(whole.begun),
            GOAL / 1000
        ));
    }
    (text, Value::Array(kept))
}

/// How much more the whole is than a part.
fn signed(whole: u64, part: u64) -> i64 {
    i64::try_from(whole).unwrap_or(i64::MAX) - i64::try_from(part).unwrap_or(i64::MAX)
}

/// A difference in thousands, as millions with a sign; nothing for none.
fn difference(thousands: i64) -> String {
    let sign = match thousands {
        0 => return String::new(),
        ..0 => "-",
        1.. => "",
    };
    format!("{sign}{}", millions(thousands.unsigned_abs()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(begun: u64, gone: u64) -> Value {
        let summary = |value| json!({ "min": value, "p50": value, "max": value });
        json!({ "phases": [
            { "name": BEGUN, "reached_us": summary(begun), "took_us": summary(1) },
            { "name": GONE, "reached_us": summary(90_000), "took_us": summary(gone) },
        ] })
    }

    #[test]
    fn what_a_part_costs_is_what_is_spared_without_it() {
        let reports = [report(17_500, 20_000), report(16_250, 20_010)];

        let (text, kept) = rows(&reports);

        let row: Vec<_> = text.lines().nth(3).unwrap().split_whitespace().collect();
        assert_eq!(
            row,
            ["without", "namespaces", "16.25", "1.25", "20.01", "-0.01"]
        );
        assert_eq!(kept[1]["left_out"], "namespaces");
        assert_eq!(kept[1]["vcpu_running_less_min"], 1250);
        assert_eq!(kept[1]["exit_to_gone_less_min"], -10);
    }

    #[test]
    fn the_whole_cell_stands_beside_what_it_may_cost() {
        let of = |last: u64| {
            let mut reports = vec![report(10_000, 1); VARIANTS.len() - 1];
            reports.push(report(last, 1));
            rows(&reports).0
        };

        assert!(of(7_000).ends_with("costs 3.00 of 10.00 until vCPU running (<= 3)\n"));
        assert!(of(6_999).ends_with("(<= 3), which is too much\n"));
    }

    #[test]
    fn a_report_without_figures_is_a_dash() {
        let (text, kept) = rows(&[report(1, 1), json!({ "phases": [] })]);

        assert!(text.lines().nth(3).unwrap().ends_with('-'), "{text}");
        assert_eq!(kept.as_array().unwrap().len(), 1);
    }
}
