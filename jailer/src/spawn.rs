//! Makes the machine's process: `clone3(2)` with the namespaces, and what the new process does until it executes its
//! program.
//!
//! The new process is a copy of one thread of its supervisor, which may have many: any lock that another thread held
//! at that moment is held for ever. So between the call and the program it makes system calls and nothing else: no
//! allocation, no formatting, no panic.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use crate::cell::Namespaces;
use crate::precedence::{self, NoIoFlusher};
use crate::report::{DESCRIPTOR, FAILED, PACKET_BYTES};

/// `CLONE_CLEAR_SIGHAND` (`include/uapi/linux/sched.h`): libc's is too narrow.
const CLEAR_SIGNAL_HANDLERS: u64 = 0x1_0000_0000;

/// `CLONE_INTO_CGROUP`.
const INTO_CGROUP: u64 = 0x2_0000_0000;

/// Where the program's descriptor is put: after standard input, output and error and the report's socket.
const PROGRAM: RawFd = DESCRIPTOR + 1;

/// Exit status of a process that could not execute its program; what went wrong is in its report.
const NOT_EXECUTED: libc::c_int = 127;

/// What the new process finds; all descriptors are above [`PROGRAM`].
#[derive(Debug)]
pub(crate) struct Inherited<'a> {
    pub(crate) control: BorrowedFd<'a>,
    pub(crate) null: BorrowedFd<'a>,
    pub(crate) stderr: BorrowedFd<'a>,
    pub(crate) report: BorrowedFd<'a>,
    /// The supervisor's end of the report's socket, of which the new process has a copy at first.
    pub(crate) supervisors_report: BorrowedFd<'a>,
    pub(crate) program: BorrowedFd<'a>,
    /// `argv[0]`.
    pub(crate) name: &'a CStr,
}

/// A process to be.
#[derive(Debug)]
pub(crate) struct Birth<'a> {
    pub(crate) inherited: Inherited<'a>,
    pub(crate) namespaces: Namespaces,
    /// The folder of the control group to be born in.
    pub(crate) cgroup: Option<BorrowedFd<'a>>,
    /// Whether it gets ids by a map that a privileged supervisor writes: it leaves its groups, where it may, and becomes 0 in
    /// there.
    pub(crate) takes_mapped_ids: bool,
}

/// A process that waits for its supervisor's byte on the report's socket.
#[derive(Debug)]
pub(crate) struct Born {
    pub(crate) pid: libc::pid_t,
    pub(crate) pidfd: OwnedFd,
    /// Whether it is in the control group already.
    pub(crate) is_in_cgroup: bool,
}

/// `struct clone_args` of `clone3(2)`, as of Linux 5.7.
#[repr(C)]
#[derive(Debug, Default)]
struct CloneArguments {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

/// Makes the process.
///
/// # Errors
/// The system's: `EPERM`, `ENOSPC` and `EINVAL` where it refuses a namespace.
pub(crate) fn spawn(birth: &Birth<'_>) -> io::Result<Born> {
    let _suspended = NoIoFlusher::suspend()?;
    let _blocked = Blocked::all()?;
    clone(birth)
}

/// All signals are blocked as long as this lives, so that no handler of the supervisor's runs in the new process.
struct Blocked(libc::sigset_t);

impl Blocked {
    #[expect(unsafe_code, reason = "no crate of ours has signal masks")]
    fn all() -> io::Result<Self> {
        // SAFETY: `sigset_t` is an array of integers, for which zeros are valid; both pointers are to values that
        // live here.
        unsafe {
            let mut all: libc::sigset_t = std::mem::zeroed();
            let mut before: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&raw mut all);
            match libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, &raw mut before) {
                0 => Ok(Self(before)),
                error => Err(io::Error::from_raw_os_error(error)),
            }
        }
    }
}

impl Drop for Blocked {
    #[expect(unsafe_code, reason = "no crate of ours has signal masks")]
    fn drop(&mut self) {
        // SAFETY: the pointer is to the mask that `all` was given by the system.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, std::ptr::null_mut());
        }
    }
}

#[expect(unsafe_code, reason = "no crate has a clone3 that is a fork")]
fn clone(birth: &Birth<'_>) -> io::Result<Born> {
    let namespaces = birth
        .namespaces
        .iter()
        .fold(0, |flags, kind| flags | kind.clone_flag());
    let pidfd_flag = u64::from(libc::CLONE_PIDFD.cast_unsigned());
    let exit_signal = u64::from(libc::SIGCHLD.cast_unsigned());
    let mut pidfd: libc::c_int = -1;
    let mut arguments = CloneArguments {
        flags: namespaces | pidfd_flag | CLEAR_SIGNAL_HANDLERS,
        pidfd: (&raw mut pidfd).addr() as u64,
        exit_signal,
        ..CloneArguments::default()
    };
    let mut is_in_cgroup = false;
    if let Some(cgroup) = birth.cgroup {
        arguments.flags |= INTO_CGROUP;
        arguments.cgroup = u64::from(cgroup.as_raw_fd().cast_unsigned());
        is_in_cgroup = true;
    }
    // SAFETY: without CLONE_VM this is a fork: the new process has a copy of all memory, and its thread goes on here on
    // a copy of this stack. There, `child` makes system calls alone (see the module), which takes no lock that
    // another thread may hold, and never returns. The kernel writes the descriptor to `pidfd`, which lives here.
    let clone3 = |arguments: &CloneArguments| unsafe {
        libc::syscall(
            libc::SYS_clone3,
            std::ptr::from_ref(arguments),
            size_of::<CloneArguments>(),
        )
    };
    let mut pid = clone3(&arguments);
    if pid < 0 && is_in_cgroup {
        // Older than 5.7, or the group may not be entered from outside: the supervisor moves the process then.
        is_in_cgroup = false;
        arguments.flags &= !INTO_CGROUP;
        arguments.cgroup = 0;
        pid = clone3(&arguments);
    }
    if pid < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::ENOSYS) {
        // Filters of containers answer so, since they cannot look into the structure.
        let flags = namespaces | pidfd_flag | exit_signal;
        // SAFETY: as above; `clone(2)` takes the place for the descriptor as the parent's thread id.
        pid = unsafe { libc::syscall(libc::SYS_clone, flags, 0, &raw mut pidfd, 0, 0) };
    }
    if pid == 0 {
        // SAFETY: this is the new process.
        unsafe { child(&birth.inherited, birth.takes_mapped_ids) }
    }
    let Ok(pid @ 1..) = libc::pid_t::try_from(pid) else {
        return Err(io::Error::last_os_error());
    };
    Ok(Born {
        pid,
        // SAFETY: the call succeeded, so that `pidfd` is a new descriptor, and nobody else's.
        pidfd: unsafe { OwnedFd::from_raw_fd(pidfd) },
        is_in_cgroup,
    })
}

