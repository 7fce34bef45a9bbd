//! The serial port: a 16550 that only listens.
//!
//! The guest's console goes here. Nothing is ever typed into it. What the guest prints goes to a [`Sink`] that keeps the
//! last [`TAIL_LEN`] bytes, so that a machine that dies can be quoted, and may pass everything on, as long as
//! that doesn't block: a guest that prints a gigabyte costs no memory and does not hold up its processor.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, Write};
use std::sync::Mutex;

use serde::{Deserialize, Serialize};
use vm_superio::{Serial, Trigger, serial::NoEvents};

use crate::bus::{BusDevice, FLOATING};
use crate::interrupt::Interrupt;
use crate::lock;
use crate::virtio::StateError;

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

    /// As [`Self::new`], with the registers of a snapshot. The tail begins empty.
    ///
    /// # Errors
    ///
    /// [`StateError::SerialInput`] where the state holds more than a port can.
    pub fn restore(
        line: Option<Box<dyn Interrupt>>,
        sink: Sink,
        state: &SerialState,
    ) -> Result<Self, StateError> {
        let uart =
            Serial::from_state(&state.to_uart(), Line(line), NoEvents, sink).map_err(|_| {
                StateError::SerialInput {
                    bytes: state.in_buffer.len(),
                }
            })?;
        Ok(Self {
            uart: Mutex::new(uart),
        })
    }

    /// The registers, for a snapshot.
    #[must_use]
    pub fn save(&self) -> SerialState {
        SerialState::of(lock(&self.uart).state())
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

/// What a snapshot keeps of the port: the registers of a 16550, by their names in its data sheet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the names are the registers'")]
pub struct SerialState {
    pub divisor_low: u8,
    pub divisor_high: u8,
    pub interrupt_enable: u8,
    pub interrupt_identification: u8,
    pub line_control: u8,
    pub line_status: u8,
    pub modem_control: u8,
    pub modem_status: u8,
    pub scratch: u8,
    /// What waits to be read: at most 64 bytes, put there by the port's own loopback.
    pub in_buffer: Vec<u8>,
}

impl SerialState {
    fn of(uart: vm_superio::SerialState) -> Self {
        Self {
            divisor_low: uart.baud_divisor_low,
            divisor_high: uart.baud_divisor_high,
            interrupt_enable: uart.interrupt_enable,
            interrupt_identification: uart.interrupt_identification,
            line_control: uart.line_control,
            line_status: uart.line_status,
            modem_control: uart.modem_control,
            modem_status: uart.modem_status,
            scratch: uart.scratch,
            in_buffer: uart.in_buffer,
        }
    }

    fn to_uart(&self) -> vm_superio::SerialState {
        vm_superio::SerialState {
            baud_divisor_low: self.divisor_low,
            baud_divisor_high: self.divisor_high,
            interrupt_enable: self.interrupt_enable,
            interrupt_identification: self.interrupt_identification,
            line_control: self.line_control,
            line_status: self.line_status,
            modem_control: self.modem_control,
            modem_status: self.modem_status,
            scratch: self.scratch,
            in_buffer: self.in_buffer.clone(),
        }
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

    #[test]
    fn test_registers_survive_a_snapshot() {
        let port = SerialPort::new(None, Sink::new());
        port.write(7, &[0x5a]);
        port.write(4, &[0x10]);
        port.write(0, b"x");
        let state = port.save();
        assert_eq!(
            (state.scratch, state.in_buffer.as_slice()),
            (0x5a, &b"x"[..])
        );

        let restored = SerialPort::restore(None, Sink::new(), &state).unwrap();

        assert_eq!(restored.save(), state);
        let mut byte = [0];
        restored.read(0, &mut byte);
        assert_eq!(&byte, b"x");
    }

    #[test]
    fn test_restore_more_input_than_a_port_holds_returns_serial_input() {
        let mut state = SerialPort::new(None, Sink::new()).save();
        state.in_buffer = vec![0; 65];
        let error = SerialPort::restore(None, Sink::new(), &state).unwrap_err();
        assert!(matches!(error, StateError::SerialInput { bytes: 65 }));
    }
}
