//! Which of the host's limits may be met where it makes no process, thread, namespace or descriptor: its error alone tells nobody what to
//! raise.

use std::fs;
use std::io;

use rustix::process::{Resource, getrlimit};

use crate::cell::{Namespace, Namespaces};

/// The same error; where it is one that a limit of processes, threads, namespaces or descriptors has, with these limits by name, and what to
/// do. To be called for what `clone(2)` answered, directly or by a thread's start, and where descriptors are made.
#[must_use]
pub fn name_limit(error: io::Error) -> io::Error {
    let advice = match error.raw_os_error() {
        Some(libc::EAGAIN) if makes_no_others() => OF_DEADLINE.to_owned(),
        Some(libc::EAGAIN) => of_processes(Limits::now()),
        // The first is Linux's since 4.9, the second an older one's.
        Some(libc::ENOSPC | libc::EUSERS) => OF_NAMESPACES.to_owned(),
        Some(libc::EMFILE) => of_descriptors(getrlimit(Resource::Nofile).current),
        Some(libc::ENFILE) => OF_FILES.to_owned(),
        _ => return error,
    };
    io::Error::new(error.kind(), format!("{error}; {advice}"))
}

/// Whether the host has no room for one more process, which is no word on namespaces.
pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::ENOMEM))
}

/// Whether so many namespaces live that there may be no more of one of these kinds; not where there may be none of it at all, nor where the
/// limit that is met is not this user namespace's: one that contains it may allow none, for ever.
pub(crate) fn is_full_of(kinds: Namespaces, error: &io::Error) -> bool {
    let is_limit = matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EUSERS));
    let limits: Vec<u32> = kinds.iter().filter_map(limit_of).collect();
    is_limit && !limits.contains(&0) && limits.iter().any(|limit| *limit < UNLIMITED)
}

/// Whether the host lets nobody make a namespace of this kind.
pub(crate) fn forbids(kind: Namespace) -> bool {
    limit_of(kind) == Some(0)
}

/// What a new user namespace has as its limits (`INT_MAX`, `create_user_ns`): those of the namespaces that contain it hold.
const UNLIMITED: u32 = i32::MAX.unsigned_abs();

/// How many namespaces of this kind each user may have, in this user namespace (`namespaces(7)`); `None` where it can't be read.
fn limit_of(kind: Namespace) -> Option<u32> {
    let limit = fs::read_to_string(kind.limit_file()).ok()?;
    limit.trim().parse().ok()
}

/// That a machine's process could not start its threads, with the limit of its user, which it may not raise; `None` where it may have as many
/// tasks as it `needs`.
pub(crate) fn too_few_tasks(needs: u64) -> Option<io::Error> {
    let most = getrlimit(Resource::Nproc).maximum?;
    (most < needs).then(|| {
        io::Error::new(
            io::ErrorKind::WouldBlock,
            format!(
                "a machine needs {needs} processes and threads, and each user may have {most} at most (`ulimit -u`, RLIMIT_NPROC): raise it"
            ),
        )
    })
}

/// That a machine's process could not map its guest's memory, with the limit, which it may not raise; `None` where it may.
pub(crate) fn too_little_memory(memory_mib: u32) -> Option<io::Error> {
    // The first is handed down as it is; of the second the process sets what it may.
    let limits = [
        (
            getrlimit(Resource::Data).current,
            "`ulimit -d`, RLIMIT_DATA",
        ),
        (getrlimit(Resource::As).maximum, "`ulimit -v`, RLIMIT_AS"),
    ];
    limits.into_iter().find_map(|(most, what)| {
        let most = most.filter(|most| *most < u64::from(memory_mib) << 20)?;
        Some(io::Error::new(
            io::ErrorKind::OutOfMemory,
            format!(
                "a machine needs its {memory_mib} MiB and some more, and each process may have {} KiB at most ({what}): raise it",
                most >> 10
            ),
        ))
    })
}

/// What is said of namespaces (`namespaces(7)`).
const OF_NAMESPACES: &str = "the limit of a kind of namespaces is met: raise `user.max_user_namespaces` and the other `user.max_*_namespaces` \
     (sysctl), or end other machines";

/// What is said of a thread of real-time (`sched(7)`, `SCHED_DEADLINE`).
const OF_DEADLINE: &str = "a thread with the policy SCHED_DEADLINE makes no others: give it SCHED_FLAG_RESET_ON_FORK, or another policy";

