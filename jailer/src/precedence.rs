//! What a machine's process must not have of its supervisor's standing with the host: precedence over other processes for the processor
//! and the disk, more exact timers, a charm against the OOM killer, addresses that are not random, and memory that is shared with whoever has the
//! same in his. All of it is handed down to children, and to the programs that they execute.
//!
//! What makes a process give way to others stays: an operator's `nice -n 10` is meant for the guest too.

use std::fs;
use std::io;

use libc::{c_int, c_long, syscall};

/// The scheduling policies that always come before the others (`sched(7)`).
const REAL_TIME: [c_int; 3] = [libc::SCHED_FIFO, libc::SCHED_RR, libc::SCHED_DEADLINE];

/// What `getpriority(2)`, the system call, answers for nice 0; more for less than 0.
const NICE_0: c_long = 20;

/// `IOPRIO_WHO_PROCESS`, and the parts of a priority (`include/uapi/linux/ioprio.h`): the class from this bit on, and a level below.
const IO_PROCESS: c_int = 1;
const IO_CLASS_SHIFT: u32 = 13;
const IO_LEVELS: c_long = 7;

/// The classes: real-time, and the usual one, whose level is 4 where nobody has chosen any.
const IO_REAL_TIME: c_long = 1;
const IO_BEST_EFFORT: c_long = 2;
const IO_USUAL_LEVEL: c_long = 4;

/// No priority of its own: it follows the processor's.
const IO_NONE: c_int = 0;

/// `PER_LINUX` without a flag (`personality(2)`).
const USUAL_PERSONALITY: c_long = 0;

/// How late a timer may be, in ns, of a process that has not chosen any slack (`PR_SET_TIMERSLACK(2const)`).
const USUAL_TIMER_SLACK_NS: c_long = 50_000;

/// `PR_SET_IO_FLUSHER` and `PR_GET_IO_FLUSHER` (`include/uapi/linux/prctl.h`).
const SET_IO_FLUSHER: c_int = 57;
const GET_IO_FLUSHER: c_int = 58;

/// `PR_SET_MEMORY_MERGE` and `PR_GET_MEMORY_MERGE` (the same file; Linux 6.4): pages like those of another process become one, and a write to one
/// takes longer, which tells its writer what others have in their memory.
const SET_MEMORY_MERGE: c_int = 67;
const GET_MEMORY_MERGE: c_int = 68;

/// While this lives, processes that the calling thread makes are none that may take the host's last memory, and write as fast as disks
/// take it, as one that serves a file system may (`PR_SET_IO_FLUSHER(2const)`).
///
/// It is the thread's own standing that they inherit, and theirs to give up only with a privilege that they do not have (`CAP_SYS_RESOURCE`
/// of the host). A supervisor that has lost it itself since can't even be told whether it has that standing; its machines keep it then.
#[derive(Debug)]
pub(crate) struct NoIoFlusher {
    was_one: bool,
}

impl NoIoFlusher {
    /// # Errors
    /// The system's.
    pub(crate) fn suspend() -> io::Result<Self> {
        let was_one = io_flusher(GET_IO_FLUSHER, 0) == 1;
        if was_one && io_flusher(SET_IO_FLUSHER, 0) < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { was_one })
    }
}

impl Drop for NoIoFlusher {
    fn drop(&mut self) {
        if self.was_one {
            io_flusher(SET_IO_FLUSHER, 1);
        }
    }
}

#[expect(unsafe_code, reason = "no crate of ours has this call")]
fn io_flusher(what: c_int, value: c_long) -> c_long {
    // SAFETY: both calls take numbers alone.
    unsafe { syscall(libc::SYS_prctl, what, value, 0, 0, 0) }
}

