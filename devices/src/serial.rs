//! The serial port: a 16550 that only listens.
//!
//! The guest's console goes here. Nothing is ever typed into it. What the guest prints goes to a [`Sink`] that keeps the
//! last [`TAIL_LEN`] bytes, so that a machine that dies can be quoted, and may pass everything on, as long as
//! that doesn't block: a guest that prints a gigabyte costs no memory and does not hold up its processor.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, Write};
use std::sync::Mutex;

use vm_superio::{Serial, Trigger, serial::NoEvents};

use crate::bus::{BusDevice, FLOATING};
use crate::interrupt::Interrupt;
use crate::lock;

/// Number of ports.
pub const SERIAL_LEN: u64 = 8;

/// How much of the end of what the guest printed is kept, in bytes: a Linux panic with its call trace is about 4 KiB.
pub const TAIL_LEN: usize = 8 << 10;

/// The most bytes of a line that are held back before they are passed on: one write for most lines.
const LINE_LEN: usize = 256;

/// The most characters of a panic's message that are quoted.
const PANIC_MESSAGE_CHARS: usize = 200;

/// What Linux prints first when it panics (`kernel/panic.c`), and behind the message when it has ended.
const PANIC_PREFIX: &str = "Kernel panic - not syncing: ";
const PANIC_SUFFIX: &str = " ]---";

/// A serial port, to be put on the port bus at 0x3f8.
pub struct SerialPort {
    uart: Mutex<Serial<Line, NoEvents, Sink>>,
}

impl fmt::Debug for SerialPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SerialPort").finish_non_exhaustive()
    }
}

impl SerialPort {
    /// A port whose output goes to `sink`. Without a line, a guest's driver must be told to poll.
    #[must_use]
    pub fn new(line: Option<Box<dyn Interrupt>>, sink: Sink) -> Self {
        Self {
            uart: Mutex::new(Serial::new(Line(line), sink)),
        }
    }

    /// The end of what the guest printed, at most [`TAIL_LEN`] bytes.
    #[must_use]
    pub fn tail(&self) -> Vec<u8> {
        lock(&self.uart).writer().tail()
    }

    /// What the guest's kernel said when it panicked last, in one printable line; `None` where the tail tells of no panic.
    #[must_use]
    pub fn panic_message(&self) -> Option<String> {
        panic_message(&self.tail())
    }
}

impl BusDevice for SerialPort {
    fn read(&self, offset: u64, data: &mut [u8]) {
        match (data, u8::try_from(offset)) {
            ([byte], Ok(offset)) => *byte = lock(&self.uart).read(offset),
            (wider, _) => wider.fill(FLOATING),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let ([byte], Ok(offset)) = (data, u8::try_from(offset)) {
            // Fails only where the line can't be raised: the driver then misses an interrupt. The sink never fails.
            let _ = lock(&self.uart).write(offset, *byte);
        }
    }
}

/// The port's interrupt line, if it has one.
struct Line(Option<Box<dyn Interrupt>>);

impl Trigger for Line {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.as_ref().map_or(Ok(()), |line| line.trigger())
    }
}

/// Where the guest's output ends. It never fails, never blocks and never grows.
#[derive(Default)]
pub struct Sink {
    tail: VecDeque<u8>,
    forward: Option<Box<dyn Write + Send>>,
    /// The line so far, to be passed on: at most [`LINE_LEN`] bytes.
    line: Vec<u8>,
    dropped_bytes: u64,
}

impl fmt::Debug for Sink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sink")
            .field("tail_len", &self.tail.len())
            .field("forwards", &self.forward.is_some())
            .field("dropped_bytes", &self.dropped_bytes)
            .finish_non_exhaustive()
    }
}

impl Sink {
    /// Keeps the tail and nothing else.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Keeps the tail, and passes everything on to `forward`, which must be non-blocking. What it does not take at
    /// once is dropped; at an error other than [`io::ErrorKind::WouldBlock`] it is closed.
    #[must_use]
    pub fn forwarding(forward: Box<dyn Write + Send>) -> Self {
        let mut sink = Self::default();
        sink.forward = Some(forward);
        sink
    }

    /// The end of what was written, at most [`TAIL_LEN`] bytes.
    #[must_use]
    pub fn tail(&self) -> Vec<u8> {
        self.tail.iter().copied().collect()
    }

    /// How many bytes were not passed on because the reader did not keep up or had gone.
    #[must_use]
    pub fn dropped_bytes(&self) -> u64 {
        self.dropped_bytes
    }

    fn push(&mut self, byte: u8) {
        if self.tail.len() == TAIL_LEN {
            self.tail.pop_front();
        }
        self.tail.push_back(byte);
        if self.forward.is_some() {
            self.line.push(byte);
            if byte == b'\n' || self.line.len() >= LINE_LEN {
                self.pass_on();
            }
        }
    }

    fn pass_on(&mut self) {
        let Some(forward) = &mut self.forward else {
            return;
        };
        let taken = match forward.write(&self.line) {
            Ok(taken) => taken,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
            Err(_) => {
                self.forward = None;
                0
            }
        };
        self.dropped_bytes += self.line.len().saturating_sub(taken) as u64;
        self.line.clear();
    }
}

impl Write for Sink {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        data.iter().for_each(|byte| self.push(*byte));
        Ok(data.len())
    }

    /// Does nothing: the port flushes after each byte, and lines are passed on whole.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        self.pass_on();
    }
}

