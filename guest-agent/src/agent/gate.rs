//! The gate's process, as far as the agent has to do with it: it starts and ends it.

use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal};

use std::os::unix::process::CommandExt;

use super::{Agent, AgentError};
use crate::gate;

/// Whether the host wants a gate, and which process it is.
#[derive(Debug, Default)]
pub(super) struct Gate {
    is_wanted: bool,
    pid: Option<Pid>,
}

impl Agent {
    /// Starts the gate, in place of one that runs.
    pub(super) fn start_gate(&mut self) -> Result<(), AgentError> {
        self.stop_gate();
        let child = Command::new(&self.stage_program)
            .arg0(gate::NAME)
            .env_clear()
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        // Dropping the handle leaves the process alone; the reaper collects it.
        self.gate = Gate {
            is_wanted: true,
            pid: i32::try_from(child.id()).ok().and_then(Pid::from_raw),
        };
        self.reaper.watch();
        Ok(())
    }

    /// Ends it: a machine that is saved has none, since its streams are another machine's then.
    pub(super) fn stop_gate(&mut self) {
        if let Some(pid) = self.gate.pid.take() {
            // One that has ended needs no signal.
            let _ = rustix::process::kill_process(pid, Signal::KILL);
        }
    }

    /// Starts it again in a machine that goes on.
    pub(super) fn restart_gate(&mut self) -> Result<(), AgentError> {
        if self.gate.is_wanted {
            self.start_gate()?;
        }
        Ok(())
    }

    /// This is another machine, whose host says whether it wants one.
    pub(super) fn forget_gate(&mut self) {
        self.gate = Gate::default();
    }

    /// A process has ended; if it is the gate there is none any more, and its number may be another's soon.
    pub(super) fn gate_may_have_ended(&mut self, pid: Pid) {
        if self.gate.pid == Some(pid) {
            self.gate.pid = None;
        }
    }
}
