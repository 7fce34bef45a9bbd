//! The gate's control stream. The supervisor's thread puts a new one in the place of a former and waits for nothing; rules are
//! written by threads that may wait for a guest that does not read.

use std::io::{self, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long the gate may take to read its rules, all of them; one that takes longer was stopped or taken over.
const RULES_LIMIT: Duration = Duration::from_secs(10);

/// Bytes that are written at a time, between two looks at the clock.
const PIECE_BYTES: usize = 32 << 10;

/// Where rules are written to.
#[derive(Debug, Default)]
pub(super) struct Control {
    /// Held to look and to swap, and never while something is written.
    current: Mutex<Option<Arc<Stream>>>,
    /// Whose turn it is to write. The supervisor's thread never takes it.
    writers: Mutex<()>,
}

/// One control stream.
#[derive(Debug)]
pub(super) struct Stream {
    socket: UnixStream,
    /// Whether its first rules are on their way.
    is_told: AtomicBool,
}

impl Control {
    /// Puts a stream in the place of a former, which ends. Never waits.
    pub(super) fn replace(&self, socket: UnixStream) -> Arc<Stream> {
        let stream = Arc::new(Stream {
            socket,
            is_told: AtomicBool::new(false),
        });
        let former = lock(&self.current).replace(Arc::clone(&stream));
        if let Some(former) = former {
            // Who writes to it or reads from it stops: there is one, however often a guest dials.
            let _ = former.socket.shutdown(Shutdown::Both);
        }
        stream
    }

    /// Writes rules to the stream that is; with `only`, if it is that one still. `frame` makes them, in the order in which they are
    /// written, and hears whether they are the stream's first. A stream that does not take them ends.
    pub(super) fn tell(
        &self,
        only: Option<&Arc<Stream>>,
        frame: impl FnOnce(bool) -> Option<Vec<u8>>,
    ) {
        let _turn = lock(&self.writers);
        let Some(stream) = lock(&self.current).clone() else {
            return;
        };
        if only.is_some_and(|only| !Arc::ptr_eq(only, &stream)) {
            return;
        }
        let is_first = !stream.is_told.swap(true, Ordering::Relaxed);
        let is_written = frame(is_first).is_some_and(|frame| write(&stream.socket, &frame).is_ok());
        if !is_written {
            let _ = stream.socket.shutdown(Shutdown::Both);
            let mut current = lock(&self.current);
            if current
                .as_ref()
                .is_some_and(|now| Arc::ptr_eq(now, &stream))
            {
                *current = None;
            }
        }
    }
}

fn write(mut socket: &UnixStream, frame: &[u8]) -> io::Result<()> {
    let deadline = Instant::now() + RULES_LIMIT;
    let mut rest = frame;
    while !rest.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        socket.set_write_timeout(Some(left))?;
        let piece = rest.get(..PIECE_BYTES).unwrap_or(rest);
        match socket.write(piece) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => rest = rest.get(count..).unwrap_or_default(),
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock
                ) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// What is held is whole at any time.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::thread;

    use super::*;

    /// More than a socket takes of a peer that does not read.
    const LONG: usize = 8 << 20;

    #[test]
    fn a_stream_that_is_not_read_delays_neither_the_next_nor_its_rules() {
        let control = Control::default();
        let (ours, silent) = UnixStream::pair().unwrap();
        let first = control.replace(ours);

        thread::scope(|scope| {
            let writer = scope.spawn(|| control.tell(Some(&first), |_| Some(vec![0; LONG])));
            while control.writers.try_lock().is_ok() || !first.is_told.load(Ordering::Relaxed) {
                thread::yield_now();
            }
            let began_at = Instant::now();
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            let second = control.replace(ours);
            control.tell(Some(&second), |is_first| {
                assert!(is_first);
                Some(b"rules".to_vec())
            });
            assert!(began_at.elapsed() < RULES_LIMIT / 2);
            let mut rules = [0; 5];
            theirs.read_exact(&mut rules).unwrap();
            assert_eq!(&rules, b"rules");
            writer.join().unwrap();
        });
        drop(silent);
    }

    #[test]
    fn the_first_rules_of_each_stream_are_known_as_such_and_a_former_is_not_written_to() {
        let control = Control::default();
        let (ours, _one) = UnixStream::pair().unwrap();
        let former = control.replace(ours);
        let (ours, _other) = UnixStream::pair().unwrap();
        control.replace(ours);

        let mut heard = Vec::new();
        control.tell(Some(&former), |_| unreachable!());
        for _ in 0..3 {
            control.tell(None, |is_first| {
                heard.push(is_first);
                Some(vec![1])
            });
        }
        assert_eq!(heard, [true, false, false]);
    }
}
