//! The warm interpreter in the loop: started as a command, then a command no longer; its processes become commands.

use std::io;

use protocol::message::{ExitStatus, Spawn, SpawnFailure};
use rustix::event::epoll::EventFlags;
use rustix::process::Pid;

use super::{Agent, AgentError};
use crate::cgroup::Cgroup;
use crate::commands::Command;
use crate::limits::CGROUP_REMOVE_TRIES;
use crate::poll::Token;
use crate::program::Failure;
use crate::spawn::{Ends, Stage};
use crate::warm::{Said, Warm};

impl Agent {
    /// An interpreter is to be started that stays.
    pub(super) fn warm_up(&mut self, spawn: &Spawn) -> Result<(), AgentError> {
        let id = spawn.command_id;
        let prepared = if self.warm.is_some() {
            Err("The guest has a warm interpreter already".to_owned())
        } else {
            Warm::prepare(spawn, &self.warm_folder).map_err(|error| match error.kind() {
                io::ErrorKind::InvalidInput => {
                    "An interpreter is warmed by code, and has no input".to_owned()
                }
                _ => format!("The warm interpreter can't be prepared: {error}"),
            })
        };
        match prepared {
            Ok((warm, start)) => {
                self.warm = Some(warm);
                self.ask(start)
            }
            Err(message) => {
                self.pending.take(id);
                self.refuse(id, Failure::new(SpawnFailure::Invalid, message))
            }
        }
    }

    /// Waits for what the interpreter says, now that it is being started.
    pub(super) fn watch_warm(&mut self) -> io::Result<()> {
        match &self.warm {
            Some(warm) => self.poll.add(warm, Token::Warm, EventFlags::IN),
            None => Ok(()),
        }
    }

    /// Has a process of the warm interpreter become this command, if there is one that can. In any trouble the command is
    /// started as others are.
    pub(super) fn fork_warm(&mut self, spawn: &Spawn, ends: &Ends) -> Option<(Stage, Cgroup)> {
        let warm = self.warm.as_mut()?;
        let (spare, cgroup) = warm.take_spare(spawn)?;
        match Stage::warm(spare, warm, spawn, &ends.theirs()) {
            Ok(stage) => Some((stage, cgroup)),
            Err(_) => {
                self.kill_and_remove(cgroup);
                None
            }
        }
    }

    /// Keeps a process in reserve that the interpreter offers, in a cgroup of its own: that of the command which it will become.
    fn keep_spare(&mut self, pid: Pid) {
        let Some(warm) = &mut self.warm else {
            return;
        };
        if !warm.is_offered(pid) {
            return;
        }
        self.spares = self.spares.wrapping_add(1);
        let Ok(cgroup) = self.workload.child(&format!("spare-{}", self.spares)) else {
            return;
        };
        match cgroup.take(pid) {
            Ok(()) => warm.keep_spare(pid, cgroup),
            // It is gone.
            Err(_) => self.leftovers.push((cgroup, CGROUP_REMOVE_TRIES)),
        }
    }

    fn kill_and_remove(&mut self, cgroup: Cgroup) {
        // If the cgroup can't be killed it is gone.
        let _ = cgroup.kill();
        self.leftovers.push((cgroup, CGROUP_REMOVE_TRIES));
    }

    /// The interpreter has said something, or is gone.
    pub(super) fn warm_says(&mut self) -> Result<(), AgentError> {
        let Some(warm) = &self.warm else {
            return Ok(());
        };
        match warm.receive() {
            Said::Nothing => Ok(()),
            Said::Gone => {
                self.forget_warm();
                Ok(())
            }
            Said::Spare(pid) => {
                if let Some(id) = warm.warming() {
                    self.warmed(id)?;
                }
                self.keep_spare(pid);
                Ok(())
            }
        }
    }

    /// The code that warms has run: its command has ended, and its process stays.
    fn warmed(&mut self, id: u32) -> Result<(), AgentError> {
        // Its exec may not have been noticed yet.
        self.staged(id)?;
        match self.commands.remove(&id) {
            Some(Command::Running { pid, cgroup, .. }) => {
                let usage = cgroup.usage();
                if let Some(warm) = &mut self.warm {
                    warm.ready(pid, cgroup);
                }
                self.ended(id, ExitStatus::Code(0), usage)
            }
            Some(command) => {
                // It can't talk before it runs; whoever does so is not it.
                self.commands.insert(id, command);
                self.forget_warm();
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// There is no warm interpreter any more. One that is still a command goes on as one.
    pub(super) fn forget_warm(&mut self) {
        for cgroup in self.warm.take().map(Warm::into_cgroups).unwrap_or_default() {
            self.kill_and_remove(cgroup);
        }
    }

    /// A command has ended, or was never started: if it was to warm an interpreter, there will be none.
    pub(super) fn not_warmed(&mut self, id: u32) {
        if self.warm.as_ref().and_then(Warm::warming) == Some(id) {
            self.warm = None;
        }
    }
}
