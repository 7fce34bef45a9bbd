//! Why a machine is over, and in whose words that is told.

use std::time::Duration;

use crate::crash::{Crash, CrashKind};
use crate::error::StartError;
use crate::event::EventKind;
use crate::limit::Limit;
use crate::state::Over;

/// Why a machine is over.
#[derive(Debug)]
pub(super) enum Reason {
    Asked,
    TimeIsOver(Duration),
    CpuTimeIsOver,
    Crashed(Crash),
    NotStarted(StartError),
}

impl Reason {
    pub(super) fn event(&self) -> EventKind {
        let (reason, message) = match self {
            Self::Asked => ("ended", None),
            Self::TimeIsOver(_) => ("timeout", None),
            Self::CpuTimeIsOver => ("limit", Some(Limit::CpuTime.to_string())),
            Self::Crashed(crash) => ("crash", Some(crash.to_string())),
            Self::NotStarted(error) => ("crash", Some(error.to_string())),
        };
        EventKind::Ended { reason, message }
    }

    pub(super) fn over(self) -> Over {
        match self {
            Self::TimeIsOver(_) => Over::Limit(Limit::WallTime),
            Self::CpuTimeIsOver => Over::Limit(Limit::CpuTime),
            Self::Crashed(crash) => Over::Crashed(crash),
            Self::Asked => Over::Ended,
            // Only a machine's process that was taken over says so after its guest was ready.
            Self::NotStarted(error) => {
                Over::Crashed(Crash::new(CrashKind::HostFailed, error.to_string()))
            }
        }
    }

    pub(super) fn start_error(self) -> StartError {
        match self {
            Self::TimeIsOver(limit) => StartError::TimedOut { limit },
            Self::CpuTimeIsOver => StartError::LimitExceeded(Limit::CpuTime),
            Self::Crashed(crash) => StartError::Crashed(crash),
            Self::NotStarted(error) => error,
            Self::Asked => StartError::Ended,
        }
    }
}

/// The fault is this library's.
pub(super) fn supervisor_failed(what: &str) -> Reason {
    Reason::Crashed(Crash::new(
        CrashKind::HostFailed,
        format!("The machine's supervisor failed: {what}"),
    ))
}
