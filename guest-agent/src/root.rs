//! The guest's file system: the image read-only below, a writable layer in memory above, and what programs
//! expect to be mounted.
//!
//! `/tmp` is part of the writable layer and no file system of its own: one budget for all that is written, so
//! that a large download in `/tmp` and a large installation elsewhere have the same room.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, symlink};
use std::thread::sleep;

use rustix::mount::{MountFlags, UnmountFlags, mount, mount_move, unmount};

use crate::limits::{DISK_TRIES, DISK_WAIT};

/// The disk with the root image.
const ROOT_DISK: &str = "/dev/vda";
/// The disk with a workspace, if there is one: an ext4 file system that outlives the machine; or a scratch disk, which does not.
const WORKSPACE_DISK: &str = "/dev/vdb";
/// Where the image is mounted before it is part of the overlay; in the initramfs.
const LOWER: &str = "/lower";
/// The memory, or the workspace, that holds the writable layer; in the initramfs.
const WRITABLE: &str = "/writable";
/// Where the overlay is mounted before it becomes the root; in the initramfs.
const NEW_ROOT: &str = "/newroot";
/// Bytes from the disk's start in which all three formats have their magic numbers.
const SUPERBLOCK_BYTES: usize = 2048;

/// Nothing on it is a device or gains rights.
const NO_DEVICES: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV);
/// Nothing on it is a program either.
const DATA_ONLY: MountFlags = NO_DEVICES.union(MountFlags::NOEXEC);

/// What is mounted inside the new root, in this order: type, folder, flags, options.
const MOUNTS: [(&str, &str, MountFlags, &std::ffi::CStr); 6] = [
    ("sysfs", "/sys", DATA_ONLY, c""),
    // Group 5 is `tty` on every distribution; mode 620 lets `write` and `mesg` work.
    (
        "devpts",
        "/dev/pts",
        MountFlags::NOSUID.union(MountFlags::NOEXEC),
        c"newinstance,ptmxmode=666,mode=620,gid=5",
    ),
    ("tmpfs", "/dev/shm", NO_DEVICES, c"mode=1777"),
    ("mqueue", "/dev/mqueue", DATA_ONLY, c""),
    ("tmpfs", "/run", NO_DEVICES, c"mode=755"),
    ("cgroup2", crate::cgroup::MOUNT_POINT, DATA_ONLY, c""),
];

/// Why there is no root file system.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RootError {
    /// No disk, or it can't be read.
    #[error("The root disk /dev/vda can't be read: {0}")]
    Disk(#[source] io::Error),
    /// None of the formats.
    #[error("The root image on /dev/vda is none of erofs, squashfs or ext4")]
    UnknownFormat,
    /// The image's superblock is right, but the kernel won't have it.
    #[error("The root image on /dev/vda can't be mounted as {format}: {source}")]
    Image {
        /// Format of its superblock.
        format: &'static str,
        /// What the kernel says.
        source: io::Error,
    },
    /// A step of the recipe failed.
    #[error("The guest's file systems can't be set up: {step}: {source}")]
    Step {
        /// Which one.
        step: &'static str,
        /// What the kernel says.
        source: io::Error,
    },
}

/// A format of root images.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    Erofs,
    Squashfs,
    Ext4,
}

impl Format {
    /// Finds out which, by the magic numbers of `struct erofs_super_block` and `struct ext4_super_block` (both
    /// at byte 1024) and of `struct squashfs_super_block` (at byte 0).
    fn of(superblock: &[u8]) -> Option<Self> {
        if superblock.get(1024..1028) == Some(&0xe0f5_e1e2_u32.to_le_bytes()) {
            Some(Self::Erofs)
        } else if superblock.get(..4) == Some(b"hsqs") {
            Some(Self::Squashfs)
        } else if superblock.get(1080..1082) == Some(&0xef53_u16.to_le_bytes()) {
            Some(Self::Ext4)
        } else {
            None
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Erofs => "erofs",
            Self::Squashfs => "squashfs",
            Self::Ext4 => "ext4",
        }
    }

