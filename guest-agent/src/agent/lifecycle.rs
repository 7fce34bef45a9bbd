//! A command's life in the loop: asked for, started, running, ended.

use std::io;
use std::os::fd::AsFd;
use std::time::Instant;

use protocol::message::{ExitStatus, Exited, FromAgent, Spawn, SpawnFailure, Stdio, TerminalSize};
use rustix::event::epoll::EventFlags;
use rustix::process::{Pid, Signal};

use super::{Agent, AgentError, path_bytes};
use crate::cgroup::{Cgroup, Usage};
use crate::commands::{Command, Starting, Streams};
use crate::limits::{CGROUP_REMOVE_TRIES, END_WAIT, MAX_COMMANDS};
use crate::poll::Token;
use crate::program::Failure;
use crate::relay::{Kind, Relay};
use crate::root;
use crate::spawn::{self, Ends, Outcome, Stage};
use crate::stage::Order;
use crate::warm::Warm;

/// What a command has before its process.
struct Parts {
    cgroup: Cgroup,
    streams: Streams,
    ends: Ends,
    signals: Vec<Signal>,
}

impl Parts {
    fn new(cgroup: Cgroup, streams: Streams, ends: Ends) -> Self {
        Self {
            cgroup,
            streams,
            ends,
            signals: Vec::new(),
        }
    }
}

fn exhausted(what: &str, error: &io::Error) -> Failure {
    Failure::new(
        SpawnFailure::Exhausted,
        format!("The guest has no room for {what}: {error}"),
    )
}

impl Agent {
    pub(super) fn ask(&mut self, spawn: Spawn) -> Result<(), AgentError> {
        let id = spawn.command_id;
        let refusal = if !self.configured {
            Some((
                SpawnFailure::Invalid,
                "No command runs before the guest is configured",
            ))
        } else if self.commands.contains_key(&id) {
            // The running command must not be taken for the refused one, so nothing is said.
            return Ok(());
        } else if self.commands.len() >= MAX_COMMANDS {
            Some((
                SpawnFailure::Exhausted,
                "The guest runs as many commands as the agent can hold",
            ))
        } else {
            None
        };
        if let Some((kind, message)) = refusal {
            self.pending.take(id);
            return self.refuse(id, Failure::new(kind, message));
        }
        let now = Instant::now();
        self.commands.insert(id, Command::new(spawn, now));
        for arrived in self.pending.take(id) {
            self.arrived(arrived)?;
        }
        Ok(())
    }

    /// Starts a command that has all its streams, or will once what stands still goes on.
    pub(super) fn start(&mut self, id: u32) -> Result<(), AgentError> {
        if self.stands_still() {
            return Ok(());
        }
        let Some(Command::Gathering { spawn, streams, .. }) = self.commands.remove(&id) else {
            return Ok(());
        };
        let ends = match Ends::new(spawn.stdio) {
            Ok(ends) => ends,
            Err(error) => return self.refuse(id, exhausted("the command's streams", &error)),
        };
        if let Some((stage, cgroup)) = self.fork_warm(&spawn, &ends) {
            return self.await_warm(id, spawn, stage, Parts::new(cgroup, streams, ends));
        }
        // The warm interpreter outlives its command, and so does its cgroup.
        let name = if self.warm.as_ref().and_then(Warm::warming) == Some(id) {
            "warm".to_owned()
        } else {
            format!("{}-{id}", self.generation)
        };
        let cgroup = match self.workload.child(&name) {
            Ok(cgroup) => cgroup,
            Err(error) => return self.refuse(id, exhausted("the command's cgroup", &error)),
        };
        self.start_anew(id, *spawn, Parts::new(cgroup, streams, ends))
    }

    /// Waits for a process of the warm interpreter to become a command.
    fn await_warm(
        &mut self,
        id: u32,
        spawn: Box<Spawn>,
        stage: Stage,
        parts: Parts,
    ) -> Result<(), AgentError> {
        let Parts {
            cgroup,
            streams,
            ends,
            signals,
        } = parts;
        self.poll
            .add(&stage, Token::Stage(id), EventFlags::IN | EventFlags::RDHUP)?;
        let starting = Starting {
            deadline: Instant::now() + stage.limit(),
            stage,
            cgroup,
            streams,
            // The command's side is kept in case that it has to be started anew.
            ends,
            signals,
            exit: None,
            anew: Some(spawn),
        };
        self.commands
            .insert(id, Command::Starting(Box::new(starting)));
        Ok(())
    }