/// What the new process does. Every step that fails is reported by its number in `report::STEPS`.
///
/// # Safety
/// To be called in a process that was just made by [`clone`], and by no other.
#[expect(unsafe_code, reason = "system calls and nothing else")]
unsafe fn child(inherited: &Inherited<'_>, takes_mapped_ids: bool) -> ! {
    use libc::{c_int, c_ulong, syscall};

    let report = inherited.report.as_raw_fd();
    // SAFETY: all pointers are to values that live in this function or in `inherited`, of the lengths given;
    // none of the calls changes memory that is Rust's but `byte`. Descriptors are closed and replaced in this process
    // alone, whose owners of descriptors never run again.
    unsafe {
        syscall(libc::SYS_close, inherited.supervisors_report.as_raw_fd());
        let follow = || {
            syscall(
                libc::SYS_prctl,
                libc::PR_SET_PDEATHSIG,
                libc::SIGKILL as c_ulong,
                0,
                0,
                0,
            )
        };
        check(follow() == 0, 0, report);
        let mut byte = 0_u8;
        let heard = syscall(libc::SYS_read, report, &raw mut byte, 1_usize);
        check(heard == 1, 1, report);
        if takes_mapped_ids {
            let none = std::ptr::null::<libc::gid_t>();
            // Refused where whoever made the supervisor's namespace, or the supervisor itself, had to forgo it: told by `enter`.
            syscall(libc::SYS_setgroups, 0_usize, none);
            check(syscall(libc::SYS_setresgid, 0, 0, 0) == 0, 2, report);
            check(syscall(libc::SYS_setresuid, 0, 0, 0) == 0, 2, report);
            // A change of ids takes the signal away (`prctl(2)`).
            check(follow() == 0, 0, report);
        }
        check(syscall(libc::SYS_setsid) >= 0, 3, report);
        check(precedence::drop_all(), 7, report);
        check(syscall(libc::SYS_chdir, c"/".as_ptr()) == 0, 4, report);
        let lay = |from: c_int, to: c_int, flags: c_int| {
            check(
                syscall(libc::SYS_dup3, from, to, flags)
                    == c_ulong::from(to.cast_unsigned()).cast_signed(),
                4,
                report,
            );
        };
        lay(inherited.control.as_raw_fd(), 0, 0);
        lay(inherited.null.as_raw_fd(), 1, 0);
        lay(inherited.stderr.as_raw_fd(), 2, 0);
        lay(report, DESCRIPTOR, 0);
        lay(inherited.program.as_raw_fd(), PROGRAM, libc::O_CLOEXEC);
        let others = PROGRAM + 1;
        let closed = syscall(libc::SYS_close_range, others, libc::c_uint::MAX, 0);
        check(closed == 0, 4, DESCRIPTOR);
        let no_signal = 0_u64;
        let unblocked = syscall(
            libc::SYS_rt_sigprocmask,
            libc::SIG_SETMASK,
            &raw const no_signal,
            std::ptr::null_mut::<u64>(),
            size_of::<u64>(),
        );
        check(unblocked == 0, 5, DESCRIPTOR);
        let arguments = [inherited.name.as_ptr(), std::ptr::null()];
        let environment = [std::ptr::null::<libc::c_char>()];
        syscall(
            libc::SYS_execveat,
            PROGRAM,
            c"".as_ptr(),
            arguments.as_ptr(),
            environment.as_ptr(),
            libc::AT_EMPTY_PATH,
        );
        check(false, 6, DESCRIPTOR);
        // Not reached: a failed check does not return.
        libc::_exit(NOT_EXECUTED)
    }
}

/// Reports a step that failed and ends this process.
///
/// # Safety
/// As [`child`].
#[expect(unsafe_code, reason = "system calls and nothing else")]
unsafe fn check(went_well: bool, step: u8, report: RawFd) {
    if went_well {
        return;
    }
    // SAFETY: the errno of this thread is read; the packet lives here and is as long as said.
    unsafe {
        let [a, b, c, d] = (*libc::__errno_location()).to_le_bytes();
        let mut packet = [0; PACKET_BYTES];
        let [tag, first, _, _, w, x, y, z, ..] = &mut packet;
        (*tag, *first) = (FAILED, step);
        (*w, *x, *y, *z) = (a, b, c, d);
        libc::syscall(libc::SYS_write, report, packet.as_ptr(), packet.len());
        libc::_exit(NOT_EXECUTED);
    }
}
