//! Carries bytes between a guest's stream and a server's: both ways as fast as the slower side takes them, holding at
//! most [`MAX_HELD_BYTES`] in each direction, and from the client only what the guard lets pass.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::SendFlags;

use crate::guard::{Guard, GuardError};

/// Most bytes held in one direction; more than the longest head that a guard waits for.
pub const MAX_HELD_BYTES: usize = 64 << 10;

/// How long nothing may move. A database connection may be silent for long; a client that only wants to hold a place
/// should not.
pub const IDLE_LIMIT: Duration = Duration::from_secs(60 * 60);

/// How a connection ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// Both sides have said all, or one is gone.
    Closed,
    /// The client said something that it may not.
    Refused(GuardError),
    /// Nothing moved for [`IDLE_LIMIT`].
    Idle,
    /// The sandbox's bytes are used up.
    Budget,
    /// TLS that was opened has failed, with one side or the other.
    Broken(String),
}

/// Bytes that may still move, shared by all connections of a sandbox, and those that one has moved.
#[derive(Debug)]
pub struct Count<'a> {
    left: &'a AtomicU64,
    /// From the guest to the server.
    pub out: u64,
    /// From the server to the guest.
    pub inward: u64,
}

impl<'a> Count<'a> {
    /// Nothing yet.
    #[must_use]
    pub fn new(left: &'a AtomicU64) -> Self {
        Self {
            left,
            out: 0,
            inward: 0,
        }
    }

    /// Takes bytes of what is left: false if there are not as many.
    pub fn take(&self, bytes: usize) -> bool {
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        let taken = self
            .left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
                left.checked_sub(bytes)
            });
        taken.is_ok()
    }
}

/// One direction.
#[derive(Debug, Default)]
struct Way {
    /// Read and not yet written.
    held: Vec<u8>,
    /// How much of it may be written.
    passed: usize,
    /// The source has said all.
    ended: bool,
    /// And the sink was told.
    closed: bool,
}

enum Moved {
    Bytes(usize),
    Nothing,
    Ended,
}

impl Way {
    fn wants_to_read(&self) -> bool {
        !self.ended && self.held.len() < MAX_HELD_BYTES
    }

    fn read(&mut self, source: BorrowedFd<'_>, chunk: &mut [u8]) -> Moved {
        let room = (MAX_HELD_BYTES - self.held.len().min(MAX_HELD_BYTES)).min(chunk.len());
        match rustix::io::read(source, chunk.get_mut(..room).unwrap_or_default()) {
            Ok(0) => {
                self.ended = true;
                Moved::Ended
            }
            Ok(count) => {
                self.held
                    .extend_from_slice(chunk.get(..count).unwrap_or_default());
                Moved::Bytes(count)
            }
            Err(Errno::AGAIN | Errno::INTR) => Moved::Nothing,
            // A peer that is gone has said all.
            Err(_) => {
                self.ended = true;
                Moved::Ended
            }
        }
    }

    /// A sink that is gone takes nothing more.
    fn write(&mut self, sink: BorrowedFd<'_>) {
        let bytes = self.held.get(..self.passed).unwrap_or_default();
        match rustix::net::send(sink, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(count) => {
                self.held.drain(..count.min(self.held.len()));
                self.passed = self.passed.saturating_sub(count);
            }
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(_) => {
                self.held.clear();
                self.passed = 0;
                self.ended = true;
                self.closed = true;
            }
        }
    }

    /// Tells the sink of the source's end, once all has been written. What may not pass is dropped with it.
    fn close_if_done(&mut self, sink: BorrowedFd<'_>) {
        if self.ended && self.passed == 0 && !self.closed {
            self.closed = true;
            // A sink that is gone knows.
            let _ = rustix::net::shutdown(sink, rustix::net::Shutdown::Write);
        }
    }
}

/// Carries until both sides are done. `first` is what the client has said so far, and how many bytes of it may go on.
/// Both streams must be non-blocking.
///
/// # Errors
/// When the system can't wait.
pub fn relay(
    guest: BorrowedFd<'_>,
    server: BorrowedFd<'_>,
    guard: &mut Guard,
    first: (Vec<u8>, usize),
    count: &mut Count<'_>,
) -> io::Result<End> {
    relay_until_idle((guest, server), guard, first, count, IDLE_LIMIT)
}

