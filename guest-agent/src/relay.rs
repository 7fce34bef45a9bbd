//! Relays: bytes between a data stream and a command's pipe or terminal, both ways as fast as the slower side
//! takes them, holding at most one buffer in each direction.
//!
//! Both descriptors are non-blocking and are waited for edge-triggered: a relay runs until it would block, and
//! is told when that has changed.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::SendFlags;
use rustix::termios::{LocalModes, SpecialCodeIndex};

use crate::limits::{DRAIN_IDLE, RELAY_TURNS};

/// What both ends of a relay are waited for with.
pub const EVENTS: EventFlags = EventFlags::IN
    .union(EventFlags::OUT)
    .union(EventFlags::RDHUP)
    .union(EventFlags::ET);

/// The end of a stream, as far as an event says it.
const CLOSING: EventFlags = EventFlags::RDHUP
    .union(EventFlags::HUP)
    .union(EventFlags::ERR);

/// What a relay carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kind {
    /// Host to guest: standard input.
    Input,
    /// Guest to host: standard output or error.
    Output,
    /// Both ways: a terminal.
    Terminal,
}

/// How a relay stands after it ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum State {
    /// It waits for an event.
    Waiting,
    /// Its turn is over, but it could go on at once.
    Ready,
    /// It is over; dropping it closes both ends.
    Done,
}

/// One relay.
#[derive(Debug)]
pub struct Relay {
    command_id: u32,
    kind: Kind,
    host: OwnedFd,
    guest: OwnedFd,
    inward: Option<Pump>,
    outward: Option<Pump>,
    /// Set once the command has ended: when its silence is taken for its end.
    idle_deadline: Option<Instant>,
    /// Whether the end of the host's input was typed into the terminal.
    end_of_file_typed: bool,
}

/// One direction.
#[derive(Debug, Default)]
struct Pump {
    /// What was read and not yet written.
    held: Vec<u8>,
    written: usize,
    source_ended: bool,
    /// Whether bytes moved since this was last asked.
    moved: bool,
    last_byte: Option<u8>,
}

enum Flow {
    /// The source has nothing, or the sink takes nothing.
    Blocked,
    /// The turn is over.
    TurnOver,
    /// The source has ended and the sink has everything.
    Delivered,
    /// The sink takes nothing any more.
    SinkClosed,
}

impl Relay {
    /// A relay between two non-blocking descriptors.
    #[must_use]
    pub fn new(command_id: u32, kind: Kind, host: OwnedFd, guest: OwnedFd) -> Self {
        Self {
            command_id,
            kind,
            host,
            guest,
            inward: (kind != Kind::Output).then(Pump::default),
            outward: (kind != Kind::Input).then(Pump::default),
            idle_deadline: None,
            end_of_file_typed: false,
        }
    }

    /// The command that it belongs to.
    #[must_use]
    pub fn command_id(&self) -> u32 {
        self.command_id
    }

    /// The data stream.
    #[must_use]
    pub fn host(&self) -> BorrowedFd<'_> {
        self.host.as_fd()
    }

    /// The pipe, or the terminal's master.
    #[must_use]
    pub fn guest(&self) -> BorrowedFd<'_> {
        self.guest.as_fd()
    }

    /// What kind it is of.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The command has ended and what it started is being killed: from now on a silence of [`DRAIN_IDLE`] is the
    /// end of its output.
    pub fn command_ended(&mut self, now: Instant) {
        self.idle_deadline = Some(now + DRAIN_IDLE);
    }

    /// When the relay is to be looked at again without an event. A host that is slow to read is waited for.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        let host_is_slow = self
            .outward
            .as_ref()
            .is_some_and(|pump| !pump.held.is_empty());
        self.idle_deadline.filter(|_| !host_is_slow)
    }

    /// Takes note of an event at the host's end; says whether the host is gone.
    #[must_use]
    pub fn host_event(&self, flags: EventFlags) -> bool {
        // Half-closed and gone look alike (virtio-vsock reports RDHUP for both), but only one of the two still
        // takes bytes, even none of them.
        self.outward.is_some()
            && flags.intersects(CLOSING)
            && !matches!(
                rustix::net::send(&self.host, &[], SendFlags::NOSIGNAL),
                Ok(_) | Err(Errno::AGAIN)
            )
    }

    /// Takes note of an event at the guest's end; says whether the program reads its input no more.
    #[must_use]
    pub fn guest_event(&self, flags: EventFlags) -> bool {
        self.kind == Kind::Input && flags.contains(EventFlags::ERR)
    }

    /// Moves bytes until both directions block or the turn is over.
    pub fn run(&mut self, buffer: &mut [u8], now: Instant) -> State {
        let (mut ready, mut moved) = (false, false);
        if let Some(pump) = &mut self.inward {
            let flow = pump.run(&self.host, &self.guest, buffer);
            moved |= pump.take_moved();
            match flow {
                Flow::Blocked => {}
                Flow::TurnOver => ready = true,
                Flow::Delivered if self.kind == Kind::Terminal && !self.end_of_file_typed => {
                    self.end_of_file_typed = true;
                    pump.held = end_of_file_keys(&self.guest, pump.last_byte);
                    ready = true;
                }
                Flow::Delivered | Flow::SinkClosed => self.inward = None,
            }
        }
        if let Some(pump) = &mut self.outward {
            let flow = pump.run(&self.guest, &self.host, buffer);
            moved |= pump.take_moved();
            match flow {
                Flow::Blocked => {}
                Flow::TurnOver => ready = true,
                Flow::Delivered | Flow::SinkClosed => self.outward = None,
            }
        }
        let over = match self.kind {
            Kind::Input => self.inward.is_none(),
            Kind::Output | Kind::Terminal => self.outward.is_none(),
        };
        if moved && self.idle_deadline.is_some() {
            self.idle_deadline = Some(now + DRAIN_IDLE);
        }
        if over || self.deadline().is_some_and(|deadline| deadline <= now) {
            State::Done
        } else if ready {
            State::Ready
        } else {
            State::Waiting
        }
    }
}

