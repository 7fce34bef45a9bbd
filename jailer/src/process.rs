//! A machine's process, seen from its supervisor.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Signal, WaitId, WaitIdOptions, WaitIdStatus, pidfd_send_signal, waitid};

use crate::calls::call_name;
use crate::cell::Cell;
use crate::cgroup::Cgroup;
use crate::cpu_quota::Throttled;
use crate::last_words;
use crate::start::{Entry, StartError};

/// Most bytes kept of what a machine's process wrote to its standard error: the last ones. A panic's message
/// and place fit.
const MAX_STDERR_TAIL_BYTES: usize = 4 << 10;

/// Bytes read of the standard error at one time, so that a process that floods it delays nobody.
const STDERR_CHUNK_BYTES: usize = 4 << 10;

/// How long a killed process may take until it is gone. Tearing down a large machine's memory takes tens of
/// milliseconds; a process that is stuck in its kernel is left to the system after this.
const REAP_LIMIT: Duration = Duration::from_secs(10);

/// How long a process that has ended may stay with somebody who traces it (`strace -f`), and between two looks at that.
const TRACER_LIMIT: Duration = Duration::from_secs(2);
const TRACER_LOOK: Duration = Duration::from_millis(1);

/// How a machine's process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessEnd {
    /// It exited with this code.
    Exited(i32),
    /// A signal of this number ended it.
    Signaled(i32),
    /// It is gone, but something else in this program reaped it first and took its status, or it could not
    /// be reaped within 10 s of its kill.
    Unknown,
}

/// A machine's process. Dropping it kills and reaps it, and removes its control group.
#[derive(Debug)]
pub struct MachineProcess {
    pub(crate) pid: u32,
    pub(crate) pidfd: OwnedFd,
    pub(crate) stderr: Option<OwnedFd>,
    pub(crate) stderr_tail: VecDeque<u8>,
    pub(crate) end: Option<ProcessEnd>,
    /// What the process has to say of its cell, until it has said it.
    pub(crate) entry: Option<Entry>,
    /// Removed after the process is reaped.
    pub(crate) cgroup: Option<Cgroup>,
}

impl MachineProcess {
    /// The process's id, for messages.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.pid
    }

    /// Waits at most `limit` until the process is in its cell, and says which parts of it are on. `None` where the process
    /// ended before, or has told already: how it ended is its own to tell.
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn entered(&mut self, limit: Duration) -> Result<Option<Cell>, StartError> {
        match self.entry.take() {
            Some(entry) => entry.finish(limit, self.cgroup.as_ref().map(Cgroup::bounds)),
            None => Ok(None),
        }
    }

    /// The folder of its control group, while it has one.
    #[must_use]
    pub fn cgroup(&self) -> Option<&Path> {
        self.cgroup.as_ref().map(Cgroup::path)
    }

    /// How its control group was kept from running so far; zeros where it has none.
    #[must_use]
    pub fn throttled(&self) -> Throttled {
        let cgroup = self.cgroup.as_ref();
        cgroup.map(Cgroup::throttled).unwrap_or_default()
    }

    /// The forbidden system call that ended it, by name where the call is known, from its end and its last words; `None` where none
    /// did. The process may have been taken over: it says so itself.
    #[must_use]
    pub fn forbidden_call(&self) -> Option<String> {
        match self.end? {
            ProcessEnd::Exited(status) => {
                let number = last_words::forbidden_call(status, &self.stderr_tail())?;
                Some(call_name(number).map_or_else(|| format!("{number}"), str::to_owned))
            }
            ProcessEnd::Signaled(libc::SIGSYS) => Some("of unknown name".to_owned()),
            _ => None,
        }
    }

    /// A descriptor that becomes readable when the process has ended.
    #[must_use]
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// The standard error's pipe, until it has ended: when it is readable, call [`Self::read_stderr`].
    #[must_use]
    pub fn stderr(&self) -> Option<BorrowedFd<'_>> {
        self.stderr.as_ref().map(AsFd::as_fd)
    }

    /// Reads one piece of the standard error without waiting; false when there is no more now.
    pub fn read_stderr(&mut self) -> bool {
        let Some(stderr) = &self.stderr else {
            return false;
        };
        let mut chunk = [0; STDERR_CHUNK_BYTES];
        match rustix::io::read(stderr, &mut chunk) {
            Ok(0) => {
                self.stderr = None;
                false
            }
            Ok(count) => {
                self.stderr_tail.extend(chunk.iter().take(count));
                let surplus = self.stderr_tail.len().saturating_sub(MAX_STDERR_TAIL_BYTES);
                self.stderr_tail.drain(..surplus);
                true
            }
            Err(Errno::INTR) => true,
            Err(Errno::AGAIN) => false,
            Err(_) => {
                self.stderr = None;
                false
            }
        }
    }

    /// The last bytes of the standard error that were read, 4 KiB at most.
    #[must_use]
    pub fn stderr_tail(&self) -> Vec<u8> {
        self.stderr_tail.iter().copied().collect()
    }

    /// Kills the process. It is gone only after [`Self::end`].
    pub fn kill(&self) {
        if self.end.is_none() {
            // The descriptor names this very process: a reused id is never hit.
            let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
        }
    }

    /// Waits at most `limit` for the process to end by itself, and reaps it; `None` when it still runs.
    pub fn wait_timeout(&mut self, limit: Duration) -> Option<ProcessEnd> {
        if self.end.is_none() && self.has_ended(limit) {
            self.end = Some(match self.reap() {
                Ok(Some(status)) => match (status.exit_status(), status.terminating_signal()) {
                    (Some(code), _) => ProcessEnd::Exited(code),
                    (None, Some(signal)) => ProcessEnd::Signaled(signal),
                    (None, None) => ProcessEnd::Unknown,
                },
                Ok(None) | Err(_) => ProcessEnd::Unknown,
            });
            self.cgroup = None;
        }
        self.end
    }

    /// Takes the status of the process, which has ended.
    fn reap(&self) -> rustix::io::Result<Option<WaitIdStatus>> {
        let deadline = Instant::now() + TRACER_LIMIT;
        loop {
            let reaped = waitid(
                WaitId::PidFd(self.pidfd.as_fd()),
                WaitIdOptions::EXITED | WaitIdOptions::NOHANG,
            );
            if !matches!(reaped, Ok(None)) || Instant::now() > deadline {
                return reaped;
            }
            std::thread::sleep(TRACER_LOOK);
        }
    }

    /// Kills and reaps the process.
    pub fn end(&mut self) -> ProcessEnd {
        self.kill();
        self.wait_timeout(REAP_LIMIT).unwrap_or(ProcessEnd::Unknown)
    }

    /// Whether the process ends within `limit`.
    fn has_ended(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let mut descriptors = [PollFd::new(&self.pidfd, PollFlags::IN)];
            match poll(&mut descriptors, Timespec::try_from(left).ok().as_ref()) {
                Ok(count) => return count > 0,
                Err(Errno::INTR) => {}
                Err(_) => return false,
            }
        }
    }
}

