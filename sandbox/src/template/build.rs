//! Building a template: boot, copy, run, warm, save.

use std::path::{Path, PathBuf};

use super::Template;
use super::check::{Content, Note};
use super::copied::{compare, tree_digest};
use super::error::{TemplateError, file};
use super::manifest::{Copied, InputFile, Inputs};
use super::rehearse::Rehearsal;
use super::save::{Afterwards, Record, save};
use super::store::{Existing, Shelf, Unfinished};
use crate::builder::SandboxBuilder;
use crate::command::{Command, Output};
use crate::file::{self as files, Role};
use crate::sandbox::Sandbox;
use crate::text::one_line;

/// The user that commands are run as: what they install is for everybody.
const COMMANDS_USER: &str = "root";

/// What a template is built from.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # sandvmm::init();
/// let template = sandvmm::Template::builder("tests")
///     .copy("words.txt", "/tmp/words.txt")
///     .run("sort -u /tmp/words.txt > /usr/share/words")
///     .replace()
///     .build()?;
/// println!("{}", template.folder().display());
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct TemplateBuilder {
    name: String,
    sandbox: SandboxBuilder,
    copies: Vec<(PathBuf, PathBuf)>,
    commands: Vec<String>,
    secrets: Vec<(String, String)>,
    warm: Option<String>,
    existing: Existing,
}

impl TemplateBuilder {
    pub(super) fn new(name: String) -> Self {
        Self {
            name,
            sandbox: Sandbox::builder(),
            copies: Vec::new(),
            commands: Vec::new(),
            secrets: Vec::new(),
            warm: None,
            existing: Existing::Stays,
        }
    }

    /// The machine: its images, processors, memory. Default: [`Sandbox::builder`]'s.
    #[must_use]
    pub fn sandbox(mut self, builder: SandboxBuilder) -> Self {
        self.sandbox = builder;
        self
    }

    /// Copies a file of the host, or a folder with all that is in it, to a path in the guest, for the image's unprivileged user, as
    /// [`Files::copy_in`](crate::Files::copy_in) does.
    #[must_use]
    pub fn copy(mut self, host: impl Into<PathBuf>, guest: impl Into<PathBuf>) -> Self {
        self.copies.push((host.into(), guest.into()));
        self
    }

    /// Runs a shell command as root, after all copies. One that fails ends the build.
    #[must_use]
    pub fn run(mut self, command: impl Into<String>) -> Self {
        self.commands.push(command.into());
        self
    }

    /// Sets a variable for the commands whose value is a secret. The template records that there was one, and is not forked unless
    /// [`Template::share_secrets`] says so.
    #[must_use]
    pub fn secret(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.secrets.push((key.into(), value.into()));
        self
    }

    /// Starts a Python interpreter at last that runs this code and stays, to be forked by runs: see [`Sandbox::warm_up`].
    #[must_use]
    pub fn warm(mut self, code: impl Into<String>) -> Self {
        self.warm = Some(code.into());
        self
    }

    /// Has it take the place of a template of the same name. That one stays, and is forked, until the new one is whole, and where none comes of
    /// it; its forks live on. Without this, a name that is taken is refused.
    #[must_use]
    pub fn replace(mut self) -> Self {
        self.existing = Existing::IsReplaced;
        self
    }

    /// Builds it.
    ///
    /// # Errors
    /// See [`TemplateError`]; nothing of it is left then.
    pub fn build(self) -> Result<Template, TemplateError> {
        let unfinished = Unfinished::new(Shelf::Templates, &self.name, self.existing)?;
        let images = self.sandbox.images().map_err(TemplateError::Start)?;
        let mut note = Note::default();
        let (kernel, initramfs, rootfs) = (
            input(&mut note, "kernel", &images.kernel)?,
            input(&mut note, "initramfs", &images.initrd)?,
            input(&mut note, "root image", &images.rootfs)?,
        );
        let (cpus, memory_mib) = self.sandbox.size();
        let sandbox = self.sandbox.start().map_err(TemplateError::Start)?;
        let copies = copy_all(&sandbox, &self.copies)?;
        for command in &self.commands {
            let mut shell = sandbox.command("sh");
            shell.arg("-c").arg(command).user(COMMANDS_USER);
            shell.envs(self.secrets.iter().map(|(key, value)| (key, value)));
            succeed(command, &mut shell)?;
        }
        if let Some(code) = &self.warm {
            succeed(code, &mut sandbox.warm_up(code))?;
        }
        // What was booted is what was read before, if it still is there unchanged.
        for (role, file) in [
            ("kernel", &kernel),
            ("initramfs", &initramfs),
            ("root image", &rootfs),
        ] {
            super::open_same(&mut note, role, file, Content::Whole)?;
        }
        let inputs = Inputs {
            kernel,
            initramfs,
            rootfs,
            cpus,
            memory_mib,
            copies,
            commands: self.commands,
            warm: self.warm,
            from_running: false,
        };
        let rehearsal = Some(match inputs.warm {
            Some(_) => Rehearsal::Python,
            None => Rehearsal::Shell,
        });
        let record = Record {
            rehearsal,
            inputs,
            built_with_secrets: !self.secrets.is_empty(),
            hostname: None,
            note,
        };
        save(&sandbox, unfinished, record, Afterwards::End)
    }
}

/// A file that the template depends on, with its digest.
pub(super) fn input(
    note: &mut Note,
    role: &'static str,
    path: &Path,
) -> Result<InputFile, TemplateError> {
    let path = path.canonicalize().map_err(file("Finding", path))?;
    let opened = files::open(Role::Kernel, &path).map_err(|_| TemplateError::Changed {
        role,
        path: path.clone(),
    })?;
    Ok(InputFile {
        sha256: note.digest(&opened.into(), &path, Content::Whole)?,
        path,
    })
}

fn copy_all(
    sandbox: &Sandbox,
    copies: &[(PathBuf, PathBuf)],
) -> Result<Vec<Copied>, TemplateError> {
    copies
        .iter()
        .map(|(host, guest)| {
            let path = host.canonicalize().map_err(file("Finding", host))?;
            let copied = Copied {
                is_folder: path.is_dir(),
                sha256: tree_digest(&path)?,
                guest_path: guest.clone(),
                host_path: Some(path),
            };
            let failed = |source| TemplateError::Copy {
                path: host.clone(),
                source,
            };
            sandbox.files().copy_in(host, guest).map_err(failed)?;
            // What was copied is what was read before, if it still is there unchanged.
            compare(&copied)?;
            Ok(copied)
        })
        .collect()
}

/// Runs a command of the build, which has to exit with 0.
fn succeed(text: &str, command: &mut Command) -> Result<(), TemplateError> {
    let Output {
        completion,
        stdout,
        stderr,
        ..
    } = command.output().map_err(|source| TemplateError::Spawn {
        command: text.to_owned(),
        source,
    })?;
    if completion.outcome.success() {
        return Ok(());
    }
    let output = if stderr.is_empty() { stdout } else { stderr };
    Err(TemplateError::Command {
        command: text.to_owned(),
        outcome: completion.outcome,
        output: one_line(&output),
    })
}
