//! Other processes, and more of its own.

use super::call::{Call, at, fork_bomb, into};
use super::{Attempt, Target};

const PID_NAMESPACE: &str = "PID namespace";
const NO_CAPABILITY: &str = "no capability";

/// Bytes of the shared segment.
const PAGE_BYTES: i64 = 4096;

/// What is looked for in the supervisor's memory.
static SECRET: [u8; 16] = *b"sandvmm's secret";

/// More processes than a machine has tasks.
const MANY: u32 = 64;

pub(super) const ATTEMPTS: &[Attempt] = &[
    Attempt::new("trace its supervisor", trace)
        .namespaces(PID_NAMESPACE)
        .landlock(1)
        .always(NO_CAPABILITY),
    Attempt::new("read its supervisor's memory", read_memory)
        .namespaces(PID_NAMESPACE)
        .landlock(1)
        .always(NO_CAPABILITY),
    Attempt::new("take a descriptor of its supervisor's", take_descriptor)
        .namespaces(PID_NAMESPACE)
        .landlock(1)
        .always(NO_CAPABILITY),
    Attempt::new("signal its supervisor", signal)
        .namespaces(PID_NAMESPACE)
        .landlock(6),
    // What Landlock forbids of it is not said: the call passes over whom it may not signal.
    Attempt::new("signal everybody", signal_all).namespaces(PID_NAMESPACE),
    Attempt::new("get hold of its supervisor's process", hold).namespaces(PID_NAMESPACE),
    Attempt::new("look at its supervisor's limits", look).namespaces(PID_NAMESPACE),
    Attempt::new("attach to a shared segment of the host", attach).namespaces("IPC namespace"),
    Attempt::new("read a key of its supervisor's", read_key).always("a keyring of its own"),
    Attempt::new("fork without end", fork).namespaces("limit of tasks, by its own ids"),
];

fn trace(target: &Target) -> i64 {
    Call::new(libc::SYS_ptrace)
        .with(&[libc::PTRACE_SEIZE.into(), target.pid.into(), 0, 0])
        .make()
}

fn read_memory(target: &Target) -> i64 {
    let mut bytes = [0_u8; 16];
    let here = libc::iovec {
        iov_base: (&raw mut bytes).cast(),
        iov_len: 16,
    };
    // The program's own addresses are the supervisor's too where it is not moved about; any mapped one would do.
    let there = libc::iovec {
        iov_base: (&raw const SECRET).cast_mut().cast(),
        iov_len: 16,
    };
    let result = Call::new(libc::SYS_process_vm_readv)
        .with(&[target.pid.into(), at(&here), 1, at(&there), 1])
        .make();
    // It was let in, and found nothing there.
    if result == -i64::from(libc::EFAULT) {
        0
    } else {
        result
    }
}

fn open_process(target: &Target) -> i64 {
    Call::new(libc::SYS_pidfd_open)
        .with(&[target.pid.into(), 0])
        .make()
}

fn take_descriptor(target: &Target) -> i64 {
    let process = open_process(target);
    if process < 0 {
        return process;
    }
    Call::new(libc::SYS_pidfd_getfd)
        .with(&[process, 0, 0])
        .make()
}

/// Signal 0 asks whether it may, and does nothing.
fn signal(target: &Target) -> i64 {
    Call::new(libc::SYS_kill)
        .with(&[target.pid.into(), 0])
        .make()
}

fn signal_all(_: &Target) -> i64 {
    Call::new(libc::SYS_kill).with(&[-1, 0]).make()
}

fn hold(target: &Target) -> i64 {
    open_process(target)
}

fn look(target: &Target) -> i64 {
    let mut limit = [0_u64; 2];
    Call::new(libc::SYS_prlimit64)
        .with(&[
            target.pid.into(),
            libc::RLIMIT_NOFILE.into(),
            0,
            into(&mut limit),
        ])
        .make()
}

fn attach(target: &Target) -> i64 {
    let address = Call::new(libc::SYS_shmat)
        .with(&[target.segment.into(), 0, libc::SHM_RDONLY.into()])
        .make();
    if address >= 0 {
        Call::new(libc::SYS_shmdt).with(&[address]).make();
    }
    address
}

fn read_key(target: &Target) -> i64 {
    let mut bytes = [0_u8; 16];
    Call::new(libc::SYS_keyctl)
        .with(&[
            libc::KEYCTL_READ.into(),
            target.key.into(),
            into(&mut bytes),
            16,
        ])
        .make()
}

fn fork(target: &Target) -> i64 {
    if target.is_direct {
        return Call::new(libc::SYS_fork).make();
    }
    fork_bomb(MANY)
}

/// Puts a key into the supervisor's session keyring; 0 where the kernel has none.
pub(crate) fn make_key() -> i32 {
    let key = Call::new(libc::SYS_add_key)
        .with(&[
            at(c"user"),
            at(c"sandvmm-attack"),
            at(b"secret"),
            6,
            libc::KEY_SPEC_SESSION_KEYRING.into(),
        ])
        .make();
    i32::try_from(key).unwrap_or(0).max(0)
}

/// Makes a shared segment that its user alone may attach to.
pub(crate) fn make_segment() -> i32 {
    let segment = Call::new(libc::SYS_shmget)
        .with(&[libc::IPC_PRIVATE.into(), PAGE_BYTES, 0o600])
        .make();
    i32::try_from(segment).unwrap_or(-1)
}

/// Removes it.
pub(crate) fn remove_segment(segment: i32) {
    Call::new(libc::SYS_shmctl)
        .with(&[segment.into(), libc::IPC_RMID.into()])
        .make();
}
