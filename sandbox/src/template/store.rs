//! Where saved machines are: a folder each, in the data folder's `templates` or `paused`.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FlockOperation, RenameFlags, flock, fstat, renameat_with};
use rustix::io::Errno;

use super::error::{TemplateError, file};
use crate::images;
use crate::name::{is_name, unique};

/// How the folder of one that is being built begins: no template's name can.
const UNFINISHED: &str = ".building-";

/// How the folder of one that is being removed begins.
const REMOVED: &str = ".removed-";

/// Permissions of folders of saved machines: what is in their memory is their owner's.
const PRIVATE: u32 = 0o700;

/// How long a name may be held by somebody who only sweeps what was left under it.
const LOOK_LIMIT: Duration = Duration::from_secs(1);

/// Pause between two looks.
const LOOK_PERIOD: Duration = Duration::from_millis(5);

/// What saved machines are kept for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shelf {
    /// To be forked, as often as somebody likes.
    Templates,
    /// To go on, once.
    Paused,
}

impl Shelf {
    /// The folder of all of its kind.
    pub(super) fn root(self) -> Result<PathBuf, TemplateError> {
        Ok(images::data_folder()?.join(match self {
            Self::Templates => "templates",
            Self::Paused => "paused",
        }))
    }

    /// The folder of all of its kind, made where it is missing, and private then. One of templates that is there keeps its permissions: whoever has
    /// opened it to others wants that.
    fn make_root(self) -> Result<PathBuf, TemplateError> {
        let root = self.root()?;
        self.make(&root).map_err(file("Making", &root))?;
        Ok(root)
    }

    fn make(self, root: &Path) -> io::Result<()> {
        if let Some(data_folder) = root.parent() {
            fs::create_dir_all(data_folder)?;
        }
        have_private(root)?;
        let permissions = fs::metadata(root)?.permissions();
        if self == Self::Paused && permissions.mode() & 0o077 != 0 {
            // Somebody else's is refused to others by the folders in it.
            let _ = fs::set_permissions(root, fs::Permissions::from_mode(PRIVATE));
        }
        Ok(())
    }

    /// The names of all of its kind, sorted.
    ///
    /// # Errors
    /// See [`TemplateError`].
    pub(super) fn list(self) -> Result<Vec<String>, TemplateError> {
        let root = self.root()?;
        let entries = match fs::read_dir(&root) {
            Ok(entries) => entries,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            // Where somebody else has paused sandboxes, this user can have none.
            Err(error) if self == Self::Paused && error.kind() == ErrorKind::PermissionDenied => {
                return Ok(Vec::new());
            }
            Err(error) => return Err(file("Reading", &root)(error)),
        };
        let mut names: Vec<String> = entries
            .filter_map(Result::ok)
            .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
            .filter_map(|entry| entry.file_name().into_string().ok())
            .filter(|name| check_name(name).is_ok())
            .collect();
        names.sort_unstable();
        Ok(names)
    }

    /// The folder of one, there or not.
    pub(super) fn folder(self, name: &str) -> Result<PathBuf, TemplateError> {
        check_name(name)?;
        Ok(self.root()?.join(name))
    }
}

/// Makes a folder that is its owner's alone.
pub(super) fn make_private(folder: &Path) -> io::Result<()> {
    fs::DirBuilder::new().mode(PRIVATE).create(folder)
}

