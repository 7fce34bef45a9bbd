//! What is made of a sandbox in use: a template, or forks without one.

use std::fs::File;

use tracing::info_span;

use super::build::input;
use super::check::Note;
use super::save::{Afterwards, Record, save, write};
use super::store::{Existing, Shelf, Staging, Unfinished};
use super::{ForkFiles, Inputs, Template, TemplateError};
use crate::builder::SandboxBuilder;
use crate::error::StartError;
use crate::sandbox::{Origin, Sandbox};

/// A machine that was saved to be forked at once, from files without a manifest.
#[derive(Debug)]
pub(crate) struct Saved {
    pub(super) origin: Origin,
    pub(super) state: File,
    pub(super) memory: File,
}

impl Saved {
    /// What the machine was started from, which its forks share.
    pub(crate) fn origin(&self) -> &Origin {
        &self.origin
    }

    pub(crate) fn fork_files(&self) -> Result<ForkFiles, StartError> {
        ForkFiles::of(&self.state, &self.memory, &self.origin.rootfs)
    }
}

impl Sandbox {
    /// Saves the sandbox as it is, files and memory, as a template of the data folder, and goes on. Programs that run in it are stopped
    /// while it is saved, and their connections to the host are broken in the forks.
    ///
    /// # Errors
    /// See [`TemplateError`]; the sandbox goes on then too, unless the error says that it has ended.
    pub fn snapshot(&self, name: &str) -> Result<Template, TemplateError> {
        self.check_alone()?;
        let unfinished = Unfinished::new(Shelf::Templates, name, Existing::Stays)?;
        save(self, unfinished, self.record(None)?, Afterwards::GoOn)
    }

    /// Forks it: so many sandboxes that go on where this one stands, each with its own clock, randomness and names, and this one goes
    /// on too. What runs in it is stopped for that moment and runs on in all of them, with its streams broken in the forks.
    ///
    /// Its memory is written once, to a file in the data folder that has no name any more when this returns; all forks map it
    /// privately. For more than a few forks, later ones, or ones that survive this process, [`Self::snapshot`] it.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let sandbox = sandvmm::Sandbox::builder().start()?;
    /// sandbox.write("state", b"prepared".as_slice())?;
    /// for (number, fork) in sandbox.fork(3)?.iter().enumerate() {
    ///     let output = fork.command("sh").args(["-c", &format!("cat state; echo {number}")]).output()?;
    ///     assert_eq!(output.stdout, format!("prepared{number}\n").as_bytes());
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// See [`TemplateError`]; no fork is left then.
    pub fn fork(&self, count: usize) -> Result<Vec<Self>, TemplateError> {
        let _span = info_span!(parent: self.shared().events.span(), "fork", count).entered();
        self.check_alone()?;
        let staging = Staging::nameless(Shelf::Paused)?;
        let written = write(self, staging.path(), Afterwards::GoOn)?;
        drop(staging);
        let saved = Saved {
            origin: self.origin().clone(),
            state: written.state,
            memory: written.memory,
        };
        let saved = std::sync::Arc::new(saved);
        // All of them begin before the first is waited for.
        let forks = (0..count)
            .map(|_| SandboxBuilder::of_saved(std::sync::Arc::clone(&saved)).begin())
            .collect::<Result<Vec<_>, _>>()
            .map_err(TemplateError::Start)?;
        for fork in &forks {
            fork.wait_ready().map_err(TemplateError::Start)?;
        }
        Ok(forks)
    }

    /// What is on record of it when it is saved in use.
    pub(super) fn record(&self, hostname: Option<String>) -> Result<Record, TemplateError> {
        let origin = self.origin();
        let mut note = Note::default();
        let inputs = match &origin.template {
            Some(template) => Inputs {
                from_running: true,
                ..template.manifest().inputs.clone()
            },
            None => Inputs {
                kernel: input(&mut note, "kernel", &origin.images.kernel)?,
                initramfs: input(&mut note, "initramfs", &origin.images.initrd)?,
                rootfs: input(&mut note, "root image", &origin.images.rootfs)?,
                cpus: origin.cpus,
                memory_mib: origin.memory_mib,
                copies: Vec::new(),
                commands: Vec::new(),
                warm: None,
                from_running: true,
            },
        };
        let template = origin.template.as_ref();
        Ok(Record {
            rehearsal: None,
            inputs,
            built_with_secrets: template
                .is_some_and(|template| template.manifest().built_with_secrets),
            hostname,
            note,
        })
    }

    /// Whether nobody else would write to its disks.
    pub(super) fn check_alone(&self) -> Result<(), TemplateError> {
        if self.origin().has_workspace {
            return Err(TemplateError::Workspace);
        }
        Ok(())
    }
}
