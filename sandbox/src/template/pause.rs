//! A sandbox that is put on disk, and goes on from there.

use std::fs;
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::check::Note;
use super::error::file;
use super::save::{Afterwards, save};
use super::store::{Existing, Shelf, Unfinished, lock_soon, set_aside};
use super::{MANIFEST, Template, TemplateError, read_manifest};
use crate::error::StartError;
use crate::sandbox::Sandbox;

/// Bytes of what `stat(2)` counts blocks in.
const STAT_BLOCK_BYTES: u64 = 512;

/// Why a sandbox was not paused, or does not go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PauseError {
    /// One of the name is there already.
    #[error(
        "There is a paused sandbox {name:?} already: resume it or remove it first (`sandvmm resume {name}`, `sandvmm stop {name}`), or choose another name"
    )]
    Exists {
        /// Which.
        name: String,
    },
    /// Another sandbox is being paused under the name.
    #[error("Another sandbox is being paused as {name:?} at this moment: choose another name")]
    Taken {
        /// Which.
        name: String,
    },
    /// No such one, or it was resumed.
    #[error("There is no paused sandbox {name:?}: `sandvmm ls` lists those that there are")]
    Missing {
        /// Which.
        name: String,
    },
    /// Somebody else is resuming it.
    #[error("The paused sandbox {name:?} is being resumed by somebody else")]
    Busy {
        /// Which.
        name: String,
    },
    /// It could not be saved, or what was saved can't be used: see [`TemplateError`], whose words are of a template.
    #[error("The sandbox could not be put on disk or taken from there")]
    Saved(#[from] TemplateError),
    /// It did not start. It is still paused.
    #[error("The paused sandbox did not go on")]
    Start(#[source] StartError),
}

impl Sandbox {
    /// Puts the sandbox on disk, files and memory, under a name in the data folder, and ends it: [`Self::resume`] goes on with it, in
    /// this process or another. Programs that run in it run on then, with their streams broken.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let sandbox = sandvmm::Sandbox::builder().start()?;
    /// sandbox.write("note", b"kept".as_slice())?;
    /// sandbox.pause("evening")?;
    /// let sandbox = sandvmm::Sandbox::resume("evening")?;
    /// assert_eq!(sandbox.read("note")?, b"kept");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// See [`PauseError`]. Where the guest could not be brought to a stand it goes on; where it could not be written, it has ended.
    pub fn pause(&self, name: &str) -> Result<(), PauseError> {
        self.check_alone()?;
        let unfinished =
            Unfinished::new(Shelf::Paused, name, Existing::Stays).map_err(|error| match error {
                TemplateError::Exists { name } => PauseError::Exists { name },
                TemplateError::Busy { name } => PauseError::Taken { name },
                other => other.into(),
            })?;
        let hostname = self.shared().lock().hostname.clone();
        save(self, unfinished, self.record(hostname)?, Afterwards::End)?;
        Ok(())
    }

    /// Goes on with a sandbox that was paused; its files on disk are removed. It keeps its host name; its clock, its randomness, machine id
    /// and boot id are new, and it has no time limit.
    ///
    /// # Errors
    /// See [`PauseError`]; it stays paused then, and also where this process ends before this returns.
    pub fn resume(name: &str) -> Result<Self, PauseError> {
        let (sandbox, paused) = Self::begin_resume(name)?;
        sandbox.wait_ready().map_err(PauseError::Start)?;
        paused.remove()?;
        Ok(sandbox)
    }

    /// Begins to go on with a sandbox that was paused, as [`Self::resume`] does, and leaves its files on disk: for callers that have more to do
    /// before they can say that it goes on. [`Self::wait_ready`] waits for its guest.
    ///
    /// Either it is ended, and is still paused; or [`StillPaused::remove`] is called before anything is done with it. Meanwhile nobody else goes on
    /// with it, or pauses another one under its name.
    ///
    /// # Errors
    /// See [`PauseError`]; it stays paused then.
    pub fn begin_resume(name: &str) -> Result<(Self, StillPaused), PauseError> {
        let folder = Shelf::Paused.folder(name)?;
        let paused = StillPaused::lock(name, folder)?;
        let folder = &paused.folder;
        let template = Template::open_folder(folder, Note::read(folder))?;
        let hostname = template.manifest().hostname.clone();
        // Its secrets, if there are any, are its own.
        let builder = template.share_secrets().sandbox();
        let builder = match hostname {
            Some(hostname) => builder.hostname(hostname),
            None => builder,
        };
        let sandbox = builder.begin().map_err(PauseError::Start)?;
        Ok((sandbox, paused))
    }
}

impl Sandbox {
    /// The sandboxes that are paused, by name, whoever paused them: [`Self::resume`] goes on with one, [`Self::remove_paused`] removes it.
    ///
    /// # Errors
    /// See [`PauseError`].
    pub fn list_paused() -> Result<Vec<PausedSandbox>, PauseError> {
        let names = Shelf::Paused.list()?;
        let root = Shelf::Paused.root()?;
        let look = |name: String| {
            let folder = root.join(&name);
            PausedSandbox::look(name, &folder)
        };
        Ok(names.into_iter().filter_map(look).collect())
    }

    /// Removes a sandbox that is paused, with its files and all that ran in it. One that can't be used any more, because an image has changed or
    /// another version has paused it, is removed as well.
    ///
    /// # Errors
    /// See [`PauseError`]: [`PauseError::Busy`] where somebody is going on with it.
    pub fn remove_paused(name: &str) -> Result<(), PauseError> {
        let folder = Shelf::Paused.folder(name)?;
        StillPaused::lock(name, folder)?.remove()
    }
}

/// Whether a sandbox of this name is paused.
pub(crate) fn is_paused(name: &str) -> bool {
    Shelf::Paused
        .folder(name)
        .is_ok_and(|folder| folder.is_dir())
}

/// A sandbox that is paused ([`Sandbox::list_paused`]).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PausedSandbox {
    /// Its name.
    pub name: String,
    /// When it was paused, in seconds since 1970.
    pub paused_unix_s: u64,
    /// Its machine's processors; 0 where what is on record of it can't be read.
    pub cpus: u8,
    /// Its machine's memory in MiB; 0 likewise.
    pub memory_mib: u32,
    /// Bytes that it takes on disk.
    pub disk_bytes: u64,
}

