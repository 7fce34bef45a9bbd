//! Whose ids a machine's process has: the maps of its user namespace (`user_namespaces(7)`).

use std::fs;
use std::io;

use rustix::process::{getegid, geteuid};

use crate::cell::Ids;

/// First of the ids that machines get from a supervisor that is root: this plus the process's number, which is below
/// 2²² (`PID_MAX_LIMIT`, `include/linux/threads.h`). No two machines that run at the same time under supervisors of one
/// namespace of process numbers share one, so that none can signal or inspect another, or use up its limits. The range from here to 2³¹ is one that systemd
/// leaves unused and that no distribution gives to users or containers (systemd, "Users, Groups, UIDs and
/// GIDs").
pub const FIRST_MACHINE_ID: u32 = 0x7000_0000;

/// The user that owns nothing, where a supervisor is root of a container that has no such range.
const NOBODY: u32 = 65534;

/// Whether this process may give others the ids that it likes.
pub(crate) fn is_root() -> bool {
    geteuid().is_root()
}

/// The machine's own id.
pub(crate) fn own(pid: libc::pid_t) -> u32 {
    FIRST_MACHINE_ID.saturating_add(pid.unsigned_abs())
}

/// Writes the maps of the new user namespace of process `pid`: id 0 in there is one on the host, and there is no
/// other.
///
/// # Errors
/// The system's.
pub(crate) fn map(pid: libc::pid_t) -> io::Result<Ids> {
    if !is_root() {
        write(pid, "setgroups", "deny")?;
        map_to(pid, geteuid().as_raw(), getegid().as_raw())?;
        return Ok(Ids::Supervisors);
    }
    let own = own(pid);
    if map_to(pid, own, own).is_ok() {
        return Ok(Ids::Own(own));
    }
    map_to(pid, NOBODY, NOBODY)?;
    Ok(Ids::Nobodys)
}

fn map_to(pid: libc::pid_t, user: u32, group: u32) -> io::Result<()> {
    write(pid, "uid_map", &format!("0 {user} 1"))?;
    write(pid, "gid_map", &format!("0 {group} 1"))
}

fn write(pid: libc::pid_t, file: &str, line: &str) -> io::Result<()> {
    fs::write(format!("/proc/{pid}/{file}"), line)
}