impl Pump {
    fn run(&mut self, source: &OwnedFd, sink: &OwnedFd, buffer: &mut [u8]) -> Flow {
        for _ in 0..RELAY_TURNS {
            if !self.held.is_empty() {
                let rest = self.held.get(self.written..).unwrap_or_default();
                match rustix::io::write(sink, rest) {
                    Ok(count) => self.wrote(count),
                    Err(Errno::INTR) => {}
                    Err(Errno::AGAIN) => return Flow::Blocked,
                    Err(_) => return Flow::SinkClosed,
                }
                continue;
            }
            if self.source_ended {
                return Flow::Delivered;
            }
            match rustix::io::read(source, &mut *buffer) {
                Ok(0) => self.source_ended = true,
                Ok(count) => {
                    let bytes = buffer.get(..count).unwrap_or_default();
                    self.moved = true;
                    self.last_byte = bytes.last().copied();
                    match rustix::io::write(sink, bytes) {
                        Ok(written) => self.hold(bytes.get(written..).unwrap_or_default()),
                        Err(Errno::AGAIN | Errno::INTR) => self.hold(bytes),
                        Err(_) => return Flow::SinkClosed,
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Flow::Blocked,
                // EIO is how a terminal's master says that nobody holds the other side; any other error ends a
                // stream as well.
                Err(_) => self.source_ended = true,
            }
        }
        Flow::TurnOver
    }

    fn hold(&mut self, bytes: &[u8]) {
        self.held.extend_from_slice(bytes);
    }

    fn wrote(&mut self, count: usize) {
        self.moved = true;
        self.written += count;
        if self.written >= self.held.len() {
            self.held = Vec::new();
            self.written = 0;
        }
    }

    fn take_moved(&mut self) -> bool {
        std::mem::take(&mut self.moved)
    }
}

/// What someone at the terminal would type for the end of the input, as script(1) does when its own input
/// ends: the VEOF character if the terminal reads by lines, twice if the last line is unfinished (the first one
/// only hands that line over, termios(3)). A terminal in raw mode has no end of file, so nothing.
fn end_of_file_keys(terminal: &OwnedFd, last_byte: Option<u8>) -> Vec<u8> {
    let Ok(settings) = rustix::termios::tcgetattr(terminal) else {
        return Vec::new();
    };
    let key = settings.special_codes[SpecialCodeIndex::VEOF];
    // Zero is `_POSIX_VDISABLE`: there is no such key.
    if !settings.local_modes.contains(LocalModes::ICANON) || key == 0 {
        return Vec::new();
    }
    match last_byte {
        None | Some(b'\n') => vec![key],
        Some(_) => vec![key; 2],
    }
}

/// Makes a descriptor non-blocking.
///
/// # Errors
/// That of fcntl(2).
pub fn set_nonblocking(descriptor: impl AsFd) -> io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(&descriptor)?;
    Ok(rustix::fs::fcntl_setfl(
        &descriptor,
        flags | rustix::fs::OFlags::NONBLOCK,
    )?)
}

#[cfg(test)]
#[path = "relay_tests.rs"]
mod tests;
