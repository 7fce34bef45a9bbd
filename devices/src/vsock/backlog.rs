//! Bytes of the guest that the host's socket did not take at once.

use std::io::{self, ErrorKind, Write};

use vm_memory::{VolatileSlice, WriteVolatile};

/// A first-in first-out buffer. Its owner bounds it: credit is checked before bytes are added.
///
/// One flat allocation, so that many small packets cost no more than their bytes.
#[derive(Debug, Default)]
pub(super) struct Backlog {
    bytes: Vec<u8>,
    /// Bytes at the front that have left.
    start: usize,
}

impl Backlog {
    pub(super) fn is_empty(&self) -> bool {
        self.start == self.bytes.len()
    }

    pub(super) fn len(&self) -> usize {
        self.bytes.len() - self.start
    }

    /// Adds a copy of guest memory.
    pub(super) fn push(&mut self, slice: &VolatileSlice<'_>) {
        // Each byte is moved once at most for each time that it is overtaken by as many: the cost is linear.
        if self.start > self.bytes.len() / 2 {
            self.bytes.drain(..self.start);
            self.start = 0;
        }
        // Writing to a vector does not fail.
        let _ = self.bytes.write_volatile(slice);
    }

    /// Writes what `sink` takes. The result is how many bytes left; the memory is given back with the last.
    ///
    /// # Errors
    ///
    /// The sink's, but for being full.
    pub(super) fn flush(&mut self, mut sink: impl Write) -> io::Result<usize> {
        let mut left = 0;
        while let Some(rest) = self.bytes.get(self.start..).filter(|rest| !rest.is_empty()) {
            match sink.write(rest) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => {
                    self.start += count.min(rest.len());
                    left += count;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(left),
                Err(error) => return Err(error),
            }
        }
        *self = Self::default();
        Ok(left)
    }

    /// Forgets all. The result is how many bytes there were.
    pub(super) fn clear(&mut self) -> usize {
        std::mem::take(self).len()
    }
}
