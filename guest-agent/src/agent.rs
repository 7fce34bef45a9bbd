//! The agent's loop: one thread that waits for the control stream, new data streams, stages, ended processes and
//! relays, and never for anything else.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use protocol::frame::{self, MAX_FROM_AGENT_BYTES};
use protocol::message::{
    Configure, ExitStatus, Exited, FileWritten, FromAgent, Spawn, SpawnFailure, StreamKind,
    TerminalSize, ToAgent, WriteFile,
};
use rustix::event::epoll::EventFlags;
use rustix::process::{Pid, Signal};

use crate::cgroup::{Cgroup, Workload};
use crate::commands::{Command, Starting};
use crate::control::{Control, ControlError};
use crate::identity::IdentityError;
use crate::limits::{
    CGROUP_REMOVE_TRIES, CGROUP_REMOVE_WAIT, MAX_COMMANDS, MAX_FILE_WRITERS, RELAY_BYTES,
};
use crate::poll::{Poll, Token};
use crate::program::Failure;
use crate::reaper::Reaper;
use crate::relay::{Kind, Relay, set_nonblocking};
use crate::relays::Relays;
use crate::spawn::{self, Ends, Outcome, Stage};
use crate::stage::Order;
use crate::streams::{Arrived, Pending};

/// The cgroup in which files are written.
const FILES_CGROUP: &str = "files";

/// What the loop stands on, so that tests can put it on a host's sockets.
#[derive(Debug)]
pub struct Setup {
    /// The control stream, behind `Hello`.
    pub control: OwnedFd,
    /// A listening, non-blocking socket for data streams.
    pub listener: OwnedFd,
    /// The cgroup of all commands.
    pub workload: Workload,
    /// The program file that plays the stage.
    pub stage_program: String,
    /// Takes over clock, randomness and names.
    pub configure: fn(&Configure) -> Result<(), IdentityError>,
}

/// Why the loop ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AgentError {
    /// The host can't be talked to any more.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The guest can't be given its identity.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The loop itself can't go on.
    #[error("The agent's loop failed: {0}")]
    Loop(#[from] io::Error),
}

/// The state of the loop.
#[derive(Debug)]
pub struct Agent {
    control: Control,
    control_waits_to_write: bool,
    listener: OwnedFd,
    listening: bool,
    workload: Workload,
    files_cgroup: Cgroup,
    stage_program: String,
    configure: fn(&Configure) -> Result<(), IdentityError>,
    configured: bool,
    poll: Poll,
    reaper: Reaper,
    pending: Pending,
    commands: BTreeMap<u32, Command>,
    writers: Vec<Pid>,
    relays: Relays,
    /// Cgroups of commands that ended, with the tries to remove them that are left.
    leftovers: Vec<(Cgroup, u32)>,
    buffer: Vec<u8>,
}

impl Agent {
    /// Prepares the loop.
    ///
    /// # Errors
    /// When the guest has no room for its descriptors or its thread.
    pub fn new(setup: Setup) -> io::Result<Self> {
        let agent = Self {
            control: Control::new(setup.control)?,
            control_waits_to_write: false,
            listener: setup.listener,
            listening: true,
            files_cgroup: setup.workload.child(FILES_CGROUP)?,
            workload: setup.workload,
            stage_program: setup.stage_program,
            configure: setup.configure,
            configured: false,
            poll: Poll::new()?,
            reaper: Reaper::start()?,
            pending: Pending::default(),
            commands: BTreeMap::new(),
            writers: Vec::new(),
            relays: Relays::default(),
            leftovers: Vec::new(),
            buffer: vec![0; RELAY_BYTES],
        };
        agent
            .poll
            .add(&agent.control, Token::Control, EventFlags::IN)?;
        agent
            .poll
            .add(&agent.listener, Token::Listener, EventFlags::IN)?;
        agent
            .poll
            .add(&agent.reaper, Token::Reaper, EventFlags::IN)?;
        Ok(agent)
    }

