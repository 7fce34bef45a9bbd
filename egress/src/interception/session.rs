//! Carries one connection between two TLS ends: requests one way, checked and with secrets put in; the server's words the other,
//! with secrets masked. Both ways as fast as the slower side takes them.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use rustix::event::PollFlags;
use rustls::{AlertDescription, ClientConnection, ServerConnection};
use zeroize::Zeroizing;

use super::answers::{Answers, Asked};
use super::mask::PAUSE;
use super::requests::Requests;
use crate::guard::GuardError;
use crate::relay::{Count, End, IDLE_LIMIT, MAX_HELD_BYTES, wait, wanted};

/// Bytes that are moved at a time.
const CHUNK_BYTES: usize = 16 << 10;

/// One connection.
pub(super) struct Session<'a> {
    guest: &'a UnixStream,
    downstream: ServerConnection,
    server: &'a TcpStream,
    upstream: ClientConnection,
    requests: Requests,
    asked: Asked,
    answers: Answers,
    /// Whether the server still takes what it is sent.
    server_takes: bool,
    /// What the guest has said and is no whole request yet.
    held: Vec<u8>,
    /// For the server, and not yet encrypted.
    out: Zeroizing<Vec<u8>>,
    /// For the guest, likewise.
    inward: Vec<u8>,
    chunk: Zeroizing<Vec<u8>>,
    guest_ends: Ends,
    server_ends: Ends,
}

/// How far one side's words have come to their end.
#[derive(Debug, Clone, Copy, Default)]
struct Ends {
    /// Its socket has.
    socket: bool,
    /// Its TLS has, properly or not.
    words: bool,
    /// Without saying so.
    is_cut: bool,
    /// The other side was told.
    told: bool,
    /// And its socket was closed for writing.
    shut: bool,
}

/// Whether an end of the connection was found.
type Found = Result<(), End>;

