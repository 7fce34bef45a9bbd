//! Which of the host's limits may be met where it makes no process, thread or namespace: its error alone tells nobody what to raise.

use std::io;

use rustix::process::{Resource, getrlimit};

/// The same error; where it is one that a limit of processes, threads or namespaces has, with these limits by name, and what to do. To be
/// called for what `clone(2)` answered, directly or by a thread's start.
#[must_use]
pub fn name_limit(error: io::Error) -> io::Error {
    let advice = match error.raw_os_error() {
        Some(libc::EAGAIN) => of_processes(getrlimit(Resource::Nproc).current),
        // The first is Linux's since 4.9, the second an older one's.
        Some(libc::ENOSPC | libc::EUSERS) => OF_NAMESPACES.to_owned(),
        _ => return error,
    };
    io::Error::new(error.kind(), format!("{error}; {advice}"))
}

/// Whether the system says that there is no room for one more process, of whatever kind.
pub(crate) fn is_full(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EAGAIN)
}

/// What is said of namespaces (`namespaces(7)`).
const OF_NAMESPACES: &str = "the limit of a kind of namespaces is met: raise `user.max_user_namespaces` and the other `user.max_*_namespaces` \
     (sysctl), or end other machines";

/// What is said of processes and threads, which count alike: the reasons that `fork(2)` has for `EAGAIN`.
fn of_processes(most_of_user: Option<u64>) -> String {
    let users = most_of_user.map_or_else(String::new, |most| {
        format!("its user's (`ulimit -u`, RLIMIT_NPROC, is {most} here), ")
    });
    format!(
        "a limit of processes and threads is met: {users}that of a control group (`pids.max`, here or above), or the host's \
         (`kernel.pid_max`, `kernel.threads-max`): raise it, or end others"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_limit_has_refused_names_the_limit() {
        let said = |errno| name_limit(io::Error::from_raw_os_error(errno)).to_string();

        for limit in ["pids.max", "kernel.pid_max", "kernel.threads-max"] {
            assert!(said(libc::EAGAIN).contains(limit), "{}", said(libc::EAGAIN));
        }
        assert!(said(libc::ENOSPC).contains("user.max_user_namespaces"));
        assert!(of_processes(Some(7)).contains("`ulimit -u`, RLIMIT_NPROC, is 7 here"));
        assert!(!of_processes(None).contains("ulimit"));
    }

    #[test]
    fn other_errors_stay_as_they_are() {
        let error = name_limit(io::Error::from_raw_os_error(libc::EPERM));

        assert_eq!(error.raw_os_error(), Some(libc::EPERM));
    }
}