    /// Runs until the host is gone.
    ///
    /// # Errors
    /// Always one: see [`AgentError`].
    pub fn run(&mut self) -> Result<std::convert::Infallible, AgentError> {
        loop {
            let timeout = self.timeout(Instant::now());
            for (token, flags) in self.poll.wait(timeout)? {
                self.handle(token, flags)?;
            }
            let now = Instant::now();
            self.relays.run_ready(now);
            self.tick(now)?;
            self.adjust_interest()?;
        }
    }

    fn handle(&mut self, token: Token, flags: EventFlags) -> Result<(), AgentError> {
        match token {
            Token::Control => {
                self.control.flush()?;
                if !flags.difference(EventFlags::OUT).is_empty() {
                    for message in self.control.receive(&mut self.buffer)? {
                        self.obey(message)?;
                    }
                }
            }
            Token::Listener => self.accept(),
            Token::Reaper => {
                for (pid, status) in self.reaper.reap() {
                    self.reaped(pid, status)?;
                }
            }
            Token::Pending(id) => {
                if let Some(arrived) = self.pending.read(id) {
                    let _ = self.poll.remove(&arrived.descriptor);
                    self.arrived(arrived)?;
                }
            }
            Token::Stage(id) => self.staged(id)?,
            Token::RelayHost(id) => self.relays.host_event(id, flags),
            Token::RelayGuest(id) => self.relays.guest_event(id, flags),
        }
        Ok(())
    }

    fn obey(&mut self, message: ToAgent) -> Result<(), AgentError> {
        match message {
            ToAgent::Configure(configure) => {
                (self.configure)(&configure)?;
                self.configured = true;
            }
            ToAgent::Spawn(spawn) => self.ask(spawn)?,
            ToAgent::Signal { command_id, signal } => {
                if let (Some(command), Some(signal)) = (
                    self.commands.get_mut(&command_id),
                    Signal::from_named_raw(signal),
                ) {
                    command.signal(signal);
                }
            }
            ToAgent::Kill { command_id } => {
                let cgroup = self.commands.get(&command_id).and_then(Command::cgroup);
                // A cgroup that is gone has nothing to kill.
                let _ = cgroup.map(Cgroup::kill);
            }
            ToAgent::Resize { command_id, size } => self.resize(command_id, size),
            // A host that knows more words than the agent has another version, which it was told.
            _ => {}
        }
        Ok(())
    }