impl<'a> Session<'a> {
    pub(super) fn new(
        (guest, downstream): (&'a UnixStream, ServerConnection),
        (server, upstream): (&'a TcpStream, ClientConnection),
        requests: Requests,
        answers: Answers,
    ) -> Self {
        Self {
            guest,
            downstream,
            server,
            upstream,
            requests,
            asked: Asked::default(),
            answers,
            server_takes: true,
            held: Vec::new(),
            // Full from the beginning: a buffer that grows leaves its bytes behind.
            out: Zeroizing::new(Vec::with_capacity(4 * MAX_HELD_BYTES)),
            inward: Vec::new(),
            chunk: Zeroizing::new(vec![0; CHUNK_BYTES]),
            guest_ends: Ends::default(),
            server_ends: Ends::default(),
        }
    }

    /// Carries until one side has ended or is at fault; `first` are the guest's first bytes.
    pub(super) fn run(mut self, first: &[u8], count: &mut Count<'_>) -> io::Result<End> {
        let mut first = first;
        while !first.is_empty() {
            self.downstream.read_tls(&mut first)?;
            if let Err(end) = self.understand_guest() {
                return Ok(end);
            }
        }
        loop {
            match self.step(count)? {
                Ok(()) => {}
                Err(end) => return Ok(end),
            }
        }
    }

    fn step(&mut self, count: &mut Count<'_>) -> io::Result<Found> {
        if let Err(end) = self.move_words() {
            return Ok(Err(end));
        }
        if self.server_ends.told && !self.downstream.wants_write() {
            let _ = self.guest.shutdown(Shutdown::Write);
            return Ok(Err(End::Closed));
        }
        // All that the guest has said is on its way.
        let is_passed_on = self.guest_ends.told && !self.server_wants();
        if is_passed_on && self.guest_ends.socket && self.guest_ends.is_cut {
            // Nobody reads an answer.
            return Ok(Err(End::Closed));
        }
        if is_passed_on && !self.guest_ends.shut {
            self.guest_ends.shut = true;
            let _ = self.server.shutdown(Shutdown::Write);
        }
        let mut of_guest = wanted(
            !self.guest_ends.socket
                && !self.guest_ends.words
                && self.downstream.wants_read()
                && self.has_room_out(),
            self.downstream.wants_write(),
        );
        // Whether it is still there, as nothing more is read of it. Told always, and asked for here so that it is looked at.
        of_guest.set(PollFlags::HUP, is_passed_on);
        let of_server = wanted(
            !self.server_ends.socket
                && self.upstream.wants_read()
                && self.inward.len() < MAX_HELD_BYTES,
            self.server_wants(),
        );
        // Where the guest holds it up, the rest may be there already.
        let is_paused = of_server.contains(PollFlags::IN) && self.answers.waits();
        let limit = if is_paused { PAUSE } else { IDLE_LIMIT };
        let ready = wait(
            (self.guest.as_fd(), of_guest),
            (self.server.as_fd(), of_server),
            limit,
        )?;
        let Some((guest_is, server_is)) = ready else {
            if is_paused {
                self.answers.pause(&mut self.inward);
                return Ok(Ok(()));
            }
            return Ok(Err(End::Idle));
        };
        if guest_is.is_empty() && server_is.is_empty() {
            return Ok(Err(End::Closed));
        }
        if is_passed_on && guest_is.intersects(PollFlags::HUP | PollFlags::ERR) {
            return Ok(Err(End::Closed));
        }
        Ok(self
            .serve_guest(guest_is, of_guest, count)
            .and_then(|()| self.serve_server(server_is, of_server, count)))
    }

    /// Whether there is something for the server that it may take.
    fn server_wants(&self) -> bool {
        self.server_takes && self.upstream.wants_write()
    }

    fn has_room_out(&self) -> bool {
        self.held.len() < MAX_HELD_BYTES && self.out.len() < MAX_HELD_BYTES
    }

    fn serve_guest(&mut self, is: PollFlags, wanted: PollFlags, count: &mut Count<'_>) -> Found {
        let gone = PollFlags::HUP | PollFlags::ERR;
        if wanted.contains(PollFlags::OUT) && is.intersects(PollFlags::OUT | gone) {
            let mut socket = self.guest;
            written(self.downstream.write_tls(&mut socket)).map_err(|_| End::Closed)?;
        }
        if wanted.contains(PollFlags::IN) && is.intersects(PollFlags::IN | gone) {
            let mut socket = self.guest;
            let moved = read(self.downstream.read_tls(&mut socket), &mut self.guest_ends);
            count.out += moved as u64;
            if !count.take(moved) {
                return Err(End::Budget);
            }
            self.understand_guest()?;
        }
        Ok(())
    }

    fn serve_server(&mut self, is: PollFlags, wanted: PollFlags, count: &mut Count<'_>) -> Found {
        let gone = PollFlags::HUP | PollFlags::ERR;
        if wanted.contains(PollFlags::OUT) && is.intersects(PollFlags::OUT | gone) {
            let mut socket = self.server;
            if written(self.upstream.write_tls(&mut socket)).is_err() {
                // It may have said why, which is still read and passed on.
                self.server_takes = false;
                self.out.clear();
                self.guest_ends.words = true;
                self.guest_ends.told = true;
            }
        }
        if wanted.contains(PollFlags::IN) && is.intersects(PollFlags::IN | gone) {
            let mut socket = self.server;
            let moved = read(self.upstream.read_tls(&mut socket), &mut self.server_ends);
            count.inward += moved as u64;
            if !count.take(moved) {
                return Err(End::Budget);
            }
            if let Err(error) = self.upstream.process_new_packets() {
                let mut socket = self.server;
                let _ = self.upstream.write_tls(&mut socket);
                return Err(server_failure(&error));
            }
        }
        Ok(())
    }

    /// What came from the guest is TLS, or it is told that it is not.
    fn understand_guest(&mut self) -> Found {
        let Err(error) = self.downstream.process_new_packets() else {
            return Ok(());
        };
        let mut socket = self.guest;
        let _ = self.downstream.write_tls(&mut socket);
        Err(guest_failure(error))
    }

    /// Moves what was decrypted to where it is encrypted again.
    fn move_words(&mut self) -> Found {
        // First what was left when there was no room.
        loop {
            if !self.guest_ends.told {
                let taken = self
                    .requests
                    .take(&self.held, &mut self.asked, &mut self.out)
                    .map_err(|error| End::Refused(GuardError::Http(error)))?;
                self.held.drain(..taken);
            }
            if !self.has_room_out() || self.guest_ends.words {
                break;
            }
            let ends = &mut self.guest_ends;
            let count = decrypted(self.downstream.reader().read(&mut self.chunk), ends);
            if count == 0 {
                break;
            }
            self.held
                .extend_from_slice(self.chunk.get(..count).unwrap_or_default());
        }
        let is_all_taken = self.out.len() < MAX_HELD_BYTES && self.asked.has_room();
        while self.inward.len() < MAX_HELD_BYTES && !self.server_ends.words {
            let ends = &mut self.server_ends;
            let count = decrypted(self.upstream.reader().read(&mut self.chunk), ends);
            if count == 0 {
                break;
            }
            let bytes = self.chunk.get(..count).unwrap_or_default();
            self.answers
                .take(bytes, &mut self.asked, &mut self.inward)
                .map_err(|error| End::Broken(error.to_string()))?;
        }
        // What TLS does not take now it takes when some of what it has was sent.
        let taken = self.upstream.writer().write(&self.out).unwrap_or(0);
        let taken = taken.min(self.out.len());
        self.out.drain(..taken);
        if self.server_ends.words && !self.server_ends.told {
            self.answers.end(&mut self.inward);
        }
        let taken = self.downstream.writer().write(&self.inward).unwrap_or(0);
        self.inward.drain(..taken.min(self.inward.len()));
        self.tell_of_ends(is_all_taken);
        Ok(())
    }

    /// An end is passed on when all before it was.
    fn tell_of_ends(&mut self, is_all_taken: bool) {
        let is_sent = is_all_taken && self.out.is_empty();
        if self.guest_ends.words && !self.guest_ends.told && is_sent {
            self.guest_ends.told = true;
            self.upstream.send_close_notify();
        }
        if self.server_ends.words && !self.server_ends.told && self.inward.is_empty() {
            self.server_ends.told = true;
            // An answer that was cut must not look whole.
            if !self.server_ends.is_cut {
                self.downstream.send_close_notify();
            }
        }
    }
}

/// What the end of the guest's TLS comes from.
pub(super) fn guest_failure(error: rustls::Error) -> End {
    End::Broken(match error {
        rustls::Error::AlertReceived(
            AlertDescription::UnknownCA
            | AlertDescription::BadCertificate
            | AlertDescription::CertificateUnknown,
        ) => "the program does not trust the sandbox's own certificate: it has a list of its own, or knows the server's"
            .to_owned(),
        rustls::Error::NoApplicationProtocol => {
            "the program and the server speak no version of HTTP in common, of HTTP/1.1 and HTTP/2"
                .to_owned()
        }
        other => format!("the program's TLS fails: {other}"),
    })
}

/// What the end of the server's TLS comes from.
pub(super) fn server_failure(error: &rustls::Error) -> End {
    End::Broken(format!("the server's TLS fails: {error}"))
}

/// Bytes that came from a socket; one that is gone has said all.
fn read(result: io::Result<usize>, ends: &mut Ends) -> usize {
    match result {
        Ok(0) => {
            ends.socket = true;
            0
        }
        Ok(count) => count,
        Err(error) if is_later(&error) => 0,
        Err(_) => {
            ends.socket = true;
            ends.words = true;
            ends.is_cut = true;
            0
        }
    }
}

fn written(result: io::Result<usize>) -> io::Result<()> {
    match result {
        Err(error) if !is_later(&error) => Err(error),
        _ => Ok(()),
    }
}

/// Bytes that were decrypted, and whether there will be more.
fn decrypted(result: io::Result<usize>, ends: &mut Ends) -> usize {
    match result {
        Ok(0) => {
            ends.words = true;
            0
        }
        Ok(count) => count,
        Err(error) if is_later(&error) => 0,
        Err(_) => {
            ends.words = true;
            ends.is_cut = true;
            0
        }
    }
}

pub(super) fn is_later(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}
