//! The bridge that carries calls of the host's functions, from the loop's side: one process, for the newest stream.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::process::Signal;

use super::{Agent, path_bytes, set_blocking};
use crate::spawn::Stage;
use crate::stage::Order;

impl Agent {
    /// Has a new process serve `stream`. Where it can't, the stream's end tells the host.
    pub(super) fn serve_calls(&mut self, stream: &OwnedFd) {
        if !self.configured {
            return;
        }
        // That of a former stream, which may be a former machine's, would be in its way.
        if let Some(former) = self.bridge.take() {
            // One that has ended and was not reaped yet is killed in vain.
            let _ = rustix::process::kill_process(former, Signal::KILL);
        }
        // Out of processes or descriptors: the host finds its stream closed, and says so.
        let _ = self.start_bridge(stream);
    }

    fn start_bridge(&mut self, stream: &OwnedFd) -> io::Result<()> {
        set_blocking(stream)?;
        let order = Order::Calls {
            cgroup: path_bytes(&self.files_cgroup),
            place: self.calls_place.clone(),
        };
        let stage = Stage::start(&self.stage_program, &order, &[stream.as_fd()])?;
        self.bridge = Some(stage.pid);
        self.reaper.watch();
        Ok(())
    }
}
