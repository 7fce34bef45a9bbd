//! The picture of a cost that changes with a number: a line for the median, one for the most. SVG, as `picture` writes it.

use std::fmt::Write as _;

use super::density::Level;
use super::millions;

/// Size of a picture in pixels, and the room for its lines.
const WIDTH: u64 = 860;
const HEIGHT: u64 = 360;
const LEFT: u64 = 80;
const RIGHT: u64 = 30;
const TOP: u64 = 50;
const BOTTOM: u64 = 50;

/// A line: its name, its colour, and what it shows of a level.
type Line = (&'static str, &'static str, fn(&Level) -> u64);

const LINES: [Line; 2] = [
    ("p50", "#1b4965", |level| level.ready_us.p50),
    ("max", "#9d4348", |level| level.ready_us.max),
];

/// Each level is as far from the one before, since their numbers double; from nothing up to the most that was measured.
pub(super) fn curve(title: &str, levels: &[Level]) -> String {
    let most = levels
        .iter()
        .map(|level| level.ready_us.max)
        .max()
        .unwrap_or(0)
        .max(1);
    let steps = (levels.len() as u64).saturating_sub(1).max(1);
    let x = |index: u64| LEFT + index * (WIDTH - LEFT - RIGHT) / steps;
    let base = HEIGHT - BOTTOM;
    let y = |figure: u64| base - figure * (base - TOP) / most;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#ffffff\"/>\n\
         <text x=\"12\" y=\"24\" font-size=\"15\" font-weight=\"bold\">{title}</text>\n\
         <path d=\"M{LEFT} {TOP} V{base} H{}\" fill=\"none\" stroke=\"#555555\"/>\n\
         <text x=\"12\" y=\"{}\">{}</text>\n",
        WIDTH - RIGHT,
        TOP + 5,
        millions(most)
    );
    for (index, level) in (0..).zip(levels) {
        // Writing to a string does not fail.
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            x(index),
            base + 20,
            level.alive
        );
    }
    for ((name, colour, figure), row) in LINES.into_iter().zip(0..) {
        let points: Vec<String> = (0..)
            .zip(levels)
            .map(|(index, level)| format!("{},{}", x(index), y(figure(level))))
            .collect();
        let _ = writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>\
             <text x=\"{}\" y=\"{}\" fill=\"{colour}\">{name}</text>",
            points.join(" "),
            LEFT + 12 + 50 * row,
            HEIGHT - 8
        );
    }
    svg.push_str("</svg>\n");
    svg
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::density::levels;
    use super::*;

    #[test]
    fn lines_begin_at_the_left_and_the_most_is_at_the_top() {
        let level = |alive: u32, p50: u64, max: u64| {
            json!({ "alive": alive, "ready_us": { "min": 1, "p50": p50, "max": max },
                    "guest_kib": null, "own_kib": null, "host_kib_each": null })
        };
        let report = json!({ "levels": [level(1, 10_000, 10_000), level(2, 10_000, 20_000)] });

        let svg = curve("Starts", &levels(&report).unwrap());

        assert!(svg.contains("points=\"80,180 830,180\""), "{svg}");
        assert!(svg.contains("points=\"80,180 830,50\""), "{svg}");
        assert!(svg.contains(">20.00</text>"), "{svg}");
        assert!(curve("Starts", &[]).ends_with("</svg>\n"));
    }
}