fn relay_until_idle(
    (guest, server): (BorrowedFd<'_>, BorrowedFd<'_>),
    guard: &mut Guard,
    (held, passed): (Vec<u8>, usize),
    count: &mut Count<'_>,
    idle_limit: Duration,
) -> io::Result<End> {
    let mut out = Way {
        held,
        passed,
        ..Way::default()
    };
    let mut inward = Way::default();
    let mut chunk = vec![0; MAX_HELD_BYTES];
    loop {
        out.close_if_done(server);
        inward.close_if_done(guest);
        if out.closed && inward.closed {
            return Ok(End::Closed);
        }
        let of_guest = wanted(out.wants_to_read(), inward.passed > 0);
        let of_server = wanted(inward.wants_to_read(), out.passed > 0);
        let ready = wait((guest, of_guest), (server, of_server), idle_limit)?;
        let Some((guest_is, server_is)) = ready else {
            return Ok(End::Idle);
        };
        if guest_is.is_empty() && server_is.is_empty() {
            return Ok(End::Closed);
        }
        let gone = PollFlags::HUP | PollFlags::ERR;
        if out.passed > 0 && server_is.intersects(PollFlags::OUT | gone) {
            // A server that takes no more may have said why, which is still read.
            out.write(server);
        }
        if inward.passed > 0 && guest_is.intersects(PollFlags::OUT | gone) {
            inward.write(guest);
            if inward.closed {
                return Ok(End::Closed);
            }
        }
        if inward.wants_to_read()
            && server_is.intersects(PollFlags::IN | gone)
            && let Moved::Bytes(moved) = inward.read(server, &mut chunk)
        {
            guard.server(chunk.get(..moved).unwrap_or_default());
            inward.passed = inward.held.len();
            count.inward += moved as u64;
            if !count.take(moved) {
                return Ok(End::Budget);
            }
        }
        if out.wants_to_read()
            && guest_is.intersects(PollFlags::IN | gone)
            && let Moved::Bytes(moved) = out.read(guest, &mut chunk)
        {
            count.out += moved as u64;
            if !count.take(moved) {
                return Ok(End::Budget);
            }
        }
        // Also after the server's words, which may have decided what the client's are.
        match guard.client(out.held.get(out.passed..).unwrap_or_default()) {
            Ok(more) => out.passed += more,
            Err(error) => return Ok(End::Refused(error)),
        }
    }
}

/// What is waited for of a stream.
pub(crate) fn wanted(reads: bool, writes: bool) -> PollFlags {
    let mut flags = PollFlags::empty();
    flags.set(PollFlags::IN, reads);
    flags.set(PollFlags::OUT, writes);
    flags
}