    fn options(self) -> &'static std::ffi::CStr {
        match self {
            // A journal that was not clean can't be replayed on a disk that may only be read.
            Self::Ext4 => c"noload",
            Self::Erofs | Self::Squashfs => c"",
        }
    }
}

/// Mounts `/dev` and the root and makes it the process's. Afterwards `/proc` and `/dev` are there, the rest
/// comes with [`complete`]. Returns a folder of the workspace's or the scratch disk, if there is one.
///
/// # Errors
/// See [`RootError`].
pub fn enter() -> Result<Option<File>, RootError> {
    folder("/dev")?;
    mount(
        "devtmpfs",
        "/dev",
        "devtmpfs",
        MountFlags::NOSUID,
        c"mode=755",
    )
    .map_err(step("mount /dev"))?;
    let format = find_format()?;
    for path in [LOWER, WRITABLE, NEW_ROOT] {
        folder(path)?;
    }
    mount(
        ROOT_DISK,
        LOWER,
        format.name(),
        MountFlags::RDONLY,
        format.options(),
    )
    .map_err(|errno| RootError::Image {
        format: format.name(),
        source: errno.into(),
    })?;
    let disk = mount_writable()?;
    folder("/writable/upper")?;
    folder("/writable/work")?;
    mount(
        "overlay",
        NEW_ROOT,
        "overlay",
        MountFlags::empty(),
        c"lowerdir=/lower,upperdir=/writable/upper,workdir=/writable/work",
    )
    .map_err(step("mount the overlay"))?;
    // The overlay keeps both alive; in the guest's list of mounts they would only puzzle.
    for path in [LOWER, WRITABLE] {
        unmount(path, UnmountFlags::DETACH).map_err(step("detach the layers"))?;
    }
    folder("/newroot/dev")?;
    folder("/newroot/proc")?;
    mount_move("/dev", "/newroot/dev").map_err(step("move /dev"))?;
    mount("proc", "/newroot/proc", "proc", DATA_ONLY, c"").map_err(step("mount /proc"))?;
    // As switch_root(8): the initramfs can't be left by pivot_root(2), but covered.
    rustix::process::chdir(NEW_ROOT).map_err(step("enter the new root"))?;
    mount_move(".", "/").map_err(step("move the new root"))?;
    rustix::process::chroot(".").map_err(step("change the root"))?;
    rustix::process::chdir("/").map_err(step("enter the new root"))?;
    Ok(disk)
}

/// What is written goes into memory, or to a disk, of which a folder is returned.
fn mount_writable() -> Result<Option<File>, RootError> {
    if !std::path::Path::new(WORKSPACE_DISK).exists() {
        mount(
            "tmpfs",
            WRITABLE,
            "tmpfs",
            MountFlags::empty(),
            c"size=50%,mode=755",
        )
        .map_err(step("mount the writable layer"))?;
        return Ok(None);
    }
    mount(
        WORKSPACE_DISK,
        WRITABLE,
        "ext4",
        MountFlags::NODEV | MountFlags::NOATIME,
        // What is removed takes no room on the host.
        c"discard",
    )
    .map_err(step("mount the workspace"))?;
    let folder = File::open(WRITABLE).map_err(|source| RootError::Step {
        step: "open the workspace",
        source,
    })?;
    Ok(Some(folder))
}

/// Where the kernel shows the disk's serial number, by which the host says what it is for.
const SERIAL_FILE: &str = "/sys/block/vdb/serial";
/// That of a disk that is gone with the machine.
const SCRATCH_SERIAL: &str = "scratch";

/// Whether what is written to the disk is gone with the machine. To be asked after [`complete`].
#[must_use]
pub fn is_scratch() -> bool {
    fs::read_to_string(SERIAL_FILE).is_ok_and(|serial| serial.trim() == SCRATCH_SERIAL)
}

