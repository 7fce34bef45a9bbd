//! `sandvmm workspace`: the disks that outlive a run.

use std::fmt::Write;

use clap::Subcommand;
use sandvmm::{Workspace, WorkspaceError};

use crate::args::parse_name;
use crate::notice;
use crate::output;

/// Exit code when it could not be done.
const FAILED: u8 = 125;

/// What to do with workspaces.
#[derive(Debug, Subcommand)]
pub(crate) enum WorkspaceTask {
    /// Show all: name, bytes on this disk, most bytes, and whether a run has it
    List,
    /// Remove one with all that is in it
    Rm {
        /// Its name
        #[arg(value_parser = parse_name)]
        name: String,
    },
}

/// Does it, and gives the exit code.
pub(crate) fn workspace(task: &WorkspaceTask) -> u8 {
    let done = match task {
        WorkspaceTask::List => list(),
        WorkspaceTask::Rm { name } => Workspace::remove(name).map(|()| 0),
    };
    done.unwrap_or_else(|error| {
        notice::say(&notice::sentence(&error));
        FAILED
    })
}

/// One line each: name, MiB on this disk, most MiB, and whether a run has it.
fn list() -> Result<u8, WorkspaceError> {
    let mut text = String::new();
    for found in Workspace::list()? {
        let found = match found {
            Ok(found) => found,
            Err(odd) => {
                notice::say(&notice::sentence(&odd));
                continue;
            }
        };
        let (used, quota) = (found.used_bytes >> 20, found.quota_bytes >> 20);
        let in_use = if found.in_use { "  in use" } else { "" };
        // A string takes all that is written to it.
        let _ = writeln!(text, "{}  {used}M of {quota}M{in_use}", found.name);
    }
    Ok(output::print(&text, 0))
}
