//! Privileges, and what of the kernel only the privileged may reach.

use super::call::{Call, at, in_child};
use super::{Attempt, Target};

const NO_CAPABILITY: &str = "no capability";

pub(super) const ATTEMPTS: &[Attempt] = &[
    Attempt::new("mount", mount).always(NO_CAPABILITY),
    Attempt::new("make a file system", fsopen).always(NO_CAPABILITY),
    Attempt::new("make a network namespace", unshare_network).always(NO_CAPABILITY),
    Attempt::new("make a user namespace", unshare_users).namespaces("limit of its user namespace"),
    Attempt::new("become another user", become_user).always(NO_CAPABILITY),
    Attempt::new("join another group", join_group).always(NO_CAPABILITY),
    Attempt::new("raise its capabilities", raise).always("no capability in any set"),
    Attempt::new("raise a limit", raise_limit).always(NO_CAPABILITY),
    Attempt::new("gain privileges again by executing", undo_no_new_privs)
        .always("no_new_privs can't be undone"),
    Attempt::new("switch the filters off", undo_seccomp).always("filters can't be undone"),
    Attempt::new("outlive its supervisor", undo_death_signal)
        .gain("a life of its own when its supervisor is killed, in the same cell"),
    Attempt::new("run at real-time priority", real_time).always("limit of priorities"),
    Attempt::new("load a kernel program", load_bpf).always(NO_CAPABILITY),
    Attempt::new("load a kernel module", load_module).always(NO_CAPABILITY),
    Attempt::new("watch the whole host's events", perf).always(NO_CAPABILITY),
    Attempt::new("set the clock", set_clock).always(NO_CAPABILITY),
    Attempt::new("name the host", name_host).always(NO_CAPABILITY),
    Attempt::new("restart the host", restart).always(NO_CAPABILITY),
    Attempt::new("swap to a file", swap).always(NO_CAPABILITY),
    Attempt::new("reach the ports of the processor", ports).always(NO_CAPABILITY),
    Attempt::new("make a ring of asynchronous calls", io_uring)
        .gain("other ways to the same files, and much of the kernel to try for faults"),
    Attempt::new("handle its own page faults", userfaultfd)
        .gain("time for races in the kernel, where the host lets every user"),
];

fn mount(_: &Target) -> i64 {
    Call::new(libc::SYS_mount)
        .with(&[at(c"none"), at(c"/"), at(c"tmpfs"), 0, 0])
        .make()
}

fn fsopen(_: &Target) -> i64 {
    Call::new(libc::SYS_fsopen).with(&[at(c"tmpfs"), 0]).make()
}

fn unshare_network(_: &Target) -> i64 {
    Call::new(libc::SYS_unshare)
        .with(&[libc::CLONE_NEWNET.into()])
        .make()
}

/// A process with more than one thread can't: one that is forked could.
fn unshare_users(target: &Target) -> i64 {
    let call = Call::new(libc::SYS_unshare).with(&[libc::CLONE_NEWUSER.into()]);
    if target.is_direct {
        call.make()
    } else {
        in_child(|| call.make())
    }
}

fn become_user(_: &Target) -> i64 {
    Call::new(libc::SYS_setresuid).with(&[1, 1, 1]).make()
}

fn join_group(_: &Target) -> i64 {
    Call::new(libc::SYS_setgroups).with(&[1, at(&1_u32)]).make()
}

fn raise(_: &Target) -> i64 {
    // `_LINUX_CAPABILITY_VERSION_3`, this thread; effective, permitted, inheritable, twice.
    let header: [u32; 2] = [0x2008_0522, 0];
    let sets: [u32; 6] = [1 << 21, 1 << 21, 0, 0, 0, 0];
    Call::new(libc::SYS_capset)
        .with(&[at(&header), at(&sets)])
        .make()
}

fn raise_limit(_: &Target) -> i64 {
    let limit: [u64; 2] = [1 << 20, 1 << 20];
    Call::new(libc::SYS_setrlimit)
        .with(&[libc::RLIMIT_NOFILE.into(), at(&limit)])
        .make()
}

fn prctl(option: i32, value: i64) -> i64 {
    Call::new(libc::SYS_prctl)
        .with(&[option.into(), value, 0, 0, 0])
        .make()
}

fn undo_no_new_privs(_: &Target) -> i64 {
    prctl(libc::PR_SET_NO_NEW_PRIVS, 0)
}

fn undo_seccomp(_: &Target) -> i64 {
    prctl(libc::PR_SET_SECCOMP, 0)
}

fn undo_death_signal(_: &Target) -> i64 {
    prctl(libc::PR_SET_PDEATHSIG, 0)
}

fn real_time(_: &Target) -> i64 {
    Call::new(libc::SYS_sched_setscheduler)
        .with(&[0, libc::SCHED_FIFO.into(), at(&50_i32)])
        .make()
}

fn load_bpf(_: &Target) -> i64 {
    // `BPF_PROG_LOAD` of a probe of the kernel (`BPF_PROG_TYPE_KPROBE`) that returns 0: two instructions.
    let instructions: [u64; 2] = [0xb7, 0x95];
    let mut attributes = [0_u64; 16];
    let [kind, place, license, ..] = &mut attributes;
    *kind = 2 | 2 << 32;
    *place = at(&instructions).cast_unsigned();
    *license = at(c"GPL").cast_unsigned();
    Call::new(libc::SYS_bpf)
        .with(&[5, at(&attributes), 128])
        .make()
}

fn load_module(_: &Target) -> i64 {
    Call::new(libc::SYS_init_module)
        .with(&[0, 0, at(c"")])
        .make()
}

fn perf(_: &Target) -> i64 {
    // `PERF_TYPE_SOFTWARE`, size, `PERF_COUNT_SW_CPU_CLOCK`: of every process, on the first processor.
    let mut attributes = [0_u32; 32];
    let [kind, bytes, ..] = &mut attributes;
    (*kind, *bytes) = (1, 128);
    Call::new(libc::SYS_perf_event_open)
        .with(&[at(&attributes), -1, 0, -1, 0])
        .make()
}

/// To no time at all: who may, changes nothing by it.
fn set_clock(_: &Target) -> i64 {
    Call::new(libc::SYS_settimeofday).make()
}

/// To the name that it has: the length is what no name has.
fn name_host(_: &Target) -> i64 {
    Call::new(libc::SYS_sethostname)
        .with(&[at(b"x"), 1000])
        .make()
}

/// Without the numbers that make it a restart.
fn restart(_: &Target) -> i64 {
    Call::new(libc::SYS_reboot).make()
}

fn swap(_: &Target) -> i64 {
    Call::new(libc::SYS_swapon)
        .with(&[at(c"/etc/passwd")])
        .make()
}

fn ports(_: &Target) -> i64 {
    Call::new(libc::SYS_iopl).with(&[3]).make()
}

fn io_uring(_: &Target) -> i64 {
    let parameters = [0_u32; 30];
    Call::new(libc::SYS_io_uring_setup)
        .with(&[1, at(&parameters)])
        .make()
}

fn userfaultfd(_: &Target) -> i64 {
    Call::new(libc::SYS_userfaultfd).make()
}
