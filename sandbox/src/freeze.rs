//! Bringing everything in a guest to a stand, so that its machine can be saved.

use std::time::Instant;

use protocol::message::ToAgent;

use crate::crash::Crash;
use crate::limit::Limit;
use crate::shared::{ANSWER_LIMIT, Shared, frame_of};
use crate::state::{Over, Phase, Refused, Request, State};

/// Whether what the guest runs stands still.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) enum Standstill {
    /// It runs.
    #[default]
    Running,
    /// The agent was asked to stop it.
    Asked,
    /// It stands.
    Still,
    /// The agent could not stop it, and says why. It runs.
    Refused(String),
    /// The agent was asked to let it go on.
    Thawing,
}

/// Why a guest could not be brought to a stand, or to life again.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FreezeError {
    /// Somebody else is saving the machine, or it is closing.
    #[error("The machine is being saved or ended by somebody else")]
    Busy,
    /// The agent could not stop what it had started.
    #[error("{0}")]
    Guest(String),
    /// The agent does not take what it is told.
    #[error("The guest has not taken what it was told before")]
    QueueFull,
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

impl From<Over> for FreezeError {
    fn from(over: Over) -> Self {
        match over {
            Over::Ended => Self::SandboxEnded,
            Over::Limit(Limit::WallTime) => Self::TimedOut,
            Over::Limit(limit) => Self::LimitExceeded(limit),
            Over::Crashed(crash) => Self::MachineCrashed(crash),
        }
    }
}

impl From<Refused> for FreezeError {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Over(over) => over.into(),
            Refused::QueueFull | Refused::TooManyCommands => Self::QueueFull,
        }
    }
}

impl State {
    /// The agent says that all stands still. False if it was not asked.
    pub(crate) fn stands_still(&mut self) -> bool {
        self.standstill_follows(&Standstill::Asked, Standstill::Still)
    }

    /// The agent says that it could not be stopped. False if it was not asked.
    pub(crate) fn freeze_failed(&mut self, sentence: String) -> bool {
        self.standstill_follows(&Standstill::Asked, Standstill::Refused(sentence))
    }

    /// The agent says that all goes on. False if it was not asked.
    pub(crate) fn goes_on(&mut self) -> bool {
        self.standstill_follows(&Standstill::Thawing, Standstill::Running)
    }

    fn standstill_follows(&mut self, expected: &Standstill, next: Standstill) -> bool {
        let follows = self.standstill == *expected;
        if follows {
            self.standstill = next;
        }
        follows
    }
}

impl Shared {
    /// Stops everything that runs in the guest and returns once it stands. `close_streams` ends all streams too.
    ///
    /// # Errors
    /// See [`FreezeError`]; the guest then goes on.
    pub(crate) fn freeze(&self, close_streams: bool) -> Result<(), FreezeError> {
        let ask = ToAgent::Freeze { close_streams };
        self.change(&Standstill::Running, Standstill::Asked, &ask)
    }

    /// Lets what was stopped go on.
    ///
    /// # Errors
    /// See [`FreezeError`].
    pub(crate) fn thaw(&self) -> Result<(), FreezeError> {
        self.change(&Standstill::Still, Standstill::Thawing, &ToAgent::Thaw)
    }

    /// Asks the agent for a change and waits for its answer.
    fn change(
        &self,
        expected: &Standstill,
        asked: Standstill,
        message: &ToAgent,
    ) -> Result<(), FreezeError> {
        let mut state = self.lock();
        if let Some(over) = state.over() {
            return Err(over.clone().into());
        }
        if !matches!(state.phase, Phase::Ready) || state.standstill != *expected {
            return Err(FreezeError::Busy);
        }
        let frame = frame_of(message).ok_or(FreezeError::QueueFull)?;
        state.push(Request::ToAgent(frame))?;
        state.standstill = asked;
        self.wake();
        let deadline = Instant::now() + ANSWER_LIMIT;
        let mut reported = false;
        loop {
            if let Some(over) = state.over() {
                return Err(over.clone().into());
            }
            match &state.standstill {
                Standstill::Running | Standstill::Still => return Ok(()),
                Standstill::Refused(sentence) => {
                    let refused = FreezeError::Guest(sentence.clone());
                    state.standstill = Standstill::Running;
                    return Err(refused);
                }
                Standstill::Asked | Standstill::Thawing => {}
            }
            state = self.wait_for_answer(state, deadline, &mut reported);
        }
    }
}
