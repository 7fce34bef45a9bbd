//! Where the project and its build are.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;

use crate::tool::{self, ToolError};

/// The only target that every Rust installation on the supported machines has. It links statically as well.
const TARGET: &str = "x86_64-unknown-linux-gnu";
/// The C library goes into the program.
const STATIC: &str = "-C target-feature=+crt-static";

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

    /// The folder of the programs that [`build_static`](Self::build_static) builds.
    pub(crate) fn release_folder(&self) -> PathBuf {
        self.target.join(TARGET).join("release")
    }

    /// Begins to build the program of `package` as it is released: linked statically, with `flags` beside that.
    ///
    /// A program that starts a hundred times a second has no time for a dynamic loader, and an initramfs has none.
    pub(crate) fn build_static(&self, package: &str, flags: &str) -> Command {
        let mut build = cargo();
        build
            .current_dir(&self.root)
            .args(["build", "--quiet", "--release", "--package", package])
            // Named, so that the flags are not those of build scripts and macros, which are loaded dynamically.
            .args(["--target", TARGET, "--target-dir"])
            .arg(&self.target)
            .env("RUSTFLAGS", format!("{STATIC} {flags}"));
        build
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
