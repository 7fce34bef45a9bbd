//! Making a tree on the host so that nothing lands outside it: every folder is opened beneath the root without following a link
//! (`RESOLVE_BENEATH` and `RESOLVE_NO_SYMLINKS` of openat2(2)), every file is made under a new name and renamed over its own.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::fchown;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, Timestamps};
use rustix::io::Errno;

use super::exchange::Exchange;
use crate::error::FileError;

/// Permission bits that a guest may set on the host: no set-user, set-group, sticky bit.
const SAFE_BITS: u32 = 0o777;

/// What the owner of a folder needs while it is filled.
const WHILE_FILLED: u32 = 0o700;

/// Bytes that are moved at once.
const CHUNK_BYTES: usize = 64 << 10;

/// Where something goes, and how it is to be.
#[derive(Debug)]
pub(super) struct Place {
    /// Plain names beneath the root; empty for the root itself.
    pub(super) path: PathBuf,
    pub(super) attributes: Attributes,
}

/// What a copy has of the original beside its content.
#[derive(Debug)]
pub(super) struct Attributes {
    pub(super) mode: u32,
    /// User and group, where they are kept.
    pub(super) owner: Option<(u32, u32)>,
    pub(super) modified_ns: i64,
}

impl Attributes {
    /// The owner first: the mode is meant for that one.
    fn give(&self, file: impl AsFd) -> io::Result<()> {
        if let Some((uid, gid)) = self.owner {
            as_far_as_may_be(fchown(&file, Some(uid), Some(gid)))?;
        }
        rustix::fs::fchmod(&file, Mode::from_raw_mode(self.mode & SAFE_BITS))?;
        Ok(rustix::fs::futimens(&file, &times(self.modified_ns))?)
    }
}

/// Who may not give a file away keeps it; so does root of a user namespace that has not this id.
fn as_far_as_may_be(given: io::Result<()>) -> io::Result<()> {
    match given {
        Err(error)
            if matches!(
                Errno::from_io_error(&error),
                Some(Errno::PERM | Errno::INVAL)
            ) =>
        {
            Ok(())
        }
        given => given,
    }
}

/// A tree under construction.
#[derive(Debug)]
pub(super) struct Extraction<'a> {
    /// What the user named.
    to: &'a Path,
    /// The folder in which the root is.
    parent: OwnedFd,
    /// The root's name.
    name: &'a OsStr,
    /// The root, if it is a folder.
    root: Option<OwnedFd>,
    /// Folders whose owner, mode and time are set last, since filling them needs the first two and changes the third.
    folders: Vec<Place>,
}

impl<'a> Extraction<'a> {
    pub(super) fn begin(to: &'a Path) -> Result<Self, FileError> {
        let Some(name) = to.file_name() else {
            return Err(FileError::Invalid(format!(
                "'{}' does not end in the name of a file",
                to.display()
            )));
        };
        let folder = match to.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let parent = rustix::fs::open(folder, flags, Mode::empty()).map_err(host(folder))?;
        Ok(Self {
            to,
            parent,
            name,
            root: None,
            folders: Vec::new(),
        })
    }

