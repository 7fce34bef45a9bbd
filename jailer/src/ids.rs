//! Whose ids a machine's process has: what the maps of its user namespace say (`user_namespaces(7)`), or what it takes itself.
//!
//! A supervisor that is root gives each machine ids of its own. Not every root may: one of a user namespace that has no such ids (of a
//! container, or `unshare -r`), or without the capabilities to change ids, gives the best that it is let. User and group are each
//! chosen by themselves: that one is refused is no reason to do without the other.

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
pub(crate) const NOBODY: u32 = 65534;

/// Whose an id is, the one to do without first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Whose {
    /// The supervisor's: no other was to be had.
    Supervisors,
    /// That of the user who owns nothing, and of other machines.
    Nobodys,
    /// The machine's own.
    Own,
}

/// Whose ids a process got that was to have its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Got {
    pub(crate) user: Whose,
    pub(crate) group: Whose,
    /// The error number of the first refusal; 0 where there was none.
    pub(crate) errno: i32,
}

impl Got {
    /// What is said of both: no more than holds of each.
    pub(crate) fn ids(self, own: u32) -> Ids {
        match self.user.min(self.group) {
            Whose::Own => Ids::Own(own),
            Whose::Nobodys => Ids::Nobodys,
            Whose::Supervisors => Ids::Supervisors,
        }
    }

    /// What the process has of its supervisor's that it was not to have, in one sentence without its end.
    pub(crate) fn lacking(self, keeps_groups: bool) -> Option<String> {
        let kept: Vec<&str> = [
            (self.user == Whose::Supervisors, "user"),
            (self.group == Whose::Supervisors, "group"),
            (keeps_groups, "other groups"),
        ]
        .into_iter()
        .filter_map(|(is_kept, what)| is_kept.then_some(what))
        .collect();
        let why = match self.errno {
            0 => String::new(),
            errno => format!(" ({})", io::Error::from_raw_os_error(errno)),
        };
        (!kept.is_empty()).then(|| {
            format!(
                "the host does not let the process leave its supervisor's ids{why}, of which it keeps: {}",
                kept.join(", ")
            )
        })
    }
}

/// Whether this process may give others ids, as far as the host lets it.
pub(crate) fn is_root() -> bool {
    geteuid().is_root()
}

/// The machine's own id.
pub(crate) fn own(pid: libc::pid_t) -> u32 {
    FIRST_MACHINE_ID.saturating_add(pid.unsigned_abs())
}

/// Writes the maps of the new user namespace of process `pid`: id 0 in there is one on the host, and there is no
/// other. `None` where the supervisor is no root, whose ids the process has then.
///
/// # Errors
/// The system's, where it refuses the supervisor's ids too.
pub(crate) fn map(pid: libc::pid_t) -> io::Result<Option<Got>> {
    let (user, group) = (geteuid().as_raw(), getegid().as_raw());
    if !is_root() {
        write(pid, "setgroups", "deny")?;
        map_one(pid, "uid_map", user)?;
        map_one(pid, "gid_map", group)?;
        return Ok(None);
    }
    // A map is written as a whole or not at all, and once.
    let mut refusal = None;
    let mut best = |file, supervisors| {
        let choices = [
            (Whose::Own, own(pid)),
            (Whose::Nobodys, NOBODY),
            (Whose::Supervisors, supervisors),
        ];
        for (whose, id) in choices {
            match map_one(pid, file, id) {
                Ok(()) => return Some(whose),
                Err(error) => {
                    refusal.get_or_insert(error);
                }
            }
        }
        None
    };
    let user = best("uid_map", user);
    let group = best("gid_map", group).or_else(|| {
        // Whoever may not change groups may map its own alone, and only where the process can't leave others by that.
        write(pid, "setgroups", "deny")
            .and_then(|()| map_one(pid, "gid_map", group))
            .ok()
            .map(|()| Whose::Supervisors)
    });
    let errno = refusal.as_ref().and_then(io::Error::raw_os_error);
    match (user, group) {
        (Some(user), Some(group)) => Ok(Some(Got {
            user,
            group,
            errno: errno.unwrap_or(0),
        })),
        _ => Err(refusal.unwrap_or_else(|| io::ErrorKind::PermissionDenied.into())),
    }
}

fn map_one(pid: libc::pid_t, file: &str, id: u32) -> io::Result<()> {
    write(pid, file, &format!("0 {id} 1"))
}

fn write(pid: libc::pid_t, file: &str, line: &str) -> io::Result<()> {
    fs::write(format!("/proc/{pid}/{file}"), line)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn got(user: Whose, group: Whose) -> Got {
        Got {
            user,
            group,
            errno: libc::EPERM,
        }
    }

    #[test]
    fn of_two_ids_the_worse_is_told() {
        assert_eq!(got(Whose::Own, Whose::Own).ids(7), Ids::Own(7));
        assert_eq!(got(Whose::Own, Whose::Nobodys).ids(7), Ids::Nobodys);
        assert_eq!(got(Whose::Supervisors, Whose::Own).ids(7), Ids::Supervisors);
    }

    #[test]
    fn what_is_kept_of_the_supervisors_is_named_with_the_reason() {
        let said = got(Whose::Own, Whose::Supervisors).lacking(true).unwrap();

        assert!(said.contains("(Operation not permitted"), "{said}");
        assert!(said.ends_with("it keeps: group, other groups"), "{said}");
        assert_eq!(got(Whose::Nobodys, Whose::Own).lacking(false), None);
    }
}
