//! The cgroups (version 2) that hold commands: one for all of them, with bounds that keep the kernel and the
//! agent alive, and below it one for each.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use crate::limits::{
    MAX_CGROUP_FILE_BYTES, MAX_PROCESSES, MEMORY_BYTES_PER_PROCESS, MEMORY_RESERVE_BYTES,
    MIN_WORKLOAD_BYTES,
};

/// Where the hierarchy is mounted.
pub const MOUNT_POINT: &str = "/sys/fs/cgroup";

/// The controllers that commands are held by.
const CONTROLLERS: &str = "+memory +pids +cpu";

/// What all commands live in.
#[derive(Debug)]
pub struct Workload {
    path: PathBuf,
    /// What goes with the guest's memory.
    max_processes: u64,
}

/// One command's cgroup.
#[derive(Debug)]
pub struct Cgroup {
    path: PathBuf,
    /// The workload's own events, and how often its bound on processes had been met when this one was made.
    workload_events: PathBuf,
    process_limit_hits_before: u64,
}

/// What a command used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Processes of it that were killed for lack of memory.
    pub oom_kills: u32,
    /// Most memory held at one time, in bytes.
    pub peak_memory_bytes: u64,
    /// Processor time, in microseconds.
    pub cpu_time_us: u64,
    /// How often the workload met its bound on processes meanwhile.
    pub process_limit_hits: u32,
    /// Most processes and threads that it had at one time. The kernel counts one that the workload's bound refused, too.
    pub peak_processes: u32,
}

impl Workload {
    /// Makes the workload's cgroup below `hierarchy` and sets its bounds, for a guest in which
    /// `memory_bytes` are free.
    ///
    /// # Errors
    /// When a controller is missing from the kernel or a bound is not taken.
    pub fn create(hierarchy: &Path, memory_bytes: u64) -> io::Result<Self> {
        let path = hierarchy.join("workload");
        fs::write(hierarchy.join("cgroup.subtree_control"), CONTROLLERS)?;
        make_folder(&path)?;
        fs::write(path.join("cgroup.subtree_control"), CONTROLLERS)?;
        fs::write(
            path.join("memory.max"),
            memory_max(memory_bytes).to_string(),
        )?;
        let workload = Self {
            path,
            max_processes: pids_max(memory_bytes),
        };
        workload.write_pids_max(workload.max_processes)?;
        Ok(workload)
    }

    /// Lets it have `count` processes and threads at most, where that is fewer than go with the guest's memory. Those that it has beyond stay.
    ///
    /// # Errors
    /// That of the write.
    pub fn bound_processes(&self, count: u32) -> io::Result<()> {
        self.write_pids_max(self.max_processes.min(u64::from(count)))
    }

    fn write_pids_max(&self, count: u64) -> io::Result<()> {
        fs::write(self.path.join("pids.max"), count.to_string())
    }

    /// Stops every process in it and below, also those that are just being forked; [`Self::is_frozen`] says when they
    /// stand (kernel: `cgroup-v2.rst`, "cgroup.freeze").
    ///
    /// # Errors
    /// That of the write.
    pub fn freeze(&self) -> io::Result<()> {
        fs::write(self.path.join("cgroup.freeze"), "1")
    }

    /// Lets them go on.
    ///
    /// # Errors
    /// That of the write.
    pub fn thaw(&self) -> io::Result<()> {
        fs::write(self.path.join("cgroup.freeze"), "0")
    }

    /// Whether all of them stand.
    #[must_use]
    pub fn is_frozen(&self) -> bool {
        keyed_value(&read_file(&self.path.join("cgroup.events")), "frozen") == Some(1)
    }

    /// Makes the cgroup called `name`.
    ///
    /// # Errors
    /// When the kernel has no room for it.
    pub fn child(&self, name: &str) -> io::Result<Cgroup> {
        let path = self.path.join(name);
        make_folder(&path)?;
        let workload_events = self.path.join("pids.events");
        Ok(Cgroup {
            path,
            process_limit_hits_before: process_limit_hits(&workload_events),
            workload_events,
        })
    }
}

impl Cgroup {
    /// Its folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Puts a process into it.
    ///
    /// # Errors
    /// That of the write: the process may be gone.
    pub fn take(&self, pid: rustix::process::Pid) -> io::Result<()> {
        let number = pid.as_raw_pid().to_string();
        fs::write(self.path.join("cgroup.procs"), number)
    }

    /// Kills every process in it, also one that is being forked at this moment (`cgroup.kill`).
    ///
    /// # Errors
    /// That of the write.
    pub fn kill(&self) -> io::Result<()> {
        fs::write(self.path.join("cgroup.kill"), "1")
    }

    /// What was used so far; a figure that can't be read is zero.
    #[must_use]
    pub fn usage(&self) -> Usage {
        let oom_kills = keyed_value(&self.read("memory.events"), "oom_kill").unwrap_or_default();
        let process_limit_hits = process_limit_hits(&self.workload_events)
            .saturating_sub(self.process_limit_hits_before);
        Usage {
            oom_kills: u32::try_from(oom_kills).unwrap_or(u32::MAX),
            process_limit_hits: u32::try_from(process_limit_hits).unwrap_or(u32::MAX),
            peak_processes: self.read("pids.peak").trim().parse().unwrap_or_default(),
            peak_memory_bytes: self.read("memory.peak").trim().parse().unwrap_or_default(),
            cpu_time_us: keyed_value(&self.read("cpu.stat"), "usage_usec").unwrap_or_default(),
        }
    }

