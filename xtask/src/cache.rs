//! Where built things are kept: one folder per thing, one entry per hash of its inputs.
//!
//! An entry appears whole or not at all (it is built beside its place and renamed into it), and two callers at once build
//! it once (a lock file per thing).

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use rustix::io::Errno;
use sha2::{Digest, Sha256};

use crate::progress::Progress;

/// Hexadecimal digits of a hash that name an entry.
const KEY_DIGITS: usize = 24;
/// Prefix of a folder in which an entry is being built.
const STAGING_PREFIX: &str = ".staging-";

/// Why the cache could not be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CacheError {
    /// Neither variable that places the folder is set.
    #[error("No home folder is known: set $HOME, or ${0}")]
    NoHome(&'static str),
    /// A file operation failed.
    #[error("Could not {action} {}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// To what.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

impl CacheError {
    /// Turns an I/O error on `path` into this error, for `map_err`.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io {
            action,
            path,
            source,
        }
    }
}

/// The cache folder of the project.
#[derive(Debug, Clone)]
pub(crate) struct Cache {
    folder: PathBuf,
}

impl Cache {
    /// Opens, and creates where missing, `$XDG_CACHE_HOME/sandvmm`, by default `~/.cache/sandvmm`.
    pub(crate) fn open() -> Result<Self, CacheError> {
        let folder = xdg_folder("XDG_CACHE_HOME", ".cache")?;
        fs::create_dir_all(&folder).map_err(CacheError::io("create the folder", &folder))?;
        Ok(Self { folder })
    }

    /// A cache in this folder, which is there.
    #[cfg(test)]
    pub(crate) fn at(folder: &Path) -> Self {
        Self {
            folder: folder.to_owned(),
        }
    }

    /// The folder itself.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the folder of the entry `key` of `thing`, calling `build` to fill it where it does not exist yet.
    ///
    /// `build` gets an empty folder to fill. Nothing is left of an attempt that failed.
    pub(crate) fn entry<E: From<CacheError>>(
        &self,
        thing: &str,
        key: &Key,
        build: impl FnOnce(&Path) -> Result<(), E>,
    ) -> Result<PathBuf, E> {
        let things = self.folder.join(thing);
        let entry = things.join(&key.0);
        if entry.exists() {
            return Ok(entry);
        }
        fs::create_dir_all(&things).map_err(CacheError::io("create the folder", &things))?;
        let _lock = Lock::take(&things.join(".lock"))?;
        if entry.exists() {
            return Ok(entry);
        }
        remove_abandoned(&things)?;
        let staging = things.join(format!("{STAGING_PREFIX}{}", key.0));
        fs::create_dir(&staging).map_err(CacheError::io("create the folder", &staging))?;
        let built = build(&staging);
        if built.is_err() {
            // What is left is removed by the next attempt where this fails.
            let _ = fs::remove_dir_all(&staging);
        }
        built?;
        fs::rename(&staging, &entry).map_err(CacheError::io("create the cache entry", &entry))?;
        Ok(entry)
    }
}

/// Removes what a killed build left; the caller holds the lock.
fn remove_abandoned(things: &Path) -> Result<(), CacheError> {
    let listing = fs::read_dir(things).map_err(CacheError::io("list", things))?;
    for found in listing {
        let found = found.map_err(CacheError::io("list", things))?;
        if found
            .file_name()
            .to_string_lossy()
            .starts_with(STAGING_PREFIX)
        {
            let path = found.path();
            fs::remove_dir_all(&path).map_err(CacheError::io("remove", &path))?;
        }
    }
    Ok(())
}

/// The project's folder below an XDG base folder: `$variable/sandvmm`, by default `$HOME/fallback/sandvmm`.
pub(crate) fn xdg_folder(variable: &'static str, fallback: &str) -> Result<PathBuf, CacheError> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    // The XDG base directory specification: a relative path is to be ignored.
    let base = set(variable)
        .map(PathBuf::from)
        .filter(|path| path.is_absolute());
    match (base, set("HOME").map(PathBuf::from)) {
        (Some(base), _) => Ok(base.join("sandvmm")),
        (None, Some(home)) => Ok(home.join(fallback).join("sandvmm")),
        (None, None) => Err(CacheError::NoHome(variable)),
    }
}

/// The name of an entry: a hash of everything that went into it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Key(String);

impl Key {
    /// Hashes `inputs`; their borders count, so that `["ab"]` and `["a", "b"]` differ.
    pub(crate) fn of<T: AsRef<[u8]>>(inputs: impl IntoIterator<Item = T>) -> Self {
        let mut hash = Sha256::new();
        for input in inputs {
            let input = input.as_ref();
            hash.update(input.len().to_le_bytes());
            hash.update(input);
        }
        let digits = hash
            .finalize()
            .iter()
            .fold(String::new(), |mut text, byte| {
                text.push_str(&format!("{byte:02x}"));
                text
            });
        Self(digits.chars().take(KEY_DIGITS).collect())
    }