    fn ask(&mut self, spawn: Spawn) -> Result<(), AgentError> {
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

    fn accept(&mut self) {
        while !self.pending.is_full() {
            let Ok(stream) =
                rustix::net::accept_with(&self.listener, rustix::net::SocketFlags::CLOEXEC)
            else {
                return;
            };
            if set_nonblocking(&stream).is_err() {
                continue;
            }
            let id = self.pending.add(stream, Instant::now());
            let Some(descriptor) = self.pending.descriptor(id) else {
                continue;
            };
            // Without an event the stream is closed at its deadline.
            let _ = self.poll.add(
                descriptor,
                Token::Pending(id),
                EventFlags::IN | EventFlags::RDHUP,
            );
        }
    }

    fn arrived(&mut self, arrived: Arrived) -> Result<(), AgentError> {
        if let StreamKind::WriteFile(file) = arrived.header.kind {
            self.write_file(file, &arrived.descriptor);
            return Ok(());
        }
        let id = arrived.header.command_id;
        let Some(command) = self.commands.get_mut(&id) else {
            self.pending.keep(arrived, Instant::now());
            return Ok(());
        };
        let Command::Gathering { spawn, streams, .. } = command else {
            return Ok(());
        };
        streams.put(spawn.stdio, &arrived.header.kind, arrived.descriptor);
        if streams.complete(spawn.stdio) {
            self.start(id)?;
        }
        Ok(())
    }

    fn start(&mut self, id: u32) -> Result<(), AgentError> {
        let Some(Command::Gathering { spawn, streams, .. }) = self.commands.remove(&id) else {
            return Ok(());
        };
        let exhausted = |what: &str, error: &io::Error| {
            Failure::new(
                SpawnFailure::Exhausted,
                format!("The guest has no room for {what}: {error}"),
            )
        };
        let ends = match Ends::new(spawn.stdio) {
            Ok(ends) => ends,
            Err(error) => return self.refuse(id, exhausted("the command's streams", &error)),
        };
        let cgroup = match self.workload.child(&id.to_string()) {
            Ok(cgroup) => cgroup,
            Err(error) => return self.refuse(id, exhausted("the command's cgroup", &error)),
        };
        let order = Order::Run {
            cgroup: path_bytes(&cgroup),
            spawn: *spawn,
        };
        let started = Stage::start(&self.stage_program, &order, &ends.theirs());
        let stage = match started {
            Ok(stage) => stage,
            Err(error) => {
                self.leftovers.push((cgroup, CGROUP_REMOVE_TRIES));
                return self.refuse(id, exhausted("the command's process", &error));
            }
        };
        self.reaper.watch();
        self.poll
            .add(&stage, Token::Stage(id), EventFlags::IN | EventFlags::RDHUP)?;
        let ends = ends.without_theirs();
        let starting = Starting {
            stage,
            cgroup,
            streams,
            ends,
            signals: Vec::new(),
            exit: None,
        };
        self.commands
            .insert(id, Command::Starting(Box::new(starting)));
        Ok(())
    }

    /// Looks how far a stage has come.
    fn staged(&mut self, id: u32) -> Result<(), AgentError> {
        let Some(Command::Starting(starting)) = self.commands.get_mut(&id) else {
            return Ok(());
        };
        let outcome = starting.stage.outcome();
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
        } = *starting;
        if let Outcome::Failed(failure) = outcome {
            self.leftovers.push((cgroup, CGROUP_REMOVE_TRIES));
            return self.refuse(id, failure);
        }
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
        self.control.send(&FromAgent::Spawned { command_id: id })?;
        match exit {
            Some(status) => self.exited(id, status),
            None => Ok(()),
        }
    }