    /// Removes it; fails as long as a process lives in it.
    ///
    /// # Errors
    /// That of `rmdir`; one that is gone already is no error.
    pub fn remove(&self) -> io::Result<()> {
        match fs::remove_dir(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    fn read(&self, name: &str) -> String {
        read_file(&self.path.join(name))
    }
}

/// How often a bound on processes was met, by the text of this file.
fn process_limit_hits(events: &Path) -> u64 {
    keyed_value(&read_file(events), "max").unwrap_or_default()
}

/// The text of an interface file; empty if it can't be read.
fn read_file(path: &Path) -> String {
    let mut text = String::new();
    if let Ok(file) = File::open(path) {
        let _ = file.take(MAX_CGROUP_FILE_BYTES).read_to_string(&mut text);
    }
    text
}

/// Puts the calling process into the cgroup at `path`.
///
/// # Errors
/// That of the write.
pub fn join(path: &Path) -> io::Result<()> {
    fs::write(path.join("cgroup.procs"), "0")
}

fn make_folder(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        result => result,
    }
}

/// What commands may use of a guest's free memory.
fn memory_max(memory_bytes: u64) -> u64 {
    memory_bytes
        .saturating_sub(MEMORY_RESERVE_BYTES)
        .max(MIN_WORKLOAD_BYTES)
}

/// How many processes and threads commands may have.
fn pids_max(memory_bytes: u64) -> u64 {
    (memory_bytes / MEMORY_BYTES_PER_PROCESS).min(MAX_PROCESSES)
}

/// The number behind `key` in a flat keyed file (kernel: `cgroup-v2.rst`, "Interface Files").
fn keyed_value(text: &str, key: &str) -> Option<u64> {
    text.lines()
        .filter_map(|line| line.split_once(' '))
        .find(|(name, _)| *name == key)
        .and_then(|(_, value)| value.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_matched_whole() {
        let events = "low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n";

        assert_eq!(keyed_value(events, "oom_kill"), Some(2));
        assert_eq!(keyed_value(events, "oom"), Some(3));
        assert_eq!(keyed_value(events, "kill"), None);
        assert_eq!(keyed_value("oom_kill many\n", "oom_kill"), None);
        assert_eq!(keyed_value("", "oom_kill"), None);
    }

    #[test]
    fn usage_is_read_from_the_kernels_files() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("memory.events"), "oom 1\noom_kill 1\n").unwrap();
        fs::write(folder.path().join("memory.peak"), "4096\n").unwrap();
        fs::write(
            folder.path().join("cpu.stat"),
            "usage_usec 77\nuser_usec 1\n",
        )
        .unwrap();
        fs::write(folder.path().join("pids.events"), "max 5\n").unwrap();
        fs::write(folder.path().join("pids.peak"), "6\n").unwrap();
        let cgroup = Cgroup {
            path: folder.path().into(),
            workload_events: folder.path().join("pids.events"),
            process_limit_hits_before: 3,
        };

        let usage = cgroup.usage();

        assert_eq!(
            usage,
            Usage {
                oom_kills: 1,
                peak_memory_bytes: 4096,
                cpu_time_us: 77,
                process_limit_hits: 2,
                peak_processes: 6,
            }
        );
    }

    #[test]
    fn fewer_processes_may_be_asked_for_and_not_more() {
        let folder = tempfile::tempdir().unwrap();
        let workload = Workload::create(folder.path(), 256 << 20).unwrap();
        let bound = || fs::read_to_string(folder.path().join("workload/pids.max")).unwrap();
        assert_eq!(bound(), "1024");

        for (asked, has) in [(20, "20"), (30, "30"), (1025, "1024"), (u32::MAX, "1024")] {
            workload.bound_processes(asked).unwrap();
            assert_eq!(bound(), has);
        }
    }

    #[test]
    fn a_workload_is_frozen_when_the_kernel_says_so_and_not_before() {
        let folder = tempfile::tempdir().unwrap();
        let workload = Workload::create(folder.path(), 256 << 20).unwrap();
        let file = |name: &str| folder.path().join("workload").join(name);

        workload.freeze().unwrap();
        assert_eq!(fs::read_to_string(file("cgroup.freeze")).unwrap(), "1");
        assert!(!workload.is_frozen());
        fs::write(file("cgroup.events"), "populated 1\nfrozen 0\n").unwrap();
        assert!(!workload.is_frozen());
        fs::write(file("cgroup.events"), "populated 1\nfrozen 1\n").unwrap();
        assert!(workload.is_frozen());
        workload.thaw().unwrap();
        assert_eq!(fs::read_to_string(file("cgroup.freeze")).unwrap(), "0");
    }

    #[test]
    fn what_is_not_there_counts_as_zero_and_as_removed() {
        let folder = tempfile::tempdir().unwrap();
        let cgroup = Cgroup {
            path: folder.path().join("gone"),
            workload_events: folder.path().join("gone"),
            process_limit_hits_before: 0,
        };

        assert_eq!(cgroup.usage(), Usage::default());
        cgroup.remove().unwrap();
    }

    #[test]
    fn a_reserve_is_kept_however_little_is_free() {
        assert_eq!(memory_max(256 << 20), 240 << 20);
        assert_eq!(memory_max(20 << 20), MIN_WORKLOAD_BYTES);
        assert_eq!(pids_max(256 << 20), 1024);
        assert_eq!(pids_max(64 << 30), MAX_PROCESSES);
    }
}
