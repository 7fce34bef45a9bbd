//! The examples of the library, run as they stand.

use std::path::Path;

use sandvmm::{Outcome, Workspace};

use crate::Test;

#[allow(dead_code, reason = "an example has a main of its own")]
#[path = "../../sandbox/examples/analysis.rs"]
mod analysis;
#[allow(dead_code, reason = "an example has a main of its own")]
#[path = "../../sandbox/examples/orchestrator.rs"]
mod orchestrator;
#[allow(dead_code, reason = "an example has a main of its own")]
#[path = "../../sandbox/examples/terminal.rs"]
mod terminal;
#[allow(dead_code, reason = "an example has a main of its own")]
#[path = "../../sandbox/examples/workspace.rs"]
mod workspace;

pub(crate) const TESTS: &[Test] = &[
    (
        "example_orchestrator_fifty_snippets_on_four_sandboxes",
        orchestrator,
    ),
    ("example_analysis_a_file_in_and_a_plot_out", analysis),
    ("example_terminal_types_resizes_and_interrupts", terminal),
    ("example_workspace_over_three_runs", workspace),
];

fn orchestrator() {
    use orchestrator::Verdict;
    let snippets: Vec<String> = (0..50).map(orchestrator::snippet).collect();

    let verdicts = orchestrator::run(&snippets);

    assert_eq!(verdicts.len(), 50);
    for (number, verdict) in verdicts {
        let expected = match number % 5 {
            0 => Verdict::Printed(format!("{}\n", (0..number).sum::<usize>())),
            1 => Verdict::Printed(format!("{{\"number\": {number}}}\n")),
            2 => Verdict::Failed(Outcome::Exited(i32::try_from(number).unwrap())),
            3 => Verdict::Failed(Outcome::Exited(1)),
            _ => Verdict::Printed(format!("{number}\n")),
        };
        assert_eq!(verdict, expected, "{number}");
    }
}

fn analysis() {
    let image = std::env::var_os("SANDVMM_TEST_ROOTFS").unwrap();

    let found = analysis::run(Path::new(&image)).unwrap();

    assert!(found.table.0.contains("2020      55"), "{:?}", found.table);
    assert!(found.table.1.contains("<table"), "{:?}", found.table);
    assert!(found.plot.starts_with(b"\x89PNG\r\n\x1a\n"));
    assert_eq!(found.file, b"year,people\n2000,30\n2020,55\n");
}

fn terminal() {
    let (screen, outcome) = terminal::run().unwrap();

    assert!(
        screen.contains("24 80") && screen.contains("40 100"),
        "{screen:?}"
    );
    assert_eq!(outcome, Outcome::Exited(3), "{screen:?}");
}

fn workspace() {
    let name = format!("example-{}", std::process::id());

    let seen = workspace::run(&name).unwrap();
    Workspace::remove(&name).unwrap();

    assert_eq!(seen, ["run 1", "run 1 run 2", "run 1 run 2 run 3"]);
}
