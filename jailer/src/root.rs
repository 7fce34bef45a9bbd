//! An empty file tree in place of the host's.

use rustix::io::Errno;
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_change, unmount,
};
use rustix::process::{chdir, pivot_root};

/// Folders of which a host has one at least: the empty tree is mounted there for a moment, in this process's namespace
/// alone.
const PLACES: [&str; 5] = ["/proc", "/tmp", "/dev", "/usr", "/etc"];

/// One inode, for the root folder itself, and no page: there is nothing that could be written, even if it were not
/// read-only.
const OPTIONS: &std::ffi::CStr = c"mode=0555,nr_inodes=1,size=4096";

/// Makes the root folder an empty one that is read-only, and lets go of the host's. The process must be in a mount
/// namespace of its own.
///
/// # Errors
/// The system's; the file tree is as it was then.
pub(crate) fn empty() -> Result<(), Errno> {
    // What is mounted here from now on is mounted here alone.
    mount_change(
        "/",
        MountPropagationFlags::PRIVATE | MountPropagationFlags::REC,
    )?;
    let flags = MountFlags::RDONLY
        | MountFlags::NOSUID
        | MountFlags::NODEV
        | MountFlags::NOEXEC
        | MountFlags::NOATIME;
    let mut result = Err(Errno::NOENT);
    for place in PLACES {
        result = mount(c"none", place, c"tmpfs", flags, OPTIONS);
        match result {
            Ok(()) => {
                chdir(place)?;
                break;
            }
            Err(Errno::NOENT | Errno::NOTDIR) => {}
            Err(error) => return Err(error),
        }
    }
    result?;
    // The old tree lies on the new one's root then, without a folder to hold it, and is taken off (`pivot_root(2)`,
    // "pivot_root(".", ".")").
    pivot_root(".", ".")?;
    unmount(".", UnmountFlags::DETACH)?;
    chdir("/")
}
