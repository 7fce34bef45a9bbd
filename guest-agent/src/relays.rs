//! All relays of the machine, in the order in which they get their turns.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::BorrowedFd;
use std::time::Instant;

use rustix::event::epoll::EventFlags;

use crate::limits::RELAY_BYTES;
use crate::poll::{Poll, Token};
use crate::relay::{self, Relay, State};

/// The relays, by number.
#[derive(Debug)]
pub struct Relays {
    relays: BTreeMap<u32, Relay>,
    /// Those that can go on without an event.
    ready: BTreeSet<u32>,
    next_id: u32,
    /// What bytes pass through; a relay holds a copy of its own only of what its sink does not take.
    buffer: Vec<u8>,
}

impl Default for Relays {
    fn default() -> Self {
        Self {
            relays: BTreeMap::new(),
            ready: BTreeSet::new(),
            next_id: 0,
            buffer: vec![0; RELAY_BYTES],
        }
    }
}

impl Relays {
    /// Takes a relay; its first turn comes with [`Self::run_ready`]. Returns its number.
    ///
    /// # Errors
    /// When `poll` has no room for its descriptors.
    pub fn add(&mut self, relay: Relay, poll: &Poll) -> io::Result<u32> {
        let id = self.next_id;
        self.next_id = self.next_id.wrapping_add(1);
        poll.add(relay.host(), Token::RelayHost(id), relay::EVENTS)?;
        poll.add(relay.guest(), Token::RelayGuest(id), relay::EVENTS)?;
        self.relays.insert(id, relay);
        self.ready.insert(id);
        Ok(id)
    }

    /// The guest's end of a relay.
    #[must_use]
    pub fn guest(&self, id: u32) -> Option<BorrowedFd<'_>> {
        self.relays.get(&id).map(Relay::guest)
    }

    /// The buffer, of [`RELAY_BYTES`], for other reads between two turns.
    pub fn buffer(&mut self) -> &mut [u8] {
        &mut self.buffer
    }

    /// Closes all of them, with both their ends.
    pub fn clear(&mut self) {
        self.relays.clear();
        self.ready.clear();
    }

    /// Whether a relay waits for its turn.
    #[must_use]
    pub fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Gives every relay that can go on a turn.
    pub fn run_ready(&mut self, now: Instant) {
        for id in std::mem::take(&mut self.ready) {
            self.run(id, now);
        }
    }

    /// An event at the host's end.
    pub fn host_event(&mut self, id: u32, flags: EventFlags) {
        if self
            .relays
            .get(&id)
            .is_some_and(|relay| relay.host_event(flags))
        {
            self.relays.remove(&id);
        }
        self.ready.insert(id);
    }

    /// An event at the guest's end.
    pub fn guest_event(&mut self, id: u32, flags: EventFlags) {
        if self
            .relays
            .get(&id)
            .is_some_and(|relay| relay.guest_event(flags))
        {
            self.relays.remove(&id);
        }
        self.ready.insert(id);
    }

    /// A command has ended.
    pub fn command_ended(&mut self, command_id: u32, now: Instant) {
        for relay in self.relays.values_mut() {
            if relay.command_id() == command_id {
                relay.command_ended(now);
            }
        }
    }

    /// Looks at the relays whose time has come.
    pub fn tick(&mut self, now: Instant) {
        let due = |relay: &Relay| relay.deadline().is_some_and(|deadline| deadline <= now);
        let due: Vec<u32> = self
            .relays
            .iter()
            .filter(|(_, relay)| due(relay))
            .map(|(id, _)| *id)
            .collect();
        for id in due {
            self.run(id, now);
        }
    }

    /// When the next relay's time comes.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.relays.values().filter_map(Relay::deadline).min()
    }

    fn run(&mut self, id: u32, now: Instant) {
        let Some(relay) = self.relays.get_mut(&id) else {
            return;
        };
        match relay.run(&mut self.buffer, now) {
            State::Waiting => {}
            State::Ready => drop(self.ready.insert(id)),
            State::Done => drop(self.relays.remove(&id)),
        }
    }
}