/// Takes precedence of every kind from the calling thread, of a process that has no other and shares no memory, lets none of its pages be
/// merged with others, and gives it the usual personality: a supervisor under a debugger or `setarch -R` has one without random addresses. Makes system calls and nothing else; false where one
/// failed, whose error number is the thread's.
///
/// None of it needs a privilege. What the kernel does not have, or a filter does not let be asked for, is passed over; that what is there can't be taken away is a failure.
///
/// # Safety
/// May be called in a process that was forked from one with several threads.
#[expect(unsafe_code, reason = "system calls and nothing else")]
pub(crate) unsafe fn drop_all() -> bool {
    // SAFETY: none of the calls takes a pointer but `sched_setscheduler`, to a value that lives here.
    unsafe {
        let policy = syscall(libc::SYS_sched_getscheduler, 0);
        if REAL_TIME.iter().any(|kind| c_long::from(*kind) == policy) {
            let usual: c_int = 0;
            let set = syscall(
                libc::SYS_sched_setscheduler,
                0,
                libc::SCHED_OTHER,
                &raw const usual,
            );
            if set < 0 {
                return false;
            }
        }
        if syscall(libc::SYS_getpriority, libc::PRIO_PROCESS, 0) > NICE_0
            && syscall(libc::SYS_setpriority, libc::PRIO_PROCESS, 0, 0) < 0
        {
            return false;
        }
        // Asked for last: who has none of its own has one that follows from the two above.
        if is_before_others(syscall(libc::SYS_ioprio_get, IO_PROCESS, 0))
            && syscall(libc::SYS_ioprio_set, IO_PROCESS, 0, IO_NONE) < 0
        {
            return false;
        }
        // After the policy: one of real-time has none. More slack than usual gives way, and stays.
        let slack_ns = syscall(libc::SYS_prctl, libc::PR_GET_TIMERSLACK, 0, 0, 0, 0);
        if (0..USUAL_TIMER_SLACK_NS).contains(&slack_ns)
            && syscall(
                libc::SYS_prctl,
                libc::PR_SET_TIMERSLACK,
                USUAL_TIMER_SLACK_NS,
                0,
                0,
                0,
            ) < 0
        {
            return false;
        }
        // The program that is executed next has it from the memory of the one before.
        if syscall(libc::SYS_prctl, GET_MEMORY_MERGE, 0, 0, 0, 0) > 0
            && syscall(libc::SYS_prctl, SET_MEMORY_MERGE, 0, 0, 0, 0) < 0
        {
            return false;
        }
        syscall(libc::SYS_personality, USUAL_PERSONALITY) >= 0
    }
}

/// Whether this is a priority for disks above the usual one.
fn is_before_others(io_priority: c_long) -> bool {
    let level = io_priority & IO_LEVELS;
    match io_priority >> IO_CLASS_SHIFT {
        IO_REAL_TIME => true,
        IO_BEST_EFFORT => level < IO_USUAL_LEVEL,
        _ => false,
    }
}

/// Lets the OOM killer take a process, a child that has executed nothing yet, as it takes any other, where the supervisor has been spared. What
/// makes it take the process sooner stays.
///
/// # Errors
/// The system's.
pub(crate) fn expose_to_oom_killer(pid: libc::pid_t) -> io::Result<()> {
    let file = format!("/proc/{pid}/oom_score_adj");
    let is_spared = fs::read_to_string(&file).map(|adjustment| adjustment.starts_with('-'));
    is_spared
        .and_then(|is_spared| {
            if is_spared {
                fs::write(&file, "0")
            } else {
                Ok(())
            }
        })
        .map_err(|error| io::Error::new(error.kind(), format!("{file} can't be seen to: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_priority_for_disks_is_before_others_or_not() {
        let of = |class: c_long, level: c_long| class << IO_CLASS_SHIFT | level;

        for before in [of(1, 0), of(1, 7), of(2, 0), of(2, 3)] {
            assert!(is_before_others(before), "{before:#x}");
        }
        // None, usual, later than usual, idle; and no answer.
        for after in [of(0, 0), of(2, 4), of(2, 7), of(3, 0), of(3, 7), -1] {
            assert!(!is_before_others(after), "{after:#x}");
        }
    }
}
