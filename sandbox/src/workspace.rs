//! Disks that outlive a sandbox.

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::images::{ImagesError, data_folder};
use crate::name::{MAX_NAME_BYTES, is_name, unique};
use crate::text::one_line;

/// The folder of all workspaces, in the data folder.
const FOLDER: &str = "workspaces";

/// What a workspace's file is called, behind its name.
const EXTENSION: &str = "ext4";

/// The quota of a workspace that is made without one, in MiB.
pub const DEFAULT_QUOTA_MIB: u32 = 8 << 10;

/// Least quota in MiB: an ext4 file system with its journal has room for little else.
pub const MIN_QUOTA_MIB: u32 = 32;

/// Most quota in MiB: 16 TiB, the largest disk of a machine.
pub const MAX_QUOTA_MIB: u32 = 16 << 20;

/// Bytes of what `stat(2)` counts blocks in.
const STAT_BLOCK_BYTES: u64 = 512;

/// Why there is no workspace.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorkspaceError {
    /// Nothing says where the data folder is.
    #[error(transparent)]
    Folder(#[from] ImagesError),
    /// The name is none.
    #[error(
        "{name:?} is no name of a workspace: 1 to {MAX_NAME_BYTES} letters, digits, `.`, `_` and `-`, the first of them a \
         letter or digit"
    )]
    Name {
        /// What was asked for.
        name: String,
    },
    /// Too little or too much.
    #[error("A disk can't have {quota_mib} MiB: give it {MIN_QUOTA_MIB} to {MAX_QUOTA_MIB} MiB")]
    Quota {
        /// What was asked for.
        quota_mib: u32,
    },
    /// There is none of that name.
    #[error("There is no workspace {name:?}")]
    Missing {
        /// Its name.
        name: String,
    },
    /// A running sandbox has it.
    #[error(
        "The workspace {name:?} is in use: wait for the other sandbox's end, or take another name"
    )]
    InUse {
        /// Its name.
        name: String,
    },
    /// There is no program to make a file system with.
    #[error("mke2fs, which makes a workspace's file system, could not be run: install e2fsprogs")]
    NoMke2fs(#[source] io::Error),
    /// It could not make one.
    #[error("mke2fs made no file system: {0}")]
    Mke2fs(String),
    /// Something lies with the workspaces that is none.
    #[error("'{}' is no workspace: it belongs elsewhere", .0.display())]
    Stray(PathBuf),
    /// A file or folder could not be used.
    #[error("The file '{}' for what is written could not be {done}", path.display())]
    File {
        /// What was tried.
        done: &'static str,
        /// Which.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

/// A persistent writable disk: everything that a sandbox writes stays on it, and the next sandbox that is given it finds
/// it again. One sandbox at a time has it; a sandbox that is killed leaves it consistent.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # sandvmm::init();
/// for _ in 0..2 {
///     let workspace = sandvmm::Workspace::open_or_create("dev", 1024)?;
///     let sandbox = sandvmm::Sandbox::builder().workspace(workspace).start()?;
///     let output = sandbox.command("sh").args(["-c", "echo here >> ~/log; cat ~/log"]).output()?;
///     print!("{}", String::from_utf8_lossy(&output.stdout)); // once more each time
/// }
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Workspace {
    name: String,
    /// Locked: by this, and by the machine's process that it is handed to.
    file: File,
    quota_bytes: u64,
}

/// What is known of a workspace without opening it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorkspaceInfo {
    /// Its name.
    pub name: String,
    /// Most bytes that it can hold, those of the file system's own included.
    pub quota_bytes: u64,
    /// Bytes that it takes on the host's disk.
    pub used_bytes: u64,
    /// Whether a sandbox has it.
    pub in_use: bool,
}

impl Workspace {
    /// Opens the workspace of this name; makes it, with `quota_mib` MiB, if there is none. The quota of one that is there stays as
    /// it is.
    ///
    /// # Errors
    /// See [`WorkspaceError`].
    pub fn open_or_create(name: &str, quota_mib: u32) -> Result<Self, WorkspaceError> {
        Self::open_or_create_in(&folder()?, name, quota_mib)
    }

    fn open_or_create_in(
        folder: &Path,
        name: &str,
        quota_mib: u32,
    ) -> Result<Self, WorkspaceError> {
        let path = path(folder, name)?;
        if !(MIN_QUOTA_MIB..=MAX_QUOTA_MIB).contains(&quota_mib) {
            return Err(WorkspaceError::Quota { quota_mib });
        }
        if !path.exists() {
            make_in(folder, || create(folder, &path, quota_mib, &[]))?;
        }
        let file = open(&path)?;
        let name = name.to_owned();
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(WorkspaceError::InUse { name }),
            Err(TryLockError::Error(source)) => return Err(failed("locked", &path)(source)),
        }
        let quota_bytes = file.metadata().map_err(failed("looked at", &path))?.len();
        Ok(Self {
            name,
            file,
            quota_bytes,
        })
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Most bytes that it can hold, those of the file system's own included.
    #[must_use]
    pub fn quota_bytes(&self) -> u64 {
        self.quota_bytes
    }

    pub(crate) fn into_file(self) -> File {
        self.file
    }

    /// All workspaces, by name, and for each other thing in their folder why it is none.
    ///
    /// # Errors
    /// When the folder can't be read; see [`WorkspaceError`].
    pub fn list() -> Result<Vec<Result<WorkspaceInfo, WorkspaceError>>, WorkspaceError> {
        Self::list_in(&folder()?)
    }

    fn list_in(
        folder: &Path,
    ) -> Result<Vec<Result<WorkspaceInfo, WorkspaceError>>, WorkspaceError> {
        let entries = match fs::read_dir(folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(failed("listed", folder)(error)),
        };
        let mut paths = Vec::new();
        for entry in entries {
            let path = entry.map_err(failed("listed", folder))?.path();
            // What is being made, and what scratch disks are copies of.
            let is_hidden = path
                .file_name()
                .is_some_and(|name| name.as_bytes().starts_with(b"."));
            if !is_hidden {
                paths.push(path);
            }
        }
        paths.sort();
        Ok(paths.iter().map(|path| info(folder, path)).collect())
    }

    /// Removes the workspace of this name with all that is in it.
    ///
    /// # Errors
    /// See [`WorkspaceError`]; one that a sandbox has is not removed.
    pub fn remove(name: &str) -> Result<(), WorkspaceError> {
        let path = path(&folder()?, name)?;
        let name = name.to_owned();
        if !path.exists() {
            return Err(WorkspaceError::Missing { name });
        }
        if open(&path)?.try_lock().is_err() {
            return Err(WorkspaceError::InUse { name });
        }
        fs::remove_file(&path).map_err(failed("removed", &path))
    }
}

pub(crate) fn folder() -> Result<PathBuf, WorkspaceError> {
    Ok(data_folder()?.join(FOLDER))
}

fn path(folder: &Path, name: &str) -> Result<PathBuf, WorkspaceError> {
    if is_name(name) {
        Ok(folder.join(format!("{name}.{EXTENSION}")))
    } else {
        Err(WorkspaceError::Name {
            name: name.to_owned(),
        })
    }
}

/// What is known of what lies at a path, without changing it.
fn info(folder: &Path, found: &Path) -> Result<WorkspaceInfo, WorkspaceError> {
    let stray = || WorkspaceError::Stray(found.to_owned());
    let name = found.file_stem().and_then(|name| name.to_str());
    let name = name.ok_or_else(stray)?;
    // Neither another extension nor a name that none can have.
    if !matches!(path(folder, name), Ok(path) if path == found) {
        return Err(stray());
    }
    // Before it is opened: that could wait, or do something to a device.
    let metadata = fs::metadata(found).map_err(failed("looked at", found))?;
    if !metadata.is_file() {
        return Err(stray());
    }
    let file = File::open(found).map_err(failed("opened", found))?;
    Ok(WorkspaceInfo {
        name: name.to_owned(),
        quota_bytes: metadata.len(),
        used_bytes: metadata.blocks().saturating_mul(STAT_BLOCK_BYTES),
        in_use: file.try_lock().is_err(),
    })
}

pub(crate) fn open(path: &Path) -> Result<File, WorkspaceError> {
    File::options()
        .read(true)
        .write(true)
        .open(path)
        .map_err(failed("opened", path))
}

/// Makes something in a folder, and the folder first; where nothing comes of it a folder that was not there is gone again.
pub(crate) fn make_in<T>(
    folder: &Path,
    make: impl FnOnce() -> Result<T, WorkspaceError>,
) -> Result<T, WorkspaceError> {
    let is_new = !folder.exists();
    fs::create_dir_all(folder).map_err(failed("made", folder))?;
    let made = make();
    if is_new && made.is_err() {
        // One that somebody else has filled meanwhile stays.
        let _ = fs::remove_dir(folder);
    }
    made
}

/// Makes the file under another name first, so that one that is there is whole.
pub(crate) fn create(
    folder: &Path,
    path: &Path,
    quota_mib: u32,
    features: &[&str],
) -> Result<(), WorkspaceError> {
    let staging = folder.join(format!(".new-{}", unique()));
    let made = File::options()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&staging)
        .and_then(|file| file.set_len(u64::from(quota_mib) << 20))
        .map_err(failed("made", &staging))
        .and_then(|()| make_file_system(&staging, features))
        // Two that make the same one at once make it once: a link does not replace.
        .and_then(|()| match fs::hard_link(&staging, path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            linked => linked.map_err(failed("made", path)),
        });
    let _ = fs::remove_file(&staging);
    made
}

