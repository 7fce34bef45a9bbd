//! What a machine's process is to the host's schedulers and its OOM killer.

use std::fs;
use std::process::Command;

use crate::skip;
use crate::supervisor::{FAVOURED, GIVING_WAY, end, may_give_ids, started_as};

/// The personality of a process that has not chosen any, as its file has it.
const USUAL_PERSONALITY: &str = "00000000";

/// The slack of one that has not chosen any, and which of a process's flags says that it is an I/O flusher (`PF_MEMALLOC_NOIO`,
/// `include/linux/sched.h`).
const USUAL_TIMER_SLACK_NS: u64 = 50_000;
const MEMALLOC_NOIO: i64 = 0x8_0000;

/// More slack than usual.
const MUCH_TIMER_SLACK_NS: u64 = 1_000_000;

/// `PR_SET_IO_FLUSHER` (`include/uapi/linux/prctl.h`).
const SET_IO_FLUSHER: libc::c_int = 57;

/// `PR_SET_MEMORY_MERGE` (the same file), and the line of `/proc/PID/ksm_stat` that tells it (Linux 6.14).
const SET_MEMORY_MERGE: libc::c_int = 67;
const MERGES: &str = "ksm_merge_any: yes";

/// What a process is to the host's schedulers and its OOM killer.
#[derive(Debug, PartialEq, Eq)]
struct Standing {
    nice: i64,
    real_time_priority: i64,
    policy: i64,
    /// The class of its priority for disks.
    io_class: i64,
    oom_score_adj: i64,
    personality: String,
    /// `None` where it may not be asked for.
    timer_slack_ns: Option<u64>,
    is_io_flusher: bool,
    /// Whether its pages may become one with those of others.
    is_merged: bool,
}

impl Standing {
    fn of(pid: u32) -> Self {
        let read = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap();
        let stat = read("stat");
        let (_, fields) = stat.rsplit_once(") ").unwrap();
        // Counted as in proc_pid_stat(5); the name, of which this is the rest, is the second.
        let field = |number: usize| fields.split(' ').nth(number - 3).unwrap().parse().unwrap();
        Self {
            nice: field(19),
            real_time_priority: field(40),
            policy: field(41),
            io_class: io_priority(pid) >> IO_CLASS_SHIFT,
            oom_score_adj: read("oom_score_adj").trim().parse().unwrap(),
            timer_slack_ns: fs::read_to_string(format!("/proc/{pid}/timerslack_ns"))
                .ok()
                .map(|text| text.trim().parse().unwrap()),
            is_io_flusher: field(9) & MEMALLOC_NOIO != 0,
            is_merged: fs::read_to_string(format!("/proc/{pid}/ksm_stat"))
                .is_ok_and(|text| text.contains(MERGES)),
            // Nobody may ask where `kernel.yama.ptrace_scope` is 3.
            personality: fs::read_to_string(format!("/proc/{pid}/personality")).map_or_else(
                |_| USUAL_PERSONALITY.to_owned(),
                |text| text.trim().to_owned(),
            ),
        }
    }
}

#[expect(unsafe_code, reason = "the C library has no call for it")]
fn io_priority(pid: u32) -> i64 {
    // SAFETY: the call takes numbers alone.
    unsafe { libc::syscall(libc::SYS_ioprio_get, 1, pid) }
}

/// The classes of priorities for disks, and at which bit of a priority its class begins.
const IO_NONE: i64 = 0;
const IO_REAL_TIME: i64 = 1;
const IO_IDLE: i64 = 3;
const IO_CLASS_SHIFT: u32 = 13;

#[expect(unsafe_code, reason = "the C library has no call for it")]
fn set_io_class(class: i64) {
    let priority = class << IO_CLASS_SHIFT;
    // SAFETY: the call takes numbers alone.
    let set = unsafe { libc::syscall(libc::SYS_ioprio_set, 1, 0, priority) };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
}

