//! The cell that a machine's process would have here, by trying.

use std::error::Error;
use std::time::Duration;

use vmm::control::ControlSocket;
use vmm::memory::MIN_MEMORY_MIB;

use super::{Check, Status};
use crate::cell::Cell;
use crate::crash::Crash;
use crate::program;

/// How long the process may take until it is in its cell.
const CELL_LIMIT: Duration = Duration::from_secs(10);

/// Why there is no cell.
#[derive(Debug)]
enum NoCell {
    /// It could not be tried, or not in time: a sandbox may have one all the same.
    Untried(String),
    /// A sandbox's process would fare no better.
    Refused(String),
}

/// Starts a process in the cell that a machine's would have, and ends it.
pub(super) fn check() -> (Check, Option<Cell>) {
    const NAME: &str = "Cell";
    let cell = match try_cell() {
        Ok(cell) => cell,
        Err(no_cell) => {
            let (status, why) = match no_cell {
                NoCell::Untried(why) => (Status::Warning, why),
                NoCell::Refused(why) => (Status::Missing, why),
            };
            let check = Check::not_ok(
                NAME,
                status,
                format!("No process could be put into a cell: {why}"),
                "see what `run` says",
            );
            return (check, None);
        }
    };
    let check = if cell.missing.is_empty() {
        Check::ok(NAME, in_words(&cell))
    } else {
        let missing: Vec<String> = cell.missing.iter().map(ToString::to_string).collect();
        Check::not_ok(
            NAME,
            Status::Warning,
            format!("{}; missing: {}", in_words(&cell), missing.join("; ")),
            "docs/cell.md says what each part needs",
        )
    };
    (check, Some(cell))
}

fn try_cell() -> Result<Cell, NoCell> {
    let program = program::find(None).map_err(|error| NoCell::Untried(error.to_string()))?;
    let (_ours, theirs) =
        ControlSocket::pair().map_err(|error| NoCell::Untried(error.to_string()))?;
    let bounds = jailer::Bounds {
        memory_mib: MIN_MEMORY_MIB,
        vcpus: 1,
        max_file_bytes: 0,
    };
    let mut process = jailer::start(&program, theirs.into(), jailer::Options::new(bounds))
        .map_err(|error| NoCell::Refused(sentence(&error)))?;
    match process.entered(CELL_LIMIT) {
        Ok(Some(cell)) => Ok(cell),
        Ok(None) => {
            // It has said that it gives up before it says why: its last words are complete when it has ended.
            let end = process.wait_timeout(CELL_LIMIT);
            process.read_stderr();
            let said = Crash::from_process(end, &process.stderr_tail());
            Err(NoCell::Refused(said.to_string()))
        }
        Err(error @ jailer::StartError::Silent { .. }) => Err(NoCell::Untried(error.to_string())),
        Err(error) => Err(NoCell::Refused(sentence(&error))),
    }
}

/// An error and its source.
fn sentence(error: &jailer::StartError) -> String {
    let source = error
        .source()
        .map_or_else(String::new, |source| format!(": {source}"));
    format!("{error}{source}")
}

fn in_words(cell: &Cell) -> String {
    let kinds: Vec<&str> = cell
        .namespaces
        .iter()
        .map(jailer::Namespace::name)
        .collect();
    let kinds = if kinds.is_empty() {
        "no namespace".to_owned()
    } else {
        format!("namespaces ({})", kinds.join(", "))
    };
    let root = if cell.empty_root {
        "an empty file tree"
    } else {
        "the host's file tree"
    };
    let ids = match cell.ids {
        jailer::Ids::Own(_) => "ids of its own",
        jailer::Ids::Nobodys => "nobody's ids, as other machines have here",
        _ => "its user's ids",
    };
    let cgroup = cell.cgroup.as_ref().map_or_else(
        || "no cgroup".to_owned(),
        |bounds| format!("a cgroup ({})", bounds.files.join(", ")),
    );
    let landlock = cell
        .landlock_abi
        .map_or_else(|| "no Landlock".to_owned(), |abi| format!("Landlock {abi}"));
    format!(
        "A machine's process has {kinds}, {root}, {ids}, {cgroup}, {landlock}, no capability, and filtered system calls"
    )
}
