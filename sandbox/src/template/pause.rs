//! A sandbox that is put on disk, and goes on from there.

use std::fs;
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use super::check::Note;
use super::error::file;
use super::save::{Afterwards, save};
use super::store::{Existing, Shelf, Unfinished, lock_soon, set_aside};
use super::{MANIFEST, Template, TemplateError};
use crate::error::StartError;
use crate::sandbox::Sandbox;

/// Why a sandbox was not paused, or does not go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PauseError {
    /// One of the name is there already.
    #[error("There is a paused sandbox {name:?} already: resume it first, or choose another name")]
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
    #[error("There is no paused sandbox {name:?}")]
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
