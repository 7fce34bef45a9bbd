//! Descriptors 1 and 2, written to without a buffer.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

/// Writes all of it, in as few calls as the other side takes. A descriptor that someone else made
/// non-blocking is waited for.
///
/// # Errors
/// What the system says; `EPIPE` when the reader is gone.
pub(crate) fn write_all(descriptor: BorrowedFd<'_>, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::write(descriptor, bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => bytes = bytes.get(count..).unwrap_or_default(),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => wait(descriptor, PollFlags::OUT)?,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Reads what is there, waiting for the first byte; 0 at the end.
///
/// # Errors
/// What the system says.
pub(crate) fn read(descriptor: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match rustix::io::read(descriptor, &mut *buffer) {
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => wait(descriptor, PollFlags::IN)?,
            result => return Ok(result?),
        }
    }
}

fn wait(descriptor: BorrowedFd<'_>, flags: PollFlags) -> io::Result<()> {
    match poll(&mut [PollFd::from_borrowed_fd(descriptor, flags)], None) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Prints text on standard output and gives the exit code: 0, 141 when the reader is gone (as `SIGPIPE`
/// would), 125 when it can't be written.
pub(crate) fn print(text: &str, code: u8) -> u8 {
    print_bytes(text.as_bytes(), code)
}

/// Prints what need not be text, likewise.
pub(crate) fn print_bytes(bytes: &[u8], code: u8) -> u8 {
    written(write_all(rustix::stdio::stdout(), bytes), code)
}

/// The exit code of what was printed so.
pub(crate) fn written(result: io::Result<()>, code: u8) -> u8 {
    match result {
        Ok(()) => code,
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => 141,
        Err(error) => {
            crate::notice::say(&format!("Standard output can't be written: {error}"));
            125
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_non_blocking_descriptor_is_waited_for() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let sent = vec![7; 4 << 20];
        let writer = {
            let sent = sent.clone();
            std::thread::spawn(move || write_all(ours.as_fd(), &sent))
        };

        let mut received = Vec::new();
        theirs.read_to_end(&mut received).unwrap();

        writer.join().unwrap().unwrap();
        assert_eq!(received, sent);
    }

    #[test]
    fn reading_waits_and_sees_the_end() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let writer = std::thread::spawn(move || theirs.write_all(b"abc"));
        let mut buffer = [0; 8];

        let first = read(ours.as_fd(), &mut buffer).unwrap();
        writer.join().unwrap().unwrap();
        let end = read(ours.as_fd(), &mut buffer).unwrap();

        assert_eq!((first, end), (3, 0));
    }

    #[test]
    fn a_reader_that_is_gone_is_a_broken_pipe() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);

        let error = write_all(ours.as_fd(), b"x").unwrap_err();

        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }
}
