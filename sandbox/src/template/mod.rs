//! Machines that were booted and warmed once, to be forked for each run.
//!
//! A template is a folder that never changes:
//!
//! ```text
//! <data folder>/templates/NAME/
//!     manifest.json    what it was built from, by digest, and its own files' digests
//!     memory           the guest's memory, mapped privately by every fork
//!     state            everything else of the machine
//!     working-set      which pages of memory a fork writes to at once
//!     verified.json    what was compared with the manifest, and when: a note, rewritten at will
//! ```
//!
//! It is built beside its place and renamed into it, so nobody sees half of one. What it was built from is compared when it is
//! opened: [`TemplateError::Changed`] says which.

mod build;
mod check;
mod copied;
mod error;
mod manifest;
mod pause;
mod rehearse;
mod save;
mod store;
mod using;

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use build::TemplateBuilder;
pub use error::TemplateError;
pub use manifest::{Copied, InputFile, Inputs, Manifest, OwnFile};
pub(crate) use pause::is_paused;
pub use pause::{PauseError, PausedSandbox, StillPaused};
pub(crate) use using::Saved;

use self::check::{Content, Note};
use self::error::file;
use self::manifest::{FORMAT, MAX_MANIFEST_BYTES};
use crate::builder::SandboxBuilder;
use crate::error::StartError;
use crate::file::{self as files, Role};
use crate::host;
use crate::sandbox::Sandbox;

/// The manifest's name in the folder, and those of the two files.
const MANIFEST: &str = "manifest.json";
const MEMORY: &str = "memory";
const STATE: &str = "state";
const WORKING_SET: &str = "working-set";

/// How often a template is opened anew because another one took its place meanwhile: a build takes seconds.
const OPEN_TRIES: u32 = 4;

/// A template that was found to be whole. Its files stay open, so it serves until it is dropped, even if it is removed.
///
/// ```no_run
/// use sandvmm::{Sandbox, Template};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # sandvmm::init();
/// let machine = Sandbox::builder().memory_mib(512);
/// let built = Template::builder("analysis").sandbox(machine).warm("import json").build()?;
/// assert_eq!(built.manifest().inputs.memory_mib, 512);
///
/// // Any later program has it by its name; each fork is a machine of its own.
/// let template = Template::open("analysis")?;
/// for text in ["[1, 2]", "{}"] {
///     let fork = template.sandbox().max_processes(Some(100)).start()?;
///     let code = format!("import json; print(len(json.loads('{text}')))");
///     let output = fork.command("python3").args(["-c", &code]).output()?;
///     println!("{}", String::from_utf8_lossy(&output.stdout));
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Template {
    opened: Arc<Opened>,
    shares_secrets: bool,
}

/// A template's manifest and open files.
#[derive(Debug)]
struct Opened {
    folder: PathBuf,
    manifest: Manifest,
    state: File,
    memory: File,
    working_set: Option<File>,
    rootfs: File,
}

/// What a fork's machine is started from.
#[derive(Debug)]
pub(crate) struct ForkFiles {
    pub(crate) state: OwnedFd,
    pub(crate) memory: OwnedFd,
    pub(crate) working_set: Option<OwnedFd>,
    pub(crate) rootfs: OwnedFd,
}

impl Template {
    /// What a template of this name is built from. Building begins with [`TemplateBuilder::build`].
    #[must_use]
    pub fn builder(name: impl Into<String>) -> TemplateBuilder {
        TemplateBuilder::new(name.into())
    }

    /// Opens a template of the data folder, if it is whole, what it was built from has not changed, and this host has the
    /// processor that it was built on. Of what was copied into it, files are compared where they still are; folders are for
    /// [`Self::verify`].
    ///
    /// # Errors
    /// See [`TemplateError`].
    pub fn open(name: &str) -> Result<Self, TemplateError> {
        Self::open_with(name, Note::read)
    }

    /// As [`Self::open`], but reads every file anew, whatever was found out before, and all that was copied into it where that was
    /// copied from.
    ///
    /// # Errors
    /// See [`TemplateError`].
    pub fn verify(name: &str) -> Result<Self, TemplateError> {
        let template = Self::open_with(name, |_| Note::default())?;
        let copies = &template.manifest().inputs.copies;
        copies.iter().try_for_each(copied::compare)?;
        Ok(template)
    }

