//! A running sandbox.

use std::ffi::OsStr;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::builder::SandboxBuilder;
use crate::clock::Clocks;
use crate::command::Command;
use crate::error::FileError;
use crate::outcome::Ended;

/// One virtual machine, ready for commands. Dropping it ends it: nothing is left.
#[derive(Debug)]
pub struct Sandbox {}

impl Sandbox {
    /// What a sandbox is made from.
    #[must_use]
    pub fn builder() -> SandboxBuilder {
        SandboxBuilder::new()
    }

    /// A command to run in the sandbox: a path when it has a slash, else looked up in the guest's `PATH`.
    #[must_use]
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let _ = program;
        todo!()
    }

    /// Writes a file in the guest, replacing one that is there atomically; missing folders are made.
    /// A relative path starts at the user's home. The content is streamed. `user` is `USER[:GROUP]`, by name
    /// or number; the image's unprivileged user when `None`. Returns the absolute path.
    ///
    /// # Errors
    /// See [`FileError`].
    pub fn write(
        &self,
        path: impl AsRef<Path>,
        mode: u32,
        user: Option<&str>,
        content: impl Read,
    ) -> Result<PathBuf, FileError> {
        let _ = (path.as_ref(), mode, user, content);
        todo!()
    }

    /// The phases reached so far.
    #[must_use]
    pub fn clocks(&self) -> Clocks {
        todo!()
    }

    /// Ends the sandbox at once, from any thread: kills the machine's process and reaps it. What was read from
    /// it before can still be read from the streams. Calling it again returns the same.
    pub fn end(&self) -> Ended {
        todo!()
    }
}
