//! A control group for each machine (cgroup v2, `Documentation/admin-guide/cgroup-v2.rst` of Linux).
//!
//! It lies below the supervisor's own group where that may have children that are limited; else beside it, where the parent is
//! the supervisor's to use; for root, at last, at the top. It is made before its process, and removed after it. A supervisor
//! that was killed removes nothing: the next start on the host that comes by, of any supervisor, does, while its own machine's process
//! is on its way; or before, where what was left is in the way of the new one.
//!
//! Whose supervisor lives is said by a lock that it holds on the group's folder, and that goes with it: supervisors in different
//! containers, which may share a parent, do not see each other's process numbers, and a number is another process's in each. What can't be
//! locked can't be judged, and stays.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, TryLockError};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags};

use crate::block_device::BlockDevice;
use crate::cell::{Bounds, CgroupBounds};
use crate::cpu_quota::{CPU_PERIOD_US, Throttled, cpu_quota_us};
use crate::ids;
use crate::rlimits;

/// Memory that a machine may use beside its guest's, in MiB: program, heap, stacks, what streams hold (32 MiB at most), the
/// kernel's structures for the virtual machine, and page cache of its disks, which goes when the rest is needed.
pub const MEMORY_OVERHEAD_MIB: u64 = 96;

/// Page tables, of the process and of the virtual machine, as a part of the guest's memory: 8 bytes in each for 4 KiB
/// are a 256th, and as much again for what KVM keeps of each page.
const PAGE_TABLES_DIVISOR: u64 = 128;

/// Where nearly every host has cgroup v2, and what `statfs(2)` says of it (`CGROUP2_SUPER_MAGIC`, `include/uapi/linux/magic.h`).
const USUAL_MOUNT_POINT: &str = "/sys/fs/cgroup";
const CGROUP2_MAGIC: u64 = 0x6367_7270;

/// Links of a folder of cgroup v2 that has no other in it: its name, and its own `.`; each folder in it has a `..` that is one more.
const LINKS_ALONE: u32 = 2;

/// The controllers that are wanted, in the order of the files below.
const CONTROLLERS: [&str; 3] = ["cpu", "memory", "pids"];

/// The controller that is taken where it is there: `io.max` is for disks that lie on a device.
const IO_CONTROLLER: &str = "io";

/// Its file.
const IO_MAX: &str = "io.max";

/// Most bytes and operations a second of a machine on each device that its disks lie on, in each direction: what a good solid-state disk
/// of the slower kind does alone. Reads that the page cache serves do not count.
const MAX_IO_BYTES_PER_S: u64 = 512 << 20;
const MAX_IO_OPERATIONS_PER_S: u64 = 16 << 10;

/// What every machine's group is called first.
const PREFIX: &str = "sandvmm-";

/// How often, and how long apart, the removal of a group is tried whose process is gone: the kernel's own threads for the
/// virtual machine leave it a moment later.
const REMOVE_TRIES: u32 = 200;
const REMOVE_WAIT: Duration = Duration::from_millis(5);

/// How many groups are made until one is kept: each but the last was another's already, was taken for one that was left, or could
/// not be locked in time.
const MAKE_TRIES: u32 = 16;

/// For its owner alone: whoever may open a folder may lock it.
const GROUP_MODE: u32 = 0o700;

/// How often, and how long apart, a lock on a new group is tried. Whoever looks after groups that were left has it for an instant.
const LOCK_TRIES: u32 = 20;
const LOCK_WAIT: Duration = Duration::from_millis(1);

/// A machine's group; dropping it removes it.
#[derive(Debug)]
pub(crate) struct Cgroup {
    path: PathBuf,
    /// Locked, as long as its supervisor lives.
    folder: File,
    bounds: CgroupBounds,
}

impl Cgroup {
    /// Makes the group with its bounds.
    ///
    /// # Errors
    /// A sentence, without its end, that says why there is none.
    pub(crate) fn create(
        bounds: Bounds,
        cpu_quota_percent: Option<u32>,
        devices: &[BlockDevice],
    ) -> Result<Self, String> {
        let root = root()?;
        let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let own = own_group(&root, &own).ok_or("this process is in no group of cgroup v2")?;
        let mut why = String::from("no group can be made");
        for parent in parents(&root, &own) {
            match Self::below(&parent, bounds, cpu_quota_percent) {
                Ok(mut group) => {
                    group.bound_io(devices);
                    return Ok(group);
                }
                // The nearest group's reason is the one to tell.
                Err(error) if why.starts_with("no group") => {
                    why = format!("{} can't have a limited group: {error}", parent.display());
                }
                Err(_) => {}
            }
        }
        Err(why)
    }

