//! What can go wrong with a context.

use std::io;

use super::MAX_CODE_BYTES;
use crate::crash::Crash;
use crate::error::SpawnError;
use crate::limit::Limit;
use crate::outcome::Outcome;

/// Why a run has no result. An exception of the code is none of these: it is in the [`Evaluation`](super::Evaluation).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PythonError {
    /// The interpreter did not start.
    #[error(transparent)]
    Spawn(#[from] SpawnError),
    /// The interpreter started and did not become a context: it is none, or too old.
    #[error("Python could not be made a context: {0}")]
    Unfit(String),
    /// The code is longer than [`MAX_CODE_BYTES`].
    #[error("Code of {0} bytes is above the bound of {MAX_CODE_BYTES}")]
    TooLong(usize),
    /// The interpreter has ended: the code ended it (`os._exit`, a crash of an extension), it ran out of memory, or it was killed. The state
    /// is lost; [`Python::restart`](super::Python::restart) makes a new one.
    #[error("Python has ended and its state is lost: {0:?}")]
    Ended(Outcome),
    /// The code did not end when it was interrupted at its deadline; the interpreter was killed. The state is lost;
    /// [`Python::restart`](super::Python::restart) makes a new one.
    #[error(
        "The code went on after its deadline and an interrupt: Python was ended and its state is lost"
    )]
    Stuck,
    /// The machine ended.
    #[error("{0}")]
    MachineCrashed(Crash),
    /// The sandbox's time was over.
    #[error("The sandbox's time was over before the code ended")]
    TimedOut,
    /// The sandbox has met another of its ceilings.
    #[error("The sandbox had used up its {0} before the code ended")]
    LimitExceeded(Limit),
    /// The sandbox was ended.
    #[error("The sandbox was ended before the code ended")]
    SandboxEnded,
    /// The guest says what no context would: it was taken over.
    #[error("The guest broke the protocol of Python contexts")]
    Misbehaved,
    /// The stream to the guest failed.
    #[error("The stream to Python failed")]
    Stream(#[source] io::Error),
}
