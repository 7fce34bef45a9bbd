//! A script on standard input: its first bytes tell who runs it.

use std::io::{self, Read};
use std::os::fd::BorrowedFd;

use sandvmm::script::MAX_SCRIPT_BYTES;

use crate::output;

/// How a script says that it names its interpreter itself.
const LINE: &[u8] = b"#!";

/// A descriptor that is read as if it had not been looked at.
#[derive(Debug)]
pub(super) struct Input {
    source: BorrowedFd<'static>,
    head: Vec<u8>,
}

impl Input {
    /// Waits for the first bytes of `source`, as many as tell.
    ///
    /// # Errors
    /// When it can't be read.
    pub(super) fn look(source: BorrowedFd<'static>) -> io::Result<Self> {
        let mut head = Vec::new();
        Descriptor(source)
            .take(LINE.len() as u64)
            .read_to_end(&mut head)?;
        Ok(Self { source, head })
    }

    /// Whether its first line names an interpreter.
    pub(super) fn names_interpreter(&self) -> bool {
        self.head == LINE
    }

    /// The bytes that have been read already.
    pub(super) fn into_head(self) -> Vec<u8> {
        self.head
    }

    /// All of it, [`MAX_SCRIPT_BYTES`] at most.
    pub(super) fn into_script(self) -> impl Read {
        io::Cursor::new(self.head)
            .chain(Descriptor(self.source))
            .take(MAX_SCRIPT_BYTES)
    }
}

/// Reads without a buffer of its own: what is not asked for stays where it is.
struct Descriptor(BorrowedFd<'static>);

impl Read for Descriptor {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        output::read(self.0, buffer)
    }
}
