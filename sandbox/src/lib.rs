//! Runs code that nobody has read inside its own KVM virtual machine.
//!
//! A [`Sandbox`] is one virtual machine in one process of its own. Inside it, a [`Command`] is what
//! [`std::process::Command`] is outside: it is built, spawned, waited for. What differs is what can go
//! wrong, and [`Outcome`] says it: a time-out, lack of memory, a machine that crashed.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! sandvmm::init(); // first in `main`: the program is started again as the machine's process
//! let sandbox = sandvmm::Sandbox::builder().memory_mib(256).start()?;
//! let output = sandbox.command("python3").arg("-c").arg("print(6 * 7)").output()?;
//! assert_eq!(output.stdout, b"42\n");
//! # Ok(()) }
//! ```
//!
//! Everything that a guest can say, hold or delay is bounded; the bounds are named constants beside the
//! code that keeps them.
#![forbid(unsafe_code)]

#[cfg(feature = "tokio")]
mod asynchronous;
mod builder;
mod calls;
mod capture;
pub mod cell;
mod child;
mod clock;
mod command;
mod control_stream;
mod crash;
pub mod egress;
mod error;
mod event;
mod file;
mod files;
mod freeze;
#[cfg(test)]
mod handles;
pub mod host;
mod images;
mod init;
mod limit;
mod meter;
mod name;
mod outcome;
mod pool;
mod program;
mod publish;
mod python;
mod randomness;
mod sandbox;
mod save;
mod scratch;
pub mod script;
pub mod session;
mod shared;
mod spans;
mod state;
mod stream;
mod supervisor;
pub mod template;
mod text;
mod workspace;

#[cfg(feature = "tokio")]
pub use asynchronous::AsyncEnd;
pub use builder::SandboxBuilder;
pub use calls::{
    CallLimits, HostFunctionError, MAX_CONCURRENCY, MAX_HOST_FUNCTIONS, is_host_function_name,
};
pub use child::Child;
pub use clock::{Clocks, CommandClocks};
pub use command::{Command, DEFAULT_OUTPUT_LIMIT_BYTES, MAX_FILE_BYTES, Output, Stdio};
pub use crash::{Crash, CrashKind};
pub use error::{FileError, SignalError, SpawnError, StartError};
pub use event::{Event, EventKind, MAX_DENIED_EVENTS};
pub use files::{
    ChangeKind, CopiedIn, CopiedOut, CopyLimits, Entry, FileChange, FileReader, FileType,
    FileWatch, Files, MAX_LISTED_ENTRIES, MAX_READ_BYTES, Metadata,
};
pub use freeze::FreezeError;
pub use images::{Images, ImagesError};
pub use init::{init, keep_descriptors};
pub use limit::Limit;
pub use name::{MAX_NAME_BYTES, is_name};
pub use outcome::{Completion, Ended, ExitStatus, Outcome, Usage};
pub use pool::{Pool, PoolBuilder, PoolError, Pooled};
pub use publish::PublishedPort;
pub use python::{
    Evaluation, MAX_CODE_BYTES, MAX_DISPLAYS, MAX_EVALUATION_OUTPUT_BYTES, OutputStream, Python,
    PythonCall, PythonError, PythonException, Representations,
};
pub use sandbox::Sandbox;
pub use save::SaveError;
pub use shared::CommandInfo;
pub use stream::{ChildStderr, ChildStdin, ChildStdout, ChildTerminal};
pub use template::{
    PauseError, PausedSandbox, StillPaused, Template, TemplateBuilder, TemplateError,
};
pub use workspace::{
    DEFAULT_QUOTA_MIB, MAX_QUOTA_MIB, MIN_QUOTA_MIB, Workspace, WorkspaceError, WorkspaceInfo,
};

/// The supervisor against a machine and an agent that say anything: for the project's fuzz targets, and no part of the library.
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing {
    pub use crate::supervisor::scripted::{Idle, Scripted};
}
