//! Supervisors that have no machine for a limit of theirs: they are told which.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use rustix::process::{Resource, Rlimit, setrlimit};
use sandvmm_jailer::start;

use crate::skip;
use crate::supervisor::{
    ALONE, ALONE_ID, DEADLINE, FEW, NARROW, may_give_ids, program_for_others, started_as,
};
use crate::walls::options;

pub(crate) fn limit(resource: Resource, current: u64, maximum: u64) {
    let most = Rlimit {
        current: Some(current),
        maximum: Some(maximum),
    };
    setrlimit(resource, most).unwrap();
}

/// `struct sched_attr` of `sched_setattr(2)`, and its policy.
#[expect(unsafe_code, reason = "the C library has no call for it")]
pub(crate) fn have_a_deadline() -> std::io::Result<()> {
    let size = 48_u32;
    let policy = libc::SCHED_DEADLINE.cast_unsigned();
    let (runtime_ns, period_ns) = (1_000_000_u64, 100_000_000_u64);
    let words: [u64; 6] = [
        u64::from(size) | u64::from(policy) << 32,
        0,
        0,
        runtime_ns,
        period_ns,
        period_ns,
    ];
    // SAFETY: the structure lives here, and is as long as it says.
    let set = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, words.as_ptr(), 0) };
    if set == 0 {
        return Ok(());
    }
    Err(std::io::Error::last_os_error())
}

pub(crate) fn say_why_it_is_alone(prepare: fn()) {
    prepare();
    let (input, _kept) = rustix::pipe::pipe().unwrap();

    let error = start(Path::new("/proc/self/exe"), input, options(&[])).unwrap_err();

    println!("{error}: {}", std::error::Error::source(&error).unwrap());
}

pub(crate) fn a_limit_that_is_met_is_named() {
    if !may_give_ids() {
        skip(
            "a_limit_that_is_met_is_named",
            "this user may have other processes than this test's",
        );
        return;
    }
    let (_folder, program) = program_for_others();
    let mut command = Command::new(&program);
    command.uid(ALONE_ID).gid(ALONE_ID);

    let (mut supervisor, words) = started_as(&mut command, ALONE);

    assert!(supervisor.wait().unwrap().success());
    let said = words.join(" ");
    for part in [
        "made no process",
        "`ulimit -u`, RLIMIT_NPROC, is 1 here",
        "pids.max",
    ] {
        assert!(said.contains(part), "{said}");
    }
}

pub(crate) fn a_limit_that_a_machine_needs_more_than_is_named() {
    let (mut supervisor, words) = started_as(&mut Command::new("/proc/self/exe"), FEW);

    assert!(supervisor.wait().unwrap().success());
    let said = words.join(" ");
    for part in [
        "needs 4 processes and threads",
        "1 at most (`ulimit -u`, RLIMIT_NPROC)",
    ] {
        assert!(said.contains(part), "{said}");
    }

    let (mut supervisor, words) = started_as(&mut Command::new("/proc/self/exe"), NARROW);

    assert!(supervisor.wait().unwrap().success());
    let said = words.join(" ");
    for part in [
        "needs its 64 MiB",
        "32768 KiB at most (`ulimit -d`, RLIMIT_DATA)",
    ] {
        assert!(said.contains(part), "{said}");
    }
}

pub(crate) fn a_supervisor_of_real_time_is_told_why_it_has_no_machine() {
    let (mut supervisor, words) = started_as(&mut Command::new("/proc/self/exe"), DEADLINE);

    assert!(supervisor.wait().unwrap().success());
    let said = words.join(" ");
    if said.starts_with("unset") {
        skip(
            "a_supervisor_of_real_time_is_told_why_it_has_no_machine",
            &said,
        );
        return;
    }
    assert!(said.contains("SCHED_DEADLINE makes no others"), "{said}");
    assert!(!said.contains("pids.max"), "{said}");
}