/// What is said of all open files.
const OF_FILES: &str =
    "the host's limit of open files is met: raise `fs.file-max` (sysctl), or end others";

/// Whether the calling thread is of the policy that no other may be made with.
#[expect(unsafe_code, reason = "no crate of ours has policies")]
fn makes_no_others() -> bool {
    // SAFETY: the call takes a number alone. With `SCHED_RESET_ON_FORK` it answers another one.
    unsafe { libc::sched_getscheduler(0) == libc::SCHED_DEADLINE }
}

/// The calling process's limits that keep it from making others, or from the memory for a thread's stack, which the C library tells as the
/// same error. `None` is no limit.
#[derive(Debug, Clone, Copy)]
struct Limits {
    processes: Option<u64>,
    data_bytes: Option<u64>,
    address_space_bytes: Option<u64>,
}

impl Limits {
    fn now() -> Self {
        Self {
            processes: getrlimit(Resource::Nproc).current,
            data_bytes: getrlimit(Resource::Data).current,
            address_space_bytes: getrlimit(Resource::As).current,
        }
    }
}

/// What is said of processes and threads, which count alike: the reasons that `fork(2)` and `pthread_create(3)` have for `EAGAIN`.
fn of_processes(limits: Limits) -> String {
    let users = limits.processes.map_or_else(String::new, |most| {
        format!("its user's (`ulimit -u`, RLIMIT_NPROC, is {most} here), ")
    });
    let memory: String = [
        (limits.data_bytes, "data (`ulimit -d`, RLIMIT_DATA"),
        (
            limits.address_space_bytes,
            "address space (`ulimit -v`, RLIMIT_AS",
        ),
    ]
    .into_iter()
    .filter_map(|(most, what)| {
        Some(format!(
            ", or its own of {what}, is {} KiB here)",
            most? >> 10
        ))
    })
    .collect();
    format!(
        "a limit of processes and threads is met: {users}that of a control group (`pids.max`, here or above), or the host's \
         (`kernel.pid_max`, `kernel.threads-max`){memory}: raise it, or end others"
    )
}

fn of_descriptors(most: Option<u64>) -> String {
    let most = most.map_or_else(String::new, |most| format!(", is {most} here"));
    format!(
        "the process's limit of descriptors is met (`ulimit -n`, RLIMIT_NOFILE{most}): raise it"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: Limits = Limits {
        processes: None,
        data_bytes: None,
        address_space_bytes: None,
    };

    #[test]
    fn what_a_limit_has_refused_names_the_limit() {
        let said = |errno| name_limit(io::Error::from_raw_os_error(errno)).to_string();

        for limit in ["pids.max", "kernel.pid_max", "kernel.threads-max"] {
            assert!(said(libc::EAGAIN).contains(limit), "{}", said(libc::EAGAIN));
        }
        assert!(said(libc::ENOSPC).contains("user.max_user_namespaces"));
        assert!(said(libc::EMFILE).contains("`ulimit -n`, RLIMIT_NOFILE, is "));
        assert!(said(libc::ENFILE).contains("fs.file-max"));
    }

    #[test]
    fn limits_that_there_are_not_are_not_named() {
        let all = of_processes(Limits {
            processes: Some(7),
            data_bytes: Some(1 << 20),
            address_space_bytes: Some(1 << 30),
        });
        let none = of_processes(NONE);

        assert!(
            all.contains("`ulimit -u`, RLIMIT_NPROC, is 7 here"),
            "{all}"
        );
        assert!(
            all.contains("`ulimit -d`, RLIMIT_DATA, is 1024 KiB here"),
            "{all}"
        );
        assert!(
            all.contains("`ulimit -v`, RLIMIT_AS, is 1048576 KiB here"),
            "{all}"
        );
        assert!(!none.contains("ulimit"), "{none}");
    }

    #[test]
    fn as_few_tasks_as_a_limit_lets_be_are_no_error() {
        assert!(too_few_tasks(0).is_none());
        // More than Linux lets any user have (`FUTEX_TID_MASK`).
        let refused = too_few_tasks(1 << 40);
        assert_eq!(
            refused.is_some(),
            getrlimit(Resource::Nproc).maximum.is_some()
        );
    }

    #[test]
    fn other_errors_stay_as_they_are() {
        let error = name_limit(io::Error::from_raw_os_error(libc::EPERM));

        assert_eq!(error.raw_os_error(), Some(libc::EPERM));
    }
}
