//! What can go wrong with templates.

use std::io;
use std::path::PathBuf;

use crate::error::{FileError, SpawnError, StartError};
use crate::freeze::FreezeError;
use crate::images::ImagesError;
use crate::outcome::Outcome;
use crate::save::SaveError;

/// Why there is no template, or none that can be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// The name is none.
    #[error(
        "{name:?} is no name for a template: 1 to 64 letters, digits, dots, hyphens and underscores, the first a letter or a digit"
    )]
    Name {
        /// As it was given.
        name: String,
    },
    /// The data folder is not known.
    #[error(transparent)]
    Images(#[from] ImagesError),
    /// No such template.
    #[error("There is no template {name:?} in {}: `sandvmm template build {name}` makes one", folder.display())]
    Missing {
        /// Which.
        name: String,
        /// The folder of all templates.
        folder: PathBuf,
    },
    /// A template of the name is there already.
    #[error("There is a template {name:?} already: remove it first")]
    Exists {
        /// Which.
        name: String,
    },
    /// Somebody is making one of the name at this moment.
    #[error(
        "A template {name:?} is being built by somebody else: wait for that, or choose another name"
    )]
    Busy {
        /// Which.
        name: String,
    },
    /// What it was built from is not what it was.
    #[error("The template's {role} {} has changed since it was built, or is gone: build the template anew", path.display())]
    Changed {
        /// Which: `kernel`, `initramfs`, `root image`, `copied file`, `copied folder`, `memory`, `state`, `working set`.
        role: &'static str,
        /// Where it was.
        path: PathBuf,
    },
    /// The manifest is none that this version reads.
    #[error("The template's manifest {} can't be used: {why}", path.display())]
    Manifest {
        /// Where it is.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// The host's processor is another, or the state file is of another version.
    #[error("The template can't be used on this host")]
    Host(#[source] vmm::restore::RestoreError),
    /// A file could not be made, read or written.
    #[error("{action} {} failed", path.display())]
    File {
        /// What was to be done.
        action: &'static str,
        /// With what.
        path: PathBuf,
        /// Why it was not.
        source: io::Error,
    },
    /// The machine that was to become the template did not start.
    #[error("The machine for the template did not start")]
    Start(#[source] StartError),
    /// A file could not be copied into it.
    #[error("{} could not be copied into the template", path.display())]
    Copy {
        /// Which.
        path: PathBuf,
        /// Why.
        source: FileError,
    },
    /// A command of the build could not be run.
    #[error("The template's command {command:?} could not be run")]
    Spawn {
        /// Which.
        command: String,
        /// Why.
        source: SpawnError,
    },
    /// A command of the build failed.
    #[error("The template's command {command:?} failed ({outcome:?}): {output}")]
    Command {
        /// Which.
        command: String,
        /// How it ended.
        outcome: Outcome,
        /// The end of what it wrote.
        output: String,
    },
    /// A first fork, which is made to find out what forks will need of its memory, did not run.
    #[error("A first fork of the template did not run: {why}")]
    Rehearsal {
        /// Why.
        why: String,
    },
    /// The guest could not be brought to a stand.
    #[error("The guest could not be stopped to be saved")]
    Freeze(#[from] FreezeError),
    /// The machine was not saved.
    #[error("The machine could not be saved")]
    Save(#[from] SaveError),
    /// Two machines can't have one workspace, or one scratch disk.
    #[error(
        "A sandbox with a workspace or a scratch disk can't be saved: its forks would all write to the one disk"
    )]
    Workspace,
    /// It was built with secrets, and whoever forks it has not said that this is right.
    #[error(
        "The template was built with secrets in its environment: say that its forks may have them"
    )]
    Secrets,
}

pub(super) fn file<'a>(
    action: &'static str,
    path: &'a std::path::Path,
) -> impl Fn(io::Error) -> TemplateError + 'a {
    move |source| TemplateError::File {
        action,
        path: path.to_owned(),
        source,
    }
}
