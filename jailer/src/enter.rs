//! What a machine's process does to itself before anything else.

use std::io;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};

use rustix::process::{
    DumpableBehavior, Signal, set_dumpable_behavior, set_parent_process_death_signal,
};

use crate::cell::{Namespace, Part};
use crate::ids::Whose;
use crate::report::{self, DESCRIPTOR, Entered};
use crate::{heap, landlock, last_words, privileges, rlimits, root};

/// First Linux that counts a user's processes by user namespace (`inc_rlimit_ucounts`, `kernel/ucount.c`).
const COUNTS_BY_NAMESPACE: (u32, u32) = (5, 14);

/// Why the cell could not be closed.
#[derive(Debug, thiserror::Error)]
#[error("The cell of the machine's process could not be closed: {step} failed")]
pub struct EnterError {
    /// What was to be done.
    step: &'static str,
    /// Why it was not.
    source: Box<dyn std::error::Error + Send + Sync>,
}

/// A process that is in its cell. What is left to close, each thread closes for itself: [`crate::Inside::close`].
#[derive(Debug, Clone, Copy)]
pub struct Inside {
    pub(crate) is_filtered: bool,
}

/// Closes the cell around this process, which [`fn@crate::start`] has started. It must be the first thing that the process does, with
/// one thread and no file opened yet.
///
/// Afterwards the process has three descriptors: the control socket at 0, nothing at 1, its standard error at 2. It has no
/// file tree, no privileges, no rights of Landlock's, and its limits. What is left for later is the
/// filter of system calls, since a machine is made with more of them than it runs with.
///
/// A machine ends with its supervisor in two ways. The first, which holds whatever the supervisor does, is
/// the hang-up of the control socket, which the machine watches. The second is the kernel's: it kills
/// this process when the *thread* that started it ends (`PR_SET_PDEATHSIG`, `prctl(2)`), also while the
/// machine is not looking at its socket. That is right because each sandbox has a thread of its own that
/// starts the process and ends after it.
///
/// # Errors
/// See [`EnterError`]; the process must end then.
pub fn enter() -> Result<Inside, EnterError> {
    heap::keep_in_one_place().map_err(|source| failed("laying out the heap", source))?;
    let report = take_report()?;
    let settings = report::settings(report.as_fd())
        .map_err(|source| failed("hearing what the supervisor wants", source))?;
    step("the name", rustix::thread::set_name(c"sandvmm-machine"))?;
    last_words::install().map_err(|source| failed("handling signals", source))?;
    if settings.namespaces.contains(Namespace::User) {
        privileges::forbid_user_namespaces();
    }
    let keyring_errno = privileges::leave_keyring();
    let root_errno = if settings.namespaces.contains(Namespace::Mount) {
        match root::empty() {
            Ok(()) => 0,
            // A security module may take back in a user namespace what the namespace gave.
            Err(errno) => errno.raw_os_error(),
        }
    } else {
        -1
    };
    step("no new privileges", rustix::thread::set_no_new_privs(true))?;
    let dropped = step(
        "dropping privileges",
        privileges::drop_all(settings.take_ids),
    )?;
    // Known only now: the limit of processes is the machine's alone where its user is.
    let counts_alone = dropped.got.is_some_and(|got| got.user == Whose::Own)
        || settings.namespaces.contains(Namespace::User) && kernel_is(COUNTS_BY_NAMESPACE);
    step("limits", rlimits::set(settings.bounds, counts_alone))?;
    // A change of ids has taken it away.
    step(
        "the death signal",
        set_parent_process_death_signal(Some(Signal::KILL)),
    )?;
    // No core dump of guest memory, and `/proc/PID` is root's. It keeps the same user's debuggers away where that user does not own a user
    // namespace that this process is in: the owner may trace it all the same.
    step(
        "not dumpable",
        set_dumpable_behavior(DumpableBehavior::NotDumpable),
    )?;
    let landlock_abi = match landlock::landlock_abi() {
        Some(abi) if !settings.leave_out.contains(Part::Landlock) => {
            landlock::enclose().map_err(|source| failed("Landlock", source))?;
            abi
        }
        _ => 0,
    };
    let entered = Entered {
        root_errno,
        landlock_abi,
        got: dropped.got,
        has_groups: privileges::has_groups(),
        keeps_bounding_set: dropped.keeps_bounding_set,
        lacks_secure_bits: dropped.lacks_secure_bits,
        keyring_errno,
    };
    // A supervisor that does not listen is one that died, or does not need to know.
    let _ = report::entered(report.as_fd(), entered);
    Ok(Inside {
        is_filtered: !settings.leave_out.contains(Part::Seccomp),
    })
}

fn failed(
    step: &'static str,
    source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
) -> EnterError {
    EnterError {
        step,
        source: source.into(),
    }
}

fn step<T>(step: &'static str, result: rustix::io::Result<T>) -> Result<T, EnterError> {
    result.map_err(|errno| failed(step, io::Error::from(errno)))
}

/// The socket that the supervisor listens on.
#[expect(unsafe_code, reason = "a descriptor is known by its number alone")]
fn take_report() -> Result<OwnedFd, EnterError> {
    // SAFETY: the descriptor is only looked at.
    let flags = unsafe { libc::fcntl(DESCRIPTOR, libc::F_GETFD) };
    if flags < 0 {
        return Err(failed(
            "finding the supervisor's socket",
            io::Error::last_os_error(),
        ));
    }
    // SAFETY: it is open, and `start` put it there for this function, which is called once, before this process has
    // opened anything.
    Ok(unsafe { OwnedFd::from_raw_fd(DESCRIPTOR) })
}

/// Whether the kernel is this version or a newer one.
fn kernel_is(version: (u32, u32)) -> bool {
    let uname = rustix::system::uname();
    let release = uname.release().to_string_lossy();
    let mut numbers = release
        .split(|c: char| !c.is_ascii_digit())
        .map(|number| number.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= version
}