    /// Starts a command through a stage.
    fn start_anew(&mut self, id: u32, mut spawn: Spawn, parts: Parts) -> Result<(), AgentError> {
        let Parts {
            cgroup,
            streams,
            ends,
            signals,
        } = parts;
        let warm_input = self.warm.as_mut().and_then(|warm| warm.take_input(id));
        let mut theirs = ends.theirs();
        if let Some(input) = &warm_input {
            spawn.stdio = Stdio::Pipes { stdin: true };
            theirs.insert(0, input.as_fd());
        }
        let order = Order::Run {
            cgroup: path_bytes(&cgroup),
            spawn,
            link_calls: warm_input.is_some().then(|| self.calls_place.clone()),
        };
        let started = Stage::start(&self.stage_program, &order, &theirs);
        let stage = match started {
            Ok(stage) => stage,
            Err(error) => {
                self.leftovers.push((cgroup, CGROUP_REMOVE_TRIES));
                return self.refuse(id, exhausted("the command's process", &error));
            }
        };
        if warm_input.is_some() {
            self.watch_warm()?;
        }
        self.reaper.watch();
        self.poll
            .add(&stage, Token::Stage(id), EventFlags::IN | EventFlags::RDHUP)?;
        let starting = Starting {
            deadline: Instant::now() + stage.limit(),
            stage,
            cgroup,
            streams,
            ends: ends.without_theirs(),
            signals,
            exit: None,
            anew: None,
        };
        self.commands
            .insert(id, Command::Starting(Box::new(starting)));
        Ok(())
    }

    /// Looks how far a stage has come.
    pub(super) fn staged(&mut self, id: u32) -> Result<(), AgentError> {
        let Some(Command::Starting(starting)) = self.commands.get_mut(&id) else {
            return Ok(());
        };
        // A process that has ended has said all.
        let outcome = match starting.exit {
            Some(_) => starting.stage.conclude(),
            None => starting.stage.outcome(),
        };
        self.settle_start(id, outcome)
    }

    /// Ends a stage that takes too long, and waits for it no longer when it does not end.
    pub(super) fn overdue(&mut self, id: u32, now: Instant) -> Result<(), AgentError> {
        let Some(Command::Starting(starting)) = self.commands.get_mut(&id) else {
            return Ok(());
        };
        if starting.stage.give_up() {
            starting.deadline = now + END_WAIT;
            return Ok(());
        }
        let outcome = starting.stage.conclude();
        self.settle_start(id, outcome)
    }

    /// Acts on what a stage has come to.
    fn settle_start(&mut self, id: u32, outcome: Outcome) -> Result<(), AgentError> {
        if matches!(outcome, Outcome::Unknown) {
            return Ok(());
        }
        let Some(Command::Starting(starting)) = self.commands.remove(&id) else {
            return Ok(());
        };
        let Starting {
            stage,
            cgroup,
            streams,
            ends,
            signals,
            exit,
            anew,
            deadline: _,
        } = *starting;
        match (outcome, anew) {
            (Outcome::Failed(failure), _) => {
                self.leftovers.push((cgroup, CGROUP_REMOVE_TRIES));
                return self.refuse(id, failure);
            }
            (Outcome::Unfit, Some(spawn)) => {
                let parts = Parts {
                    cgroup,
                    streams,
                    ends,
                    signals,
                };
                return self.start_anew(id, *spawn, parts);
            }
            _ => {}
        }
        let ends = ends.without_theirs();
        let warm = stage.is_warm();
        let mut terminal_relay = None;
        match ends {
            Ends::Pipes {
                ours: (input, output, error),
                ..
            } => {
                for (kind, host, guest) in [
                    (Kind::Input, streams.input, input),
                    (Kind::Output, streams.output, Some(output)),
                    (Kind::Output, streams.error, Some(error)),
                ] {
                    if let (Some(host), Some(guest)) = (host, guest) {
                        self.relays
                            .add(Relay::new(id, kind, host, guest), &self.poll)?;
                    }
                }
            }
            Ends::Terminal { master, .. } => {
                if let Some(host) = streams.terminal {
                    terminal_relay = Some(
                        self.relays
                            .add(Relay::new(id, Kind::Terminal, host, master), &self.poll)?,
                    );
                }
            }
        }
        let mut command = Command::Running {
            pid: stage.pid,
            cgroup,
            terminal_relay,
        };
        for signal in signals {
            command.signal(signal);
        }
        self.commands.insert(id, command);
        self.control.send(&FromAgent::Spawned {
            command_id: id,
            warm,
        })?;
        match exit {
            Some(status) => self.exited(id, status),
            None => Ok(()),
        }
    }

