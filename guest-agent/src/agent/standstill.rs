//! Bringing everything that the agent started to a stand before the machine is saved, and to life again: here, or as
//! another machine.

use std::time::{Duration, Instant};

use protocol::VERSION;
use protocol::message::{FromAgent, Restored, Resume};
use rustix::event::epoll::EventFlags;

use super::{Agent, AgentError};
use crate::boot::boottime_ns;
use crate::commands::Command;
use crate::control::ControlError;
use crate::limits::{CGROUP_REMOVE_TRIES, FREEZE_LOOK_WAIT, FREEZE_WAIT};
use crate::poll::Token;
use crate::streams::Pending;
use crate::warm::Warm;

/// Where the agent stands between two states of rest.
#[derive(Debug, Default)]
pub(super) enum Standstill {
    /// Everything runs.
    #[default]
    None,
    /// The host wants it to stand.
    Asked {
        close_streams: bool,
        deadline: Instant,
        /// Whether the kernel was told.
        begun: bool,
    },
    /// It stands. The control stream's end means that this is another machine.
    Frozen,
    /// This is another machine, and it has not been told yet what is new in it; it greeted at this time of its own clock.
    Restored { greeted_ns: u64 },
}

impl Agent {
    pub(super) fn freeze(&mut self, close_streams: bool) -> Result<(), AgentError> {
        let is_warming = self.warm.as_ref().and_then(Warm::warming).is_some();
        if !self.configured || is_warming || !matches!(self.standstill, Standstill::None) {
            let message = "The guest is not in a state in which it could be frozen".to_owned();
            return Ok(self.control.send(&FromAgent::FreezeFailed { message })?);
        }
        self.stop_gate();
        (self.prepare_renewal)();
        self.standstill = Standstill::Asked {
            close_streams,
            deadline: Instant::now() + FREEZE_WAIT,
            begun: false,
        };
        self.go_on_freezing(Instant::now())
    }

    /// Looks how far the freeze has come. A command that is being started is let start first. A file that is half written
    /// stays so: another machine, where the rest never comes, forgets it.
    pub(super) fn go_on_freezing(&mut self, now: Instant) -> Result<(), AgentError> {
        let Standstill::Asked {
            close_streams,
            deadline,
            begun,
        } = &mut self.standstill
        else {
            return Ok(());
        };
        let close_streams = *close_streams;
        let starting = |command: &Command| matches!(command, Command::Starting(_));
        let mut failure = None;
        if !*begun && !self.commands.values().any(starting) {
            *begun = true;
            failure = self.workload.freeze().err().map(|error| error.to_string());
        }
        if failure.is_none() && *begun && self.workload.is_frozen() {
            self.standstill = Standstill::Frozen;
            if close_streams {
                self.forget_streams();
            }
            return Ok(self.control.send(&FromAgent::Frozen)?);
        }
        if failure.is_none() && *deadline <= now {
            failure = Some(format!("it took longer than {} s", FREEZE_WAIT.as_secs()));
        }
        let Some(failure) = failure else {
            return Ok(());
        };
        self.standstill = Standstill::None;
        // What was never frozen is not thawed either.
        let _ = self.workload.thaw();
        let message = format!("What runs in the guest can't be frozen: {failure}");
        self.control.send(&FromAgent::FreezeFailed { message })?;
        self.restart_gate()?;
        self.start_complete()
    }

    /// When a freeze that was begun is to be looked at again.
    pub(super) fn freeze_wait(&self) -> Option<Duration> {
        matches!(self.standstill, Standstill::Asked { .. }).then_some(FREEZE_LOOK_WAIT)
    }

    /// The machine was saved and goes on.
    pub(super) fn thaw(&mut self) -> Result<(), AgentError> {
        if !matches!(self.standstill, Standstill::Frozen) {
            return Ok(());
        }
        self.workload.thaw()?;
        self.end_late_files(Instant::now());
        self.standstill = Standstill::None;
        self.control.send(&FromAgent::Thawed)?;
        self.restart_gate()?;
        self.start_complete()
    }

    /// Whether no command may start now.
    pub(super) fn stands_still(&self) -> bool {
        !matches!(self.standstill, Standstill::None)
    }

    /// What a broken control stream means: while everything is frozen, that the machine was restored.
    pub(super) fn control_broke(&mut self, error: ControlError) -> Result<(), AgentError> {
        let broken = matches!(error, ControlError::Closed | ControlError::Stream(_));
        if !broken || !matches!(self.standstill, Standstill::Frozen) {
            return Err(error.into());
        }
        let noticed_ns = boottime_ns();
        // Streams of the former machine are broken too, whatever they say; and its host will never ask again for the
        // end of what it started.
        self.forget_streams();
        self.forget_gate();
        self.generation += 1;
        // The former stream holds the port that the new one is dialled from.
        self.control.replace(self.redial)?;
        self.control_waits_to_write = false;
        let descriptor = self.control.descriptor()?;
        self.poll.add(descriptor, Token::Control, EventFlags::IN)?;
        let greeted_ns = boottime_ns();
        self.standstill = Standstill::Restored { greeted_ns };
        Ok(self.control.send(&FromAgent::Restored(Restored {
            version: VERSION,
            noticed_ns,
            sent_ns: greeted_ns,
        }))?)
    }

    /// Becomes the new machine, says so, and only then lets anything run.
    pub(super) fn resume(&mut self, resume: &Resume) -> Result<(), AgentError> {
        let Standstill::Restored { greeted_ns } = self.standstill else {
            return Ok(());
        };
        // The host has read its clock somewhere between the greeting and now: half of that time ago, for all that is known here.
        let answered_after_ns = boottime_ns().saturating_sub(greeted_ns);
        let resume = Resume {
            realtime_ns: resume.realtime_ns.saturating_add(answered_after_ns / 2),
            ..resume.clone()
        };
        (self.renew)(&resume)?;
        self.bound_processes(resume.max_processes)?;
        self.control.send(&FromAgent::Resumed)?;
        self.workload.thaw()?;
        self.end_late_files(Instant::now());
        self.standstill = Standstill::None;
        self.start_complete()
    }

    /// Closes every stream but the control stream. Running commands stay, and nobody is told of their end.
    fn forget_streams(&mut self) {
        self.relays.clear();
        self.pending = Pending::default();
        for (_, command) in std::mem::take(&mut self.commands) {
            if let Command::Running { pid, cgroup, .. } = command {
                self.inherited.push((pid, cgroup));
            }
        }
    }

    /// A command that nobody asks for has ended: what it started is ended too.
    pub(super) fn inherited_ended(&mut self, pid: rustix::process::Pid) {
        if let Some(place) = self.inherited.iter().position(|(known, _)| *known == pid) {
            let (_, cgroup) = self.inherited.swap_remove(place);
            // If the cgroup can't be killed it is gone.
            let _ = cgroup.kill();
            self.leftovers.push((cgroup, CGROUP_REMOVE_TRIES));
        }
    }

    /// Starts the commands that have all their streams and had to wait.
    fn start_complete(&mut self) -> Result<(), AgentError> {
        let complete = |command: &Command| matches!(command, Command::Gathering { spawn, streams, .. } if streams.complete(spawn.stdio));
        let waiting: Vec<u32> = self
            .commands
            .iter()
            .filter(|(_, command)| complete(command))
            .map(|(id, _)| *id)
            .collect();
        for id in waiting {
            self.start(id)?;
        }
        Ok(())
    }
}
