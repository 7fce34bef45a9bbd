//! What the agent's loop waits for: epoll(7), and the names of what is waited for.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;
use rustix::time::Timespec;

use crate::limits::MAX_EVENTS;

/// What an event is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Token {
    /// The control stream.
    Control,
    /// The listener for data streams.
    Listener,
    /// The reaper has seen that a process ended.
    Reaper,
    /// A data stream whose header or command is missing.
    Pending(u32),
    /// The warm interpreter has said something.
    Warm,
    /// The stage of this command.
    Stage(u32),
    /// The stream of this stage that works on a file.
    File(u32),
    /// The host's end of a relay.
    RelayHost(u32),
    /// The guest's end of a relay.
    RelayGuest(u32),
}

impl Token {
    fn encode(self) -> u64 {
        let (kind, id) = match self {
            Self::Control => (0, 0),
            Self::Listener => (1, 0),
            Self::Reaper => (2, 0),
            Self::Pending(id) => (3, id),
            Self::Stage(id) => (4, id),
            Self::RelayHost(id) => (5, id),
            Self::RelayGuest(id) => (6, id),
            Self::Warm => (7, 0),
            Self::File(id) => (8, id),
        };
        kind << 32 | u64::from(id)
    }

    fn decode(number: u64) -> Option<Self> {
        let id = u32::try_from(number & u64::from(u32::MAX)).ok()?;
        match number >> 32 {
            0 => Some(Self::Control),
            1 => Some(Self::Listener),
            2 => Some(Self::Reaper),
            3 => Some(Self::Pending(id)),
            4 => Some(Self::Stage(id)),
            5 => Some(Self::RelayHost(id)),
            6 => Some(Self::RelayGuest(id)),
            7 => Some(Self::Warm),
            8 => Some(Self::File(id)),
            _ => None,
        }
    }
}

/// An epoll instance. A descriptor leaves it when it is closed; the agent holds no duplicates.
#[derive(Debug)]
pub struct Poll(OwnedFd);

impl Poll {
    /// A new one.
    ///
    /// # Errors
    /// When the process is out of descriptors.
    pub fn new() -> io::Result<Self> {
        Ok(Self(epoll::create(CreateFlags::CLOEXEC)?))
    }

    /// Waits for `flags` of `source` too.
    ///
    /// # Errors
    /// When the kernel has no memory for it.
    pub fn add(&self, source: impl AsFd, token: Token, flags: EventFlags) -> io::Result<()> {
        Ok(epoll::add(
            &self.0,
            source,
            EventData::new_u64(token.encode()),
            flags,
        )?)
    }

    /// Waits for other flags of `source` than before.
    ///
    /// # Errors
    /// When `source` was not added.
    pub fn modify(&self, source: impl AsFd, token: Token, flags: EventFlags) -> io::Result<()> {
        Ok(epoll::modify(
            &self.0,
            source,
            EventData::new_u64(token.encode()),
            flags,
        )?)
    }

    /// Waits for `source` no more.
    ///
    /// # Errors
    /// When `source` was not added.
    pub fn remove(&self, source: impl AsFd) -> io::Result<()> {
        Ok(epoll::delete(&self.0, source)?)
    }

    /// Waits, at most for `timeout`, and returns what happened.
    ///
    /// # Errors
    /// That of `epoll_wait`; an interruption is none.
    pub fn wait(&self, timeout: Option<Duration>) -> io::Result<Vec<(Token, EventFlags)>> {
        let mut events: Vec<Event> = Vec::with_capacity(MAX_EVENTS);
        let timeout = timeout.map(|wait| Timespec {
            tv_sec: i64::try_from(wait.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: wait.subsec_nanos().into(),
        });
        match epoll::wait(
            &self.0,
            rustix::buffer::spare_capacity(&mut events),
            timeout.as_ref(),
        ) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let known = events.iter().filter_map(|event| {
            let (data, flags) = (event.data, event.flags);
            Token::decode(data.u64()).map(|token| (token, flags))
        });
        Ok(known.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_survive_the_kernel() {
        for token in [
            Token::Control,
            Token::Listener,
            Token::Reaper,
            Token::Pending(7),
            Token::Stage(u32::MAX),
            Token::RelayHost(0),
            Token::RelayGuest(9),
            Token::Warm,
            Token::File(3),
        ] {
            assert_eq!(Token::decode(token.encode()), Some(token));
        }
        assert_eq!(Token::decode(u64::MAX), None);
    }
}