/// The message of the last panic in `tail`. The bytes are the guest's: what could steer a terminal is left out.
fn panic_message(tail: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(tail);
    let (_, message) = text.rsplit_once(PANIC_PREFIX)?;
    let line = message.lines().next().unwrap_or_default();
    let line = line.strip_suffix(PANIC_SUFFIX).unwrap_or(line);
    Some(
        line.chars()
            .filter(|character| !character.is_control())
            .take(PANIC_MESSAGE_CHARS)
            .collect(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    /// Takes at most a number of bytes, then blocks, or breaks.
    #[derive(Clone, Debug)]
    struct Reader {
        taken: Arc<Mutex<Vec<u8>>>,
        room: usize,
        error: io::ErrorKind,
    }

    impl Reader {
        fn new(room: usize, error: io::ErrorKind) -> Self {
            Self {
                taken: Arc::default(),
                room,
                error,
            }
        }

        fn taken(&self) -> Vec<u8> {
            lock(&self.taken).clone()
        }
    }

    impl Write for Reader {
        fn write(&mut self, data: &[u8]) -> io::Result<usize> {
            let mut taken = lock(&self.taken);
            let room = self.room - taken.len();
            if room == 0 {
                return Err(self.error.into());
            }
            let now = &data[..data.len().min(room)];
            taken.extend_from_slice(now);
            Ok(now.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn print(port: &SerialPort, text: &[u8]) {
        text.iter().for_each(|byte| port.write(0, &[*byte]));
    }

    #[test]
    fn test_printing_more_than_the_tail_keeps_the_end() {
        let port = SerialPort::new(None, Sink::new());
        let text: Vec<u8> = (0..=250).cycle().take(TAIL_LEN * 3 + 7).collect();

        print(&port, &text);

        assert_eq!(port.tail(), text[text.len() - TAIL_LEN..]);
    }

    #[test]
    fn test_reader_that_stops_loses_bytes_and_does_not_block() {
        let reader = Reader::new(10, io::ErrorKind::WouldBlock);
        let mut sink = Sink::forwarding(Box::new(reader.clone()));

        sink.write_all(b"0123456\n89abcdef\nmore\n").unwrap();

        assert_eq!(reader.taken(), b"0123456\n89");
        assert_eq!(sink.dropped_bytes(), 12);
        assert_eq!(sink.tail(), b"0123456\n89abcdef\nmore\n");
    }

    #[test]
    fn test_reader_that_has_gone_is_closed() {
        let reader = Reader::new(0, io::ErrorKind::BrokenPipe);
        let mut sink = Sink::forwarding(Box::new(reader));

        sink.write_all(b"one\ntwo\n").unwrap();

        assert!(sink.forward.is_none());
        assert_eq!(sink.dropped_bytes(), 4);
    }

    #[test]
    fn test_output_without_newline_is_bounded_and_passed_on() {
        let reader = Reader::new(usize::MAX, io::ErrorKind::WouldBlock);
        let mut sink = Sink::forwarding(Box::new(reader.clone()));

        sink.write_all(&vec![0; LINE_LEN * 5 + 3]).unwrap();

        assert_eq!(reader.taken().len(), LINE_LEN * 5);
        assert!(sink.line.capacity() <= LINE_LEN * 2);
        drop(sink);
        assert_eq!(reader.taken().len(), LINE_LEN * 5 + 3);
    }

    #[test]
    fn test_panic_message_is_one_clean_line() {
        let port = SerialPort::new(None, Sink::new());

        print(
            &port,
            b"[ 0.1] Kernel panic - not syncing: VFS: \x1b[2Jno root\r\n[ 0.1] CPU: 0\r\n\
              [ 0.2] ---[ end Kernel panic - not syncing: VFS: \x1b[2Jno root ]---\r\n\xff\xfe",
        );

        assert_eq!(port.panic_message().as_deref(), Some("VFS: [2Jno root"));
    }

    #[test]
    fn test_panic_message_without_panic_is_none() {
        let port = SerialPort::new(None, Sink::new());
        print(&port, b"all is well\n");
        assert_eq!(port.panic_message(), None);
    }

    #[test]
    fn test_transmitter_is_always_ready() {
        let port = SerialPort::new(None, Sink::new());
        let mut status = [0];

        port.read(5, &mut status);

        assert_eq!(status[0] & 0x60, 0x60, "THR empty and transmitter empty");
    }

    #[test]
    fn test_wide_access_reads_floating_and_writes_nothing() {
        let port = SerialPort::new(None, Sink::new());
        for width in [2, 4] {
            let mut data = vec![0; width];
            port.read(0, &mut data);
            port.write(0, &data);
            assert!(data.iter().all(|byte| *byte == FLOATING));
        }
        assert!(port.tail().is_empty());
    }

    #[test]
    fn test_enabled_transmit_interrupt_raises_the_line() {
        let line = crate::virtio::testing::CountingLine::default();
        let port = SerialPort::new(Some(Box::new(line.clone())), Sink::new());

        port.write(1, &[2]);
        port.write(0, b"x");

        assert!(line.count() >= 1);
    }

    #[test]
    fn test_loopback_storm_stays_bounded() {
        let port = SerialPort::new(None, Sink::new());
        port.write(4, &[0x10]);
        for _ in 0..100_000 {
            port.write(0, b"x");
        }
        assert!(port.tail().is_empty());
    }
}
