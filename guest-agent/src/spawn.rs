//! Starting stages, and the ends of their pipes and terminals that the agent keeps.

use std::fs::File;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

use protocol::frame::{self, Decoder, MAX_TO_AGENT_BYTES};
use protocol::message::{Spawn, SpawnFailure, Stdio, TerminalSize};
use rustix::fs::MemfdFlags;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use rustix::pipe::PipeFlags;
use rustix::process::{Pid, Signal};
use rustix::pty::OpenptFlags;
use rustix::termios::Winsize;

use crate::limits::{MAX_REPORT_BYTES, START_WAIT, WARM_START_WAIT};
use crate::program::Failure;
use crate::relay::set_nonblocking;
use crate::stage::{self, MAX_DESCRIPTORS, Order, Report};
use crate::warm::{self, Warm};

/// The agent's program file, whichever root it has moved to.
pub const OWN_PROGRAM: &str = "/proc/self/exe";

/// A stage that was given its order.
#[derive(Debug)]
pub struct Stage {
    /// Its process, later the command's.
    pub pid: Pid,
    socket: OwnedFd,
    decoder: Decoder,
    ready: bool,
    /// Whether it was forked from the warm interpreter.
    is_warm: bool,
    /// Whether the agent has ended it, since it took too long.
    is_given_up: bool,
}

/// How a stage ended.
#[derive(Debug)]
#[non_exhaustive]
pub enum Outcome {
    /// The stage still prepares.
    Unknown,
    /// It has become the program.
    Started,
    /// It could not.
    Failed(Failure),
    /// A process of the warm interpreter can't be this command, or ended before it was: nothing of the command ran.
    Unfit,
}