impl Drop for MachineProcess {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, io};

    use super::*;
    use crate::cell::Bounds;
    use crate::start::{Options, start};

    const BOUNDS: Bounds = Bounds {
        memory_mib: 32,
        vcpus: 1,
        max_file_bytes: 0,
    };

    /// Starts a shell under the machine's name; what it does comes on its standard input, the socket.
    fn shell(script: &str) -> (MachineProcess, OwnedFd) {
        let (ours, theirs) = rustix::net::socketpair(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::STREAM,
            rustix::net::SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        rustix::io::write(&ours, script.as_bytes()).unwrap();
        (
            start(Path::new("/bin/sh"), theirs, Options::new(BOUNDS)).unwrap(),
            ours,
        )
    }

    fn drain(process: &mut MachineProcess) -> String {
        while process.read_stderr() {}
        String::from_utf8(process.stderr_tail()).unwrap()
    }

    #[test]
    fn the_end_and_the_last_words_of_a_process_are_known() {
        let (mut process, _socket) = shell("echo gone wrong >&2; exit 3\n");

        let end = process.wait_timeout(Duration::from_secs(10));

        assert_eq!(end, Some(ProcessEnd::Exited(3)));
        assert_eq!(drain(&mut process), "gone wrong\n");
    }

    #[test]
    fn the_process_starts_with_nothing_of_its_supervisors() {
        let (mut process, _socket) =
            shell("echo \"$0 $(pwd) ${HOME-none} ${USER-none}\" >&2; exit 0\n");

        process.wait_timeout(Duration::from_secs(10)).unwrap();

        assert_eq!(drain(&mut process), "sandvmm-machine / none none\n");
    }

    #[test]
    fn only_the_last_words_are_kept() {
        let (mut process, _socket) =
            shell("i=0; while [ $i -lt 3000 ]; do echo $i >&2; i=$((i+1)); done; exit 0\n");

        while process.wait_timeout(Duration::from_millis(5)).is_none() {
            process.read_stderr();
        }
        let tail = drain(&mut process);

        assert_eq!(tail.len(), MAX_STDERR_TAIL_BYTES);
        assert!(tail.ends_with("\n2999\n"));
    }

    #[test]
    fn a_process_that_does_not_end_is_waited_for_no_longer_than_said() {
        let (mut process, _socket) = shell("read never\n");

        assert_eq!(process.wait_timeout(Duration::from_millis(20)), None);
        assert_eq!(process.end(), ProcessEnd::Signaled(9));
        assert_eq!(process.end(), ProcessEnd::Signaled(9));
    }

    #[test]
    fn dropping_leaves_no_process_and_no_zombie() {
        let (process, _socket) = shell("read never\n");
        let folder = format!("/proc/{}", process.id());
        assert!(fs::exists(&folder).unwrap());

        drop(process);

        assert!(!fs::exists(&folder).unwrap());
    }

    #[test]
    fn a_missing_program_is_an_error() {
        let (_ours, theirs) = rustix::pipe::pipe().unwrap();

        let error = start(
            Path::new("/nonexistent/sandvmm"),
            theirs,
            Options::new(BOUNDS),
        )
        .unwrap_err();

        assert!(
            matches!(error, StartError::Program(source) if source.kind() == io::ErrorKind::NotFound)
        );
    }
}
