//! Why a machine ended by itself, as one sentence.

use std::fmt::{self, Write as _};

use jailer::ProcessEnd;
use rustix::process::{Resource, getrlimit};
use serde::{Deserialize, Serialize};
use vmm::control::{EndReason, MAX_CONSOLE_TAIL_BYTES};

use crate::text::one_line;

/// What Linux says on its console when it panics (`panic()` in `kernel/panic.c`).
const PANIC_MARK: &[u8] = b"Kernel panic - not syncing: ";

/// What follows the reason where Linux says it a second time.
const PANIC_END_MARK: &[u8] = b" ]---";

/// What the panic's reason or the console holds when Linux had nothing left to kill for memory (`out_of_memory()`
/// in `mm/oom_kill.c`), or killed the first program itself.
const OUT_OF_MEMORY_MARKS: [&[u8]; 4] = [
    b"System is deadlocked on memory",
    b"compulsory panic_on_oom",
    b"Out of memory: Killed process 1 (",
    b"Out of memory and no killable processes",
];

/// What Linux says when its first program, here the agent, ended (`do_exit()` in `kernel/exit.c`).
const INIT_ENDED_MARK: &str = "Attempted to kill init!";

/// A machine that ended without being told to. Its `Display` is one sentence that says what was seen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Crash {
    kind: CrashKind,
    sentence: String,
    console_tail: Vec<u8>,
}

/// What kind of end it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum CrashKind {
    /// The guest's kernel panicked.
    KernelPanic,
    /// The guest's kernel had no memory left and nothing to kill but its first program.
    OutOfMemory,
    /// The guest asked for a reset and left no reason on its console.
    Reset,
    /// A vCPU shut down after a triple fault.
    TripleFault,
    /// A vCPU could not go on.
    VcpuFailed,
    /// The agent in the guest closed its control stream, or said why it can't go on.
    AgentGone,
    /// The agent, or something in its place, broke the protocol or did not answer in time.
    AgentMisbehaved,
    /// The machine's process was killed by a signal from outside.
    ProcessKilled,
    /// The machine's process made a system call that it may not make, and was ended.
    ForbiddenCall,
    /// The machine's process failed: the fault of the host or of this library.
    HostFailed,
}

impl Crash {
    pub(crate) fn new(kind: CrashKind, sentence: String) -> Self {
        Self {
            kind,
            sentence,
            console_tail: Vec::new(),
        }
    }

    /// The crash that a machine's last message tells of; a machine that could not be built is none:
    /// the sentence of that comes back.
    pub(crate) fn from_end(reason: EndReason, mut console_tail: Vec<u8>) -> Result<Self, String> {
        console_tail.truncate(MAX_CONSOLE_TAIL_BYTES);
        let (kind, sentence) = match reason {
            EndReason::StartFailed(sentence) => return Err(one_line(sentence.as_bytes())),
            EndReason::Reset => of_reset(&console_tail),
            EndReason::TripleFault => match panic_reason(&console_tail) {
                Some(_) => of_reset(&console_tail),
                None => (
                    CrashKind::TripleFault,
                    "A vCPU triple-faulted: the guest's kernel could not handle an exception"
                        .to_owned(),
                ),
            },
            EndReason::VcpuFailed(what) => (
                CrashKind::VcpuFailed,
                format!("A vCPU could not go on: {}", one_line(what.as_bytes())),
            ),
            EndReason::HostFailed(what) => (
                CrashKind::HostFailed,
                format!(
                    "The machine's process failed: {}",
                    one_line(what.as_bytes())
                ),
            ),
            _ => (
                CrashKind::HostFailed,
                "The machine ended for a reason that this library does not know".to_owned(),
            ),
        };
        Ok(Self {
            kind,
            sentence,
            console_tail,
        })
    }

    /// The crash of a machine whose process went away without a last message.
    pub(crate) fn from_process(end: Option<ProcessEnd>, stderr_tail: &[u8]) -> Self {
        let mut kind = CrashKind::HostFailed;
        let mut sentence = match end {
            Some(ProcessEnd::Signaled(9)) => {
                kind = CrashKind::ProcessKilled;
                let mut sentence = "The machine's process was killed by signal 9 (SIGKILL), as the host's out-of-memory killer does"
                    .to_owned();
                if let Some(seconds) = getrlimit(Resource::Cpu).maximum {
                    let _ = write!(
                        sentence,
                        ", or a limit of {seconds} s of processor time (ulimit -t)"
                    );
                }
                sentence
            }
            Some(ProcessEnd::Signaled(signal)) => {
                if stderr_tail.is_empty() {
                    kind = CrashKind::ProcessKilled;
                }
                format!("The machine's process was killed by signal {signal}")
            }
            Some(ProcessEnd::Exited(code)) => {
                format!("The machine's process exited with status {code} in the middle of its work")
            }
            Some(ProcessEnd::Unknown) => "The machine's process is gone".to_owned(),
            None => "The machine's process closed its control socket in the middle of its work"
                .to_owned(),
        };
        let said = one_line(stderr_tail);
        if !said.is_empty() {
            sentence = format!("{sentence}: {said}");
        }
        Self::new(kind, sentence)
    }

    /// The crash of a machine whose process was ended for a system call of this name.
    pub(crate) fn from_forbidden_call(name: &str) -> Self {
        Self::new(
            CrashKind::ForbiddenCall,
            format!(
                "The machine's process made a system call that it may not make ({name}) and was ended: it may \
                 have been taken over"
            ),
        )
    }