    fn below(parent: &Path, bounds: Bounds, cpu_quota_percent: Option<u32>) -> io::Result<Self> {
        delegate(parent)?;
        let (path, folder) = make(parent)?;
        // From here on, whatever fails removes it.
        let mut group = Self {
            path,
            folder,
            bounds: CgroupBounds::default(),
        };
        group.bound(bounds, cpu_quota_percent)?;
        Ok(group)
    }

    fn bound(&mut self, bounds: Bounds, cpu_quota_percent: Option<u32>) -> io::Result<()> {
        let quota_us = cpu_quota_us(bounds, cpu_quota_percent);
        self.write("cpu.max", &format!("{quota_us} {CPU_PERIOD_US}"))?;
        self.write("memory.max", &memory_max(bounds).to_string())?;
        self.write("pids.max", &rlimits::max_tasks(bounds).to_string())?;
        // A machine is whole or gone. Kernels before 4.19 do not have it.
        let _ = self.write("memory.oom.group", "1");
        // Guest memory is in memory alone: what is in it is on no disk, and a guest can't have the host write it there without end. Kernels
        // that count no swap for a group (`swapaccount=0`), or have none, do not have the file.
        let _ = self.write("memory.swap.max", "0");
        Ok(())
    }

    /// How often, and how long in all, the group was kept from running since its share was used up; zeros where the kernel does not say.
    pub(crate) fn throttled(&self) -> Throttled {
        let text = fs::read_to_string(self.path.join("cpu.stat")).unwrap_or_default();
        Throttled::read(&text)
    }

    /// Bounds what is asked of the disks' devices, as far as the host lets them be bounded.
    fn bound_io(&mut self, devices: &[BlockDevice]) {
        let bytes = MAX_IO_BYTES_PER_S;
        let operations = MAX_IO_OPERATIONS_PER_S;
        let written = devices.iter().filter(|device| {
            let line =
                format!("{device} rbps={bytes} wbps={bytes} riops={operations} wiops={operations}");
            fs::write(self.path.join(IO_MAX), line).is_ok()
        });
        if written.count() > 0 {
            self.bounds.files.push(IO_MAX);
        }
    }

    fn write(&mut self, file: &'static str, value: &str) -> io::Result<()> {
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        let opened: OwnedFd = rustix::fs::openat(&self.folder, file, flags, Mode::empty())?;
        // The kernel takes such a file's content in one call or not at all.
        rustix::io::write(opened, value.as_bytes())?;
        self.bounds.files.push(file);
        Ok(())
    }

    /// Removes the groups beside this one whose supervisors are gone.
    ///
    /// To be called once the machine's process is on its way, which does not wait for it.
    pub(crate) fn sweep_beside(&self) {
        if let Some(parent) = self.path.parent()
            && has_others(parent)
        {
            sweep(parent);
        }
    }

    /// The open folder, to be born into.
    pub(crate) fn folder(&self) -> BorrowedFd<'_> {
        self.folder.as_fd()
    }

    /// Moves a process in.
    pub(crate) fn take(&self, pid: libc::pid_t) -> io::Result<()> {
        fs::write(self.path.join("cgroup.procs"), pid.to_string())
    }

    pub(crate) fn bounds(&self) -> &CgroupBounds {
        &self.bounds
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        for _ in 0..REMOVE_TRIES {
            match fs::remove_dir(&self.path) {
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                    thread::sleep(REMOVE_WAIT);
                }
                // Gone, or nothing that waiting would change: the next start sees to it.
                _ => return,
            }
        }
    }
}

/// `memory.max` in bytes.
fn memory_max(bounds: Bounds) -> u64 {
    let guest = u64::from(bounds.memory_mib) << 20;
    guest + guest / PAGE_TABLES_DIVISOR + (MEMORY_OVERHEAD_MIB << 20)
}

