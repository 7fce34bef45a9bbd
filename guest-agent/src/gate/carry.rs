//! One connection's bytes, between a program's socket and the stream to the host: both ways as fast as the slower side
//! takes them.

use std::io;
use std::os::fd::BorrowedFd;

use protocol::gate::CONNECTED;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{SendFlags, Shutdown};

/// Most bytes held in one direction.
const MAX_HELD_BYTES: usize = 32 << 10;

#[derive(Debug, Default)]
struct Way {
    /// Read and not yet written.
    held: Vec<u8>,
    written: usize,
    ended: bool,
    /// And the sink was told.
    closed: bool,
}

impl Way {
    fn wants_to_read(&self) -> bool {
        !self.ended && self.held.is_empty()
    }

    fn wants_to_write(&self) -> bool {
        !self.held.is_empty()
    }

    fn read(&mut self, source: BorrowedFd<'_>) {
        self.held.resize(MAX_HELD_BYTES, 0);
        let count = match rustix::io::read(source, &mut *self.held) {
            Ok(0) => {
                self.ended = true;
                0
            }
            Ok(count) => count,
            Err(Errno::AGAIN | Errno::INTR) => 0,
            // A peer that is gone has said all.
            Err(_) => {
                self.ended = true;
                0
            }
        };
        self.held.truncate(count);
        self.written = 0;
    }

    /// A sink that is gone takes nothing more; the other direction goes on.
    fn write(&mut self, sink: BorrowedFd<'_>) {
        let rest = self.held.get(self.written..).unwrap_or_default();
        match rustix::net::send(sink, rest, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(count) => {
                self.written += count;
                if self.written >= self.held.len() {
                    self.held.clear();
                }
            }
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(_) => {
                self.held.clear();
                self.ended = true;
                self.closed = true;
            }
        }
    }

    fn close_if_done(&mut self, sink: BorrowedFd<'_>) {
        if self.ended && self.held.is_empty() && !self.closed {
            self.closed = true;
            // A sink that is gone knows.
            let _ = rustix::net::shutdown(sink, Shutdown::Write);
        }
    }
}

/// Carries until both sides are done. Both must be non-blocking. Where the host has to say first that it is connected and does
/// not, the result is false.
///
/// # Errors
/// When the system can't wait.
pub(super) fn carry(
    program: BorrowedFd<'_>,
    host: BorrowedFd<'_>,
    mut waits_for_host: bool,
) -> io::Result<bool> {
    let (mut out, mut inward) = (Way::default(), Way::default());
    loop {
        if inward.ended && waits_for_host {
            return Ok(false);
        }
        out.close_if_done(host);
        inward.close_if_done(program);
        if out.closed && inward.closed {
            return Ok(true);
        }
        let (program_is, host_is) = wait(program, host, &out, &inward)?;
        let gone = PollFlags::HUP | PollFlags::ERR;
        if out.wants_to_write() && host_is.intersects(PollFlags::OUT | gone) {
            out.write(host);
        }
        if inward.wants_to_write() && program_is.intersects(PollFlags::OUT | gone) {
            inward.write(program);
            if inward.closed {
                // The program is gone, and with it whoever would say more.
                return Ok(true);
            }
        }
        if inward.wants_to_read() && host_is.intersects(PollFlags::IN | gone) {
            inward.read(host);
            if waits_for_host && !inward.held.is_empty() {
                if inward.held.first() != Some(&CONNECTED) {
                    return Ok(false);
                }
                inward.held.remove(0);
                waits_for_host = false;
            }
        }
        if out.wants_to_read() && program_is.intersects(PollFlags::IN | gone) {
            out.read(program);
        }
    }
}

fn wait(
    program: BorrowedFd<'_>,
    host: BorrowedFd<'_>,
    out: &Way,
    inward: &Way,
) -> io::Result<(PollFlags, PollFlags)> {
    let wanted = |reads: bool, writes: bool| {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::IN, reads);
        flags.set(PollFlags::OUT, writes);
        flags
    };
    let of_program = wanted(out.wants_to_read(), inward.wants_to_write());
    let of_host = wanted(inward.wants_to_read(), out.wants_to_write());
    // A socket that nothing is wanted of is left out: its end would be told again and again. One of the two is always in:
    // a direction that is not over wants to read or to write.
    let mut rows: Vec<PollFd<'_>> = [(program, of_program), (host, of_host)]
        .into_iter()
        .filter(|(_, flags)| !flags.is_empty())
        .map(|(socket, flags)| PollFd::from_borrowed_fd(socket, flags))
        .collect();
    rustix::io::retry_on_intr(|| poll(&mut rows, None))?;
    let mut found = rows.iter().map(PollFd::revents);
    let mut next = |flags: PollFlags| {
        if flags.is_empty() {
            PollFlags::empty()
        } else {
            found.next().unwrap_or(PollFlags::empty())
        }
    };
    let program_is = next(of_program);
    Ok((program_is, next(of_host)))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;
    use std::thread::{self, JoinHandle};

    use super::*;

    fn start(waits_for_host: bool) -> (UnixStream, UnixStream, JoinHandle<bool>) {
        let (program, ours) = UnixStream::pair().unwrap();
        let (host, theirs) = UnixStream::pair().unwrap();
        for socket in [&ours, &theirs] {
            socket.set_nonblocking(true).unwrap();
        }
        let over =
            thread::spawn(move || carry(ours.as_fd(), theirs.as_fd(), waits_for_host).unwrap());
        (program, host, over)
    }

    #[test]
    fn every_byte_arrives_both_ways_behind_the_hosts_word() {
        let (mut program, mut host, over) = start(true);
        let sent: Vec<u8> = (0..1_000_000_u32)
            .map(|number| (number % 251) as u8)
            .collect();
        let writer = {
            let (mut program, sent) = (program.try_clone().unwrap(), sent.clone());
            thread::spawn(move || {
                program.write_all(&sent).unwrap();
                program.shutdown(std::net::Shutdown::Write).unwrap();
            })
        };
        let mut at_host = Vec::new();
        host.read_to_end(&mut at_host).unwrap();
        host.write_all(&[CONNECTED, b'o', b'k']).unwrap();
        drop(host);
        let mut at_program = Vec::new();
        program.read_to_end(&mut at_program).unwrap();
        writer.join().unwrap();

        assert!(at_host == sent);
        assert_eq!(at_program, b"ok");
        assert!(over.join().unwrap());
    }

    #[test]
    fn a_host_that_closes_without_its_word_has_refused() {
        let (_program, host, over) = start(true);
        drop(host);
        assert!(!over.join().unwrap());

        let (mut program, host, over) = start(true);
        program.write_all(b"hello").unwrap();
        drop(host);
        assert!(!over.join().unwrap());
    }

    #[test]
    fn a_program_that_is_gone_ends_it() {
        let (program, mut host, over) = start(false);
        drop(program);
        let mut rest = Vec::new();
        host.read_to_end(&mut rest).unwrap();
        drop(host);
        assert!(over.join().unwrap());
    }
}