impl PausedSandbox {
    /// What is known of the one in this folder; `None` where it has just gone.
    fn look(name: String, folder: &Path) -> Option<Self> {
        let made = fs::metadata(folder).ok()?;
        let manifest = read_manifest(&folder.join(MANIFEST)).ok();
        let manifest = manifest.as_ref();
        let files = fs::read_dir(folder).into_iter().flatten().flatten();
        let blocks = files.filter_map(|entry| Some(entry.metadata().ok()?.blocks()));
        Some(Self {
            name,
            paused_unix_s: manifest.map_or_else(
                || u64::try_from(made.mtime()).unwrap_or_default(),
                |manifest| manifest.built_at_s,
            ),
            cpus: manifest.map_or(0, |manifest| manifest.inputs.cpus),
            memory_mib: manifest.map_or(0, |manifest| manifest.inputs.memory_mib),
            disk_bytes: blocks.sum::<u64>().saturating_mul(STAT_BLOCK_BYTES),
        })
    }
}

/// A paused sandbox that somebody is about to go on with: it is on disk, and nobody else's as long as this lives. Dropping it leaves it paused, as
/// the end of the process does, however that comes.
#[derive(Debug)]
pub struct StillPaused {
    folder: PathBuf,
    _lock: OwnedFd,
}

impl StillPaused {
    fn lock(name: &str, folder: PathBuf) -> Result<Self, PauseError> {
        let name = || name.to_owned();
        match lock_soon(&folder) {
            Ok(lock) => Ok(Self {
                folder,
                _lock: lock,
            }),
            Err(error) => Err(match error.kind() {
                ErrorKind::NotFound => PauseError::Missing { name: name() },
                ErrorKind::WouldBlock => PauseError::Busy { name: name() },
                _ => file("Locking", &folder)(error).into(),
            }),
        }
    }

    /// It goes on, and is on disk no more.
    ///
    /// # Errors
    /// [`PauseError::Saved`] where its name can't be taken away: it is still paused, and what was made of it must be ended.
    pub fn remove(self) -> Result<(), PauseError> {
        let gone = match set_aside(&self.folder) {
            // A folder of an overlay's lower layer can't be renamed (`Documentation/filesystems/overlayfs.rst` of Linux, redirect_dir).
            // Without its manifest it is none.
            Err(error) if error.kind() == ErrorKind::CrossesDevices => {
                fs::remove_file(self.folder.join(MANIFEST)).map(|()| self.folder.clone())
            }
            other => other,
        };
        let gone = gone.map_err(file("Removing", &self.folder))?;
        // What has mapped its files keeps them. What can't be removed now is swept later.
        let _ = fs::remove_dir_all(gone);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_goes_on_is_somebodys_and_on_disk_until_it_is_removed() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("dev");
        let take = || StillPaused::lock("dev", folder.clone());
        assert!(matches!(take(), Err(PauseError::Missing { .. })));
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("memory"), "x").unwrap();

        let paused = take().unwrap();
        assert!(matches!(take(), Err(PauseError::Busy { .. })));
        // As at the end of the process that has it.
        drop(paused);
        assert!(folder.join("memory").exists());

        take().unwrap().remove().unwrap();

        assert!(matches!(take(), Err(PauseError::Missing { .. })));
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
    }
}