/// Bytes that the root's writable layer holds, and bytes that it has left; zeros where it can't be asked.
#[must_use]
pub fn disk_bytes() -> (u64, u64) {
    let Ok(found) = rustix::fs::statvfs("/") else {
        return (0, 0);
    };
    let used = found.f_blocks.saturating_sub(found.f_bfree);
    (
        used.saturating_mul(found.f_frsize),
        found.f_bavail.saturating_mul(found.f_frsize),
    )
}

/// Mounts everything else below the new root.
///
/// # Errors
/// See [`RootError`].
pub fn complete() -> Result<(), RootError> {
    for (kind, path, flags, options) in MOUNTS {
        // The kernel makes this one's folder, and nobody can make folders in sysfs.
        if path != crate::cgroup::MOUNT_POINT {
            folder(path)?;
        }
        mount(kind, path, kind, flags, options).map_err(|errno| RootError::Step {
            step: path,
            source: errno.into(),
        })?;
    }
    for (name, target) in [
        ("/dev/fd", "/proc/self/fd"),
        ("/dev/stdin", "/proc/self/fd/0"),
        ("/dev/stdout", "/proc/self/fd/1"),
        ("/dev/stderr", "/proc/self/fd/2"),
    ] {
        symlink(target, name).map_err(|source| RootError::Step { step: name, source })?;
    }
    shared_folder("/tmp")
}

/// Reads the format off the disk, which may take a moment to appear.
fn find_format() -> Result<Format, RootError> {
    let mut tries = 1;
    let disk = loop {
        match File::open(ROOT_DISK) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && tries < DISK_TRIES => {
                tries += 1;
                sleep(DISK_WAIT);
            }
            result => break result.map_err(RootError::Disk)?,
        }
    };
    let mut superblock = Vec::with_capacity(SUPERBLOCK_BYTES);
    disk.take(SUPERBLOCK_BYTES as u64)
        .read_to_end(&mut superblock)
        .map_err(RootError::Disk)?;
    Format::of(&superblock).ok_or(RootError::UnknownFormat)
}

/// Makes a folder unless it is there.
fn folder(path: &'static str) -> Result<(), RootError> {
    match fs::DirBuilder::new().mode(0o755).create(path) {
        Err(source) if source.kind() != io::ErrorKind::AlreadyExists => {
            Err(RootError::Step { step: path, source })
        }
        _ => Ok(()),
    }
}

/// Makes a folder that everybody may write to, or makes an existing one so.
fn shared_folder(path: &'static str) -> Result<(), RootError> {
    const SHARED: u32 = 0o1777;
    folder(path)?;
    let failed = |source| RootError::Step { step: path, source };
    let mode = fs::metadata(path).map_err(failed)?.permissions().mode();
    if mode & 0o7777 == SHARED {
        return Ok(());
    }
    fs::set_permissions(path, fs::Permissions::from_mode(SHARED)).map_err(failed)
}

fn step(step: &'static str) -> impl Fn(rustix::io::Errno) -> RootError {
    move |errno| RootError::Step {
        step,
        source: errno.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(magic: &[u8], offset: usize) -> Vec<u8> {
        let mut disk = vec![0; SUPERBLOCK_BYTES];
        disk[offset..offset + magic.len()].copy_from_slice(magic);
        disk
    }

    #[test]
    fn each_format_is_known_by_its_magic_number() {
        assert_eq!(
            Format::of(&disk(&[0xe2, 0xe1, 0xf5, 0xe0], 1024)),
            Some(Format::Erofs)
        );
        assert_eq!(Format::of(&disk(b"hsqs", 0)), Some(Format::Squashfs));
        assert_eq!(Format::of(&disk(&[0x53, 0xef], 1080)), Some(Format::Ext4));
    }

    #[test]
    fn other_disks_and_short_ones_have_no_format() {
        assert_eq!(Format::of(&disk(b"MZ", 0)), None);
        assert_eq!(Format::of(&[0; 100]), None);
        assert_eq!(Format::of(&[]), None);
    }
}
