//! Pictures of what was measured: each way to a machine is a bar, and each phase a part of it. SVG, written as text: a few rectangles.

use std::fmt::Write as _;

use super::Report;

/// Size of a picture in pixels, and where its bars begin.
const WIDTH: u64 = 860;
const LEFT: u64 = 150;
const RIGHT: u64 = 60;
const BAR: u64 = 34;
const GAP: u64 = 26;
const TOP: u64 = 44;
const LEGEND_LINE: u64 = 20;

/// One colour for each phase, told apart also without colours by their lightness.
const COLOURS: [&str; 7] = [
    "#1b4965", "#5fa8d3", "#2a9d8f", "#bee9e8", "#e9c46a", "#f4a261", "#9d4348",
];

/// Names of the bars, with their measurements; parts are the medians of the phases, in millions of instructions.
pub(super) fn stacked(title: &str, bars: &[(&str, &Report)]) -> String {
    let longest = bars
        .iter()
        .map(|(_, report)| parts(report).map(|(_, took)| took).sum::<u64>())
        .max()
        .unwrap_or(0)
        .max(1);
    let room = WIDTH - LEFT - RIGHT;
    let bars_end = TOP + bars.len() as u64 * (BAR + GAP);
    let names: Vec<&str> = bars
        .first()
        .map(|(_, report)| parts(report).map(|(name, _)| name).collect())
        .unwrap_or_default();
    let height = bars_end + names.len() as u64 * LEGEND_LINE + 12;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>\n\
         <text x=\"12\" y=\"24\" font-size=\"15\" font-weight=\"bold\">{title}</text>\n"
    );
    for (index, (name, report)) in (0..).zip(bars) {
        let y = TOP + index * (BAR + GAP);
        let middle = y + BAR / 2 + 5;
        // Writing to a string does not fail.
        let _ = writeln!(svg, "<text x=\"12\" y=\"{middle}\">{name}</text>");
        let mut begun = 0;
        for ((_, took), colour) in parts(report).zip(COLOURS.iter().cycle()) {
            let x = LEFT + begun * room / longest;
            begun += took;
            let width = LEFT + begun * room / longest - x;
            let _ = writeln!(
                svg,
                "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{BAR}\" fill=\"{colour}\"/>"
            );
        }
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{middle}\">{}</text>",
            LEFT + begun * room / longest + 6,
            tenths(begun)
        );
    }
    for ((index, name), colour) in (0..).zip(&names).zip(COLOURS.iter().cycle()) {
        let y = bars_end + index * LEGEND_LINE;
        let _ = writeln!(
            svg,
            "<rect x=\"{LEFT}\" y=\"{y}\" width=\"12\" height=\"12\" fill=\"{colour}\"/>\
             <text x=\"{}\" y=\"{}\">{name}{}</text>",
            LEFT + 20,
            y + 11,
            of_each(bars, index)
        );
    }
    svg.push_str("</svg>\n");
    svg
}

/// The phases that were reached, and what each took, in thousands.
fn parts(report: &Report) -> impl Iterator<Item = (&str, u64)> {
    report
        .phases
        .iter()
        .filter_map(|phase| Some((phase.name.as_str(), phase.took_us.as_ref()?.p50)))
}

/// What the phase at `index` took in each bar.
fn of_each(bars: &[(&str, &Report)], index: u64) -> String {
    let index = usize::try_from(index).unwrap_or(usize::MAX);
    let figures: Vec<String> = bars
        .iter()
        .map(|(_, report)| {
            parts(report)
                .nth(index)
                .map_or_else(|| "-".to_owned(), |(_, took)| tenths(took))
        })
        .collect();
    format!(": {}", figures.join(" · "))
}

/// Thousands as millions with one decimal.
fn tenths(thousands: u64) -> String {
    format!("{}.{}", thousands / 1000, thousands % 1000 / 100)
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;
    use serde_json::json;

    use super::*;

    fn report(took: [u64; 2]) -> Report {
        let phase = |name: &str, took: u64| {
            let summary = json!({ "min": took, "p50": took, "max": took });
            json!({ "name": name, "reached_us": summary, "took_us": summary })
        };
        let phases = [phase("vCPU running", took[0]), phase("all gone", took[1])];
        Report::deserialize(json!({ "phases": phases })).unwrap()
    }

    #[test]
    fn the_longest_bar_fills_the_room_and_the_others_keep_to_its_measure() {
        let (whole, half) = (report([3_000, 1_000]), report([1_000, 1_000]));

        let svg = stacked("Boots", &[("whole", &whole), ("half", &half)]);

        // 650 pixels for 4 millions.
        assert!(svg.contains("x=\"150\" y=\"44\" width=\"487\""), "{svg}");
        assert!(svg.contains("x=\"637\" y=\"44\" width=\"163\""), "{svg}");
        assert!(svg.contains("x=\"150\" y=\"104\" width=\"162\""), "{svg}");
        assert!(svg.contains("vCPU running: 3.0 · 1.0</text>"), "{svg}");
        assert_eq!(svg.matches("<svg").count(), svg.matches("</svg>").count());
    }

    #[test]
    fn nothing_measured_is_an_empty_picture() {
        assert!(stacked("Boots", &[]).ends_with("</svg>\n"));
    }
}
