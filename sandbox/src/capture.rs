//! Reading a command's output to its end, and keeping what its limit allows.

use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

/// Bytes that are read at one time.
const OUTPUT_CHUNK_BYTES: usize = 64 << 10;

/// A stream that is read to its end, and what is kept of it.
#[derive(Debug)]
pub(crate) struct Capture<R> {
    stream: Option<R>,
    pub(crate) bytes: Vec<u8>,
    limit_bytes: usize,
    pub(crate) truncated: bool,
}

/// A [`Capture`] of any stream.
pub(crate) trait Captured {
    fn descriptor(&self) -> Option<BorrowedFd<'_>>;
    fn read_some(&mut self, chunk: &mut [u8]) -> io::Result<()>;
}

impl<R> Capture<R> {
    pub(crate) fn new(stream: Option<R>, limit_bytes: usize) -> Self {
        Self {
            stream,
            bytes: Vec::new(),
            limit_bytes,
            truncated: false,
        }
    }
}

impl<R: Read + AsFd> Captured for Capture<R> {
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.stream.as_ref().map(AsFd::as_fd)
    }

    fn read_some(&mut self, chunk: &mut [u8]) -> io::Result<()> {
        let Some(stream) = &mut self.stream else {
            return Ok(());
        };
        match stream.read(chunk) {
            Ok(0) => self.stream = None,
            Ok(count) => {
                let room = self.limit_bytes.saturating_sub(self.bytes.len());
                self.truncated |= count > room;
                self.bytes.extend(chunk.iter().take(count.min(room)));
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // The machine went away with unread bytes of ours: its end all the same.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => self.stream = None,
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

/// Reads all streams to their ends, each as its bytes come, so that none keeps the command waiting.
pub(crate) fn capture(streams: &mut [&mut dyn Captured]) -> io::Result<()> {
    let mut chunk = vec![0; OUTPUT_CHUNK_BYTES];
    loop {
        let ready: Vec<bool> = {
            let mut polled: Vec<PollFd<'_>> = streams
                .iter()
                .filter_map(|stream| stream.descriptor())
                .map(|descriptor| PollFd::from_borrowed_fd(descriptor, PollFlags::IN))
                .collect();
            if polled.is_empty() {
                return Ok(());
            }
            match poll(&mut polled, None) {
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(errno.into()),
            }
            polled
                .iter()
                .map(|polled| !polled.revents().is_empty())
                .collect()
        };
        let open = streams
            .iter_mut()
            .filter(|stream| stream.descriptor().is_some());
        for (stream, ready) in open.zip(ready) {
            if ready {
                stream.read_some(&mut chunk)?;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use std::thread;

    use super::*;

    #[test]
    fn both_streams_are_read_as_they_come_and_cut_at_the_limit() {
        let (ours_1, mut theirs_1) = UnixStream::pair().unwrap();
        let (ours_2, mut theirs_2) = UnixStream::pair().unwrap();
        // More than a socket holds, first all of one, then all of the other: whoever reads them in the other
        // order waits for ever.
        let writer = thread::spawn(move || {
            theirs_2.write_all(&vec![b'2'; 4 << 20]).unwrap();
            theirs_1.write_all(&vec![b'1'; 4 << 20]).unwrap();
        });
        let mut first = Capture::new(Some(ours_1), 8 << 20);
        let mut second = Capture::new(Some(ours_2), 1000);

        capture(&mut [&mut first, &mut second]).unwrap();

        writer.join().unwrap();
        assert_eq!((first.bytes.len(), first.truncated), (4 << 20, false));
        assert_eq!((second.bytes.len(), second.truncated), (1000, true));
    }

    #[test]
    fn output_of_exactly_the_limit_is_whole() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(b"12345").unwrap();
        drop(theirs);
        let mut stream = Capture::new(Some(ours), 5);

        capture(&mut [&mut stream]).unwrap();

        assert_eq!(
            (stream.bytes.as_slice(), stream.truncated),
            (b"12345".as_slice(), false)
        );
    }
}
