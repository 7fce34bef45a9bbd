//! `cargo xtask bench --check`: what is measured now, beside the figures that were kept.

use serde::Deserialize;
use serde_json::Value;

use super::{Report, millions};

/// A phase that takes more than this part longer than before is worse.
const MAX_WORSE_PER_CENT: u64 = 3;

/// What a phase may take more than before whatever its length, in thousands of instructions: where a clock's tick of the host's kernel
/// falls moves this much.
const MAX_WORSE_THOUSANDS: u64 = 50;

/// The phases, and the whole, beside what was kept: a table, and whether any is worse. Least figures are compared, since waits and first uses
/// only add; `kept` is the file's content.
pub(super) fn compare(kept: &Value, measured: &Report) -> (String, bool) {
    let kept = Report::deserialize(kept.get("report").unwrap_or(&Value::Null)).ok();
    let mut text = format!(
        "\n{:<18}{:>12}{:>12}{:>12}\n",
        "least of each", "kept", "now", "change"
    );
    let mut is_worse = false;
    for phase in &measured.phases {
        let before = kept
            .iter()
            .flat_map(|report| &report.phases)
            .find(|other| other.name == phase.name)
            .and_then(|phase| phase.took_us.as_ref());
        let line = match (before, &phase.took_us) {
            (Some(before), Some(now)) => {
                let most =
                    before.min + (before.min * MAX_WORSE_PER_CENT / 100).max(MAX_WORSE_THOUSANDS);
                let worse = now.min > most;
                is_worse |= worse;
                let change = per_cent(before.min, now.min);
                let mark = if worse { "  WORSE" } else { "" };
                format!(
                    "{:>12}{:>12}{change:>11}%{mark}",
                    millions(before.min),
                    millions(now.min)
                )
            }
            // What was reached before and is not any more is worse than slow.
            (Some(before), None) => {
                is_worse = true;
                format!("{:>12}{:>12}  WORSE", millions(before.min), "-")
            }
            (None, Some(now)) => format!("{:>12}{:>12}", "-", millions(now.min)),
            (None, None) => format!("{:>12}{:>12}", "-", "-"),
        };
        text.push_str(&format!("{:<18}{line}\n", phase.name));
    }
    (text, is_worse)
}

/// The change in whole and tenths of a hundredth part, with its sign.
fn per_cent(before: u64, now: u64) -> String {
    let tenths = now.abs_diff(before) * 1000 / before.max(1);
    let sign = if now < before { "-" } else { "+" };
    format!("{sign}{}.{}", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn report(took: Option<u64>) -> Value {
        let summary = took.map(|min| json!({ "min": min, "p50": min + 7, "max": min + 9 }));
        json!({ "phases": [{ "name": "vCPU running", "reached_us": null, "took_us": summary }] })
    }

    fn check(before: Option<u64>, now: Option<u64>) -> (String, bool) {
        let now = Report::deserialize(report(now)).unwrap();
        compare(&json!({ "report": report(before) }), &now)
    }

    #[test]
    fn a_phase_that_takes_three_per_cent_more_is_worse() {
        assert!(!check(Some(10_000), Some(10_300)).1);
        let (text, is_worse) = check(Some(10_000), Some(10_301));
        assert!(is_worse && text.contains("+3.0%  WORSE"), "{text}");
    }

    #[test]
    fn a_short_phase_may_move_by_a_little() {
        assert!(!check(Some(100), Some(150)).1);
        assert!(check(Some(100), Some(151)).1);
    }

    #[test]
    fn what_is_not_reached_any_more_is_worse_and_what_is_new_is_not() {
        assert!(check(Some(100), None).1);
        assert!(!check(None, Some(100)).1);
        assert!(!check(Some(10_000), Some(5_000)).1);
    }
}
