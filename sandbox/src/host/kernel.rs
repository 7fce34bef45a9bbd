//! The kernel of this host: its version, and what it has for the cell around a machine's process.

use std::fs;

use super::{Check, Status};

/// The first Linux whose KVM, `close_range`, pidfds and cgroup v2 are all that is needed.
const MIN_KERNEL: (u32, u32) = (5, 10);

pub(super) fn check_version() -> Check {
    const NAME: &str = "Kernel";
    let uname = rustix::system::uname();
    let release = uname.release().to_string_lossy().into_owned();
    let (major, minor) = MIN_KERNEL;
    match version_of(&release) {
        Some(version) if version < MIN_KERNEL => Check::not_ok(
            NAME,
            Status::Missing,
            format!("Linux {release} is older than {major}.{minor}"),
            "use a newer kernel",
        ),
        Some(_) => Check::ok(NAME, format!("Linux {release}")),
        None => Check::not_ok(
            NAME,
            Status::Warning,
            format!("The kernel calls itself {release}, which is no version"),
            format!("see that it has what Linux {major}.{minor} has"),
        ),
    }
}

fn version_of(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release
        .split(|c: char| !c.is_ascii_digit())
        .map(str::parse::<u32>);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

pub(super) fn check_landlock() -> Check {
    const NAME: &str = "Landlock";
    match jailer::landlock_abi() {
        Some(version) => Check::ok(NAME, format!("The kernel has version {version}")),
        None => Check::not_ok(
            NAME,
            Status::Warning,
            "The kernel has no Landlock, or it is switched off",
            "boot with `lsm=landlock,…` or a kernel with CONFIG_SECURITY_LANDLOCK, else a machine's process has \
             one wall less",
        ),
    }
}

pub(super) fn check_user_namespaces() -> Check {
    const NAME: &str = "User namespaces";
    const LESS: &str = "else a machine's process has one wall less unless it is started by root";
    let read = |path: &str| fs::read_to_string(path).map(|text| text.trim().to_owned());
    let off = [
        (
            "/proc/sys/user/max_user_namespaces",
            "0",
            "user.max_user_namespaces=15000",
        ),
        (
            "/proc/sys/kernel/unprivileged_userns_clone",
            "0",
            "kernel.unprivileged_userns_clone=1",
        ),
        (
            "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "kernel.apparmor_restrict_unprivileged_userns=0",
        ),
    ]
    .into_iter()
    .find(|(path, off, _)| read(path).is_ok_and(|value| value == *off));
    if fs::exists("/proc/self/ns/user").is_ok_and(|exists| !exists) {
        return Check::not_ok(
            NAME,
            Status::Warning,
            "The kernel has no user namespaces",
            format!("use one with CONFIG_USER_NS, {LESS}"),
        );
    }
    match off {
        None => Check::ok(NAME, "A user without privileges may make them"),
        Some((path, value, setting)) => Check::not_ok(
            NAME,
            Status::Warning,
            format!("{path} is {value}: a user without privileges may not make them"),
            format!("`sudo sysctl {setting}`, {LESS}"),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_the_releases_of_distributions() {
        assert_eq!(version_of("6.1.0-18-amd64"), Some((6, 1)));
        assert_eq!(version_of("5.4.0"), Some((5, 4)));
        assert_eq!(version_of("6.18-rc1"), Some((6, 18)));
        assert_eq!(version_of("custom"), None);
    }
}
