//! One thread per direction: from a stream of the guest to a descriptor of ours or into memory, and from
//! standard input to the guest. Each holds one buffer, so that memory stays flat and whoever stops reading
//! stops whoever writes.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use crate::output;

/// Bytes moved at once: what a pipe holds by default (pipe(7)).
const BUFFER_BYTES: usize = 64 << 10;

/// Most bytes of each stream that `--json` keeps; what comes after is counted and dropped, so that the program
/// goes on.
pub(crate) const MAX_CAPTURED_BYTES: usize = 1 << 20;

/// What is kept of a stream.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Captured {
    /// Its first bytes.
    pub(crate) kept: Vec<u8>,
    /// How many there were in all.
    pub(crate) total_bytes: u64,
}

impl Captured {
    /// Whether bytes were dropped.
    pub(crate) fn is_truncated(&self) -> bool {
        self.total_bytes > self.kept.len() as u64
    }

    fn take(&mut self, bytes: &[u8]) {
        let room = MAX_CAPTURED_BYTES.saturating_sub(self.kept.len());
        self.kept
            .extend_from_slice(bytes.get(..room).unwrap_or(bytes));
        self.total_bytes = self.total_bytes.saturating_add(bytes.len() as u64);
    }
}

/// How the copying of a stream ended.
#[derive(Debug)]
pub(crate) enum Copied {
    /// The guest ended the stream, and every byte of it was written. A stream that breaks has ended, too: the
    /// machine is gone.
    Whole,
    /// Whoever reads our descriptor is gone; nothing was lost so far.
    ReaderGone,
    /// The descriptor took no more: bytes were lost.
    Lost(io::Error),
}

/// Copies a stream of the guest to a descriptor, each piece as it comes, until the stream ends or the reader of
/// the descriptor is gone. With this call's end the stream is closed, so that the guest's program meets a closed
/// pipe when it writes next, as a local one would.
pub(crate) fn copy(mut stream: impl Read + AsFd, sink: BorrowedFd<'_>) -> Copied {
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        match wait_for(stream.as_fd(), sink) {
            Ok(Ready::First) => {}
            Ok(Ready::SecondGone) => return Copied::ReaderGone,
            Err(error) => return Copied::Lost(error),
        }
        match stream.read(&mut buffer) {
            Ok(0) => return Copied::Whole,
            Ok(count) => {
                let piece = buffer.get(..count).unwrap_or_default();
                if let Err(error) = output::write_all(sink, piece) {
                    return Copied::Lost(error);
                }
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => return Copied::Whole,
        }
    }
}

/// Reads a stream of the guest to its end and keeps what [`MAX_CAPTURED_BYTES`] allow.
pub(crate) fn capture(mut stream: impl Read) -> Captured {
    let mut captured = Captured::default();
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return captured,
            Ok(count) => captured.take(buffer.get(..count).unwrap_or_default()),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => return captured,
        }
    }
}

/// Copies a descriptor of ours to the guest until it ends or the guest no longer takes it; returns at once in
/// the latter case, also while the descriptor is silent. The bytes `ahead` go first.
///
/// # Errors
/// When the descriptor can't be read; a guest that takes no more is none.
pub(crate) fn feed(
    source: BorrowedFd<'_>,
    ahead: &[u8],
    mut stream: impl Write + AsFd,
) -> io::Result<()> {
    if stream.write_all(ahead).is_err() {
        return Ok(());
    }
    let mut buffer = vec![0; BUFFER_BYTES];
    while let Ready::First = wait_for(source, stream.as_fd())? {
        match output::read(source, &mut buffer)? {
            0 => return Ok(()),
            count => {
                let piece = buffer.get(..count).unwrap_or_default();
                if stream.write_all(piece).is_err() {
                    return Ok(());
                }
            }
        }
    }
    Ok(())
}

