//! The control group in which those of machines can be made.

use std::fs;

use super::{Check, Status};

/// The cgroup controllers that bound a machine's process.
const CONTROLLERS: [&str; 3] = ["cpu", "memory", "pids"];

pub(super) fn check() -> Check {
    const NAME: &str = "cgroup v2";
    const LESS: &str = "a machine's process is not held to a share of processor and memory";
    let Ok(mounts) = fs::read_to_string("/proc/self/mounts") else {
        return Check::not_ok(NAME, Status::Warning, "/proc is not mounted", LESS);
    };
    let Some(root) = cgroup_root(&mounts) else {
        return Check::not_ok(
            NAME,
            Status::Warning,
            "cgroup v2 is not mounted",
            format!("boot with `systemd.unified_cgroup_hierarchy=1`, else {LESS}"),
        );
    };
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let own = own
        .lines()
        .find_map(|line| line.strip_prefix("0::"))
        .unwrap_or("/");
    let folder = format!("{root}{own}");
    let controllers =
        fs::read_to_string(format!("{folder}/cgroup.controllers")).unwrap_or_default();
    let lacking = lacking_controllers(&controllers);
    if !lacking.is_empty() {
        return Check::not_ok(
            NAME,
            Status::Warning,
            format!("{folder} lacks the controllers {}", lacking.join(", ")),
            format!("delegate them (`systemctl edit user@.service`, `Delegate=yes`), else {LESS}"),
        );
    }
    if rustix::fs::access(
        format!("{folder}/cgroup.procs"),
        rustix::fs::Access::WRITE_OK,
    )
    .is_err()
    {
        return Check::not_ok(
            NAME,
            Status::Warning,
            format!("{folder} is not this user's"),
            format!("run under `systemd-run --user --scope -p Delegate=yes`, else {LESS}"),
        );
    }
    Check::ok(
        NAME,
        format!("{folder} has the controllers {}", CONTROLLERS.join(", ")),
    )
}

/// Where cgroup v2 is mounted, from the text of `/proc/self/mounts`.
fn cgroup_root(mounts: &str) -> Option<&str> {
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (folder, kind) = (fields.next()?, fields.next()?);
        (kind == "cgroup2").then_some(folder)
    })
}

fn lacking_controllers(available: &str) -> Vec<&'static str> {
    CONTROLLERS
        .into_iter()
        .filter(|needed| !available.split_whitespace().any(|one| one == *needed))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroup_v2_is_found_among_the_mounts_and_v1_is_not_taken_for_it() {
        let hybrid = "cgroup /sys/fs/cgroup/cpu cgroup rw 0 0\ncgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";
        assert_eq!(cgroup_root(hybrid), Some("/sys/fs/cgroup/unified"));
        assert_eq!(
            cgroup_root("cgroup /sys/fs/cgroup/cpu cgroup rw 0 0\n"),
            None
        );
    }

    #[test]
    fn controllers_that_lack_are_named() {
        assert_eq!(lacking_controllers("cpuset cpu io pids"), ["memory"]);
        assert!(lacking_controllers("cpu memory pids").is_empty());
    }
}
