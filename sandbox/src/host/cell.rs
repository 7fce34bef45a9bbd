//! The cell that a machine's process would have here, by trying.

use std::time::Duration;

use vmm::control::ControlSocket;
use vmm::memory::MIN_MEMORY_MIB;

use super::{Check, Status};
use crate::cell::Cell;
use crate::program;
use crate::text::one_line;

/// How long the process may take until it is in its cell.
const CELL_LIMIT: Duration = Duration::from_secs(10);

/// Starts a process in the cell that a machine's would have, and ends it.
pub(super) fn check() -> (Check, Option<Cell>) {
    const NAME: &str = "Cell";
    let cell = match try_cell() {
        Ok(cell) => cell,
        Err(why) => {
            let check = Check::not_ok(
                NAME,
                Status::Warning,
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
            "the checks above tell what to do",
        )
    };
    (check, Some(cell))
}

fn try_cell() -> Result<Cell, String> {
    let program = program::find(None).map_err(|error| error.to_string())?;
    let (_ours, theirs) = ControlSocket::pair().map_err(|error| error.to_string())?;
    let bounds = jailer::Bounds {
        memory_mib: MIN_MEMORY_MIB,
        vcpus: 1,
        max_file_bytes: 0,
    };
    let mut process = jailer::start(&program, theirs.into(), jailer::Options::new(bounds))
        .map_err(|error| error.to_string())?;
    match process.entered(CELL_LIMIT) {
        Ok(Some(cell)) => Ok(cell),
        Ok(None) => {
            process.end();
            process.read_stderr();
            Err(one_line(&process.stderr_tail()))
        }
        Err(error) => Err(error.to_string()),
    }
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