#[expect(unsafe_code, reason = "no crate of ours has priorities")]
pub(crate) fn favour_this_process() {
    if fs::write("/proc/self/oom_score_adj", "-500").is_err() {
        skip(
            "a_favoured_supervisor_favours_no_machine, in part",
            "root may not spare a process from the OOM killer here",
        );
    }
    set_io_class(IO_REAL_TIME);
    let priority = libc::sched_param { sched_priority: 7 };
    // SAFETY: numbers, and a pointer to a structure that lives here.
    unsafe {
        assert_eq!(libc::setpriority(libc::PRIO_PROCESS, 0, -5), 0);
        assert_eq!(libc::prctl(libc::PR_SET_TIMERSLACK, 1, 0, 0, 0), 0);
        if libc::prctl(SET_IO_FLUSHER, 1, 0, 0, 0) != 0 {
            skip(
                "a_favoured_supervisor_favours_no_machine, in part",
                "root may make no process an I/O flusher here",
            );
        }
        if libc::prctl(SET_MEMORY_MERGE, 1, 0, 0, 0) != 0 {
            // Linux before 6.4: there is nothing to hand down, and so no part to skip.
            let error = std::io::Error::last_os_error();
            assert_eq!(error.raw_os_error(), Some(libc::EINVAL), "{error}");
        }
        libc::personality(libc::ADDR_NO_RANDOMIZE.cast_unsigned().into());
        if libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const priority) != 0 {
            // The group of cgroup v1 that the host has it in has no share of real-time.
            skip(
                "a_favoured_supervisor_favours_no_machine, in part",
                "the host lets root run nothing as real-time",
            );
        }
    }
}

#[expect(unsafe_code, reason = "no crate of ours has priorities")]
pub(crate) fn have_this_process_give_way() {
    fs::write("/proc/self/oom_score_adj", "300").unwrap();
    set_io_class(IO_IDLE);
    let priority = libc::sched_param { sched_priority: 0 };
    // SAFETY: numbers, and a pointer to a structure that lives here.
    unsafe {
        assert_eq!(libc::setpriority(libc::PRIO_PROCESS, 0, 10), 0);
        assert_eq!(
            libc::prctl(libc::PR_SET_TIMERSLACK, MUCH_TIMER_SLACK_NS, 0, 0, 0),
            0
        );
        assert_eq!(
            libc::sched_setscheduler(0, libc::SCHED_BATCH, &raw const priority),
            0
        );
    }
}

pub(crate) fn a_favoured_supervisor_favours_no_machine() {
    if !may_give_ids() {
        skip(
            "a_favoured_supervisor_favours_no_machine",
            "it needs root to favour a process",
        );
        return;
    }

    let (supervisor, words) = started_as(&mut Command::new("/proc/self/exe"), FAVOURED);

    let favoured = Standing::of(supervisor.id());
    assert_eq!((favoured.nice, favoured.io_class), (-5, IO_REAL_TIME));
    assert_eq!(
        Standing::of(words[0].parse().unwrap()),
        Standing {
            nice: 0,
            real_time_priority: 0,
            policy: libc::SCHED_OTHER.into(),
            io_class: IO_NONE,
            oom_score_adj: 0,
            personality: USUAL_PERSONALITY.to_owned(),
            timer_slack_ns: Some(USUAL_TIMER_SLACK_NS),
            is_io_flusher: false,
            is_merged: false,
        }
    );
    end(supervisor);
}

pub(crate) fn a_supervisor_that_gives_way_has_machines_that_do() {
    let (supervisor, words) = started_as(&mut Command::new("/proc/self/exe"), GIVING_WAY);

    let its = Standing::of(words[0].parse().unwrap());
    assert_eq!(
        its,
        Standing {
            nice: 10,
            real_time_priority: 0,
            policy: libc::SCHED_BATCH.into(),
            io_class: IO_IDLE,
            oom_score_adj: 300,
            personality: USUAL_PERSONALITY.to_owned(),
            timer_slack_ns: its.timer_slack_ns.map(|_| MUCH_TIMER_SLACK_NS),
            is_io_flusher: false,
            is_merged: false,
        }
    );
    end(supervisor);
}