    /// What kind of end it was.
    #[must_use]
    pub fn kind(&self) -> CrashKind {
        self.kind
    }

    /// The last bytes that the guest wrote to its console, 8 KiB at most, exactly as it wrote them: do not
    /// print them to a terminal unescaped.
    #[must_use]
    pub fn console_tail(&self) -> &[u8] {
        &self.console_tail
    }
}

impl fmt::Display for Crash {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.sentence)
    }
}

impl std::error::Error for Crash {}

/// What a guest that reset its machine says of it on its console.
fn of_reset(console_tail: &[u8]) -> (CrashKind, String) {
    let out_of_memory = OUT_OF_MEMORY_MARKS
        .iter()
        .any(|mark| find(console_tail, mark).is_some());
    match panic_reason(console_tail) {
        Some(reason) if out_of_memory => (
            CrashKind::OutOfMemory,
            format!("The guest ran out of memory and its kernel panicked: {reason}"),
        ),
        Some(reason) if reason.starts_with(INIT_ENDED_MARK) => (
            CrashKind::KernelPanic,
            format!("The guest's kernel panicked since the agent ended: {reason}"),
        ),
        Some(reason) => (
            CrashKind::KernelPanic,
            format!("The guest's kernel panicked: {reason}"),
        ),
        None => (
            CrashKind::Reset,
            "The guest reset its machine and left no reason on its console".to_owned(),
        ),
    }
}

/// The reason of the console's last panic, to the end of its line.
fn panic_reason(console_tail: &[u8]) -> Option<String> {
    let mut rest = console_tail;
    let mut last = None;
    while let Some(at) = find(rest, PANIC_MARK) {
        rest = rest.get(at + PANIC_MARK.len()..).unwrap_or_default();
        last = Some(rest);
    }
    let line = last?
        .split(|byte| matches!(byte, b'\n' | b'\r'))
        .next()
        .unwrap_or_default();
    let reason = line.strip_suffix(PANIC_END_MARK).unwrap_or(line);
    Some(one_line(reason)).filter(|reason| !reason.is_empty())
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack
        .windows(needle.len())
        .position(|window| window == needle)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn crash_of(reason: EndReason, console: &[u8]) -> Crash {
        Crash::from_end(reason, console.to_vec()).unwrap()
    }

    #[test]
    fn a_panic_is_quoted_to_the_end_of_its_line() {
        let console = b"[    0.5] noise\r\n[    0.6] Kernel panic - not syncing: VFS: Unable to mount root fs\r\n[ 0.6] CPU: 0";

        let crash = crash_of(EndReason::Reset, console);

        assert_eq!(crash.kind(), CrashKind::KernelPanic);
        assert_eq!(
            crash.to_string(),
            "The guest's kernel panicked: VFS: Unable to mount root fs"
        );
        assert_eq!(crash.console_tail(), console);
    }

    #[test]
    fn the_second_telling_of_a_panic_is_the_same_reason() {
        let crash = crash_of(
            EndReason::Reset,
            b"---[ end Kernel panic - not syncing: Fatal exception ]---\n",
        );
        assert_eq!(
            crash.to_string(),
            "The guest's kernel panicked: Fatal exception"
        );
    }

    #[test]
    fn an_agent_that_ended_is_named() {
        let crash = crash_of(
            EndReason::Reset,
            b"Kernel panic - not syncing: Attempted to kill init! exitcode=0x00000100\n",
        );
        assert_eq!(crash.kind(), CrashKind::KernelPanic);
        assert!(crash.to_string().contains("the agent ended"), "{crash}");
    }

    #[test]
    fn a_panic_for_lack_of_memory_is_called_that() {
        for console in [
            b"Kernel panic - not syncing: System is deadlocked on memory\n".as_slice(),
            b"Out of memory: Killed process 1 (init) total-vm\nKernel panic - not syncing: Attempted to kill init!\n",
        ] {
            assert_eq!(
                crash_of(EndReason::Reset, console).kind(),
                CrashKind::OutOfMemory
            );
        }
    }

    #[test]
    fn a_reset_without_a_panic_says_so() {
        for console in [b"".as_slice(), b"\xff\x00\x1b[2J", PANIC_MARK] {
            assert_eq!(crash_of(EndReason::Reset, console).kind(), CrashKind::Reset);
        }
    }

    #[test]
    fn a_console_above_its_bound_is_cut() {
        let crash = crash_of(EndReason::TripleFault, &vec![b'x'; 1 << 16]);
        assert_eq!(crash.console_tail().len(), MAX_CONSOLE_TAIL_BYTES);
    }

    #[test]
    fn a_machine_that_was_never_built_is_no_crash() {
        let reason = EndReason::StartFailed("The kernel is none\n".to_owned());
        assert_eq!(
            Crash::from_end(reason, Vec::new()),
            Err("The kernel is none".to_owned())
        );
    }

    #[test]
    fn a_killed_process_and_one_that_panicked_are_told_apart() {
        let killed = Crash::from_process(Some(ProcessEnd::Signaled(9)), b"");
        let panicked = Crash::from_process(
            Some(ProcessEnd::Exited(101)),
            b"thread 'main' panicked at vmm/src/lib.rs:1:\nboom\n",
        );

        assert_eq!(killed.kind(), CrashKind::ProcessKilled);
        assert_eq!(panicked.kind(), CrashKind::HostFailed);
        assert!(panicked.to_string().ends_with("vmm/src/lib.rs:1: boom"));
    }
}
