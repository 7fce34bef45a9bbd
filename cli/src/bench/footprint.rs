//! What a machine's process holds of the host's memory, by `smaps` of proc(5).

use std::fs;

/// A writable mapping of at least so many KiB is guest memory: no guest has less, and nothing else of the process is as large.
const GUEST_MAPPING_MIN_KIB: u64 = 32 << 10;

/// The memory of one process, in KiB.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Footprint {
    /// Pages of the guest's memory that are there.
    pub(super) guest_kib: u64,
    /// What the process alone has beside these.
    pub(super) own_kib: u64,
}

/// The processes that threads of this one have made and that have not ended.
pub(super) fn children() -> Vec<u32> {
    let Ok(threads) = fs::read_dir("/proc/self/task") else {
        return Vec::new();
    };
    threads
        .flatten()
        .filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok())
        .flat_map(|list| {
            let numbers = list.split_whitespace().map(str::parse);
            numbers.filter_map(Result::ok).collect::<Vec<_>>()
        })
        .collect()
}

/// What the process has; `None` where it may not be looked into, or is gone.
pub(super) fn of(process: u32) -> Option<Footprint> {
    let smaps = fs::read_to_string(format!("/proc/{process}/smaps")).ok()?;
    (!smaps.is_empty()).then(|| read(&smaps))
}

/// Memory of the host that can be had for something else, in KiB.
pub(super) fn available_kib() -> Option<u64> {
    let meminfo = fs::read_to_string("/proc/meminfo").ok()?;
    meminfo
        .lines()
        .find_map(|line| value_kib(line, "MemAvailable:"))
}

fn read(smaps: &str) -> Footprint {
    let mut footprint = Footprint::default();
    let (mut is_writable, mut is_guests) = (false, false);
    for line in smaps.lines() {
        if let Some(size_kib) = value_kib(line, "Size:") {
            is_guests = is_writable && size_kib >= GUEST_MAPPING_MIN_KIB;
        } else if let Some(kib) = value_kib(line, "Rss:").filter(|_| is_guests) {
            footprint.guest_kib += kib;
        } else if let Some(kib) = value_kib(line, "Private_Dirty:").filter(|_| !is_guests) {
            footprint.own_kib += kib;
        } else if let Some(permissions) = permissions(line) {
            is_writable = permissions.starts_with("rw");
        }
    }
    footprint
}

/// The permissions in the first line of a mapping, which begins with its addresses.
fn permissions(line: &str) -> Option<&str> {
    let (addresses, rest) = line.split_once(' ')?;
    addresses.contains('-').then_some(rest)
}

fn value_kib(line: &str, name: &str) -> Option<u64> {
    let value = line.strip_prefix(name)?.trim();
    value.strip_suffix(" kB")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_memory_is_told_from_what_the_process_has_itself() {
        let mapping = |permissions: &str, size: u64, rss: u64, dirty: u64| {
            format!(
                "7f00-7f01 {permissions} 00000000 00:00 0 \nSize:  {size} kB\nRss:   {rss} kB\nPrivate_Clean: 9 kB\n\
                 Private_Dirty:  {dirty} kB\nVmFlags: rd wr\n"
            )
        };
        let smaps = [
            mapping("rw-p", 131_072, 20_000, 19_000),
            mapping("---p", 65_536, 0, 0),
            mapping("r-xp", 2_000, 1_500, 4),
            mapping("rw-p", 132, 100, 100),
        ]
        .concat();

        assert_eq!(
            read(&smaps),
            Footprint {
                guest_kib: 20_000,
                own_kib: 104
            }
        );
    }

    #[test]
    fn this_process_has_memory_and_the_host_too() {
        let own = of(std::process::id()).unwrap();

        assert!(own.own_kib > 0, "{own:?}");
        assert!(available_kib().unwrap() > 0);
        assert_eq!(of(0), None);
    }
}
