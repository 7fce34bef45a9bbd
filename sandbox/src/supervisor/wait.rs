//! The one wait of a supervisor, for all that can happen.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::Supervisor;
use crate::clock::now_ns;

/// What a turn of the loop has to look at.
#[derive(Debug, Default)]
pub(super) struct Ready {
    pub(super) machine: bool,
    pub(super) agent: bool,
    pub(super) process: bool,
    pub(super) stderr: bool,
    pub(super) discarded: Vec<bool>,
}

impl Supervisor {
    /// Waits until something is to be done. An interrupted wait finds nothing.
    pub(super) fn wait(&mut self) -> io::Result<Ready> {
        let timeout = self.next_deadline_ns().map(|at_ns| {
            let left = Duration::from_nanos(at_ns.saturating_sub(now_ns()));
            Timespec::try_from(left).unwrap_or(Timespec {
                tv_sec: i64::MAX,
                tv_nsec: 0,
            })
        });
        let wanted = |wants_to_send: bool| {
            if wants_to_send {
                PollFlags::IN | PollFlags::OUT
            } else {
                PollFlags::IN
            }
        };
        let agent = self
            .agent
            .as_ref()
            .filter(|_| !self.agent_has_ended)
            .map(|agent| (agent.as_fd(), wanted(agent.wants_to_send())));
        // One row for each kind of descriptor: what is absent is a row that is not polled.
        let fixed: [Option<(BorrowedFd<'_>, PollFlags)>; 5] = [
            Some((self.shared.wake.as_fd(), PollFlags::IN)),
            Some((self.socket.as_fd(), wanted(!self.to_machine.is_empty()))),
            Some((self.process.pidfd(), PollFlags::IN)),
            self.process.stderr().map(|stderr| (stderr, PollFlags::IN)),
            agent,
        ];
        let mut descriptors: Vec<PollFd<'_>> = fixed
            .iter()
            .flatten()
            .copied()
            .chain(
                self.discarded
                    .iter()
                    .map(|end| (end.as_fd(), PollFlags::IN)),
            )
            .map(|(descriptor, flags)| PollFd::from_borrowed_fd(descriptor, flags))
            .collect();
        match poll(&mut descriptors, timeout.as_ref()) {
            Ok(_) => {}
            Err(Errno::INTR) => return Ok(Ready::default()),
            Err(errno) => return Err(errno.into()),
        }
        let mut found = descriptors
            .iter()
            .map(|polled| !polled.revents().is_empty());
        let mut of = |row: usize| {
            fixed.get(row).is_some_and(Option::is_some) && found.next().unwrap_or(false)
        };
        let (_wake, machine, process, stderr, agent) = (of(0), of(1), of(2), of(3), of(4));
        Ok(Ready {
            machine,
            agent,
            process,
            stderr,
            discarded: found.collect(),
        })
    }
}