impl Stage {
    /// Starts a stage and gives it its order, with the descriptors that belong to it.
    ///
    /// # Errors
    /// When the guest has no room for another process or descriptor.
    pub fn start(program: &str, order: &Order, descriptors: &[BorrowedFd<'_>]) -> io::Result<Self> {
        let order = memory_file(order)?;
        let (ours, theirs) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )?;
        set_nonblocking(&ours)?;
        let mut all = Vec::with_capacity(MAX_DESCRIPTORS);
        all.push(order.as_fd());
        all.extend_from_slice(descriptors);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !ancillary.push(SendAncillaryMessage::ScmRights(&all)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        rustix::net::sendmsg(
            &ours,
            &[IoSlice::new(b"!")],
            &mut ancillary,
            SendFlags::NOSIGNAL,
        )?;
        let child = Command::new(program)
            .arg0(stage::NAME)
            .env_clear()
            .stdin(theirs)
            .spawn()?;
        // Dropping the handle leaves the process alone; the reaper collects it.
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or(io::ErrorKind::InvalidData)?;
        Ok(Self {
            pid,
            socket: ours,
            decoder: Decoder::new(MAX_REPORT_BYTES),
            ready: false,
            is_warm: false,
            is_given_up: false,
        })
    }

    /// Has a process of the warm interpreter, which is in the command's cgroup already, become the command. It reports
    /// as a stage does.
    ///
    /// # Errors
    /// When the process can't be given its order.
    pub fn warm(
        pid: Pid,
        warm: &Warm,
        spawn: &Spawn,
        streams: &[BorrowedFd<'_>],
    ) -> io::Result<Self> {
        let (ours, theirs) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )?;
        set_nonblocking(&ours)?;
        let uid = warm::user_of(pid).ok_or(io::ErrorKind::NotFound)?;
        stage::own_streams(uid, streams.iter().copied())?;
        let mut descriptors = Vec::with_capacity(MAX_DESCRIPTORS);
        descriptors.push(theirs.as_fd());
        descriptors.extend_from_slice(streams);
        warm.order(pid, spawn, &descriptors)?;
        Ok(Self {
            pid,
            socket: ours,
            decoder: Decoder::new(MAX_REPORT_BYTES),
            ready: false,
            is_warm: true,
            is_given_up: false,
        })
    }

    /// Whether it was forked from the warm interpreter.
    #[must_use]
    pub fn is_warm(&self) -> bool {
        self.is_warm
    }

    /// How long it may take.
    #[must_use]
    pub fn limit(&self) -> Duration {
        if self.is_warm {
            WARM_START_WAIT
        } else {
            START_WAIT
        }
    }

    /// Ends the process, which took too long and has not been waited for. False if that was done before.
    pub fn give_up(&mut self) -> bool {
        // One that has just ended needs no signal.
        let _ = rustix::process::kill_process(self.pid, Signal::KILL);
        !std::mem::replace(&mut self.is_given_up, true)
    }

    /// Reads what the stage has said so far, up to the end of its socket.
    pub fn outcome(&mut self) -> Outcome {
        let mut bytes = [0; 1024];
        loop {
            match rustix::io::read(&self.socket, &mut bytes) {
                Ok(0) | Err(Errno::CONNRESET) => break,
                Ok(count) => self.decoder.push(bytes.get(..count).unwrap_or_default()),
                Err(Errno::INTR) => {}
                Err(_) => return Outcome::Unknown,
            }
            match self.decoder.next() {
                Ok(Some(Report::Failed { kind, message })) => {
                    return Outcome::Failed(Failure { kind, message });
                }
                Ok(Some(Report::Ready)) => self.ready = true,
                Ok(Some(Report::Unfit)) => return Outcome::Unfit,
                Ok(None) => {}
                Err(_) => break,
            }
        }
        self.last_word()
    }

    /// What it has come to when nothing more is to be waited for: its process has ended, or does not end. Another process may have got hold of
    /// its socket, which says nothing then.
    pub fn conclude(&mut self) -> Outcome {
        match self.outcome() {
            Outcome::Unknown => self.last_word(),
            outcome => outcome,
        }
    }

    fn last_word(&mut self) -> Outcome {
        // A failed exec is told behind `Ready`, and both may have come in one read.
        match self.decoder.next() {
            Ok(Some(Report::Failed { kind, message })) => {
                Outcome::Failed(Failure { kind, message })
            }
            // One that had said that it is ready may have run, and is not run twice.
            _ if self.is_given_up && (self.ready || !self.is_warm) => {
                Outcome::Failed(Failure::new(
                    SpawnFailure::Exhausted,
                    format!(
                        "The command was not started within {} s: its process was stopped, or the guest is too slow",
                        self.limit().as_secs()
                    ),
                ))
            }
            _ if self.ready => Outcome::Started,
            _ if self.is_warm => Outcome::Unfit,
            _ => Outcome::Failed(Failure::new(
                SpawnFailure::Exhausted,
                "The command could not be prepared: the guest ended its process for lack of memory",
            )),
        }
    }
}

impl AsFd for Stage {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn memory_file(order: &Order) -> io::Result<OwnedFd> {
    let descriptor = rustix::fs::memfd_create("order", MemfdFlags::CLOEXEC)?;
    let mut file = File::from(descriptor);
    frame::write(&mut file, order, 2 * MAX_TO_AGENT_BYTES).map_err(io::Error::other)?;
    Ok(file.into())
}

/// Both ends of a command's input and output.
#[derive(Debug)]
#[non_exhaustive]
pub enum Ends {
    /// Pipes.
    Pipes {
        /// The agent's, non-blocking: input if it is piped, output, error.
        ours: (Option<OwnedFd>, OwnedFd, OwnedFd),
        /// The command's, in that order.
        theirs: Vec<OwnedFd>,
    },
    /// A terminal.
    Terminal {
        /// The master, non-blocking.
        master: OwnedFd,
        /// The command's side.
        theirs: Vec<OwnedFd>,
    },
}

impl Ends {
    /// Makes what `stdio` asks for.
    ///
    /// # Errors
    /// When the guest is out of descriptors or terminals.
    pub fn new(stdio: Stdio) -> io::Result<Self> {
        match stdio {
            Stdio::Pipes { stdin } => {
                let mut theirs = Vec::with_capacity(3);
                let mut input = None;
                if stdin {
                    let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
                    set_nonblocking(&write)?;
                    theirs.push(read);
                    input = Some(write);
                }
                let (output, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
                set_nonblocking(&output)?;
                theirs.push(write);
                let (error, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
                set_nonblocking(&error)?;
                theirs.push(write);
                Ok(Self::Pipes {
                    ours: (input, output, error),
                    theirs,
                })
            }
            Stdio::Terminal(size) => {
                let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
                let master = rustix::pty::openpt(flags)?;
                rustix::pty::unlockpt(&master)?;
                resize(&master, size)?;
                let slave = rustix::pty::ioctl_tiocgptpeer(&master, flags)?;
                set_nonblocking(&master)?;
                Ok(Self::Terminal {
                    master,
                    theirs: vec![slave],
                })
            }
            _ => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Closes the command's side here, so that only the command holds it.
    #[must_use]
    pub fn without_theirs(mut self) -> Self {
        let (Self::Pipes { theirs, .. } | Self::Terminal { theirs, .. }) = &mut self;
        theirs.clear();
        self
    }

    /// What the stage gets.
    #[must_use]
    pub fn theirs(&self) -> Vec<BorrowedFd<'_>> {
        let (Self::Pipes { theirs, .. } | Self::Terminal { theirs, .. }) = self;
        theirs.iter().map(AsFd::as_fd).collect()
    }
}

/// Sets a terminal's size; the kernel tells its foreground processes if it is another one.
///
/// # Errors
/// That of the ioctl.
pub fn resize(master: impl AsFd, size: TerminalSize) -> io::Result<()> {
    let size = Winsize {
        ws_row: size.rows,
        ws_col: size.columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    Ok(rustix::termios::tcsetwinsize(master, size)?)
}
