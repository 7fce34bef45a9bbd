//! Having a machine write itself into two files.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use vmm::control::{Taken, Then};

use crate::crash::Crash;
use crate::limit::Limit;
use crate::shared::{ANSWER_LIMIT, Shared};
use crate::state::{Over, Refused, Request, State};

/// How much longer than [`ANSWER_LIMIT`] a machine may take to write itself, for each GiB of its memory: a slow disk's pace.
const LIMIT_PER_GIB: Duration = Duration::from_secs(20);

/// Where saving a machine stands.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) enum Saving {
    /// Nobody has asked.
    #[default]
    Idle,
    /// The machine was asked.
    Asked,
    /// It has answered: what was written, or why nothing was.
    Answered(Result<Taken, String>),
}

/// Why a machine was not saved.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SaveError {
    /// Somebody else is saving it.
    #[error("The machine is being saved by somebody else")]
    Busy,
    /// It could not.
    #[error("{0}")]
    Machine(String),
    /// The machine ended.
    #[error("{0}")]
    MachineCrashed(Crash),
    /// The sandbox's time was over.
    #[error("The sandbox's time was over before its machine was saved")]
    TimedOut,
    /// The sandbox has met another of its ceilings.
    #[error("The sandbox had used up its {0} before its machine was saved")]
    LimitExceeded(Limit),
    /// The sandbox was ended.
    #[error("The sandbox was ended before its machine was saved")]
    SandboxEnded,
}

impl From<Over> for SaveError {
    fn from(over: Over) -> Self {
        match over {
            Over::Ended => Self::SandboxEnded,
            Over::Limit(Limit::WallTime) => Self::TimedOut,
            Over::Limit(limit) => Self::LimitExceeded(limit),
            Over::Crashed(crash) => Self::MachineCrashed(crash),
        }
    }
}

impl State {
    /// The machine says what came of being saved. False if it was not asked.
    pub(crate) fn saved(&mut self, answer: Result<Taken, String>) -> bool {
        let was_asked = self.saving == Saving::Asked;
        if was_asked {
            self.saving = Saving::Answered(answer);
        }
        was_asked
    }
}

impl Shared {
    /// Has the machine save itself and waits for that. `descriptors` are those of [`vmm::control::ToMachine::Snapshot`].
    ///
    /// # Errors
    /// See [`SaveError`].
    pub(crate) fn save(
        &self,
        then: Then,
        descriptors: Vec<OwnedFd>,
        memory_mib: u32,
    ) -> Result<Taken, SaveError> {
        let mut state = self.lock();
        if state.saving != Saving::Idle {
            return Err(SaveError::Busy);
        }
        match state.push(Request::Save(then, descriptors)) {
            Ok(()) => {}
            Err(Refused::Over(over)) => return Err(over.into()),
            Err(Refused::TooManyCommands | Refused::QueueFull) => return Err(SaveError::Busy),
        }
        state.saving = Saving::Asked;
        self.wake();
        let deadline = Instant::now() + ANSWER_LIMIT + LIMIT_PER_GIB * (memory_mib / 1024);
        let mut reported = false;
        loop {
            if let Saving::Answered(_) = &state.saving
                && let Saving::Answered(answer) = std::mem::take(&mut state.saving)
            {
                return answer.map_err(SaveError::Machine);
            }
            if let Some(over) = state.over() {
                return Err(over.clone().into());
            }
            state = self.wait_for_answer(state, deadline, &mut reported);
        }
    }
}