/// Where cgroup v2 is mounted. The list of all mounts, which is long on many hosts, is read where it is not in its usual place alone.
fn root() -> Result<PathBuf, String> {
    let usual = Path::new(USUAL_MOUNT_POINT);
    if rustix::fs::statfs(usual).is_ok_and(|found| u64::try_from(found.f_type) == Ok(CGROUP2_MAGIC))
    {
        return Ok(usual.to_owned());
    }
    let mounts = fs::read_to_string("/proc/self/mounts")
        .map_err(|error| format!("/proc/self/mounts can't be read ({error})"))?;
    mount_point(&mounts).ok_or_else(|| "cgroup v2 is not mounted".to_owned())
}

/// Whether a group has others in it than one.
fn has_others(parent: &Path) -> bool {
    let found = rustix::fs::statx(rustix::fs::CWD, parent, AtFlags::empty(), StatxFlags::NLINK);
    // What can't be told is looked at.
    found.map_or(true, |found| found.stx_nlink > LINKS_ALONE + 1)
}

/// Where cgroup v2 is mounted, from the text of `/proc/self/mounts`.
fn mount_point(mounts: &str) -> Option<PathBuf> {
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (folder, kind) = (fields.next()?, fields.next()?);
        (kind == "cgroup2").then(|| unescaped(folder))
    })
}

/// A field of `/proc/self/mounts`: what would end it is there as a backslash and three octal digits (`mangle`, `fs/proc_namespace.c`).
fn unescaped(field: &str) -> PathBuf {
    let mut parts = field.split('\\');
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        let code = part.get(..3).map(|digits| u8::from_str_radix(digits, 8));
        match (code, part.get(3..)) {
            (Some(Ok(byte)), Some(rest)) => {
                bytes.push(byte);
                bytes.extend(rest.as_bytes());
            }
            // Nothing that the kernel writes.
            _ => {
                bytes.push(b'\\');
                bytes.extend(part.as_bytes());
            }
        }
    }
    PathBuf::from(OsString::from_vec(bytes))
}

/// This process's group, from the text of `/proc/self/cgroup`.
fn own_group(root: &Path, text: &str) -> Option<PathBuf> {
    let path = text.lines().find_map(|line| line.strip_prefix("0::/"))?;
    // A group outside of this process's view begins with `..`.
    (!path.starts_with("..")).then(|| root.join(path))
}

/// Where a machine's group may be: below the supervisor's, beside it, and for root at the top.
fn parents(root: &Path, own: &Path) -> Vec<PathBuf> {
    let mut parents = vec![own.to_owned()];
    let beside = own.parent().filter(|parent| parent.starts_with(root));
    parents.extend(beside.map(Path::to_owned));
    if ids::is_root() && !parents.iter().any(|parent| parent == root) {
        parents.push(root.to_owned());
    }
    parents
}

/// Lets the children of a group have the controllers. A group that has processes of its own can't, but for the top
/// one ("no internal process constraint").
///
/// Writes only what changes something: each write waits until groups that were removed before are gone from the kernel, three of its
/// ticks later.
fn delegate(parent: &Path) -> io::Result<()> {
    let control = parent.join("cgroup.subtree_control");
    let has = fs::read_to_string(&control)?;
    let may_have = fs::read_to_string(parent.join("cgroup.controllers"))?;
    let absent = lacking(&CONTROLLERS, &may_have);
    if !absent.is_empty() {
        return Err(io::Error::other(format!(
            "it has not the controllers {}",
            absent.replace('+', "")
        )));
    }
    let required = lacking(&CONTROLLERS, &has);
    if !required.is_empty() {
        fs::write(&control, required)?;
    }
    if names(&may_have, IO_CONTROLLER) {
        let io = lacking(&[IO_CONTROLLER], &has);
        if !io.is_empty() {
            // A machine does without.
            let _ = fs::write(&control, io);
        }
    }
    Ok(())
}

/// What enables those of `controllers` that are not in the list `has`.
fn lacking(controllers: &[&str], has: &str) -> String {
    let lacking: Vec<String> = controllers
        .iter()
        .filter(|controller| !names(has, controller))
        .map(|controller| format!("+{controller}"))
        .collect();
    lacking.join(" ")
}

fn names(list: &str, controller: &str) -> bool {
    list.split_whitespace().any(|one| one == controller)
}

