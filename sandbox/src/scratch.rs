//! Disks that are gone with their sandbox: copies of an empty file system that is made once for each size.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{SeekFrom, copy_file_range, seek};
use rustix::io::Errno;

use crate::workspace::{
    MAX_QUOTA_MIB, MIN_QUOTA_MIB, WorkspaceError, create, failed, folder, make_in, open,
};

/// A scratch disk's file system has no journal: nobody looks at it after a crash.
const FEATURES: &[&str] = &["-O", "^has_journal"];

/// Permissions of a disk: what is written to it is for its owner's eyes.
const PRIVATE: u32 = 0o600;

/// Tells the copies of one process apart.
static COUNT: AtomicU32 = AtomicU32::new(0);

/// A new empty disk of this size. Its file has no name any more: it is gone with its last owner.
pub(crate) fn disk(size_mib: u32) -> Result<File, WorkspaceError> {
    disk_in(&folder()?, size_mib)
}

fn disk_in(folder: &Path, size_mib: u32) -> Result<File, WorkspaceError> {
    if !(MIN_QUOTA_MIB..=MAX_QUOTA_MIB).contains(&size_mib) {
        return Err(WorkspaceError::Quota {
            quota_mib: size_mib,
        });
    }
    let prepared = folder.join(format!(".empty-{size_mib}"));
    if !prepared.exists() {
        make_in(folder, || create(folder, &prepared, size_mib, FEATURES))?;
    }
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let name = folder.join(format!(".scratch-{}-{count}", std::process::id()));
    // One that a former process of this number has left half made is nobody's.
    let _ = fs::remove_file(&name);
    let source = open(&prepared)?;
    // A name that it has for a moment only is a name.
    let disk = File::options()
        .write(true)
        .create_new(true)
        .mode(PRIVATE)
        .open(&name)
        .and_then(|file| file.set_len(u64::from(size_mib) << 20))
        .map_err(failed("made", &name))
        .and_then(|()| open(&name));
    let _ = fs::remove_file(&name);
    let disk = disk?;
    copy_data(&source, &disk).map_err(failed("copied", &prepared))?;
    Ok(disk)
}

/// Copies what is not a hole: of an empty file system, little.
fn copy_data(from: &File, to: &File) -> io::Result<()> {
    let mut at = 0;
    loop {
        let begin = match seek(from.as_fd(), SeekFrom::Data(at)) {
            Ok(begin) => begin,
            // No data behind this.
            Err(Errno::NXIO) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        };
        let end = seek(from.as_fd(), SeekFrom::Hole(begin))?;
        let (mut source, mut target) = (begin, begin);
        while source < end {
            let left = usize::try_from(end - source).unwrap_or(usize::MAX);
            let copied = copy_file_range(from, Some(&mut source), to, Some(&mut target), left)?;
            if copied == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        at = end;
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileExt, MetadataExt};

    use super::*;

    #[test]
    fn each_disk_is_an_empty_file_system_of_its_own_and_has_no_name() {
        let folder = tempfile::tempdir().unwrap();
        let (one, two) = (
            disk_in(folder.path(), 64).unwrap(),
            disk_in(folder.path(), 64).unwrap(),
        );

        one.write_all_at(b"one", 10 << 20).unwrap();
        let mut read = [0; 3];
        two.read_exact_at(&mut read, 10 << 20).unwrap();
        // The magic number of `struct ext4_super_block`, at byte 1024 + 0x38.
        let mut magic = [0; 2];
        two.read_exact_at(&mut magic, 1080).unwrap();

        assert_eq!(read, [0; 3]);
        assert_eq!(magic, 0xef53_u16.to_le_bytes());
        let metadata = two.metadata().unwrap();
        assert_eq!((metadata.len(), metadata.nlink()), (64 << 20, 0));
        // Also while it had a name.
        assert_eq!(metadata.mode() & 0o7777, PRIVATE);
        assert!(metadata.blocks() * 512 < 4 << 20, "{metadata:?}");
        let left: Vec<_> = fs::read_dir(folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        assert_eq!(left, [".empty-64"]);
    }

    #[test]
    fn sizes_outside_the_bounds_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        for size_mib in [0, MIN_QUOTA_MIB - 1, MAX_QUOTA_MIB + 1] {
            let refused = disk_in(folder.path(), size_mib);
            assert!(matches!(refused, Err(WorkspaceError::Quota { .. })));
        }
    }
}
