//! The guest's initramfs: one program, the agent, and what the kernel needs to start it.

use std::path::{Path, PathBuf};

use crate::cache::{self, CacheError};
use crate::cpio::{Archive, TooLong};
use crate::progress::Progress;
use crate::tool::{self, ToolError};
use crate::workspace::Workspace;

/// The package and its program.
const AGENT: &str = "sandvmm-guest-agent";
/// At a fixed address, as relocations are work before `main`.
const FLAGS: &str = "-C relocation-model=static";

/// Why there is no initramfs.
#[derive(Debug, thiserror::Error)]
pub(crate) enum InitramfsError {
    /// The agent was not built.
    #[error("Could not build the guest's agent")]
    Build(#[from] ToolError),
    /// A file could not be read or written.
    #[error(transparent)]
    File(#[from] CacheError),
    /// The agent is too large.
    #[error("Could not pack the guest's initramfs")]
    Archive(#[from] TooLong),
}

/// Builds the agent and writes the initramfs to `target`, unless it is there already.
pub(crate) fn install(
    workspace: &Workspace,
    target: &Path,
    progress: &Progress,
) -> Result<(), InitramfsError> {
    let agent = build_agent(workspace, progress)?;
    let agent = std::fs::read(&agent).map_err(CacheError::io("read", &agent))?;
    Ok(cache::replace(target, &pack(&agent)?)?)
}

fn build_agent(workspace: &Workspace, progress: &Progress) -> Result<PathBuf, ToolError> {
    let built = workspace.release_folder().join(AGENT);
    let _step = (!built.exists()).then(|| progress.begin("Building the guest's agent"));
    let mut build = workspace.build_static(AGENT, FLAGS);
    // Every byte of it is copied and unpacked at each boot.
    build.env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "s");
    tool::run(&mut build)?;
    Ok(built)
}

/// The archive: `/init`, and the devices that are wanted before anything is mounted: the console, which the kernel
/// opens, and the null device, without which a Rust program that got no standard streams aborts before `main`.
fn pack(agent: &[u8]) -> Result<Vec<u8>, TooLong> {
    let mut archive = Archive::default();
    archive.folder("dev", 0o755)?;
    archive.device("dev/console", 0o600, (5, 1))?;
    archive.device("dev/null", 0o666, (1, 3))?;
    archive.file("init", 0o755, agent)?;
    archive.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agent_is_in_the_archive_whole_and_in_place() {
        let archive = pack(b"the agent").unwrap();

        let name = b"init\0";
        let at = archive
            .windows(name.len())
            .position(|window| window == name)
            .unwrap();
        let content = (at + name.len()).next_multiple_of(4);
        assert_eq!(&archive[content..content + 9], b"the agent");
    }
}
