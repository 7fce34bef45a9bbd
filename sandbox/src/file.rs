//! Opening the files that a user names for a machine.
//!
//! The path is the operator's own, so a symbolic link in it is followed (`/dev/disk/by-id` and package stores
//! are made of them); what it leads to is held to the same rules as a file. A guest cannot name a path here.
//! Nothing waits in `open`: a FIFO without a writer or a device is refused by its kind before, and the file
//! is opened with `O_NONBLOCK` in case it was exchanged in between.

use std::fs::{self, File, FileType};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;

use crate::error::StartError;

/// Bytes of a disk's sector: virtio-block counts in these (virtio 1.2 §5.2.4).
const SECTOR_BYTES: u64 = 512;

/// What a file is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// The guest kernel.
    Kernel,
    /// The initramfs.
    Initramfs,
    /// A disk, read only.
    Disk,
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Initramfs => "initramfs",
            Self::Disk => "disk",
        }
    }

    fn takes(self, kind: FileType) -> bool {
        kind.is_file() || (self == Self::Disk && kind.is_block_device())
    }
}

/// Opens a user's file for reading, if it can serve in its role.
///
/// # Errors
/// [`StartError::File`].
pub(crate) fn open(role: Role, path: &Path) -> Result<OwnedFd, StartError> {
    open_checked(role, path).map_err(|(problem, source)| StartError::File {
        role: role.name(),
        path: path.to_owned(),
        problem,
        source,
    })
}

fn open_checked(role: Role, path: &Path) -> Result<OwnedFd, (String, Option<io::Error>)> {
    let cannot = |error: io::Error| {
        let problem = match error.kind() {
            io::ErrorKind::NotFound => "does not exist",
            io::ErrorKind::PermissionDenied => "may not be read: change its owner or mode",
            _ => "cannot be opened",
        };
        (problem.to_owned(), Some(error))
    };
    check_kind(role, fs::metadata(path).map_err(cannot)?.file_type())?;
    let mut file = File::options()
        .read(true)
        .custom_flags(nonblocking_flags())
        .open(path)
        .map_err(cannot)?;
    check_kind(role, file.metadata().map_err(cannot)?.file_type())?;
    // A block device has its size here alone.
    let size_bytes = file.seek(SeekFrom::End(0)).map_err(cannot)?;
    file.rewind().map_err(cannot)?;
    if size_bytes == 0 {
        return Err(("is empty".to_owned(), None));
    }
    if role == Role::Disk && !size_bytes.is_multiple_of(SECTOR_BYTES) {
        return Err((
            format!(
                "has {size_bytes} bytes, not a multiple of {SECTOR_BYTES}: it is cut short or no raw image"
            ),
            None,
        ));
    }
    Ok(file.into())
}

fn nonblocking_flags() -> i32 {
    (OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed()
}

fn check_kind(role: Role, kind: FileType) -> Result<(), (String, Option<io::Error>)> {
    if role.takes(kind) {
        return Ok(());
    }
    let is = if kind.is_dir() {
        "a folder"
    } else if kind.is_fifo() {
        "a FIFO"
    } else if kind.is_socket() {
        "a socket"
    } else if kind.is_char_device() {
        "a character device"
    } else if kind.is_block_device() {
        "a block device"
    } else {
        "something else"
    };
    let must_be = match role {
        Role::Disk => "a regular file or a block device",
        Role::Kernel | Role::Initramfs => "a regular file",
    };
    Err((format!("is {is}, and must be {must_be}"), None))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;
    use std::path::PathBuf;

    use rustix::fs::{CWD, FileType as NodeType, Mode, mknodat};

    use super::*;

    fn problem(role: Role, path: &Path) -> String {
        match open(role, path).unwrap_err() {
            error @ StartError::File { .. } => error.to_string(),
            other => panic!("{other:?}"),
        }
    }

    fn folder_with(name: &str, content: &[u8]) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        fs::write(&path, content).unwrap();
        (folder, path)
    }

    #[test]
    fn a_whole_number_of_sectors_is_a_disk() {
        let (_folder, path) = folder_with("disk", &[0; 1024]);
        let disk = open(Role::Disk, &path).unwrap();
        assert_eq!(File::from(disk).stream_position().unwrap(), 0);
    }

    #[test]
    fn the_operators_own_link_is_followed_to_a_file_and_to_nothing_else() {
        let (folder, path) = folder_with("disk", &[0; 512]);
        let to_file = folder.path().join("to-file");
        let to_folder = folder.path().join("to-folder");
        let to_nothing = folder.path().join("to-nothing");
        symlink(&path, &to_file).unwrap();
        symlink(folder.path(), &to_folder).unwrap();
        symlink("nothing", &to_nothing).unwrap();

        open(Role::Disk, &to_file).unwrap();
        assert!(problem(Role::Disk, &to_folder).contains("is a folder"));
        assert!(problem(Role::Disk, &to_nothing).contains("does not exist"));
    }

    #[test]
    fn a_missing_file_names_itself_and_its_role() {
        assert_eq!(
            problem(Role::Kernel, Path::new("/nonexistent/vmlinux")),
            "The kernel /nonexistent/vmlinux does not exist"
        );
    }

    #[test]
    fn an_empty_file_is_refused_in_every_role() {
        let (_folder, path) = folder_with("empty", b"");
        for role in [Role::Kernel, Role::Initramfs, Role::Disk] {
            assert!(problem(role, &path).ends_with("is empty"));
        }
    }

    #[test]
    fn a_disk_that_ends_inside_a_sector_is_refused_and_a_kernel_is_not() {
        let (_folder, path) = folder_with("cut", &[0; 513]);
        assert!(problem(Role::Disk, &path).contains("513 bytes, not a multiple of 512"));
        open(Role::Kernel, &path).unwrap();
    }

    #[test]
    fn a_folder_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        assert!(problem(Role::Disk, folder.path()).contains("is a folder"));
    }

    #[test]
    fn a_fifo_is_refused_without_waiting_for_a_writer() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("fifo");
        mknodat(CWD, &path, NodeType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        assert!(problem(Role::Disk, &path).contains("is a FIFO"));
    }

    #[test]
    fn a_socket_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let _listener = UnixListener::bind(&path).unwrap();
        assert!(problem(Role::Initramfs, &path).contains("is a socket"));
    }

    #[test]
    fn a_character_device_is_refused() {
        for device in ["/dev/zero", "/dev/null", "/dev/tty"] {
            assert!(problem(Role::Disk, Path::new(device)).contains("is a character device"));
        }
    }
}
