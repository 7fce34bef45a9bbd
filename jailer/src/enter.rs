//! What a machine's process does to itself before anything else.

use std::io;

use rustix::process::{
    DumpableBehavior, Resource, Rlimit, Signal, set_dumpable_behavior,
    set_parent_process_death_signal, setrlimit,
};

/// The first descriptor that is neither standard input, output nor error.
const FIRST_OTHER_DESCRIPTOR: libc::c_uint = 3;

/// Why the cell could not be closed.
#[derive(Debug, thiserror::Error)]
#[error("The cell of the machine's process could not be closed: {step} failed")]
pub struct EnterError {
    /// What was to be done.
    step: &'static str,
    /// Why it was not.
    source: io::Error,
}

/// Closes the cell around this process. It must be the first thing that the process does, with one thread and
/// no file opened yet, since every descriptor but the three standard ones is closed: an application that
/// embeds this library may have leaked some into its children.
///
/// A machine ends with its supervisor in two ways. The first, which holds whatever the supervisor does, is
/// the hang-up of the control socket, which the machine watches. The second is set here: the kernel kills
/// this process when the *thread* that started it ends (`PR_SET_PDEATHSIG`, `prctl(2)`), also while the
/// machine is not looking at its socket. That is right because each sandbox has a thread of its own that
/// starts the process and ends after it.
///
/// # Errors
/// See [`EnterError`]; the process must end then.
pub fn enter() -> Result<(), EnterError> {
    close_other_descriptors()?;
    step(
        "the death signal",
        set_parent_process_death_signal(Some(Signal::KILL)),
    )?;
    step("no new privileges", rustix::thread::set_no_new_privs(true))?;
    // No core dump of guest memory, no debugger of the same user, and `/proc/self` is root's.
    step(
        "not dumpable",
        set_dumpable_behavior(DumpableBehavior::NotDumpable),
    )?;
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    step("no core dump", setrlimit(Resource::Core, none))?;
    step("the name", rustix::thread::set_name(c"sandvmm-machine"))
}

fn step(step: &'static str, result: rustix::io::Result<()>) -> Result<(), EnterError> {
    result.map_err(|errno| EnterError {
        step,
        source: errno.into(),
    })
}

/// Closes all descriptors but the three standard ones, in one system call.
#[expect(unsafe_code, reason = "no crate has a safe close_range")]
fn close_other_descriptors() -> Result<(), EnterError> {
    // SAFETY: closing descriptors touches no memory. It can break the promise that an `OwnedFd` is open as
    // long as it lives; the caller states that none exists yet besides the three that are kept.
    let result = unsafe {
        libc::syscall(
            libc::SYS_close_range,
            FIRST_OTHER_DESCRIPTOR,
            libc::c_uint::MAX,
            0 as libc::c_uint,
        )
    };
    if result == 0 {
        return Ok(());
    }
    Err(EnterError {
        step: "closing what was inherited",
        source: io::Error::last_os_error(),
    })
}
