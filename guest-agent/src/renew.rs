//! What makes a restored guest another one than all that were restored from the same snapshot: its clock, its
//! randomness, its names. Nothing that was frozen runs before all of it is done.

use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::sync::{Mutex, PoisonError};

use linux_crng_ioctl::ioctl::{add_randomness_to_kernel, force_kernel_crng_reseed};
use protocol::message::Resume;
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount_bind, mount_remount, unmount};

use crate::identity::{
    IdentityError, failed, hostname, hosts_with, machine_id, read_small, set_clock, set_hostname,
    version_4,
};

/// The kernel draws it once at its boot, so that all restored guests would have one; nobody can write to it.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// The file that is mounted over it and then has no name any more.
const BOOT_ID_FILE: &str = "/run/.sandvmm-boot-id";
/// That file, once it is mounted.
static COVER: Mutex<Option<File>> = Mutex::new(None);

/// Does before the machine is saved what need not be done when somebody waits for the restored one: mounting.
pub fn prepare() {
    let mut cover = COVER.lock().unwrap_or_else(PoisonError::into_inner);
    if !cover.as_ref().is_some_and(is_mounted) {
        // Where it fails, the restored machine tries again, and says so.
        *cover = cover_boot_id(&read_small(BOOT_ID)).ok();
    }
}

/// Takes over everything that is new.
///
/// # Errors
/// [`IdentityError`] on the first step that fails.
pub fn apply(resume: &Resume) -> Result<(), IdentityError> {
    // First, since it is the only one of these that grows old.
    set_clock(resume.realtime_ns)?;
    seed(&resume.entropy)?;
    let name = hostname(&resume.hostname).map_err(failed("take the host name"))?;
    let former = rustix::system::uname();
    let former = former.nodename().to_string_lossy();
    set_hostname(name)?;
    if let Some(hosts) = hosts_after(&read_small("/etc/hosts"), &former, name) {
        fs::write("/etc/hosts", hosts).map_err(failed("write /etc/hosts"))?;
    }
    fs::write("/etc/machine-id", machine_id(resume.machine_id))
        .map_err(failed("write /etc/machine-id"))?;
    replace_boot_id(&boot_id(resume.boot_id)).map_err(failed("replace the boot id"))
}

/// Writes to the file that covers the kernel's, which root in the guest may have taken off since.
fn replace_boot_id(text: &str) -> io::Result<()> {
    let mut cover = COVER.lock().unwrap_or_else(PoisonError::into_inner);
    match &*cover {
        Some(file) if is_mounted(file) => file.write_all_at(text.as_bytes(), 0),
        _ => {
            *cover = Some(cover_boot_id(text)?);
            Ok(())
        }
    }
}

/// Whether this file is what is found in the kernel's place.
fn is_mounted(file: &File) -> bool {
    let identity = |found: fs::Metadata| (found.dev(), found.ino());
    let shown = fs::metadata(BOOT_ID).map(identity);
    shown.is_ok_and(|shown| file.metadata().map(identity).is_ok_and(|own| own == shown))
}

/// Seeds the kernel's generator. Mixing bytes in changes nothing that is read until the next time the kernel seeds
/// itself from its pool, up to a minute later (`CRNG_RESEED_INTERVAL`, `drivers/char/random.c`), so that it is told to.
fn seed(entropy: &[u8; 32]) -> Result<(), IdentityError> {
    // Nothing is credited: the kernel's count was full long ago.
    add_randomness_to_kernel(entropy, 0)
        .and_then(|()| force_kernel_crng_reseed())
        .map_err(|error| IdentityError {
            step: "seed the kernel's generator",
            source: io::Error::other(error.to_string()),
        })
}

/// The text of `/etc/hosts` once it knows the new name in the former one's place; none when it does already.
fn hosts_after(hosts: &str, former: &str, name: &str) -> Option<String> {
    let own_line = format!("127.0.1.1 {former}");
    let without_former: String = hosts
        .split_inclusive('\n')
        .filter(|line| line.trim_end() != own_line)
        .collect();
    let after = hosts_with(&without_former, name);
    after.or_else(|| (without_former != hosts).then_some(without_former))
}

