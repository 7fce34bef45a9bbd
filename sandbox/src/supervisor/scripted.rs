//! A supervisor whose machine and agent are the caller: for the fuzz targets, and compiled for them alone (feature `fuzzing`).

use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use jailer::{Bounds, MachineProcess, Options, Part};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use vmm::control::{ControlSocket, FromMachine};

use super::{GuestOptions, Supervisor};
use crate::clock::{nanos, now_ns};
use crate::event::Events;
use crate::shared::{MAX_COMMANDS, Shared};
use crate::state::{Over, Phase, Request};
use crate::text::MAX_QUOTED_CHARS;

/// The most descriptors that [`Scripted::machine_says`] attaches.
const MAX_ATTACHED: usize = 16;

/// The most characters of any sentence that tells of a machine's end: what is quoted of it, and words of our own.
const MAX_SENTENCE_CHARS: usize = MAX_QUOTED_CHARS + 200;

/// A process that does nothing, in the machine's place; one serves many supervisors, one after another.
#[derive(Debug)]
pub struct Idle {
    process: MachineProcess,
    /// The process reads its standard input to the end, which comes when this is closed.
    stdin: UnixStream,
}

impl Idle {
    /// Starts it; it ends with the thread that calls.
    ///
    /// # Errors
    /// Where the system makes no process.
    pub fn start() -> Result<Self, jailer::StartError> {
        let (ours, theirs) = UnixStream::pair().map_err(jailer::StartError::Descriptors)?;
        let bounds = Bounds {
            memory_mib: 32,
            vcpus: 1,
            max_file_bytes: 0,
        };
        let options = Options {
            leave_out: Part::ALL.into_iter().collect(),
            ..Options::new(bounds)
        };
        Ok(Self {
            process: jailer::start(Path::new("/bin/cat"), theirs.into(), options)?,
            stdin: ours,
        })
    }
}

/// The supervisor, and what it talks with.
#[derive(Debug)]
pub struct Scripted {
    supervisor: Supervisor,
    machine: ControlSocket,
    agent: Option<UnixStream>,
    stdin: UnixStream,
    is_over: bool,
}

impl Scripted {
    /// A supervisor whose guest is still booting.
    ///
    /// # Errors
    /// When the system is out of descriptors.
    pub fn new(idle: Idle) -> std::io::Result<Self> {
        let called_ns = now_ns();
        let shared = Arc::new(Shared::new(called_ns, Events::default())?);
        let (ours, machine) = ControlSocket::pair()?;
        let limit = Duration::from_secs(3600);
        let deadline = Some((called_ns.saturating_add(nanos(limit)), limit));
        let guest = GuestOptions {
            hostname: Some("scripted".to_owned()),
            ..GuestOptions::default()
        };
        Ok(Self {
            supervisor: Supervisor::new(&shared, ours, idle.process, guest, deadline),
            machine,
            agent: None,
            stdin: idle.stdin,
            is_over: false,
        })
    }

    /// The machine's process sends a packet with `count` descriptors, all of them copies of `attached`. An empty one, which would be
    /// the end of the socket, is not sent.
    pub fn machine_says(&self, packet: &[u8], attached: BorrowedFd<'_>, count: usize) {
        if packet.is_empty() {
            return;
        }
        let descriptors = vec![attached; count.min(MAX_ATTACHED)];
        let mut space =
            [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_ATTACHED))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        // A supervisor that is over does not read.
        let _ = sendmsg(
            &self.machine,
            &[std::io::IoSlice::new(packet)],
            &mut ancillary,
            flags,
        );
    }

    /// The guest dials; from then on [`Self::agent_says`] is heard on the newest stream.
    ///
    /// # Errors
    /// When the system is out of descriptors.
    pub fn guest_dials(&mut self, host_port: u32, guest_port: u32) -> std::io::Result<()> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        let message = FromMachine::GuestConnected {
            host_port,
            guest_port,
        };
        let _ = self.machine.try_send(&message, &[theirs.as_fd()]);
        self.agent = Some(ours);
        Ok(())
    }

    /// The agent writes; what its stream does not take is lost.
    pub fn agent_says(&mut self, bytes: &[u8]) {
        if let Some(agent) = &mut self.agent {
            let _ = agent.write(bytes);
        }
    }

    /// The agent closes its stream.
    pub fn agent_closes(&mut self) {
        self.agent = None;
    }

    /// A user starts a command.
    pub fn user_starts(&self) -> Option<u32> {
        let shared = &self.supervisor.shared;
        let id = shared.register_command("program".as_ref()).ok()?;
        shared
            .request_command(id, vec![1, 0, 0, 0, 0], Vec::new())
            .ok()?;
        Some(id)
    }

    /// A user wants to hear no more of a command.
    pub fn user_forgets(&self, command_id: u32) {
        self.supervisor.shared.forget(command_id);
    }

    /// A user ends the machine.
    pub fn user_ends(&self) {
        let _ = self.supervisor.shared.request(Request::End);
    }

    /// The machine's time is over now.
    pub fn time_is_over(&mut self) {
        self.supervisor.deadline = Some((now_ns(), Duration::ZERO));
    }

    /// One round of the supervisor's loop. False when the machine is over.
    ///
    /// # Panics
    /// Where something has grown beyond its bound, or a sentence could steer a terminal.
    pub fn turn(&mut self) -> bool {
        if self.is_over {
            return false;
        }
        self.supervisor.shared.wake();
        if let Err(reason) = self.supervisor.turn() {
            let is_booting = matches!(self.supervisor.shared.lock().phase, Phase::Booting);
            let sentence = if is_booting {
                reason.start_error().to_string()
            } else {
                match reason.over() {
                    Over::Crashed(crash) => crash.to_string(),
                    Over::Ended | Over::Limit(_) => String::new(),
                }
            };
            assert!(sentence.chars().count() <= MAX_SENTENCE_CHARS);
            assert!(!sentence.chars().any(char::is_control), "{sentence:?}");
            self.is_over = true;
        }
        let state = self.supervisor.shared.lock();
        assert!(state.commands.len() <= MAX_COMMANDS);
        !self.is_over
    }

    /// Ends it; the process is for the next.
    #[must_use]
    pub fn end(self) -> Idle {
        Idle {
            process: self.supervisor.process,
            stdin: self.stdin,
        }
    }
}