    /// The key as text.
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

/// A lock between processes; dropping it releases it, and so does the end of the process.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

impl Lock {
    /// Takes the lock `path`, waiting, with a word about it, while another process holds it.
    pub(crate) fn take(path: &Path) -> Result<Self, CacheError> {
        let file = File::create(path).map_err(CacheError::io("create the lock", path))?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => {
                Progress::new().say("Waiting for another xtask that builds the same thing");
                rustix::fs::flock(&file, FlockOperation::LockExclusive)
            }
            other => other,
        }
        .map_err(io::Error::from)
        .map_err(CacheError::io("lock", path))?;
        Ok(Self { _file: file })
    }
}

/// Puts a copy of `source` at `target`: whole, or not at all. Does nothing where the two already agree in size and time.
pub(crate) fn install(source: &Path, target: &Path) -> Result<(), CacheError> {
    let wanted = fs::metadata(source).map_err(CacheError::io("read", source))?;
    let modified = wanted
        .modified()
        .map_err(CacheError::io("read the time of", source))?;
    if let Ok(present) = fs::metadata(target)
        && present.len() == wanted.len()
        && present.modified().is_ok_and(|time| time == modified)
    {
        return Ok(());
    }
    let staging = beside(target);
    fs::copy(source, &staging).map_err(CacheError::io("write", &staging))?;
    let file = File::options()
        .write(true)
        .open(&staging)
        .map_err(CacheError::io("open", &staging))?;
    file.set_modified(modified)
        .map_err(CacheError::io("set the time of", &staging))?;
    fs::rename(&staging, target).map_err(CacheError::io("create", target))
}

/// Writes `content` to `target`, whole or not at all, unless that is its content already.
pub(crate) fn replace(target: &Path, content: &[u8]) -> Result<(), CacheError> {
    if fs::read(target).is_ok_and(|present| present == content) {
        return Ok(());
    }
    let staging = beside(target);
    fs::write(&staging, content).map_err(CacheError::io("write", &staging))?;
    fs::rename(&staging, target).map_err(CacheError::io("create", target))
}

/// A name beside `target` for what is to become it. One for all processes, so that what a killed one left is overwritten; the
/// caller holds a lock.
fn beside(target: &Path) -> PathBuf {
    let mut name = target
        .file_name()
        .map_or_else(OsString::new, OsString::from);
    name.push(".new");
    target.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn test_key_borders_of_inputs_count() {
        assert_ne!(Key::of(["ab"]), Key::of(["a", "b"]));
        assert_eq!(Key::of(["a", "b"]), Key::of(["a", "b"]));
    }

    #[test]
    fn an_entry_is_built_once() {
        let folder = tempfile::tempdir().unwrap();
        let builds = Cell::new(0);
        let build = |staging: &Path| {
            builds.set(builds.get() + 1);
            fs::write(staging.join("file"), "content").unwrap();
            Ok::<(), CacheError>(())
        };

        let first = Cache::at(folder.path())
            .entry("thing", &Key::of(["1"]), build)
            .unwrap();
        let second = Cache::at(folder.path())
            .entry("thing", &Key::of(["1"]), build)
            .unwrap();

        assert_eq!(first, second);
        assert_eq!(builds.get(), 1);
        assert_eq!(fs::read_to_string(first.join("file")).unwrap(), "content");
    }

    #[test]
    fn a_failed_build_leaves_nothing_and_is_tried_again() {
        let folder = tempfile::tempdir().unwrap();
        let fail = |staging: &Path| {
            fs::write(staging.join("half"), "").unwrap();
            Err(CacheError::NoHome("X"))
        };

        let failed = Cache::at(folder.path()).entry("thing", &Key::of(["1"]), fail);
        let retried =
            Cache::at(folder.path()).entry("thing", &Key::of(["1"]), |_| Ok::<(), CacheError>(()));

        assert!(matches!(failed, Err(CacheError::NoHome(_))));
        assert_eq!(fs::read_dir(retried.unwrap()).unwrap().count(), 0);
    }

    #[test]
    fn what_a_killed_build_left_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let key = Key::of(["1"]);
        let staging = folder
            .path()
            .join("thing")
            .join(format!("{STAGING_PREFIX}{}", key.as_str()));
        fs::create_dir_all(staging.join("half")).unwrap();

        let entry = Cache::at(folder.path()).entry("thing", &key, |_| Ok::<(), CacheError>(()));

        assert_eq!(fs::read_dir(entry.unwrap()).unwrap().count(), 0);
        assert!(!staging.exists());
    }

    #[test]
    fn test_install_changed_source_replaces_target() {
        let folder = tempfile::tempdir().unwrap();
        let (source, target) = (folder.path().join("source"), folder.path().join("target"));
        fs::write(&source, "one").unwrap();
        install(&source, &target).unwrap();
        fs::write(&source, "three").unwrap();

        install(&source, &target).unwrap();

        assert_eq!(fs::read_to_string(&target).unwrap(), "three");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }
}
