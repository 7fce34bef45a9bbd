//! The agent's loop: one thread that waits for the control stream, new data streams, stages, ended processes and
//! relays, and never for anything else.

mod bridging;
mod files;
mod gate;
mod lifecycle;
mod standstill;
mod warming;

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use protocol::message::{Configure, FromAgent, Resume, SpawnFailure, StreamKind, ToAgent};
use protocol::port::HOST_CID;
use rustix::event::epoll::EventFlags;
use rustix::process::{Pid, Signal};
use socket2::SockRef;

use crate::calls::Place;
use crate::cgroup::{Cgroup, Workload};
use crate::commands::Command;
use crate::control::{Control, ControlError};
use crate::identity::IdentityError;
use crate::limits::{CGROUP_REMOVE_WAIT, CONTROL_DIAL_WAIT, FATAL_WAIT};
use crate::poll::{Poll, Token};
use crate::program::Failure;
use crate::reaper::Reaper;
use crate::relay::set_nonblocking;
use crate::relays::Relays;
use crate::streams::{Arrived, Pending};
use crate::warm::Warm;
use files::FileStage;
use standstill::Standstill;

/// The cgroup in which files are read and written.
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
    /// Where the warm interpreter's program is written; its parent is there.
    pub warm_folder: PathBuf,
    /// Where the bridge for calls of the host's functions puts what programs need.
    pub calls_place: Place,
    /// Takes over clock, randomness and names.
    pub configure: fn(&Configure) -> Result<(), IdentityError>,
    /// Prepares for that which follows; called before the machine is saved.
    pub prepare_renewal: fn(),
    /// Takes over what is new in a restored machine.
    pub renew: fn(&Resume) -> Result<(), IdentityError>,
    /// A folder on the disk that outlives the machine, if there is one: what a command wrote is brought there when it has ended, before
    /// the host is told. It is open since before the first write, so that no error is missed (`syncfs(2)`).
    pub workspace: Option<File>,
    /// Dials another control stream, once the first is closed.
    pub redial: fn() -> io::Result<OwnedFd>,
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
    warm_folder: PathBuf,
    warm: Option<Warm>,
    calls_place: Place,
    /// The process that carries calls of the host's functions.
    bridge: Option<Pid>,
    /// How many processes the warm interpreter has had in reserve.
    spares: u32,
    configure: fn(&Configure) -> Result<(), IdentityError>,
    prepare_renewal: fn(),
    renew: fn(&Resume) -> Result<(), IdentityError>,
    workspace: Option<File>,
    redial: fn() -> io::Result<OwnedFd>,
    configured: bool,
    standstill: Standstill,
    gate: gate::Gate,
    /// How often the machine was restored: commands of former ones may still have cgroups of the same id.
    generation: u32,
    /// Commands of former machines that still run.
    inherited: Vec<(Pid, Cgroup)>,
    poll: Poll,
    reaper: Reaper,
    pending: Pending,
    commands: BTreeMap<u32, Command>,
    file_stages: BTreeMap<u32, FileStage>,
    next_file_stage: u32,
    relays: Relays,
    /// Cgroups of commands that ended, with the tries to remove them that are left.
    leftovers: Vec<(Cgroup, u32)>,
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
            warm_folder: setup.warm_folder,
            warm: None,
            calls_place: setup.calls_place,
            bridge: None,
            spares: 0,
            configure: setup.configure,
            prepare_renewal: setup.prepare_renewal,
            renew: setup.renew,
            workspace: setup.workspace,
            redial: setup.redial,
            configured: false,
            standstill: Standstill::default(),
            gate: gate::Gate::default(),
            generation: 0,
            inherited: Vec::new(),
            poll: Poll::new()?,
            reaper: Reaper::start()?,
            pending: Pending::default(),
            commands: BTreeMap::new(),
            file_stages: BTreeMap::new(),
            next_file_stage: 0,
            relays: Relays::default(),
            leftovers: Vec::new(),
        };
        agent
            .poll
            .add(agent.control.descriptor()?, Token::Control, EventFlags::IN)?;
        agent
            .poll
            .add(&agent.listener, Token::Listener, EventFlags::IN)?;
        agent
            .poll
            .add(&agent.reaper, Token::Reaper, EventFlags::IN)?;
        Ok(agent)
    }

    /// Runs until the host is gone, or the guest is of no more use, which the host is told.
    #[must_use]
    pub fn run(&mut self) -> AgentError {
        let Err(error) = self.serve();
        if !matches!(error, AgentError::Control(_)) {
            self.say_last(error.to_string());
        }
        error
    }

    /// Tells the host that the guest is of no use and gives it time to end the machine.
    fn say_last(&mut self, message: String) {
        let _ = self.control.send(&FromAgent::Fatal { message });
        let deadline = Instant::now() + FATAL_WAIT;
        while self.control.flush().is_ok() && self.control.receive(self.relays.buffer()).is_ok() {
            if Instant::now() >= deadline {
                return;
            }
            std::thread::sleep(CONTROL_DIAL_WAIT);
        }
    }

    fn serve(&mut self) -> Result<std::convert::Infallible, AgentError> {
        loop {
            let timeout = self.timeout(Instant::now());
            for (token, flags) in self.poll.wait(timeout)? {
                let handled = self.handle(token, flags);
                self.unless_restored(handled)?;
            }
            let now = Instant::now();
            self.relays.run_ready(now);
            let ticked = self.tick(now);
            self.unless_restored(ticked)?;
            self.adjust_interest()?;
        }
    }

    /// A failed control stream is none if the machine was restored.
    fn unless_restored(&mut self, result: Result<(), AgentError>) -> Result<(), AgentError> {
        match result {
            Err(AgentError::Control(error)) => self.control_broke(error),
            result => result,
        }
    }

    fn handle(&mut self, token: Token, flags: EventFlags) -> Result<(), AgentError> {
        match token {
            Token::Control => {
                self.control.flush()?;
                if !flags.difference(EventFlags::OUT).is_empty() {
                    for message in self.control.receive(self.relays.buffer())? {
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
            Token::Warm => self.warm_says()?,
            Token::Stage(id) => self.staged(id)?,
            Token::File(id) => self.file_host_gone(id),
            Token::RelayHost(id) => self.relays.host_event(id, flags),
            Token::RelayGuest(id) => self.relays.guest_event(id, flags),
        }
        Ok(())
    }

    fn obey(&mut self, message: ToAgent) -> Result<(), AgentError> {
        match message {
            ToAgent::Configure(configure) => {
                (self.configure)(&configure)?;
                self.bound_processes(configure.max_processes)?;
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
            ToAgent::WarmUp(spawn) => self.warm_up(&spawn)?,
            ToAgent::Freeze { close_streams } => self.freeze(close_streams)?,
            ToAgent::Thaw => self.thaw()?,
            ToAgent::Resume(resume) => self.resume(&resume)?,
            ToAgent::Gate => self.start_gate()?,
            // A host that knows more words than the agent has another version, which it was told.
            _ => {}
        }
        Ok(())
    }

    /// Takes over the ceiling of processes that the host has chosen; without one, the bound that is there stays.
    fn bound_processes(&self, max: Option<u32>) -> io::Result<()> {
        max.map_or(Ok(()), |max| self.workload.bound_processes(max))
    }

    fn accept(&mut self) {
        while !self.pending.is_full() {
            let Ok(stream) =
                rustix::net::accept_with(&self.listener, rustix::net::SocketFlags::CLOEXEC)
            else {
                return;
            };
            if !from_host(&stream) || set_nonblocking(&stream).is_err() {
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
        match arrived.header.kind {
            StreamKind::File(request) => {
                self.serve_file(request, arrived.descriptor);
                return Ok(());
            }
            StreamKind::Calls => {
                self.serve_calls(&arrived.descriptor);
                return Ok(());
            }
            _ => {}
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

    /// Does what is due by time.
    fn tick(&mut self, now: Instant) -> Result<(), AgentError> {
        self.pending.expire(now);
        let late: Vec<u32> = self
            .commands
            .iter()
            .filter(|(_, command)| self.due(command).is_some_and(|due| due <= now))
            .map(|(id, _)| *id)
            .collect();
        for id in late {
            if matches!(self.commands.get(&id), Some(Command::Starting(_))) {
                self.overdue(id, now)?;
                continue;
            }
            self.commands.remove(&id);
            let message = "The host did not open the command's streams in time";
            self.refuse(id, Failure::new(SpawnFailure::Invalid, message))?;
        }
        self.relays.tick(now);
        self.end_late_files(now);
        self.go_on_freezing(now)?;
        self.leftovers.retain_mut(|(cgroup, tries)| {
            *tries = tries.saturating_sub(1);
            cgroup.remove().is_err() && *tries > 0
        });
        Ok(())
    }

    /// When a command is waited for no longer. One that waits for a thaw waits for its host no longer.
    fn due(&self, command: &Command) -> Option<Instant> {
        let waits = matches!(command, Command::Gathering { .. }) && self.stands_still();
        command.deadline().filter(|_| !waits)
    }

    /// How long nothing is due by time.
    fn timeout(&self, now: Instant) -> Option<Duration> {
        if self.relays.has_ready() {
            return Some(Duration::ZERO);
        }
        let commands = self
            .commands
            .values()
            .filter_map(|command| self.due(command));
        let due = commands
            .chain(self.relays.deadline())
            .chain(self.pending.deadline())
            .chain(self.late_file_deadline())
            .min();
        let due = due.map(|due| due.saturating_duration_since(now));
        let leftovers = (!self.leftovers.is_empty()).then_some(CGROUP_REMOVE_WAIT);
        let freeze = self.freeze_wait();
        due.into_iter().chain(leftovers).chain(freeze).min()
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
            self.poll.modify(
                self.control.descriptor()?,
                Token::Control,
                EventFlags::IN | extra,
            )?;
            self.control_waits_to_write = backlog;
        }
        Ok(())
    }
}

/// Whether the peer is not a program in this guest, which must not pass for the host. Tests have no vsock.
fn from_host(stream: &OwnedFd) -> bool {
    let peer = SockRef::from(stream).peer_addr();
    peer.is_ok_and(|peer| {
        peer.as_vsock_address()
            .is_none_or(|(cid, _)| cid == HOST_CID)
    })
}

/// A stage reads as ordinary programs do.
fn set_blocking(stream: &OwnedFd) -> io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(stream)?;
    Ok(rustix::fs::fcntl_setfl(
        stream,
        flags.difference(rustix::fs::OFlags::NONBLOCK),
    )?)
}

fn path_bytes(cgroup: &Cgroup) -> Vec<u8> {
    std::os::unix::ffi::OsStrExt::as_bytes(cgroup.path().as_os_str()).to_vec()
}