/// What the guest's stream and the server's are ready for: `None` when nothing moves within the limit, empty when nothing is waited
/// for.
pub(crate) fn wait(
    (guest, of_guest): (BorrowedFd<'_>, PollFlags),
    (server, of_server): (BorrowedFd<'_>, PollFlags),
    limit: Duration,
) -> io::Result<Option<(PollFlags, PollFlags)>> {
    // A stream that nothing is wanted of is left out: its end would be told again and again.
    let mut rows: Vec<PollFd<'_>> = [(guest, of_guest), (server, of_server)]
        .into_iter()
        .filter(|(_, flags)| !flags.is_empty())
        .map(|(stream, flags)| PollFd::from_borrowed_fd(stream, flags))
        .collect();
    if rows.is_empty() {
        return Ok(Some((PollFlags::empty(), PollFlags::empty())));
    }
    let limit = Timespec::try_from(limit).map_err(io::Error::other)?;
    match rustix::io::retry_on_intr(|| poll(&mut rows, Some(&limit))) {
        Ok(0) => return Ok(None),
        Ok(_) => {}
        Err(errno) => return Err(errno.into()),
    }
    let mut found = rows.iter().map(PollFd::revents);
    let mut next = |flags: PollFlags| {
        if flags.is_empty() {
            PollFlags::empty()
        } else {
            found.next().unwrap_or(PollFlags::empty())
        }
    };
    let guest_is = next(of_guest);
    Ok(Some((guest_is, next(of_server))))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;
    use std::thread;

    use super::*;
    use crate::name::HostName;
    use crate::policy::Target;

    struct Pair {
        client: UnixStream,
        server: UnixStream,
        over: thread::JoinHandle<(End, u64, u64)>,
    }

    fn start(port: u16, is_raw: bool, budget: u64) -> Pair {
        let (client, guest) = UnixStream::pair().unwrap();
        let (server, upstream) = UnixStream::pair().unwrap();
        for stream in [&guest, &upstream] {
            stream.set_nonblocking(true).unwrap();
        }
        let over = thread::spawn(move || {
            let target = Target::Name(HostName::parse("a.example").unwrap());
            let mut guard = Guard::new(&target, port, is_raw);
            let left = AtomicU64::new(budget);
            let mut count = Count::new(&left);
            let none = (Vec::new(), 0);
            let end = relay(
                guest.as_fd(),
                upstream.as_fd(),
                &mut guard,
                none,
                &mut count,
            )
            .unwrap();
            (end, count.out, count.inward)
        });
        Pair {
            client,
            server,
            over,
        }
    }

    #[test]
    fn every_byte_arrives_both_ways_and_half_closes_are_passed_on() {
        let Pair {
            client,
            mut server,
            over,
        } = start(22, true, u64::MAX);
        let sent: Vec<u8> = (0..3_000_000_u32)
            .map(|number| (number % 251) as u8)
            .collect();
        let writer = {
            let (mut client, sent) = (client.try_clone().unwrap(), sent.clone());
            thread::spawn(move || {
                client.write_all(&sent).unwrap();
                client.shutdown(std::net::Shutdown::Write).unwrap();
            })
        };

        let mut at_server = Vec::new();
        server.read_to_end(&mut at_server).unwrap();
        let back = at_server[..1_000_000].to_vec();
        let answerer = thread::spawn(move || server.write_all(&back).unwrap());
        let mut at_client = Vec::new();
        (&client).read_to_end(&mut at_client).unwrap();
        writer.join().unwrap();
        answerer.join().unwrap();

        assert!(at_server == sent && at_client == sent[..1_000_000]);
        assert_eq!(over.join().unwrap(), (End::Closed, 3_000_000, 1_000_000));
    }

    #[test]
    fn a_reader_that_stops_stops_the_writer() {
        let Pair {
            client,
            server,
            over,
        } = start(22, true, u64::MAX);
        client.set_nonblocking(true).unwrap();
        let mut taken = 0;
        let mut full = 0;
        while full < 20 {
            match (&client).write(&[0; 16 << 10]) {
                Ok(count) => taken += count,
                Err(_) => {
                    full += 1;
                    thread::sleep(Duration::from_millis(5));
                }
            }
        }
        // Two sockets' buffers and one of ours.
        assert!(taken < 4 << 20, "{taken}");
        drop((client, server));
        over.join().unwrap();
    }

    #[test]
    fn a_second_request_for_another_host_never_reaches_the_server() {
        let Pair {
            mut client,
            mut server,
            over,
        } = start(80, false, u64::MAX);
        let good = b"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n";
        client.write_all(good).unwrap();
        let mut first = vec![0; good.len()];
        server.read_exact(&mut first).unwrap();
        server
            .write_all(b"HTTP/1.1 204 No Content\r\n\r\n")
            .unwrap();
        client
            .write_all(b"GET / HTTP/1.1\r\nHost: b.example\r\n\r\n")
            .unwrap();

        let (end, ..) = over.join().unwrap();

        assert!(matches!(end, End::Refused(GuardError::Http(_))), "{end:?}");
        let mut rest = Vec::new();
        server.read_to_end(&mut rest).unwrap();
        assert_eq!((first.as_slice(), rest.as_slice()), (&good[..], &[][..]));
    }

    #[test]
    fn a_connection_on_which_nothing_moves_ends_and_one_that_moves_does_not() {
        const LIMIT: Duration = Duration::from_millis(500);
        let (mut client, guest) = UnixStream::pair().unwrap();
        let (_server, upstream) = UnixStream::pair().unwrap();
        let talking = thread::spawn(move || {
            for _ in 0..8 {
                client.write_all(b".").unwrap();
                thread::sleep(LIMIT / 4);
            }
            client
        });
        let target = Target::Name(HostName::parse("a.example").unwrap());
        let (mut guard, left) = (Guard::new(&target, 22, true), AtomicU64::new(u64::MAX));
        let mut count = Count::new(&left);
        let end = relay_until_idle(
            (guest.as_fd(), upstream.as_fd()),
            &mut guard,
            (Vec::new(), 0),
            &mut count,
            LIMIT,
        );
        assert_eq!((end.unwrap(), count.out), (End::Idle, 8));
        talking.join().unwrap();
    }

    #[test]
    fn a_budget_that_is_used_up_ends_the_connection() {
        let Pair {
            mut client,
            server,
            over,
        } = start(22, true, 1000);
        client.write_all(&[0; 2000]).unwrap();
        assert_eq!(over.join().unwrap().0, End::Budget);
        drop(server);
    }

    #[test]
    fn a_server_that_is_gone_ends_the_connection() {
        let Pair {
            mut client,
            server,
            over,
        } = start(80, false, u64::MAX);
        client.write_all(b"GET / HTTP/1.1\r\nHost: a.ex").unwrap();
        drop(server);
        let mut rest = Vec::new();
        client.read_to_end(&mut rest).unwrap();
        drop(client);
        assert_eq!(over.join().unwrap().0, End::Closed);
    }
}
