//! What a machine's process uses, by `/proc`.

use std::fs;
use std::io::ErrorKind;
use std::time::{Duration, Instant};

use crate::machine::MEMORY_MIB;

/// The most memory that a machine's process may ever have had, in KiB: a guest touches a part of its memory, and whatever it does, the
/// process itself needs no more than this.
pub(crate) const PEAK_KIB_MAX: u64 = 12 << 10;

const _: () = assert!(
    PEAK_KIB_MAX < (MEMORY_MIB as u64) << 10,
    "else a guest's memory could hide in it"
);

/// How long an idle machine is watched, and how much of that it may compute.
const WATCHED: Duration = Duration::from_millis(150);
const IDLE_MAX: Duration = Duration::from_millis(45);

/// The most memory that the process has had so far, in KiB.
pub(crate) fn peak_kib(pid: u32) -> Result<u64, String> {
    let status = read(pid, "status")?;
    status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))
        .and_then(|line| line.split_whitespace().next())
        .and_then(|kib| kib.parse().ok())
        .ok_or_else(|| String::from("/proc tells no peak of memory"))
}

/// Checks it against its bound.
pub(crate) fn memory_is_bounded(pid: u32) -> Result<u64, String> {
    let kib = peak_kib(pid)?;
    if kib > PEAK_KIB_MAX {
        return Err(format!(
            "the process had {kib} KiB of memory, more than {PEAK_KIB_MAX} KiB"
        ));
    }
    Ok(kib)
}

/// How many descriptors it has; `None` where only root may know, since the process is not dumpable.
pub(crate) fn descriptors(pid: u32) -> Result<Option<usize>, String> {
    let path = format!("/proc/{pid}/fd");
    match fs::read_dir(&path) {
        Ok(entries) => Ok(Some(entries.count())),
        Err(error)
            if error.kind() == ErrorKind::PermissionDenied
                && !rustix::process::geteuid().is_root() =>
        {
            Ok(None)
        }
        Err(error) => Err(format!("{path}: {error}")),
    }
}

/// Checks that it does next to nothing for a while: its guest is idle.
pub(crate) fn is_idle(pid: u32) -> Result<(), String> {
    let mut used = Duration::ZERO;
    // What was begun before may still be going on, the first time.
    for _ in 0..3 {
        let (before, since) = (processor_time(pid)?, Instant::now());
        std::thread::sleep(WATCHED);
        used = processor_time(pid)?.saturating_sub(before);
        // On a busy host the sleep is longer than asked for.
        if used < IDLE_MAX.mul_f64(since.elapsed().as_secs_f64() / WATCHED.as_secs_f64()) {
            return Ok(());
        }
    }
    Err(format!(
        "the process computes for {used:?} in {WATCHED:?} while its guest is idle"
    ))
}

/// What all its threads have computed.
pub(crate) fn processor_time(pid: u32) -> Result<Duration, String> {
    let path = format!("/proc/{pid}/task");
    let threads = fs::read_dir(&path).map_err(|error| format!("{path}: {error}"))?;
    let mut nanoseconds = 0;
    for thread in threads.flatten() {
        // "time on the processor, time waited for it, time slices", in nanoseconds (Documentation/scheduler/sched-stats.rst).
        let text = fs::read_to_string(thread.path().join("schedstat")).unwrap_or_default();
        nanoseconds += text
            .split(' ')
            .next()
            .and_then(|word| word.parse::<u64>().ok())
            .unwrap_or(0);
    }
    Ok(Duration::from_nanos(nanoseconds))
}

fn read(pid: u32, name: &str) -> Result<String, String> {
    let path = format!("/proc/{pid}/{name}");
    fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))
}
