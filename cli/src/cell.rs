//! The cell around a machine's process, in words and as JSON.

use sandvmm::cell::{Cell, Ids, Namespace, Part};
use serde::Serialize;

/// The object `cell` of `run --json` and `doctor --json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct CellReport {
    namespaces: Vec<&'static str>,
    empty_root: bool,
    own_ids: bool,
    cgroup: Option<Vec<&'static str>>,
    landlock_abi: Option<u32>,
    seccomp: bool,
    missing: Vec<MissingReport>,
    left_out: Vec<&'static str>,
}

/// A part that was wanted and is not on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct MissingReport {
    part: &'static str,
    why: String,
}

impl From<&Cell> for CellReport {
    fn from(cell: &Cell) -> Self {
        Self {
            namespaces: cell.namespaces.iter().map(Namespace::name).collect(),
            empty_root: cell.empty_root,
            own_ids: matches!(cell.ids, Ids::Own(_)),
            cgroup: cell.cgroup.as_ref().map(|bounds| bounds.files.clone()),
            landlock_abi: cell.landlock_abi,
            seccomp: cell.seccomp,
            missing: cell
                .missing
                .iter()
                .map(|missing| MissingReport {
                    part: missing.part.name(),
                    why: missing.why.clone(),
                })
                .collect(),
            left_out: cell.left_out.iter().map(Part::name).collect(),
        }
    }
}

/// What has to be said even where nobody asked: the walls that the host did not give, one or many.
pub(crate) fn warning(cell: &Cell) -> Option<String> {
    let missing: Vec<&str> = cell
        .missing
        .iter()
        .filter(|missing| missing.part == Part::Namespaces)
        .map(|missing| missing.why.as_str())
        .collect();
    (!missing.is_empty()).then(|| {
        format!(
            "The cell around the machine's process is not whole: {}; `sandvmm doctor` tells what to do",
            missing.join("; ")
        )
    })
}
