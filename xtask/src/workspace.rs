//! Where the project and its build are.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;

use crate::tool::{self, ToolError};

/// Why the project was not found.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WorkspaceError {
    /// cargo did not describe it.
    #[error("Could not ask cargo about the project")]
    Cargo(#[from] ToolError),
    /// cargo described it in a way that is not understood.
    #[error("Could not understand cargo's description of the project")]
    Metadata(#[from] serde_json::Error),
}

/// The project's folders.
#[derive(Debug)]
pub(crate) struct Workspace {
    root: PathBuf,
    target: PathBuf,
}

/// The part of `cargo metadata` that is of interest.
#[derive(Deserialize)]
struct Metadata {
    workspace_root: PathBuf,
    target_directory: PathBuf,
}

impl Workspace {
    /// Asks cargo.
    pub(crate) fn find() -> Result<Self, WorkspaceError> {
        let mut question = cargo();
        question.args(["metadata", "--no-deps", "--format-version", "1"]);
        question
            .arg("--manifest-path")
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"));
        let metadata: Metadata = serde_json::from_slice(&tool::run(&mut question)?)?;
        Ok(Self {
            root: metadata.workspace_root,
            target: metadata.target_directory,
        })
    }

    /// The folder of the workspace's `Cargo.toml`.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// The folder of cargo's builds.
    pub(crate) fn target(&self) -> &Path {
        &self.target
    }

    /// The folder of the release build's programs.
    pub(crate) fn release_folder(&self) -> PathBuf {
        self.target.join("release")
    }

    /// The folders that a KVM host may write to: the project, and its build where that is elsewhere. Canonical paths.
    pub(crate) fn shares(&self) -> Vec<PathBuf> {
        let mut shares: Vec<PathBuf> = [&self.root, &self.target]
            .into_iter()
            .filter_map(|folder| folder.canonicalize().ok())
            .collect();
        if let [root, target] = shares.as_slice()
            && target.starts_with(root)
        {
            shares.truncate(1);
        }
        shares
    }
}

/// The cargo that runs this program.
pub(crate) fn cargo() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}