/// What [`wait_for`] saw.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ready {
    /// The first descriptor can be read, or has ended.
    First,
    /// Nobody is at the other side of the second one any more.
    SecondGone,
}

/// Waits until `first` can be read or the other side of `second` is gone.
fn wait_for(first: BorrowedFd<'_>, second: BorrowedFd<'_>) -> io::Result<Ready> {
    loop {
        let mut watched = [
            PollFd::from_borrowed_fd(first, PollFlags::IN),
            PollFd::from_borrowed_fd(second, PollFlags::empty()),
        ];
        match poll(&mut watched, None) {
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        }
        let [first, second] = &watched;
        if second.revents().intersects(PollFlags::ERR | PollFlags::HUP) {
            return Ok(Ready::SecondGone);
        }
        if !first.revents().is_empty() {
            return Ok(Ready::First);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_stream_is_copied_to_its_end() {
        let (guest, ours) = UnixStream::pair().unwrap();
        let (sink, mut seen) = UnixStream::pair().unwrap();
        let sent: Vec<u8> = (0..3_000_000u32).map(|i| (i % 251) as u8).collect();
        let copier = std::thread::spawn(move || copy(ours, sink.as_fd()));
        let writer = {
            let sent = sent.clone();
            std::thread::spawn(move || (&guest).write_all(&sent))
        };

        let mut received = Vec::new();
        seen.read_to_end(&mut received).unwrap();

        writer.join().unwrap().unwrap();
        assert!(matches!(copier.join().unwrap(), Copied::Whole));
        assert_eq!(received, sent);
    }

    #[test]
    fn a_reader_that_is_gone_closes_the_stream_of_a_silent_guest() {
        let (mut guest, ours) = UnixStream::pair().unwrap();
        let (seen, sink) = rustix::pipe::pipe().unwrap();
        drop(seen);

        let copied = copy(ours, sink.as_fd());

        assert!(matches!(copied, Copied::ReaderGone));
        assert_eq!(
            guest.write_all(b"y").unwrap_err().kind(),
            ErrorKind::BrokenPipe
        );
    }

    #[test]
    fn bytes_that_can_not_be_written_are_lost_with_a_reason() {
        let (mut guest, ours) = UnixStream::pair().unwrap();
        let full = std::fs::File::options()
            .write(true)
            .open("/dev/full")
            .unwrap();
        guest.write_all(b"x").unwrap();

        match copy(ours, full.as_fd()) {
            Copied::Lost(error) => assert_eq!(error.kind(), ErrorKind::StorageFull),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_is_above_the_cap_is_counted_and_dropped() {
        let sent = vec![b'x'; MAX_CAPTURED_BYTES + 70_000];

        let captured = capture(sent.as_slice());

        assert_eq!(captured.kept.len(), MAX_CAPTURED_BYTES);
        assert_eq!(captured.total_bytes, sent.len() as u64);
        assert!(captured.is_truncated());
        assert!(!capture(&sent[..MAX_CAPTURED_BYTES]).is_truncated());
    }

    #[test]
    fn input_is_fed_to_its_end() {
        let (mut user, ours) = UnixStream::pair().unwrap();
        let (stream, mut guest) = UnixStream::pair().unwrap();
        let feeder = std::thread::spawn(move || feed(ours.as_fd(), b"", stream));

        user.write_all(b"abc").unwrap();
        drop(user);
        let mut received = Vec::new();
        guest.read_to_end(&mut received).unwrap();

        feeder.join().unwrap().unwrap();
        assert_eq!(received, b"abc");
    }

    #[test]
    fn a_guest_that_closes_ends_the_feeding_while_the_user_is_silent() {
        let (_user, ours) = UnixStream::pair().unwrap();
        let (stream, guest) = UnixStream::pair().unwrap();
        let (told, tell) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            feed(ours.as_fd(), b"", stream).unwrap();
            told.send(())
        });

        drop(guest);

        tell.recv_timeout(Duration::from_secs(10)).unwrap();
    }
}
