//! A sandbox that is put on disk, and goes on from there.

use std::fs;

use super::check::Note;
use super::error::file;
use super::save::{Afterwards, save};
use super::store::{Shelf, Unfinished, lock};
use super::{Template, TemplateError};
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
        let unfinished = Unfinished::new(Shelf::Paused, name).map_err(|error| match error {
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
    /// See [`PauseError`]; it stays paused then.
    pub fn resume(name: &str) -> Result<Self, PauseError> {
        let folder = Shelf::Paused.folder(name)?;
        // Held until its files are gone: it is resumed once.
        let _lock = match lock(&folder) {
            Ok(lock) => lock,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(PauseError::Missing {
                    name: name.to_owned(),
                });
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                return Err(PauseError::Busy {
                    name: name.to_owned(),
                });
            }
            Err(error) => return Err(file("Locking", &folder)(error).into()),
        };
        let template = Template::open_folder(&folder, Note::read(&folder))?;
        let hostname = template.manifest().hostname.clone();
        // Its secrets, if there are any, are its own.
        let builder = template.share_secrets().sandbox();
        let builder = match hostname {
            Some(hostname) => builder.hostname(hostname),
            None => builder,
        };
        let sandbox = builder.start().map_err(PauseError::Start)?;
        // What has mapped them keeps them. Where they can't be removed, it must not be resumed a second time.
        fs::remove_dir_all(&folder).map_err(file("Removing", &folder))?;
        Ok(sandbox)
    }
}