/// Makes one where none is.
fn have_private(folder: &Path) -> io::Result<()> {
    match make_private(folder) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

/// The folder of a template, there or not.
pub(super) fn folder(name: &str) -> Result<PathBuf, TemplateError> {
    Shelf::Templates.folder(name)
}

fn check_name(name: &str) -> Result<(), TemplateError> {
    if is_name(name) {
        return Ok(());
    }
    Err(TemplateError::Name {
        name: name.to_owned(),
    })
}

/// Removes a template. Its forks live on: what they have mapped stays until they end.
///
/// # Errors
/// See [`TemplateError`].
pub(super) fn remove(name: &str) -> Result<(), TemplateError> {
    let folder = folder(name)?;
    if !folder.is_dir() {
        return Err(missing(name)?);
    }
    let gone = set_aside(&folder).map_err(file("Removing", &folder))?;
    match fs::remove_dir_all(&gone) {
        // Somebody was sweeping.
        Err(_) if !gone.exists() => Ok(()),
        removed => removed.map_err(file("Removing", &gone)),
    }
}

/// The error for a template that is not there.
pub(super) fn missing(name: &str) -> Result<TemplateError, TemplateError> {
    Ok(TemplateError::Missing {
        name: name.to_owned(),
        folder: Shelf::Templates.root()?,
    })
}

/// A folder that is being filled, whose name is nobody else's meanwhile; dropped before it is finished, it is removed.
///
/// Its lock is what makes it somebody's: one without is what was left by who was killed, and the next one removes it.
#[derive(Debug)]
pub(super) struct Staging {
    lock: OwnedFd,
    path: PathBuf,
}

impl Staging {
    /// One that never gets a name of its own.
    ///
    /// # Errors
    /// See [`TemplateError`].
    pub(super) fn nameless(shelf: Shelf) -> Result<Self, TemplateError> {
        Self::nameless_below(&shelf.make_root()?)
    }

    fn nameless_below(root: &Path) -> Result<Self, TemplateError> {
        sweep(root);
        // No name begins with a dot.
        let path = root.join(format!("{UNFINISHED}.{}", unique()));
        Self::claim(path.clone()).map_err(file("Making", &path))
    }

    /// Makes the folder and takes its lock, or takes over what is left of one.
    fn claim(path: PathBuf) -> io::Result<Self> {
        // Somebody has it, or has just swept it: who sweeps may be as fast as to come between these two.
        let lock = soon(&[ErrorKind::WouldBlock, ErrorKind::NotFound], || {
            have_private(&path)?;
            lock(&path)
        })?;
        fs::set_permissions(&path, fs::Permissions::from_mode(PRIVATE))?;
        empty(&path)?;
        Ok(Self { lock, path })
    }

    /// The folder.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // Where it was finished, it has another name, and this one may be somebody else's.
        if is_current(&self.lock, &self.path) {
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

/// What becomes of one that has the name already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Existing {
    /// It stays, and there is no other one.
    Stays,
    /// It stays until the new one is whole, which then takes its place.
    IsReplaced,
}

/// A saved machine's folder while it is being made. Its name is taken from the beginning on.
#[derive(Debug)]
pub(super) struct Unfinished {
    staging: Staging,
    target: PathBuf,
    name: String,
    existing: Existing,
}

impl Unfinished {
    /// Makes the folder, beside those of finished ones.
    ///
    /// # Errors
    /// [`TemplateError::Exists`], [`TemplateError::Busy`], and others.
    pub(super) fn new(shelf: Shelf, name: &str, existing: Existing) -> Result<Self, TemplateError> {
        check_name(name)?;
        Self::below(&shelf.make_root()?, name, existing)
    }

    fn below(root: &Path, name: &str, existing: Existing) -> Result<Self, TemplateError> {
        sweep(root);
        let path = root.join(format!("{UNFINISHED}{name}"));
        let staging = Staging::claim(path.clone()).map_err(|error| match error.kind() {
            ErrorKind::WouldBlock => TemplateError::Busy {
                name: name.to_owned(),
            },
            _ => file("Making", &path)(error),
        })?;
        let target = root.join(name);
        // Nobody else makes one from here on.
        if existing == Existing::Stays && target.exists() {
            return Err(TemplateError::Exists {
                name: name.to_owned(),
            });
        }
        Ok(Self {
            staging,
            target,
            name: name.to_owned(),
            existing,
        })
    }

    /// The folder.
    pub(super) fn path(&self) -> &Path {
        self.staging.path()
    }

    /// Gives it its name, all at once. Gives the folder.
    ///
    /// # Errors
    /// [`TemplateError::Exists`] where somebody has put something there by other means.
    pub(super) fn finish(self) -> Result<PathBuf, TemplateError> {
        // So that names survive the host's crash, as the files do: theirs here, that of all of it below.
        let _ = fs::File::open(self.path()).and_then(|folder| folder.sync_all());
        let named = match self.existing {
            Existing::Stays => fs::rename(self.path(), &self.target),
            Existing::IsReplaced => replace(self.path(), &self.target),
        };
        match named {
            Ok(()) => {
                let root = self.target.parent().map(fs::File::open);
                let _ = root.map(|opened| opened.and_then(|root| root.sync_all()));
                Ok(self.target.clone())
            }
            Err(_) if self.existing == Existing::Stays && self.target.exists() => {
                Err(TemplateError::Exists {
                    name: self.name.clone(),
                })
            }
            Err(error) => Err(file("Naming", &self.target)(error)),
        }
    }
}

/// The folder's lock.
///
/// # Errors
/// `WouldBlock` where somebody else has it, `NotFound` also where the folder has gone or got another name meanwhile, and the system's.
pub(super) fn lock(folder: &Path) -> io::Result<OwnedFd> {
    let opened = OwnedFd::from(fs::File::open(folder)?);
    flock(&opened, FlockOperation::NonBlockingLockExclusive)?;
    if is_current(&opened, folder) {
        return Ok(opened);
    }
    Err(ErrorKind::NotFound.into())
}

/// Whether an open folder is still the one of this name. Of one whose lock the caller has, it stays so: nobody else renames or removes it.
fn is_current(opened: &OwnedFd, folder: &Path) -> bool {
    fstat(opened).is_ok_and(|opened| identity(folder) == Some((opened.st_dev, opened.st_ino)))
}

/// What tells a folder from another one that had or gets its name: device and number, if it is there.
pub(super) fn identity(folder: &Path) -> Option<(u64, u64)> {
    let there = fs::symlink_metadata(folder).ok()?;
    Some((there.dev(), there.ino()))
}

/// As [`lock`], but waits a moment for it where somebody has it: also who is through with it may seem to, since a process that is being made has
/// copies of all that its maker has open until it executes its program.
pub(super) fn lock_soon(folder: &Path) -> io::Result<OwnedFd> {
    soon(&[ErrorKind::WouldBlock], || lock(folder))
}

/// Tries again for [`LOOK_LIMIT`] where it fails in a way that passes.
fn soon<T>(passing: &[ErrorKind], mut attempt: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let until = Instant::now() + LOOK_LIMIT;
    loop {
        match attempt() {
            Err(error) if passing.contains(&error.kind()) && Instant::now() < until => {
                thread::sleep(LOOK_PERIOD);
            }
            other => return other,
        }
    }
}

/// Takes a finished one's name away, all at once: nobody opens half of it. Gives where it is, to be removed there; else it is swept later.
///
/// # Errors
/// The system's; it is as it was then.
pub(super) fn set_aside(folder: &Path) -> io::Result<PathBuf> {
    let gone = folder.with_file_name(format!("{REMOVED}{}", unique()));
    fs::rename(folder, &gone)?;
    Ok(gone)
}

/// Gives a new one, whose lock the caller has, its name, and takes away the old one, if there is one. Of the old one nobody opens half: its open files
/// stay what they are.
fn replace(new: &Path, target: &Path) -> io::Result<()> {
    // Under a name that nobody takes over: it is the old one's for a moment. Its lock keeps the new one from being swept.
    let aside = set_aside(new)?;
    let named = match renameat_with(CWD, &aside, CWD, target, RenameFlags::EXCHANGE) {
        Ok(()) => Ok(()),
        Err(Errno::NOENT) => fs::rename(&aside, target),
        // Not every file system can (rename(2), EINVAL). Then there is none of the name for a moment.
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => replace_in_two_steps(&aside, target),
        // The old one lies in an overlay's lower layer, where no folder can be renamed.
        Err(Errno::XDEV) => fs::remove_dir_all(target).and_then(|()| fs::rename(&aside, target)),
        Err(errno) => Err(errno.into()),
    };
    // The old one, or the new one where it was not named.
    let _ = fs::remove_dir_all(&aside);
    named
}

/// As [`replace`], by names that are given one after the other.
fn replace_in_two_steps(new: &Path, target: &Path) -> io::Result<()> {
    let old = set_aside(target)?;
    if let Err(error) = fs::rename(new, target) {
        let _ = fs::rename(&old, target);
        return Err(error);
    }
    let _ = fs::remove_dir_all(old);
    Ok(())
}

/// Removes what is in a folder.
fn empty(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            fs::remove_dir_all(entry.path())?;
        } else {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Removes what those have left who were killed. What can't be removed costs room and no more.
fn sweep(root: &Path) {
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        let is_left = entry
            .file_name()
            .to_str()
            .is_some_and(|name| name.starts_with(UNFINISHED) || name.starts_with(REMOVED));
        if is_left && let Ok(_lock) = lock(&entry.path()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests;