/// Makes a group's folder, and opens and locks it. Groups that were left behind count for the parent's `cgroup.max.descendants`, and are
/// swept where that keeps the new one from being made.
fn make(parent: &Path) -> io::Result<(PathBuf, File)> {
    let mut has_swept = false;
    for _ in 0..MAKE_TRIES {
        let path = parent.join(new_name()?);
        match fs::DirBuilder::new().mode(GROUP_MODE).create(&path) {
            Ok(()) => {}
            // What the kernel says to one group too many, here or above, and to one too deep, of which no sweep makes less.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && !has_swept => {
                sweep(parent);
                has_swept = true;
                continue;
            }
            // A supervisor in another namespace has the same number, and began at the same time.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
            Err(error) => return Err(error),
        }
        if let Some(folder) = hold(&path)? {
            return Ok((path, folder));
        }
    }
    Err(io::Error::new(
        io::ErrorKind::AlreadyExists,
        "each one that was made is another's, was swept at once, or stayed locked by somebody",
    ))
}

/// Opens and locks a group that was just made; `None` where it was swept meanwhile, or is removed here since somebody keeps its lock:
/// a sweeper that is stopped between lock and removal would take it away from the machine later.
fn hold(path: &Path) -> io::Result<Option<File>> {
    let folder = match File::open(path) {
        Ok(folder) => folder,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => {
            let _ = fs::remove_dir(path);
            return Err(error);
        }
    };
    for _ in 0..LOCK_TRIES {
        match folder.try_lock() {
            Err(TryLockError::WouldBlock) => thread::sleep(LOCK_WAIT),
            // Where it can't be locked, nobody sweeps it.
            Ok(()) | Err(TryLockError::Error(_)) => return Ok(path.exists().then_some(folder)),
        }
    }
    let _ = fs::remove_dir(path);
    Ok(None)
}

/// Removes the groups of machines whose supervisor is gone. A group that still has a process is left to the next.
fn sweep(parent: &Path) {
    let Ok(entries) = fs::read_dir(parent) else {
        return;
    };
    for entry in entries.flatten() {
        if is_machines(&entry.file_name())
            && let Ok(folder) = File::open(entry.path())
            && folder.try_lock().is_ok()
        {
            // Before the lock is given up: else it might be another's by then.
            let _ = fs::remove_dir(entry.path());
        }
    }
}

/// `sandvmm-PID-START-NUMBER`: the supervisor, when it began, and how many machines it has made. It is for whoever looks, and unlike others.
fn new_name() -> io::Result<String> {
    static MADE: AtomicU32 = AtomicU32::new(0);
    static START: OnceLock<Option<u64>> = OnceLock::new();
    let pid = std::process::id();
    let start = START.get_or_init(|| start_of(pid)).ok_or_else(|| {
        io::Error::new(io::ErrorKind::NotFound, "/proc does not show this process")
    })?;
    let number = MADE.fetch_add(1, Ordering::Relaxed);
    Ok(format!("{PREFIX}{pid}-{start}-{number}"))
}

/// Whether a group of this name is a machine's.
fn is_machines(name: &OsStr) -> bool {
    let numbers = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
    numbers.is_some_and(|numbers| {
        let numbers: Vec<&str> = numbers.split('-').collect();
        numbers.len() == 3 && numbers.iter().all(|number| number.parse::<u64>().is_ok())
    })
}