    fn open_with(name: &str, note: impl Fn(&Path) -> Note) -> Result<Self, TemplateError> {
        let folder = store::folder(name)?;
        if !folder.is_dir() {
            return Err(store::missing(name)?);
        }
        Self::open_steady(&folder, note)
    }

    /// Opens what has the name, also where it is replaced meanwhile: of two that were met half each, the new one.
    fn open_steady(folder: &Path, note: impl Fn(&Path) -> Note) -> Result<Self, TemplateError> {
        let mut tries_left = OPEN_TRIES;
        loop {
            let before = store::identity(folder);
            let opened = Self::open_folder(folder, note(folder));
            tries_left -= 1;
            if opened.is_ok() || tries_left == 0 || store::identity(folder) == before {
                return opened;
            }
        }
    }

    /// The names of all templates of the data folder.
    ///
    /// # Errors
    /// See [`TemplateError`].
    pub fn list() -> Result<Vec<String>, TemplateError> {
        store::Shelf::Templates.list()
    }

    /// The manifest of a template, whether it can be used or not.
    ///
    /// # Errors
    /// See [`TemplateError`].
    pub fn inspect(name: &str) -> Result<Manifest, TemplateError> {
        let folder = store::folder(name)?;
        if !folder.is_dir() {
            return Err(store::missing(name)?);
        }
        read_manifest(&folder.join(MANIFEST))
    }

    /// Removes a template from the data folder. Its forks live on.
    ///
    /// # Errors
    /// See [`TemplateError`].
    pub fn remove(name: &str) -> Result<(), TemplateError> {
        store::remove(name)
    }

    fn open_folder(folder: &Path, mut note: Note) -> Result<Self, TemplateError> {
        let manifest = read_manifest(&folder.join(MANIFEST))?;
        let inputs = &manifest.inputs;
        let rootfs = open_same(&mut note, "root image", &inputs.rootfs, Content::Whole)?;
        open_same(&mut note, "kernel", &inputs.kernel, Content::Whole)?;
        open_same(&mut note, "initramfs", &inputs.initramfs, Content::Whole)?;
        for copied in &inputs.copies {
            copied::look_at(&mut note, copied)?;
        }
        let mut own = |role, name, known: &OwnFile, content| {
            let known = InputFile {
                path: folder.join(name),
                sha256: known.sha256.clone(),
            };
            open_same(&mut note, role, &known, content)
        };
        let state = own("state", STATE, &manifest.state, Content::Whole)?;
        let memory = own("memory", MEMORY, &manifest.memory, Content::Sparse)?;
        let working_set = manifest
            .working_set
            .as_ref()
            .map(|known| own("working set", WORKING_SET, known, Content::Whole))
            .transpose()?;
        if !note.is_of_this_boot() {
            check_host(&state, &folder.join(STATE))?;
            note.set_this_boot();
        }
        note.write(folder);
        Ok(Self {
            opened: Arc::new(Opened {
                folder: folder.to_owned(),
                manifest,
                state,
                memory,
                working_set,
                rootfs,
            }),
            shares_secrets: false,
        })
    }

    /// What it was built from.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.opened.manifest
    }

    /// Where it is.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.opened.folder
    }

    /// Says that forks may have the secrets that the template was built with: whoever runs code in them may find these in the guest's
    /// memory or files. Without this, a template that was built with secrets is not forked.
    #[must_use]
    pub fn share_secrets(mut self) -> Self {
        self.shares_secrets = true;
        self
    }

    /// A fork with other options than [`Self::fork`]'s: its time, host name, console, cell. Processors, memory and images are the
    /// template's.
    #[must_use]
    pub fn sandbox(&self) -> SandboxBuilder {
        SandboxBuilder::of_template(self.clone())
    }

    /// Starts a fork: a machine of its own that goes on where the template was saved, with its own clock, randomness and names.
    ///
    /// # Errors
    /// See [`StartError`]; nothing is left behind.
    pub fn fork(&self) -> Result<Sandbox, StartError> {
        self.sandbox().start()
    }

    /// The files of a fork.
    pub(crate) fn fork_files(&self) -> Result<ForkFiles, StartError> {
        if self.opened.manifest.built_with_secrets && !self.shares_secrets {
            return Err(StartError::InvalidOption {
                sentence: TemplateError::Secrets.to_string(),
            });
        }
        let opened = &self.opened;
        let files = ForkFiles::of(&opened.state, &opened.memory, &opened.rootfs)?;
        Ok(ForkFiles {
            working_set: opened.working_set.as_ref().map(again).transpose()?,
            ..files
        })
    }
}

