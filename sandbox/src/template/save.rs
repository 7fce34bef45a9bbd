//! From a sandbox to a template's files.

use std::fs::{self, File};
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use vmm::control::Then;
use vmm::snapshot::working_set::encode;

use super::check::{Content, Note};
use super::error::{TemplateError, file};
use super::manifest::{FORMAT, Inputs, Manifest, OwnFile};
use super::rehearse::Rehearsal;
use super::store::Unfinished;
use super::{MANIFEST, MEMORY, STATE, Template, WORKING_SET};
use crate::error::StartError;
use crate::host;
use crate::sandbox::Sandbox;

/// What becomes of the sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Afterwards {
    /// It is ended: it was made for this.
    End,
    /// It goes on.
    GoOn,
}

/// Permissions of a template's files while they are written, and then: a guest's memory is for its owner's eyes.
const WRITING: u32 = 0o600;
const READ_ONLY: u32 = 0o400;

/// What is told of a saved machine by whoever has it saved.
#[derive(Debug)]
pub(super) struct Record {
    /// What a first fork runs, for the working set.
    pub(super) rehearsal: Option<Rehearsal>,
    pub(super) inputs: Inputs,
    pub(super) built_with_secrets: bool,
    /// Of a paused sandbox.
    pub(super) hostname: Option<String>,
    /// What was read of its inputs.
    pub(super) note: Note,
}

/// A machine's two files.
#[derive(Debug)]
pub(super) struct Written {
    pub(super) state: File,
    pub(super) memory: File,
    /// Bytes of memory that are in use.
    memory_used_bytes: u64,
}

/// Saves the sandbox into the folder, and gives that its name.
pub(super) fn save(
    sandbox: &Sandbox,
    unfinished: Unfinished,
    record: Record,
    afterwards: Afterwards,
) -> Result<Template, TemplateError> {
    let folder = unfinished.path();
    let Written {
        state,
        memory,
        memory_used_bytes,
    } = write(sandbox, folder, afterwards)?;
    let Record {
        rehearsal,
        inputs,
        built_with_secrets,
        hostname,
        mut note,
    } = record;
    let working_set = match rehearsal {
        None => None,
        Some(rehearsal) => {
            let path = folder.join(WORKING_SET);
            let mut opened = create(&path)?;
            let runs = rehearsal.working_set(sandbox.origin(), (&state, &memory), folder)?;
            opened
                .write_all(&encode(&runs))
                .map_err(file("Writing", &path))?;
            Some(own_file(&mut note, &opened, &path, Content::Whole)?)
        }
    };
    let manifest = Manifest {
        format: FORMAT,
        sandvmm: env!("CARGO_PKG_VERSION").to_owned(),
        built_at_s: SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_secs()),
        inputs_digest: inputs.digest(),
        inputs,
        built_with_secrets,
        memory: own_file(&mut note, &memory, &folder.join(MEMORY), Content::Sparse)?,
        memory_used_bytes,
        state: own_file(&mut note, &state, &folder.join(STATE), Content::Whole)?,
        working_set,
        hostname,
    };
    let path = folder.join(MANIFEST);
    let text = serde_json::to_vec_pretty(&manifest).map_err(|error| TemplateError::Manifest {
        path: path.clone(),
        why: error.to_string(),
    })?;
    let mut opened = create(&path)?;
    opened.write_all(&text).map_err(file("Writing", &path))?;
    finish(&opened, &path)?;
    // What was read once is not read again when it is opened.
    note.write(folder);
    let folder = unfinished.finish()?;
    Template::open_folder(&folder, note)
}

/// Brings the guest to a stand and has the machine write itself into the folder.
pub(super) fn write(
    sandbox: &Sandbox,
    folder: &Path,
    afterwards: Afterwards,
) -> Result<Written, TemplateError> {
    let memory_mib = sandbox.origin().memory_mib;
    let (state, memory, descriptors) = create_files(folder, memory_mib)?;
    let shared = sandbox.shared();
    let then = match afterwards {
        Afterwards::End => Then::Stay,
        Afterwards::GoOn => Then::Resume,
    };
    shared.freeze(afterwards == Afterwards::End)?;
    let saved = shared.save(then, descriptors, memory_mib);
    match afterwards {
        Afterwards::End => {
            sandbox.end();
        }
        // Also where it was not saved.
        Afterwards::GoOn => shared.thaw()?,
    }
    let memory_used_bytes = saved?.memory_bytes;
    Ok(Written {
        state,
        memory,
        memory_used_bytes,
    })
}

/// Has a machine whose guest stands write itself into the folder, and gives its memory. Its processors stay where they are.
pub(super) fn write_standing(sandbox: &Sandbox, folder: &Path) -> Result<File, TemplateError> {
    let memory_mib = sandbox.origin().memory_mib;
    let (_, memory, descriptors) = create_files(folder, memory_mib)?;
    sandbox.shared().save(Then::Stay, descriptors, memory_mib)?;
    Ok(memory)
}

/// The two files of a machine, empty, and what a machine is given to write them.
fn create_files(
    folder: &Path,
    memory_mib: u32,
) -> Result<(File, File, Vec<OwnedFd>), TemplateError> {
    let memory = create(&folder.join(MEMORY))?;
    memory
        .set_len(u64::from(memory_mib) << 20)
        .map_err(file("Sizing", &folder.join(MEMORY)))?;
    let state = create(&folder.join(STATE))?;
    let no_kvm = |sentence| TemplateError::Start(StartError::NoKvm { sentence });
    let again = |file: &File| file.try_clone().map(OwnedFd::from);
    let no_descriptor = |source| {
        TemplateError::Start(StartError::System {
            action: "Giving the template's files to the machine",
            source,
        })
    };
    let descriptors = vec![
        host::open_kvm().map_err(no_kvm)?,
        again(&state).map_err(no_descriptor)?,
        again(&memory).map_err(no_descriptor)?,
    ];
    Ok((state, memory, descriptors))
}

pub(super) fn create(path: &Path) -> Result<File, TemplateError> {
    File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(WRITING)
        .open(path)
        .map_err(file("Making", path))
}

/// What is recorded of a file, which does not change any more.
fn own_file(
    note: &mut Note,
    opened: &File,
    path: &Path,
    content: Content,
) -> Result<OwnFile, TemplateError> {
    finish(opened, path)?;
    Ok(OwnFile {
        bytes: opened.metadata().map_err(file("Inspecting", path))?.len(),
        sha256: note.digest(opened, path, content)?,
    })
}

/// Nobody writes to it any more, and it survives the host's crash.
fn finish(opened: &File, path: &Path) -> Result<(), TemplateError> {
    opened
        .set_permissions(fs::Permissions::from_mode(READ_ONLY))
        .and_then(|()| opened.sync_all())
        .map_err(file("Writing", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_else_reads_what_is_saved_neither_then_nor_later() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(MEMORY);
        let mode = || fs::metadata(&path).unwrap().permissions().mode() & 0o7777;

        let opened = create(&path).unwrap();
        assert_eq!(mode(), 0o600);

        finish(&opened, &path).unwrap();
        assert_eq!(mode(), 0o400);
    }
}
