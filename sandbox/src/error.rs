//! What can go wrong, one enum per operation.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use protocol::file::{FileFailure, FileFailureKind};

use crate::crash::Crash;
use crate::images::ImagesError;
use crate::limit::Limit;
use crate::text::one_line;
use crate::workspace::WorkspaceError;

/// Why a sandbox could not be started. No code of the user's has run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The data folder has no images.
    #[error(transparent)]
    Images(#[from] ImagesError),
    /// This machine cannot run virtual machines, as [`crate::host::HostReport::can_run`] says.
    #[error("{sentence}")]
    NoKvm {
        /// What is missing and what to do.
        sentence: String,
    },
    /// An option of the builder is out of its bounds.
    #[error("{sentence}")]
    InvalidOption {
        /// Which option, its value, and its bounds.
        sentence: String,
    },
    /// A file that the user named cannot be used.
    #[error("The {role} {} {problem}", path.display())]
    File {
        /// What the file was to be: `kernel`, `initramfs`, `disk`.
        role: &'static str,
        /// As it was named.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
        /// The system's own error, if one was the reason.
        source: Option<io::Error>,
    },
    /// There is no scratch disk.
    #[error("A scratch disk could not be made: {0}")]
    Scratch(#[from] WorkspaceError),
    /// A control group was required, and there can be none.
    #[error(
        "There is no control group for the machine: {why}. Run it in a group that is its user's own (under systemd: `systemd-run \
         --user --scope -p Delegate=yes …`), or do not require one"
    )]
    NoCgroup {
        /// Why not.
        why: String,
    },
    /// The program to start machines with was not found, or could not be started.
    #[error("The machine's process could not be started from {}", program.display())]
    Process {
        /// The program.
        program: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The machine could not be built from what was given: the kernel is none, the memory does not
    /// suffice.
    #[error("{sentence}")]
    Machine {
        /// What, and what to do.
        sentence: String,
    },
    /// The guest came up but cannot be used, for example since it found no root file system.
    #[error("{sentence}")]
    Guest {
        /// What the guest said.
        sentence: String,
    },
    /// The agent in the initramfs is of another version than this library.
    #[error(
        "The agent in the initramfs speaks version {agent}, this library speaks {library}: build the \
         images again with `cargo xtask setup`"
    )]
    Version {
        /// The agent's.
        agent: u32,
        /// This library's.
        library: u32,
    },
    /// The machine ended before the guest was ready.
    #[error("{0}")]
    Crashed(Crash),
    /// The sandbox was ended before its guest was ready.
    #[error("The sandbox was ended before its guest was ready")]
    Ended,
    /// The guest was not ready in time.
    #[error(
        "The guest was not ready within {} s: what its kernel prints tells more, or give it more time",
        limit.as_secs_f32()
    )]
    TimedOut {
        /// The sandbox's time, or the bound on a boot.
        limit: Duration,
    },
    /// The sandbox met a ceiling while its guest booted.
    #[error("The sandbox had used up its {0} before its guest was ready")]
    LimitExceeded(Limit),
    /// The system refused something that is no file of the user's: it is out of descriptors, memory or threads.
    #[error("{action} failed")]
    System {
        /// What was to be done.
        action: &'static str,
        /// Why it was not.
        source: io::Error,
    },
}

