//! Where saved machines are: a folder each, in the data folder's `templates` or `paused`.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

use super::error::{TemplateError, file};
use crate::images;

/// Longest name of a template.
const MAX_NAME_BYTES: usize = 64;

/// How the folder of one that is being built begins: no template's name can.
const UNFINISHED: &str = ".building-";

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

    /// The folder of one, there or not.
    pub(super) fn folder(self, name: &str) -> Result<PathBuf, TemplateError> {
        check_name(name)?;
        Ok(self.root()?.join(name))
    }
}

/// The folder of a template, there or not.
pub(super) fn folder(name: &str) -> Result<PathBuf, TemplateError> {
    Shelf::Templates.folder(name)
}

fn check_name(name: &str) -> Result<(), TemplateError> {
    let mut bytes = name.bytes();
    let is_name = bytes.len() <= MAX_NAME_BYTES
        && bytes
            .next()
            .is_some_and(|byte| byte.is_ascii_alphanumeric())
        && bytes.all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
    if is_name {
        return Ok(());
    }
    Err(TemplateError::Name {
        name: name.to_owned(),
    })
}

/// The names of all templates, sorted.
///
/// # Errors
/// See [`TemplateError`].
pub(super) fn list() -> Result<Vec<String>, TemplateError> {
    let root = Shelf::Templates.root()?;
    let entries = match fs::read_dir(&root) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(file("Reading", &root)(error)),
    };
    let mut names: Vec<String> = entries
        .filter_map(Result::ok)
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| folder(name).is_ok())
        .collect();
    names.sort_unstable();
    Ok(names)
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
    // Under a name that is none first: nobody opens half a template.
    let gone = Unfinished::name(&Shelf::Templates.root()?, name);
    fs::rename(&folder, &gone).map_err(file("Removing", &folder))?;
    fs::remove_dir_all(&gone).map_err(file("Removing", &gone))
}

/// The error for a template that is not there.
pub(super) fn missing(name: &str) -> Result<TemplateError, TemplateError> {
    Ok(TemplateError::Missing {
        name: name.to_owned(),
        folder: Shelf::Templates.root()?,
    })
}

/// A template's folder while it is being built; dropped before it is finished, it is removed.
///
/// It is locked as long as its builder lives: one that is not is what a builder has left that was killed, and the next one removes it.
#[derive(Debug)]
pub(super) struct Unfinished {
    _lock: OwnedFd,
    path: PathBuf,
    target: PathBuf,
    name: String,
}

impl Unfinished {
    /// Makes the folder, beside those of finished ones.
    ///
    /// # Errors
    /// [`TemplateError::Exists`], and others.
    pub(super) fn new(shelf: Shelf, name: &str) -> Result<Self, TemplateError> {
        let target = shelf.folder(name)?;
        let exists = TemplateError::Exists {
            name: name.to_owned(),
        };
        if target.exists() {
            return Err(exists);
        }
        let root = shelf.root()?;
        fs::create_dir_all(&root).map_err(file("Making", &root))?;
        let path = Self::name(&root, name);
        remove_left_behind(&root);
        fs::create_dir(&path).map_err(file("Making", &path))?;
        let lock = lock(&path).map_err(file("Locking", &path))?;
        Ok(Self {
            _lock: lock,
            path,
            target,
            name: name.to_owned(),
        })
    }

    fn name(root: &Path, name: &str) -> PathBuf {
        root.join(format!("{UNFINISHED}{name}-{}", std::process::id()))
    }

    /// The folder.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Gives it its name, all at once. Gives the folder.
    ///
    /// # Errors
    /// [`TemplateError::Exists`] where somebody was faster.
    pub(super) fn finish(self) -> Result<PathBuf, TemplateError> {
        match fs::rename(&self.path, &self.target) {
            Ok(()) => {
                // So that the name survives the host's crash, as the files do.
                let _ = fs::File::open(&self.target).and_then(|folder| folder.sync_all());
                Ok(self.target.clone())
            }
            Err(_) if self.target.exists() => Err(TemplateError::Exists {
                name: self.name.clone(),
            }),
            Err(error) => Err(file("Naming", &self.target)(error)),
        }
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        // Gone already where it was finished.
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// The folder's lock.
///
/// # Errors
/// Where somebody else has it, and the system's.
pub(super) fn lock(folder: &Path) -> std::io::Result<OwnedFd> {
    let opened = OwnedFd::from(fs::File::open(folder)?);
    flock(&opened, FlockOperation::NonBlockingLockExclusive)?;
    Ok(opened)
}

/// Removes the folders of builders that are gone. What can't be removed costs room and no more.
fn remove_left_behind(root: &Path) {
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        let is_unfinished = entry
            .file_name()
            .to_str()
            .is_some_and(|name| name.starts_with(UNFINISHED));
        if is_unfinished && let Ok(_lock) = lock(&entry.path()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_killed_builder_has_left_is_removed_and_no_more() {
        let root = tempfile::tempdir().unwrap();
        let folder = |name: &str| {
            let path = root.path().join(name);
            fs::create_dir(&path).unwrap();
            fs::write(path.join("memory"), "x").unwrap();
            path
        };
        let (template, living, dead) = (
            folder("t"),
            folder(&format!("{UNFINISHED}a-1")),
            folder(&format!("{UNFINISHED}b-2")),
        );
        let held = lock(&living).unwrap();

        remove_left_behind(root.path());

        assert!(template.exists() && living.exists() && !dead.exists());
        drop(held);
        remove_left_behind(root.path());
        assert!(template.exists() && !living.exists());
    }

    #[test]
    fn names_that_could_lead_elsewhere_are_refused() {
        for name in [
            "",
            ".",
            "..",
            ".a",
            "a/b",
            "/a",
            "-a",
            "a b",
            "ä",
            "a\0",
            &"a".repeat(65),
        ] {
            assert!(
                matches!(folder(name), Err(TemplateError::Name { .. })),
                "{name:?}"
            );
        }
        for name in ["a", "default", "numpy-1.2_x", "0", &"a".repeat(64)] {
            assert!(folder(name).unwrap().ends_with(name));
        }
    }
}
