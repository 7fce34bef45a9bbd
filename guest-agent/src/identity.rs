//! What makes this guest this guest: its clock, its randomness, its names. The host tells them before
//! anything runs.

use std::fs::{self, File};
use std::io::{self, Read, Write};

use protocol::message::Configure;
use rustix::time::{ClockId, Timespec};

use crate::limits::MAX_SMALL_FILE_BYTES;

const NANOS_PER_SECOND: u64 = 1_000_000_000;
/// Longest name that Linux takes (`__NEW_UTS_LEN`).
const MAX_HOSTNAME_BYTES: usize = 64;
/// What an image without a resolver gets: there is no network, and a question to nobody on loopback fails at
/// once instead of after a time-out.
const RESOLV_CONF: &str = "nameserver 127.0.0.1\n";
const HOSTS: &str = "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n";

/// Why the guest could not be configured.
#[derive(Debug, thiserror::Error)]
#[error("The guest could not be configured: {step}: {source}")]
pub struct IdentityError {
    /// What was being done.
    pub(crate) step: &'static str,
    /// What the kernel said.
    pub(crate) source: io::Error,
}

/// Takes over everything that the host says.
///
/// # Errors
/// [`IdentityError`] on the first step that fails.
pub fn apply(configure: &Configure) -> Result<(), IdentityError> {
    set_clock(configure.realtime_ns)?;
    // Mixed in, not credited: the kernel was seeded by the boot protocol already.
    write_to("/dev/urandom", &configure.entropy).map_err(failed("mix in randomness"))?;
    let name = hostname(&configure.hostname).map_err(failed("take the host name"))?;
    set_hostname(name)?;
    let hosts = read_small("/etc/hosts");
    if let Some(hosts) = hosts_with(&hosts, name) {
        fs::write("/etc/hosts", hosts).map_err(failed("write /etc/hosts"))?;
    }
    if fs::metadata("/etc/resolv.conf").is_err() {
        // A link into a folder of a service that does not run here counts as missing.
        let _ = fs::remove_file("/etc/resolv.conf");
        fs::write("/etc/resolv.conf", RESOLV_CONF).map_err(failed("write /etc/resolv.conf"))?;
    }
    if !is_machine_id(&read_small("/etc/machine-id")) {
        let id = new_machine_id().map_err(failed("draw a machine id"))?;
        fs::write("/etc/machine-id", id).map_err(failed("write /etc/machine-id"))?;
    }
    Ok(())
}

/// Sets the wall clock.
pub(crate) fn set_clock(realtime_ns: u64) -> Result<(), IdentityError> {
    let now = Timespec {
        tv_sec: i64::try_from(realtime_ns / NANOS_PER_SECOND).unwrap_or(i64::MAX),
        tv_nsec: i64::try_from(realtime_ns % NANOS_PER_SECOND).unwrap_or_default(),
    };
    rustix::time::clock_settime(ClockId::Realtime, now).map_err(|errno| IdentityError {
        step: "set the clock",
        source: errno.into(),
    })
}

/// Sets the kernel's host name and the file's.
pub(crate) fn set_hostname(name: &str) -> Result<(), IdentityError> {
    rustix::system::sethostname(name.as_bytes()).map_err(|errno| IdentityError {
        step: "set the host name",
        source: errno.into(),
    })?;
    fs::write("/etc/hostname", format!("{name}\n")).map_err(failed("write /etc/hostname"))
}

pub(crate) fn failed(step: &'static str) -> impl Fn(io::Error) -> IdentityError {
    move |source| IdentityError { step, source }
}

fn write_to(path: &str, bytes: &[u8]) -> io::Result<()> {
    File::options().write(true).open(path)?.write_all(bytes)
}

pub(crate) fn read_small(path: &str) -> String {
    let mut bytes = Vec::new();
    if let Ok(file) = File::open(path) {
        let _ = file.take(MAX_SMALL_FILE_BYTES).read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Checks a host name, since it goes into files that programs parse.
pub(crate) fn hostname(name: &str) -> io::Result<&str> {
    let fits = !name.is_empty()
        && name.len() <= MAX_HOSTNAME_BYTES
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
    fits.then_some(name)
        .ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

/// The text of `/etc/hosts` once it knows `localhost` and the host's own name; none when it does already.
pub(crate) fn hosts_with(hosts: &str, name: &str) -> Option<String> {
    let knows = |wanted: &str| {
        hosts
            .lines()
            .filter_map(|line| line.split('#').next())
            .any(|line| {
                line.split_ascii_whitespace()
                    .skip(1)
                    .any(|word| word == wanted)
            })
    };
    let (has_localhost, has_name) = (knows("localhost"), knows(name));
    if has_localhost && has_name {
        return None;
    }
    let mut text = String::new();
    if !has_localhost {
        text.push_str(HOSTS);
    }
    text.push_str(hosts);
    if !text.ends_with('\n') {
        text.push('\n');
    }
    if !has_name {
        // Debian's customary address for the own name of a machine without a permanent one.
        text.push_str("127.0.1.1 ");
        text.push_str(name);
        text.push('\n');
    }
    Some(text)
}

/// Whether the text is a machine id (machine-id(5)): 32 hexadecimal digits and a newline. An image leaves it
/// empty, or says `uninitialized`.
fn is_machine_id(text: &str) -> bool {
    let id = text.trim_end();
    id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// A machine id that is a version 4 UUID, as systemd makes them.
fn new_machine_id() -> io::Result<String> {
    let mut bytes = [0_u8; 16];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    Ok(machine_id(bytes))
}

/// A machine id of these random bytes.
pub(crate) fn machine_id(bytes: [u8; 16]) -> String {
    format!("{:032x}\n", version_4(bytes))
}

/// A version 4 UUID of these random bytes (RFC 9562, §5.4).
pub(crate) fn version_4(bytes: [u8; 16]) -> u128 {
    let number = u128::from_be_bytes(bytes);
    let number = number & !(0xf << 76) | (0x4 << 76);
    number & !(0x3 << 62) | (0x2 << 62)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_hosts_file_gets_localhost_and_the_name() {
        let hosts = hosts_with("", "box").unwrap();

        assert!(hosts.contains("127.0.0.1 localhost\n") && hosts.ends_with("127.0.1.1 box\n"));
        assert_eq!(hosts_with(&hosts, "box"), None);
    }

    #[test]
    fn an_images_hosts_file_is_kept_and_added_to() {
        let hosts = hosts_with("127.0.0.1\tlocalhost\n10.0.0.1 db # box", "box").unwrap();

        assert_eq!(
            hosts,
            "127.0.0.1\tlocalhost\n10.0.0.1 db # box\n127.0.1.1 box\n"
        );
    }

    #[test]
    fn test_hostname_that_would_break_a_file_returns_error() {
        for name in ["", "a b", "a\n", "a.b", &"x".repeat(65)] {
            assert!(hostname(name).is_err(), "{name:?}");
        }
        assert_eq!(hostname("sandbox-1").unwrap(), "sandbox-1");
    }

    #[test]
    fn machine_ids_are_version_4_and_differ() {
        let (first, second) = (new_machine_id().unwrap(), new_machine_id().unwrap());

        assert!(is_machine_id(&first), "{first}");
        assert_eq!(&first[12..13], "4");
        assert!("89ab".contains(&first[16..17]), "{first}");
        assert_ne!(first, second);
        assert!(!is_machine_id("") && !is_machine_id("uninitialized\n"));
    }
}