/// When a process began, in clock ticks since the host's boot (field 22 of `/proc/PID/stat`); `None` where there is none.
fn start_of(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may hold anything; field 3 follows.
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_groups_name_tells_its_supervisor_and_when_it_began() {
        let name = new_name().unwrap();

        let pid = std::process::id();
        let start = start_of(pid).unwrap();
        assert!(
            name.starts_with(&format!("sandvmm-{pid}-{start}-")),
            "{name}"
        );
        assert!(is_machines(OsStr::new(&name)));
        assert_ne!(new_name().unwrap(), name);
    }

    /// Whether a group is gone after some sweeps: a process that another test is just making has a copy of every descriptor for a moment.
    fn is_swept(parent: &Path, group: &Path) -> bool {
        (0..1000).any(|_| {
            sweep(parent);
            thread::sleep(LOCK_WAIT);
            !group.exists()
        })
    }

    #[test]
    fn a_group_is_swept_when_nobody_holds_it_whatever_its_number_is() {
        let parent = tempfile::tempdir().unwrap();
        let left = |name: &str| {
            let path = parent.path().join(name);
            fs::create_dir(&path).unwrap();
            path
        };
        // Supervisors of another namespace: no process has this number here; or one has that began at the same time.
        let theirs = left(&format!("{PREFIX}{}-1-0", u32::MAX));
        let own = left(&new_name().unwrap());
        let others = left("user.slice");
        let held = File::open(&theirs).unwrap();
        held.try_lock().unwrap();

        sweep(parent.path());

        assert!(theirs.exists() && others.exists());
        assert!(!own.exists());
        drop(held);
        assert!(is_swept(parent.path(), &theirs));
    }

    #[test]
    fn a_new_group_is_held_until_it_is_let_go_of() {
        let parent = tempfile::tempdir().unwrap();

        let (path, folder) = make(parent.path()).unwrap();

        sweep(parent.path());
        assert!(path.exists());
        drop(folder);
        assert!(is_swept(parent.path(), &path));
        assert!(hold(&path).unwrap().is_none());
    }

    #[test]
    fn a_new_group_that_stays_locked_is_removed_and_another_is_made() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join(new_name().unwrap());
        fs::create_dir(&path).unwrap();
        let theirs = File::open(&path).unwrap();
        theirs.try_lock().unwrap();

        assert!(hold(&path).unwrap().is_none());

        assert!(!path.exists());
        make(parent.path()).unwrap();
    }

    #[test]
    fn a_new_group_is_its_owners_alone() {
        let parent = tempfile::tempdir().unwrap();

        let (path, _held) = make(parent.path()).unwrap();

        let mode = fs::metadata(path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, GROUP_MODE);
    }

    #[test]
    fn groups_that_are_made_while_others_sweep_are_kept() {
        let parent = tempfile::tempdir().unwrap();
        let is_over = std::sync::atomic::AtomicBool::new(false);

        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !is_over.load(Ordering::Relaxed) {
                        sweep(parent.path());
                    }
                });
            }
            let made: Vec<_> = (0..500).map(|_| make(parent.path())).collect();
            is_over.store(true, Ordering::Relaxed);

            for group in made {
                let (path, _held) = group.unwrap();
                assert!(path.exists(), "{}", path.display());
            }
        });
    }

    #[test]
    fn other_names_are_nobodys() {
        for name in [
            "sandvmm",
            "sandvmm-1",
            "sandvmm-1-2",
            "sandvmm-a-1-1",
            "sandvmm-1-1-1-1",
            "user.slice",
        ] {
            assert!(!is_machines(OsStr::new(name)), "{name}");
        }
    }

    #[test]
    fn only_what_is_lacking_is_enabled() {
        assert_eq!(lacking(&CONTROLLERS, "cpuset io pids\n"), "+cpu +memory");
        assert_eq!(lacking(&CONTROLLERS, "cpu memory pids"), "");
    }

    #[test]
    fn a_process_that_is_not_there_has_not_begun() {
        assert_eq!(start_of(u32::MAX), None);
    }

    #[test]
    fn a_mount_point_may_have_any_name() {
        let mounts = "proc /proc proc rw 0 0\nnone /run/a\\040b\\134\\011c cgroup2 rw 0 0\n";

        let found = mount_point(mounts).unwrap();

        assert_eq!(found, Path::new("/run/a b\\\tc"));
        assert_eq!(unescaped("/a\\9"), Path::new("/a\\9"));
        assert_eq!(mount_point("none /x tmpfs rw 0 0\n"), None);
    }

    #[test]
    fn groups_are_looked_for_nearest_first() {
        let root = Path::new("/sys/fs/cgroup");
        let own = own_group(root, "1:name=x:/\n0::/user.slice/a.scope\n").unwrap();

        let parents = parents(root, &own);

        assert_eq!(parents[0], Path::new("/sys/fs/cgroup/user.slice/a.scope"));
        assert_eq!(parents[1], Path::new("/sys/fs/cgroup/user.slice"));
        assert_eq!(own_group(root, "0::/../x\n"), None);
        assert_eq!(own_group(root, "4:memory:/a\n"), None);
        assert_eq!(own_group(root, "0::/\n").unwrap(), root);
    }

    #[test]
    fn a_machine_may_use_its_guests_memory_and_the_overhead() {
        let bounds = Bounds {
            memory_mib: 256,
            vcpus: 1,
            max_file_bytes: 0,
        };
        assert_eq!(memory_max(bounds), (256 + 2 + 96) << 20);
    }
}