    pub(super) fn resize(&self, command_id: u32, size: TerminalSize) {
        let master = match self.commands.get(&command_id) {
            Some(Command::Running {
                terminal_relay: Some(relay),
                ..
            }) => self.relays.guest(*relay),
            Some(Command::Starting(starting)) => match &starting.ends {
                Ends::Terminal { master, .. } => Some(master.as_fd()),
                Ends::Pipes { .. } => None,
            },
            _ => None,
        };
        // A terminal that is just being closed needs no size.
        let _ = master.map(|master| spawn::resize(master, size));
    }

    pub(super) fn reaped(&mut self, pid: Pid, status: ExitStatus) -> Result<(), AgentError> {
        self.gate_may_have_ended(pid);
        if self.file_stage_ended(pid) {
            return Ok(());
        }
        if self.bridge.take_if(|bridge| *bridge == pid).is_some() {
            return Ok(());
        }
        let found = self
            .commands
            .iter_mut()
            .find(|(_, command)| command.pid() == Some(pid));
        let Some((id, command)) = found.map(|(id, command)| (*id, command)) else {
            self.inherited_ended(pid);
            match &mut self.warm {
                Some(warm) if warm.server() == Some(pid) => self.forget_warm(),
                Some(warm) => {
                    let left = warm.ended(pid);
                    self.leftovers
                        .extend(left.map(|cgroup| (cgroup, CGROUP_REMOVE_TRIES)));
                }
                None => {}
            }
            return Ok(());
        };
        if let Command::Starting(starting) = command {
            // What it said before it ended is still in its socket.
            starting.exit = Some(status);
            return self.staged(id);
        }
        self.exited(id, status)
    }

    pub(super) fn exited(&mut self, id: u32, status: ExitStatus) -> Result<(), AgentError> {
        let Some(Command::Running { cgroup, .. }) = self.commands.remove(&id) else {
            return Ok(());
        };
        let usage = cgroup.usage();
        // If the cgroup can't be killed it is gone.
        let _ = cgroup.kill();
        self.leftovers.push((cgroup, CGROUP_REMOVE_TRIES));
        self.not_warmed(id);
        self.ended(id, status, usage)?;
        if let Some(warm) = &mut self.warm {
            warm.want_spare();
        }
        Ok(())
    }

    /// Tells the host of a command's end, and waits for the rest of its output.
    pub(super) fn ended(
        &mut self,
        id: u32,
        status: ExitStatus,
        usage: Usage,
    ) -> Result<(), AgentError> {
        let now = Instant::now();
        self.relays.command_ended(id, now);
        // The machine may be killed at any time after this. A disk that fails has not failed the programs that wrote to memory.
        let is_kept = self
            .workspace
            .as_ref()
            .is_none_or(|folder| rustix::fs::syncfs(folder).is_ok());
        let (disk_used_bytes, disk_free_bytes) = root::disk_bytes();
        self.control.send(&FromAgent::Exited(Exited {
            command_id: id,
            status,
            oom_kills: usage.oom_kills,
            peak_memory_bytes: usage.peak_memory_bytes,
            cpu_time_us: usage.cpu_time_us,
            process_limit_hits: usage.process_limit_hits,
            peak_processes: usage.peak_processes,
            disk_used_bytes,
            disk_free_bytes,
            is_kept,
        }))?;
        Ok(())
    }

    pub(super) fn refuse(&mut self, command_id: u32, failure: Failure) -> Result<(), AgentError> {
        self.not_warmed(command_id);
        let Failure { kind, message } = failure;
        Ok(self.control.send(&FromAgent::SpawnFailed {
            command_id,
            kind,
            message,
        })?)
    }
}
