//! The guest's README has the table: it is written from here.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use libtest_mimic::Failed;

use crate::table;

/// Where it is.
const README: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/hostile-guest/README.md");

/// What the table is between.
const BEGIN: &str = "<!-- table: begin -->\n";
const END: &str = "<!-- table: end -->";

/// Set to have the table written.
const WRITE: &str = "HOSTILE_WRITE_README";

/// The README's table is that of the code.
pub(crate) fn is_current() -> Result<(), Failed> {
    let text = fs::read_to_string(Path::new(README))?;
    let split = || {
        let (before, rest) = text.split_once(BEGIN)?;
        let (table, after) = rest.split_once(END)?;
        Some((before, table, after))
    };
    let (before, written, after) = split().ok_or("the README has no table")?;
    let table = table();
    if written == table {
        return Ok(());
    }
    if std::env::var_os(WRITE).is_some() {
        fs::write(README, [before, BEGIN, &table, END, after].concat())?;
        return Ok(());
    }
    Err(format!("the table is not that of the code: run the suite once with {WRITE}=1").into())
}

fn table() -> String {
    let mut table = String::from(
        "| test | part | outcome | what the guest does |\n| --- | --- | --- | --- |\n",
    );
    for case in table::CASES {
        // Writing to a string can't fail.
        let _ = writeln!(
            table,
            "| `{}` | {} | {} | {} |",
            case.name,
            case.part,
            case.outcome.text(),
            case.does
        );
    }
    table
}