/// A boot id as the kernel writes it.
fn boot_id(bytes: [u8; 16]) -> String {
    let digits = format!("{:032x}", version_4(bytes));
    let mut text = String::with_capacity(digits.len() + 5);
    for (position, digit) in digits.chars().enumerate() {
        if matches!(position, 8 | 12 | 16 | 20) {
            text.push('-');
        }
        text.push(digit);
    }
    text.push('\n');
    text
}

/// Mounts a file with this text over the kernel's, in the place of an earlier one.
fn cover_boot_id(text: &str) -> io::Result<File> {
    let _ = fs::remove_file(BOOT_ID_FILE);
    let mut file = File::options()
        .write(true)
        .create_new(true)
        .mode(0o444)
        .open(BOOT_ID_FILE)?;
    file.write_all(text.as_bytes())?;
    // Whatever the agent's umask is.
    file.set_permissions(Permissions::from_mode(0o444))?;
    match unmount(BOOT_ID, UnmountFlags::DETACH) {
        // Nothing was mounted there.
        Ok(()) | Err(Errno::INVAL) => {}
        Err(errno) => return Err(errno.into()),
    }
    mount_bind(BOOT_ID_FILE, BOOT_ID)?;
    let flags = MountFlags::BIND
        | MountFlags::RDONLY
        | MountFlags::NOSUID
        | MountFlags::NODEV
        | MountFlags::NOEXEC;
    mount_remount(BOOT_ID, flags, "")?;
    fs::remove_file(BOOT_ID_FILE)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_boot_id_looks_like_the_kernels() {
        let own = read_small(BOOT_ID);

        let text = boot_id([0xab; 16]);

        assert_eq!(text, "abababab-abab-4bab-abab-abababababab\n");
        assert_eq!(text.len(), own.len());
        let shape = |text: &str| {
            text.match_indices('-')
                .map(|(at, _)| at)
                .collect::<Vec<_>>()
        };
        assert_eq!(shape(&text), shape(&own));
    }

    #[test]
    fn the_hosts_file_forgets_the_former_name_and_knows_the_new_one() {
        let hosts = "127.0.0.1 localhost\n127.0.1.1 old\n10.0.0.1 older\n";

        let after = hosts_after(hosts, "old", "new").unwrap();

        assert_eq!(
            after,
            "127.0.0.1 localhost\n10.0.0.1 older\n127.0.1.1 new\n"
        );
        assert_eq!(hosts_after(&after, "old", "new"), None);
        assert_eq!(hosts_after(&after, "new", "new").as_deref(), Some(&*after));
    }

    #[test]
    fn the_kernel_is_seeded_or_says_who_may() {
        // As root of the first user namespace it works; elsewhere it is refused and must not pass unnoticed.
        let before = rand();
        match seed(&[7; 32]) {
            Ok(()) => assert_ne!(before, rand()),
            Err(error) => assert!(!may_seed(), "{error}"),
        }
    }

    fn rand() -> [u8; 32] {
        let mut bytes = [0; 32];
        rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()).unwrap();
        bytes
    }

    /// Whether this process has `CAP_SYS_ADMIN` (bit 21, capabilities(7)) and no container stands between.
    fn may_seed() -> bool {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let effective = status
            .lines()
            .find_map(|line| line.strip_prefix("CapEff:\t"))
            .unwrap();
        let effective = u64::from_str_radix(effective, 16).unwrap();
        let namespace = fs::read_to_string("/proc/self/uid_map").unwrap();
        let is_first = namespace
            .split_ascii_whitespace()
            .eq(["0", "0", "4294967295"]);
        effective & (1 << 21) != 0 && is_first && File::open("/dev/random").is_ok()
    }
}
