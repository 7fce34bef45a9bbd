//! PID 1 is the parent of every orphan, and has to wait for each, or they stay as zombies until the process
//! table is full.
//!
//! A thread blocks in waitid(2) with `WNOWAIT`: it only sees that some child ended. The agent's loop then
//! collects all of them, so that a process number is free for another process only after the loop knows that
//! its owner is gone. (SIGCHLD would need a signal handler, which safe Rust has none of.)

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;

use protocol::message::ExitStatus;
use rustix::event::EventfdFlags;
use rustix::io::Errno;
use rustix::process::{Pid, WaitId, WaitIdOptions, WaitOptions};

/// The loop's side of the thread.
#[derive(Debug)]
pub struct Reaper {
    event: Arc<OwnedFd>,
    look: SyncSender<()>,
    looking: bool,
}

impl Reaper {
    /// Starts the thread; it sleeps until [`Self::watch`].
    ///
    /// # Errors
    /// When there is no room for a thread or a descriptor.
    pub fn start() -> io::Result<Self> {
        let event = Arc::new(rustix::event::eventfd(
            0,
            EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK,
        )?);
        let (look, looks) = sync_channel::<()>(1);
        let thread_event = Arc::clone(&event);
        thread::Builder::new()
            .name("reaper".to_owned())
            .spawn(move || {
                while looks.recv().is_ok() {
                    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
                    while matches!(
                        rustix::process::waitid(WaitId::All, options),
                        Err(Errno::INTR)
                    ) {}
                    // One that ended, or no child at all: both are the loop's to find out.
                    let _ = rustix::io::write(&thread_event, &1_u64.to_ne_bytes());
                }
            })?;
        Ok(Self {
            event,
            look,
            looking: false,
        })
    }

    /// To be called after a child was started.
    pub fn watch(&mut self) {
        if !self.looking {
            self.looking = self.look.try_send(()).is_ok();
        }
    }

    /// Collects every child that has ended, to be called when the descriptor is readable.
    pub fn reap(&mut self) -> Vec<(Pid, ExitStatus)> {
        let mut count = [0; 8];
        if rustix::io::read(&self.event, &mut count).is_ok() {
            self.looking = false;
        }
        let mut ended = Vec::new();
        loop {
            match rustix::process::wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) => {
                    if let Some(code) = status.exit_status() {
                        ended.push((pid, ExitStatus::Code(code)));
                    } else if let Some(signal) = status.terminating_signal() {
                        ended.push((pid, ExitStatus::Signal(signal)));
                    }
                }
                Ok(None) => {
                    self.watch();
                    return ended;
                }
                Err(Errno::INTR) => {}
                // No children left. The next one comes from the loop, which calls `watch`.
                Err(_) => return ended,
            }
        }
    }
}

impl AsFd for Reaper {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
