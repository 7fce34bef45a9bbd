//! Every test that the threat model names is there.
#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test fails by panicking"
)]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The document, from the project's root.
const DOCUMENT: &str = "docs/threat-model.md";

/// Programs of tests that are not plain functions: their tests' names stand in them as text.
const HARNESSES: [&str; 9] = [
    "tests/hostile/table.rs",
    "tests/hostile/main.rs",
    "jailer/tests/cell/main.rs",
    "tests/cell/main.rs",
    "tests/library/alike.rs",
    "tests/library/calls.rs",
    "tests/library/commands.rs",
    "tests/library/egress.rs",
    "tests/library/python.rs",
];

/// How far above a function its attribute may stand, in lines.
const ATTRIBUTE_LINES_MAX: usize = 4;

#[test]
fn every_test_that_the_threat_model_names_exists() {
    let named = named(&document());
    let tests = tests();

    let missing: Vec<&String> = named.difference(&tests).collect();

    assert!(missing.is_empty(), "{DOCUMENT} names {missing:?}");
    assert!(named.len() > 50, "only {} tests are named", named.len());
}

#[test]
fn no_promise_is_without_a_test() {
    let document = document();

    let rows = rows(&document);

    assert!(rows.len() > 20);
    for row in rows {
        assert!(row.contains('`'), "nothing shows it: {row}");
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn document() -> String {
    fs::read_to_string(root().join(DOCUMENT)).unwrap()
}

/// The last cells of the table of promises.
fn rows(document: &str) -> Vec<&str> {
    document
        .lines()
        .skip_while(|line| !line.starts_with("| promise |"))
        .skip(2)
        .take_while(|line| line.starts_with('|'))
        .filter_map(|line| line.trim_end_matches([' ', '|']).rsplit(" | ").next())
        .collect()
}

/// What stands between backquotes in these cells.
fn named(document: &str) -> BTreeSet<String> {
    rows(document)
        .into_iter()
        .flat_map(|cell| cell.split('`').skip(1).step_by(2))
        .map(str::to_owned)
        .collect()
}

/// The names of all tests.
fn tests() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let mut folders = vec![root()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().and_then(|name| name.to_str());
            let is_ours = !matches!(name, Some("target" | ".git"));
            if path.is_dir() && is_ours {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                names.extend(functions(&path));
            }
        }
    }
    for harness in HARNESSES {
        let text = fs::read_to_string(root().join(harness)).unwrap();
        names.extend(text.split('"').skip(1).step_by(2).map(str::to_owned));
    }
    names
}

/// The functions of a file that are tests.
fn functions(path: &Path) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap();
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let is_test = |at: usize| {
        let from = at.saturating_sub(ATTRIBUTE_LINES_MAX);
        lines[from..at].contains(&"#[test]")
    };
    lines
        .iter()
        .enumerate()
        .filter(|(at, _)| is_test(*at))
        .filter_map(|(_, line)| {
            let name = line.strip_prefix("fn ")?;
            Some(name.split('(').next()?.to_owned())
        })
        .collect()
}