    /// Makes a folder, unless it is there.
    pub(super) fn folder(&mut self, place: Place) -> Result<(), FileError> {
        let full = self.full(&place.path);
        let (folder, name) = self.above(&place.path)?;
        let mode = Mode::from_raw_mode(WHILE_FILLED);
        match rustix::fs::mkdirat(&folder, &name, mode) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(host(&full)(error)),
        }
        let made = open_beneath(&folder, Path::new(&name)).map_err(host(&full))?;
        if place.path.as_os_str().is_empty() {
            self.root = Some(made);
        }
        self.folders.push(place);
        Ok(())
    }

    /// Makes a file of the content that comes now, and returns how many bytes it had; `None`, and no file, where there are more than `bytes_max`.
    pub(super) fn file(
        &mut self,
        place: &Place,
        exchange: &Exchange<'_>,
        bytes_max: u64,
    ) -> Result<Option<u64>, FileError> {
        let full = self.full(&place.path);
        let (folder, name) = self.above(&place.path)?;
        let process = std::process::id();
        let beside = OsString::from(format!(".sandvmm-{process}-{}.part", exchange.number()));
        // What a copy that was killed left behind.
        let _ = rustix::fs::unlinkat(&folder, &beside, AtFlags::empty());
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&folder, &beside, flags, Mode::from_raw_mode(0o600))
            .map_err(host(&full))?;
        let file = File::from(file);
        let written = fill(&file, exchange, bytes_max, &full).and_then(|bytes| {
            if bytes.is_none() {
                return Ok(None);
            }
            place.attributes.give(&file).map_err(failed(&full))?;
            rustix::fs::renameat(&folder, &beside, &folder, &name).map_err(host(&full))?;
            Ok(bytes)
        });
        if !matches!(written, Ok(Some(_))) {
            let _ = rustix::fs::unlinkat(&folder, &beside, AtFlags::empty());
        }
        written
    }

    /// Gives the folders their owners, modes and times, the innermost first.
    pub(super) fn finish(mut self) -> Result<(), FileError> {
        while let Some(place) = self.folders.pop() {
            let full = self.full(&place.path);
            let (folder, name) = self.above(&place.path)?;
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let opened = rustix::fs::openat(&folder, &name, flags, Mode::empty());
            let opened = opened.map_err(host(&full))?;
            place.attributes.give(&opened).map_err(failed(&full))?;
        }
        Ok(())
    }

    /// The open folder that a path's last name is in, and that name.
    fn above(&self, path: &Path) -> Result<(OwnedFd, OsString), FileError> {
        let full = self.full(path);
        let cloned = |folder: &OwnedFd| folder.try_clone().map_err(FileError::Stream);
        let Some(name) = path.file_name() else {
            return Ok((cloned(&self.parent)?, self.name.to_owned()));
        };
        let Some(root) = &self.root else {
            return Err(super::hostile("a file in what is no folder"));
        };
        let folder = match path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => {
                open_beneath(root, folder).map_err(host(&full))?
            }
            _ => cloned(root)?,
        };
        Ok((folder, name.to_owned()))
    }

    fn full(&self, path: &Path) -> PathBuf {
        if path.as_os_str().is_empty() {
            self.to.to_owned()
        } else {
            self.to.join(path)
        }
    }
}

fn fill(
    file: &File,
    exchange: &Exchange<'_>,
    bytes_max: u64,
    full: &Path,
) -> Result<Option<u64>, FileError> {
    let mut content = exchange.content()?;
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut bytes = 0;
    loop {
        let count = match content.read(&mut chunk) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(exchange.broken(error)),
        };
        bytes += count as u64;
        if bytes > bytes_max {
            return Ok(None);
        }
        (&mut &*file)
            .write_all(chunk.get(..count).unwrap_or_default())
            .map_err(failed(full))?;
    }
    Ok(Some(bytes))
}

/// A folder beneath another, on a way without links.
fn open_beneath(root: impl AsFd, path: &Path) -> Result<OwnedFd, Errno> {
    rustix::fs::openat2(
        root,
        path,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
        ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS,
    )
}

fn times(modified_ns: i64) -> Timestamps {
    let time = rustix::fs::Timespec {
        tv_sec: modified_ns.div_euclid(1_000_000_000),
        tv_nsec: modified_ns.rem_euclid(1_000_000_000),
    };
    Timestamps {
        last_access: time,
        last_modification: time,
    }
}

fn host(path: &Path) -> impl Fn(Errno) -> FileError + '_ {
    |error| failed(path)(error.into())
}

fn failed(path: &Path) -> impl Fn(io::Error) -> FileError + '_ {
    |source| FileError::Host {
        path: path.to_owned(),
        source,
    }
}