/// An empty ext4 file system that takes no room yet: tables and journal are filled when they are used.
fn make_file_system(file: &Path, features: &[&str]) -> Result<(), WorkspaceError> {
    let run = |program: &str| {
        Command::new(program)
            .args(["-q", "-F", "-t", "ext4", "-m", "0", "-E"])
            .arg("lazy_itable_init=1,lazy_journal_init=1,nodiscard,root_owner=0:0")
            .args(features)
            .arg(file)
            .output()
    };
    // Not everybody's PATH has the administrator's folders.
    let made = ["mke2fs", "/usr/sbin/mke2fs", "/sbin/mke2fs"]
        .into_iter()
        .map(run)
        .find(|result| !matches!(result, Err(error) if error.kind() == io::ErrorKind::NotFound))
        .unwrap_or_else(|| Err(io::ErrorKind::NotFound.into()))
        .map_err(WorkspaceError::NoMke2fs)?;
    if made.status.success() {
        return Ok(());
    }
    // It says who it is and where it is, on lines of their own.
    Err(WorkspaceError::Mke2fs(one_line(&made.stderr)))
}

pub(crate) fn failed<'a>(
    done: &'static str,
    path: &'a Path,
) -> impl Fn(io::Error) -> WorkspaceError + 'a {
    move |source| WorkspaceError::File {
        done,
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_lead_elsewhere_are_none() {
        let long = "x".repeat(MAX_NAME_BYTES + 1);
        for name in ["", ".", "..", ".x", "-x", "a/b", "a\0", "ä", &long] {
            let error = path(Path::new("/f"), name).unwrap_err();
            assert!(matches!(error, WorkspaceError::Name { .. }), "{name}");
        }
        assert_eq!(
            path(Path::new("/f"), "a.b_c-1").unwrap(),
            Path::new("/f/a.b_c-1.ext4")
        );
    }

    #[test]
    fn quotas_outside_the_bounds_are_refused_and_nothing_is_made() {
        let folder = tempfile::tempdir().unwrap();
        for quota_mib in [0, MIN_QUOTA_MIB - 1, MAX_QUOTA_MIB + 1] {
            let refused = Workspace::open_or_create_in(folder.path(), "a", quota_mib);
            assert!(matches!(refused, Err(WorkspaceError::Quota { .. })));
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_folder_that_was_made_for_nothing_is_gone_again() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("workspaces");
        let nothing = || Err::<(), _>(WorkspaceError::Mke2fs("no".to_owned()));

        make_in(&folder, nothing).unwrap_err();
        assert!(!folder.exists());

        make_in(&folder, || Ok(())).unwrap();
        make_in(&folder, nothing).unwrap_err();
        assert!(folder.exists());
    }

    #[test]
    fn what_mke2fs_says_is_one_line() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        // Too small for a file system.
        File::create(&file).unwrap().set_len(1024).unwrap();

        let error = make_file_system(&file, &[]).unwrap_err().to_string();

        assert!(error.starts_with("mke2fs made no file system: "), "{error}");
        assert!(error.lines().count() == 1 && error.len() > 40, "{error:?}");
    }

    #[test]
    fn what_is_no_workspace_keeps_none_from_being_listed() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["a", "c"] {
            drop(Workspace::open_or_create_in(folder.path(), name, 64).unwrap());
        }
        fs::create_dir(folder.path().join("b.ext4")).unwrap();
        fs::write(folder.path().join("notes.txt"), "").unwrap();
        fs::write(folder.path().join("b b.ext4"), "").unwrap();
        fs::write(folder.path().join(".new-7"), "").unwrap();
        std::os::unix::fs::symlink("/no/such", folder.path().join("d.ext4")).unwrap();

        let listed = Workspace::list_in(folder.path()).unwrap();

        let (found, odd): (Vec<_>, Vec<_>) = listed.into_iter().partition(Result::is_ok);
        let names: Vec<_> = found.into_iter().map(|one| one.unwrap().name).collect();
        assert_eq!(names, ["a", "c"]);
        let odd: Vec<_> = odd
            .into_iter()
            .map(|one| one.unwrap_err().to_string())
            .collect();
        for name in ["b.ext4", "notes.txt", "b b.ext4", "d.ext4"] {
            assert!(
                odd.iter().any(|said| said.contains(name)),
                "{name}: {odd:?}"
            );
        }
        assert_eq!(odd.len(), 4);
    }

    #[test]
    fn threads_that_make_some_at_once_do_not_meet() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();

        let made: Vec<_> = std::thread::scope(|scope| {
            let making: Vec<_> = (0..8)
                .map(|number: u32| {
                    scope.spawn(move || {
                        let name = number.to_string();
                        Workspace::open_or_create_in(folder, &name, 64 + number).unwrap()
                    })
                })
                .collect();
            making.into_iter().map(|one| one.join().unwrap()).collect()
        });

        for (workspace, number) in made.iter().zip(0_u64..) {
            assert_eq!(workspace.quota_bytes(), (64 + number) << 20);
            // The magic number of ext4's superblock.
            let mut magic = [0; 2];
            std::os::unix::fs::FileExt::read_exact_at(&workspace.file, &mut magic, 1024 + 0x38)
                .unwrap();
            assert_eq!(magic, [0x53, 0xef], "{number}");
        }
        assert_eq!(fs::read_dir(folder).unwrap().count(), 8);
    }

    #[test]
    fn one_has_it_at_a_time_and_the_quota_stays() {
        let folder = tempfile::tempdir().unwrap();
        let first = Workspace::open_or_create_in(folder.path(), "a", 64).unwrap();

        let second = Workspace::open_or_create_in(folder.path(), "a", 128);
        assert!(
            matches!(second, Err(WorkspaceError::InUse { .. })),
            "{second:?}"
        );
        drop(first);
        let third = Workspace::open_or_create_in(folder.path(), "a", 128).unwrap();

        assert_eq!((third.name(), third.quota_bytes()), ("a", 64 << 20));
        let metadata = third.file.metadata().unwrap();
        assert!(
            metadata.blocks() * STAT_BLOCK_BYTES < 8 << 20,
            "{metadata:?}"
        );
        assert_eq!(metadata.mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