    fn resize(&self, command_id: u32, size: TerminalSize) {
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

    fn reaped(&mut self, pid: Pid, status: ExitStatus) -> Result<(), AgentError> {
        if let Some(place) = self.writers.iter().position(|writer| *writer == pid) {
            self.writers.swap_remove(place);
            return Ok(());
        }
        let found = self
            .commands
            .iter_mut()
            .find(|(_, command)| command.pid() == Some(pid));
        let Some((id, command)) = found.map(|(id, command)| (*id, command)) else {
            return Ok(());
        };
        if let Command::Starting(starting) = command {
            // What it said before it ended is still in its socket.
            starting.exit = Some(status);
            return self.staged(id);
        }
        self.exited(id, status)
    }

    fn exited(&mut self, id: u32, status: ExitStatus) -> Result<(), AgentError> {
        let Some(Command::Running { cgroup, .. }) = self.commands.remove(&id) else {
            return Ok(());
        };
        let usage = cgroup.usage();
        // If the cgroup can't be killed it is gone.
        let _ = cgroup.kill();
        self.leftovers.push((cgroup, CGROUP_REMOVE_TRIES));
        let now = Instant::now();
        self.relays.command_ended(id, now);
        self.control.send(&FromAgent::Exited(Exited {
            command_id: id,
            status,
            oom_kills: usage.oom_kills,
            peak_memory_bytes: usage.peak_memory_bytes,
            cpu_time_us: usage.cpu_time_us,
        }))?;
        Ok(())
    }

    fn write_file(&mut self, file: WriteFile, stream: &OwnedFd) {
        let sentence = if !self.configured {
            "No file is written before the guest is configured".to_owned()
        } else if self.writers.len() >= MAX_FILE_WRITERS {
            "The guest is writing as many files as the agent allows".to_owned()
        } else {
            match self.start_writer(file, stream) {
                Ok(()) => return,
                Err(error) => format!("The guest has no room to write a file: {error}"),
            }
        };
        let answer = FileWritten {
            result: Err(sentence),
        };
        if let Ok(bytes) = frame::encode(&answer, MAX_FROM_AGENT_BYTES) {
            // The stream is new, so that its buffer takes the answer; else the close is the answer.
            let _ = rustix::io::write(stream, &bytes);
        }
    }

    fn start_writer(&mut self, file: WriteFile, stream: &OwnedFd) -> io::Result<()> {
        // The stage reads as ordinary programs do.
        let flags = rustix::fs::fcntl_getfl(stream)?;
        rustix::fs::fcntl_setfl(stream, flags.difference(rustix::fs::OFlags::NONBLOCK))?;
        let order = Order::Write {
            cgroup: path_bytes(&self.files_cgroup),
            file,
        };
        let stage = Stage::start(&self.stage_program, &order, &[stream.as_fd()])?;
        self.writers.push(stage.pid);
        self.reaper.watch();
        Ok(())
    }

    fn refuse(&mut self, command_id: u32, failure: Failure) -> Result<(), AgentError> {
        let Failure { kind, message } = failure;
        Ok(self.control.send(&FromAgent::SpawnFailed {
            command_id,
            kind,
            message,
        })?)
    }

    /// Does what is due by time.
    fn tick(&mut self, now: Instant) -> Result<(), AgentError> {
        self.pending.expire(now);
        let late = |command: &Command| matches!(command, Command::Gathering { deadline, .. } if *deadline <= now);
        let late: Vec<u32> = self
            .commands
            .iter()
            .filter(|(_, command)| late(command))
            .map(|(id, _)| *id)
            .collect();
        for id in late {
            self.commands.remove(&id);
            let message = "The host did not open the command's streams in time";
            self.refuse(id, Failure::new(SpawnFailure::Invalid, message))?;
        }
        self.relays.tick(now);
        self.leftovers.retain_mut(|(cgroup, tries)| {
            *tries = tries.saturating_sub(1);
            cgroup.remove().is_err() && *tries > 0
        });
        Ok(())
    }

    /// How long nothing is due by time.
    fn timeout(&self, now: Instant) -> Option<Duration> {
        if self.relays.has_ready() {
            return Some(Duration::ZERO);
        }
        let commands = self.commands.values().filter_map(|command| match command {
            Command::Gathering { deadline, .. } => Some(*deadline),
            _ => None,
        });
        let due = commands
            .chain(self.relays.deadline())
            .chain(self.pending.deadline())
            .min();
        let due = due.map(|due| due.saturating_duration_since(now));
        let leftovers = (!self.leftovers.is_empty()).then_some(CGROUP_REMOVE_WAIT);
        due.into_iter().chain(leftovers).min()
    }

    /// Waits for the listener only while there is room, and for room on the control stream only when needed.
    fn adjust_interest(&mut self) -> io::Result<()> {
        let listening = !self.pending.is_full();
        if listening != self.listening {
            let flags = if listening {
                EventFlags::IN
            } else {
                EventFlags::empty()
            };
            self.poll.modify(&self.listener, Token::Listener, flags)?;
            self.listening = listening;
        }
        let backlog = self.control.has_backlog();
        if backlog != self.control_waits_to_write {
            let extra = if backlog {
                EventFlags::OUT
            } else {
                EventFlags::empty()
            };
            self.poll
                .modify(&self.control, Token::Control, EventFlags::IN | extra)?;
            self.control_waits_to_write = backlog;
        }
        Ok(())
    }
}

fn path_bytes(cgroup: &Cgroup) -> Vec<u8> {
    std::os::unix::ffi::OsStrExt::as_bytes(cgroup.path().as_os_str()).to_vec()
}