/// Why a command could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SpawnError {
    /// No such program, or its interpreter is missing: 127 for a shell.
    #[error("{0}")]
    NotFound(String),
    /// It is there but cannot be executed: 126 for a shell.
    #[error("{0}")]
    NotExecutable(String),
    /// The request itself cannot be met: user, working folder, arguments too long.
    #[error("{0}")]
    Invalid(String),
    /// The guest, or this process, has no more room: processes, memory, descriptors, commands.
    #[error("{0}")]
    Exhausted(String),
    /// The machine ended before it said whether the command runs.
    #[error("{0}")]
    MachineCrashed(Crash),
    /// The sandbox's time was over before the guest said whether the command runs.
    #[error("The sandbox's time was over before the command ran")]
    TimedOut,
    /// The sandbox has met another of its ceilings before the guest said whether the command runs.
    #[error("The sandbox had used up its {0} before the command ran")]
    LimitExceeded(Limit),
    /// The sandbox was ended before the guest said whether the command runs.
    #[error("The sandbox was ended before the command ran")]
    SandboxEnded,
    /// The system refused a socket pair.
    #[error("The command's streams could not be made")]
    Streams(#[source] io::Error),
    /// What is to be given as standard input, or the output, could not be moved.
    #[error("The command's output could not be read")]
    Output(#[source] io::Error),
}

impl SpawnError {
    /// Whether the command may have run, in part or whole, all the same.
    ///
    /// `false` means that nothing of it ran: the same call may be made again, here or in a new sandbox.
    #[must_use]
    pub fn may_have_run(&self) -> bool {
        match self {
            Self::NotFound(_)
            | Self::NotExecutable(_)
            | Self::Invalid(_)
            | Self::Exhausted(_)
            | Self::Streams(_) => false,
            Self::MachineCrashed(_)
            | Self::TimedOut
            | Self::LimitExceeded(_)
            | Self::SandboxEnded
            | Self::Output(_) => true,
        }
    }
}

/// Why something could not be done with the guest's files. Of a file that was to be written, nothing is left at its path, or what
/// was there before.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// The path or the mode is none.
    #[error("{0}")]
    Invalid(String),
    /// Nothing is there.
    #[error("{0}")]
    NotFound(String),
    /// The guest's user may not.
    #[error("{0}")]
    PermissionDenied(String),
    /// The guest has no room for it.
    #[error("{0}")]
    NoSpace(String),
    /// It is not what the operation is for: a folder, a device.
    #[error("{0}")]
    WrongKind(String),
    /// Anything else that the guest says.
    #[error("{0}")]
    Guest(String),
    /// It is above a bound.
    #[error("{what} is larger than {bound}")]
    TooLarge {
        /// What.
        what: &'static str,
        /// The bound, with its unit.
        bound: String,
    },
    /// The content could not be read.
    #[error("The file's content could not be read")]
    Source(#[source] io::Error),
    /// A file of the host could not be read or written.
    #[error("'{}' could not be copied", path.display())]
    Host {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The system refused a socket pair, or the stream to the guest failed.
    #[error("The stream to the guest failed")]
    Stream(#[source] io::Error),
    /// The machine ended before it was done.
    #[error("{0}")]
    MachineCrashed(Crash),
    /// The sandbox's time was over before it was done.
    #[error("The sandbox's time was over before the file was copied")]
    TimedOut,
    /// The sandbox has met another of its ceilings.
    #[error("The sandbox had used up its {0} before the file was copied")]
    LimitExceeded(Limit),
    /// The sandbox was ended before it was done.
    #[error("The sandbox was ended before the file was copied")]
    SandboxEnded,
}

impl From<FileFailure> for FileError {
    fn from(failure: FileFailure) -> Self {
        let message = one_line(failure.message.as_bytes());
        match failure.kind {
            FileFailureKind::NotFound => Self::NotFound(message),
            FileFailureKind::PermissionDenied => Self::PermissionDenied(message),
            FileFailureKind::NoSpace => Self::NoSpace(message),
            FileFailureKind::WrongKind => Self::WrongKind(message),
            _ => Self::Guest(message),
        }
    }
}

/// Why a running command could not be told something. A command that has ended is no error: there is
/// nothing left to tell.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SignalError {
    /// No such signal.
    #[error("{0} is no signal: 1 to 64 are")]
    InvalidSignal(i32),
    /// Only a command with a terminal has a size.
    #[error("The command has no terminal whose size could change")]
    NoTerminal,
    /// The guest does not take what it is told.
    #[error("The guest has not taken what it was told before")]
    Busy,
}