impl ForkFiles {
    /// Descriptors of its own for another fork.
    fn of(state: &File, memory: &File, rootfs: &File) -> Result<Self, StartError> {
        Ok(Self {
            state: again(state)?,
            memory: again(memory)?,
            working_set: None,
            rootfs: again(rootfs)?,
        })
    }
}

fn again(file: &File) -> Result<OwnedFd, StartError> {
    file.try_clone()
        .map(OwnedFd::from)
        .map_err(|source| StartError::System {
            action: "Giving a saved machine's file to a fork",
            source,
        })
}

fn read_manifest(path: &Path) -> Result<Manifest, TemplateError> {
    let unusable = |why: String| TemplateError::Manifest {
        path: path.to_owned(),
        why,
    };
    let mut text = Vec::new();
    File::open(path)
        .and_then(|file| file.take(MAX_MANIFEST_BYTES + 1).read_to_end(&mut text))
        .map_err(file("Reading", path))?;
    if text.len() as u64 > MAX_MANIFEST_BYTES {
        return Err(unusable(format!(
            "it is longer than {MAX_MANIFEST_BYTES} bytes"
        )));
    }
    // The version first: another version's may have other fields.
    let value: serde_json::Value =
        serde_json::from_slice(&text).map_err(|error| unusable(error.to_string()))?;
    let format = value.get("format").and_then(serde_json::Value::as_u64);
    if format != Some(u64::from(FORMAT)) {
        return Err(unusable(format!(
            "it is of another version than {FORMAT}: build the template anew"
        )));
    }
    let manifest: Manifest =
        serde_json::from_value(value).map_err(|error| unusable(error.to_string()))?;
    if manifest.inputs.digest() != manifest.inputs_digest {
        return Err(unusable(
            "its digest is not that of what is in it".to_owned(),
        ));
    }
    Ok(manifest)
}

/// Opens a file, if its content is what it was.
fn open_same(
    note: &mut Note,
    role: &'static str,
    known: &InputFile,
    content: Content,
) -> Result<File, TemplateError> {
    let changed = TemplateError::Changed {
        role,
        path: known.path.clone(),
    };
    // Regular files alone: a block device has nothing that tells of a change.
    let opened = match files::open(Role::Kernel, &known.path) {
        Ok(opened) => File::from(opened),
        // It is there, perhaps as it was.
        Err(StartError::File {
            source: Some(source),
            ..
        }) if source.kind() != io::ErrorKind::NotFound => {
            return Err(file("Opening", &known.path)(source));
        }
        Err(_) => return Err(changed),
    };
    if note.has_content(&opened, known, content)? {
        Ok(opened)
    } else {
        Err(changed)
    }
}

/// Whether this host's processor and program can go on with the state.
fn check_host(state: &File, path: &Path) -> Result<(), TemplateError> {
    let kvm = host::open_kvm()
        .map_err(|sentence| TemplateError::Start(StartError::NoKvm { sentence }))?;
    let mut bytes = Vec::new();
    state
        .try_clone()
        .and_then(|state| {
            use std::io::Seek;
            let mut state = state;
            state.rewind()?;
            state
                .take(vmm::snapshot::format::MAX_STATE_BYTES + 1)
                .read_to_end(&mut bytes)
        })
        .map_err(file("Reading", path))?;
    vmm::restore::check(kvm, &bytes).map_err(TemplateError::Host)
}

#[cfg(test)]
mod tests;
