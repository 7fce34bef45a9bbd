//! Watches the system calls of machines' processes from outside (`ptrace(2)`), while another process drives them.
//!
//! The driver is this program again. All threads and processes that it makes are followed; of each, calls count once it has closed itself
//! in: after the filter's installation, which a driver does not do.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::process::{Command, Stdio};

use jailer::Thread;

/// A system call: its number and arguments.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call {
    pub(crate) number: u64,
    pub(crate) arguments: [u64; 6],
}

/// Threads and processes are followed, calls told from other stops, and nothing outlives the tracer.
const OPTIONS: libc::c_int = libc::PTRACE_O_TRACESYSGOOD
    | libc::PTRACE_O_TRACECLONE
    | libc::PTRACE_O_TRACEFORK
    | libc::PTRACE_O_TRACEVFORK
    | libc::PTRACE_O_EXITKILL;

/// What is known of a thread.
#[derive(Debug, Clone, Copy, Default)]
enum Traced {
    #[default]
    Open,
    /// It is in the call that installs its filter.
    Closing,
    Closed(Thread),
}

/// Runs this program with these words as a driver, which begins when it is told to on its standard input, and tells `seen` of each call
/// of each closed thread. Returns whether the driver succeeded.
pub(crate) fn run(words: &[&str], mut seen: impl FnMut(Thread, Call)) -> io::Result<bool> {
    let mut driver = Command::new("/proc/self/exe")
        .args(words)
        .stdin(Stdio::piped())
        .spawn()?;
    let root = driver.id().cast_signed();
    request(libc::PTRACE_SEIZE, root, OPTIONS)?;
    if let Some(mut stdin) = driver.stdin.take() {
        stdin.write_all(b"\n")?;
    }
    let mut threads: BTreeMap<i32, Traced> = BTreeMap::new();
    let mut has_succeeded = false;
    while let Some((thread, status)) = wait()? {
        if !libc::WIFSTOPPED(status) {
            threads.remove(&thread);
            if thread == root {
                has_succeeded = libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0;
            }
            continue;
        }
        let (signal, event) = (libc::WSTOPSIG(status), status >> 16);
        let mut to_deliver = 0;
        if event == 0 && signal == libc::SIGTRAP | 0x80 {
            let state = threads.entry(thread).or_default();
            *state = state.next(thread, call(thread), &mut seen);
        } else if event == 0 {
            to_deliver = signal;
        }
        // It fails only where the thread was killed meanwhile.
        let _ = request(libc::PTRACE_SYSCALL, thread, to_deliver);
    }
    Ok(has_succeeded)
}

impl Traced {
    /// What follows from a stop at a call: its beginning where there is one, else its end.
    fn next(self, thread: i32, call: Option<Call>, seen: &mut impl FnMut(Thread, Call)) -> Self {
        match (self, call) {
            (Self::Closed(kind), Some(call)) => {
                seen(kind, call);
                self
            }
            (Self::Open, Some(call)) if call.number == libc::SYS_seccomp.cast_unsigned() => {
                Self::Closing
            }
            (Self::Closing, None) => Self::Closed(kind_of(thread)),
            _ => self,
        }
    }
}

/// A machine's first thread is its event loop; all others are processors.
fn kind_of(thread: i32) -> Thread {
    let status = fs::read_to_string(format!("/proc/{thread}/status")).unwrap_or_default();
    let process = status.lines().find_map(|line| line.strip_prefix("Tgid:"));
    if process.is_some_and(|number| number.trim() == thread.to_string()) {
        Thread::Main
    } else {
        Thread::Vcpu
    }
}

/// Waits for the next stop or end of what this thread traces; `None` when nothing is left.
#[expect(unsafe_code, reason = "no crate of ours waits for a tracee")]
fn wait() -> io::Result<Option<(i32, i32)>> {
    /// Only this thread's: other tests wait for theirs (`include/uapi/linux/wait.h`).
    const THIS_THREADS: libc::c_int = 0x2000_0000;
    let mut status = 0;
    loop {
        // SAFETY: the pointer is to an integer that lives here.
        let thread = unsafe { libc::waitpid(-1, &raw mut status, libc::__WALL | THIS_THREADS) };
        if thread > 0 {
            return Ok(Some((thread, status)));
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::ECHILD) => return Ok(None),
            Some(libc::EINTR) => {}
            _ => return Err(error),
        }
    }
}

/// A request with a number for its data: none of these has the kernel read or write memory of this process.
#[expect(unsafe_code, reason = "no crate of ours traces")]
fn request(what: libc::c_uint, thread: i32, data: libc::c_int) -> io::Result<()> {
    let none = std::ptr::null_mut::<libc::c_void>();
    let data = libc::c_long::from(data);
    // SAFETY: PTRACE_SEIZE and PTRACE_SYSCALL take numbers and change only what the tracee does.
    if unsafe { libc::ptrace(what, thread, none, data) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// The call that the thread stopped at the beginning of; `None` at an end.
#[expect(unsafe_code, reason = "no crate of ours traces")]
fn call(thread: i32) -> Option<Call> {
    // SAFETY: the structure is of integers, for which zeros are valid; the kernel writes at most as many bytes as it is told that
    // there are. At the beginning of a call it fills `entry` (`ptrace(2)`, PTRACE_GET_SYSCALL_INFO).
    unsafe {
        let mut information: libc::ptrace_syscall_info = std::mem::zeroed();
        let bytes = libc::ptrace(
            libc::PTRACE_GET_SYSCALL_INFO,
            thread,
            size_of::<libc::ptrace_syscall_info>(),
            &raw mut information,
        );
        if bytes <= 0 || information.op != libc::PTRACE_SYSCALL_INFO_ENTRY {
            return None;
        }
        let entry = information.u.entry;
        Some(Call {
            number: entry.nr,
            arguments: entry.args,
        })
    }
}
