//! What a supervisor and its machines hold of the system.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long what is left behind may stay: the kernel takes a virtual machine down after its process.
const GONE_MAX: Duration = Duration::from_secs(20);

/// Counts of what could be left behind by this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Footprint {
    /// This process's descriptors.
    descriptors: usize,
    /// Its threads.
    threads: usize,
    /// Its children, those included that nobody has waited for.
    children: usize,
    /// Control groups of its machines, and of machines whose supervisor is gone.
    groups: usize,
    /// What is mounted for this process.
    mounts: usize,
    /// Files in the folder for temporary ones, which is this process's own, and in that for shared memory.
    files: usize,
}

impl Footprint {
    /// As it is now.
    pub(crate) fn now() -> Self {
        let count = |folder: &str| fs::read_dir(folder).map_or(0, Iterator::count);
        let tasks = fs::read_dir("/proc/self/task").unwrap().flatten();
        let children = tasks
            .filter_map(|task| fs::read_to_string(task.path().join("children")).ok())
            .map(|list| list.split_whitespace().count())
            .sum();
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        Self {
            descriptors: count("/proc/self/fd"),
            threads: count("/proc/self/task"),
            children,
            groups: groups().len(),
            mounts: mounts.lines().count(),
            files: fs::read_dir(std::env::temp_dir()).unwrap().count() + count("/dev/shm"),
        }
    }

    /// Waits until it is this again.
    pub(crate) fn is_again(&self) -> Result<(), String> {
        let deadline = Instant::now() + GONE_MAX;
        loop {
            let now = Self::now();
            if now == *self {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(format!("before: {self:?}, after: {now:?}"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// The control groups of this process's machines, and of those whose supervisor is gone.
fn groups() -> Vec<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    let root = mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (folder, kind) = (fields.next()?, fields.next()?);
        (kind == "cgroup2").then(|| PathBuf::from(folder))
    });
    let mut open: Vec<PathBuf> = root.into_iter().collect();
    let mut found = Vec::new();
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                if entry.file_name().to_str().is_some_and(is_ours_or_nobodys) {
                    found.push(entry.path());
                }
                open.push(entry.path());
            }
        }
    }
    found
}

/// Whether a group by this name is one of them: `sandvmm-PID-…` is the supervisor's process.
fn is_ours_or_nobodys(name: &str) -> bool {
    name.strip_prefix("sandvmm-")
        .and_then(|rest| rest.split('-').next())
        .is_some_and(|pid| {
            pid == std::process::id().to_string() || !Path::new("/proc").join(pid).exists()
        })
}

/// Resident memory of this process, in KiB.
pub(crate) fn resident_kib() -> u64 {
    sandvmm_tests::resident_kib(std::process::id()).unwrap()
}
