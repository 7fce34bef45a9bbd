//! What a session's detached commands print: lines in two files of bounded size, of which the older one is dropped.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Bytes of one of the two files: a session's log takes twice as many of the host's disk, or memory.
pub const MAX_LOG_FILE_BYTES: u64 = 4 << 20;

/// Longest line in bytes; a longer one comes in pieces.
const MAX_LINE_BYTES: usize = 8 << 10;

/// Bytes read at once.
const BUFFER_BYTES: usize = 64 << 10;

/// The file that is written to.
const CURRENT: &str = "log";
/// The one before.
const BEFORE: &str = "log.before";

/// The names of all files of a log.
pub(super) const FILES: [&str; 2] = [CURRENT, BEFORE];

/// A log that is written.
#[derive(Debug)]
pub(super) struct Log {
    folder: PathBuf,
    open: Mutex<Open>,
}

#[derive(Debug)]
struct Open {
    file: File,
    bytes: u64,
}

impl Log {
    /// Begins it anew.
    ///
    /// # Errors
    /// What the system says.
    pub(super) fn new(folder: &Path) -> io::Result<Self> {
        Ok(Self {
            folder: folder.to_owned(),
            open: Mutex::new(Open {
                file: create(folder)?,
                bytes: 0,
            }),
        })
    }

    /// Writes one line, with whose it is in front. What the disk does not take is dropped: whoever prints goes on.
    pub(super) fn line(&self, whose: &str, line: &[u8]) {
        let mut bytes = format!("[{whose}] ").into_bytes();
        bytes.extend_from_slice(line);
        bytes.push(b'\n');
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if open.bytes.saturating_add(bytes.len() as u64) > MAX_LOG_FILE_BYTES {
            let renamed = fs::rename(self.folder.join(CURRENT), self.folder.join(BEFORE));
            match renamed.and_then(|()| create(&self.folder)) {
                Ok(file) => *open = Open { file, bytes: 0 },
                Err(_) => return,
            }
        }
        if open.file.write_all(&bytes).is_ok() {
            open.bytes = open.bytes.saturating_add(bytes.len() as u64);
        }
    }

    /// Writes all lines of a stream, until its end.
    pub(super) fn copy(&self, whose: &str, mut stream: impl Read) {
        let mut buffer = vec![0; BUFFER_BYTES];
        let mut rest = Vec::new();
        loop {
            let count = match stream.read(&mut buffer) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Ok(0) | Err(_) => break,
                Ok(count) => count,
            };
            rest.extend_from_slice(buffer.get(..count).unwrap_or_default());
            let mut from = 0;
            while let Some(line) = next_line(rest.get(from..).unwrap_or_default()) {
                self.line(whose, line.strip_suffix(b"\n").unwrap_or(line));
                from += line.len();
            }
            rest.drain(..from);
        }
        if !rest.is_empty() {
            self.line(whose, &rest);
        }
    }
}

/// A whole line with its end, or a piece of one that is too long.
fn next_line(bytes: &[u8]) -> Option<&[u8]> {
    let longest = bytes.get(..MAX_LINE_BYTES);
    match bytes
        .iter()
        .take(MAX_LINE_BYTES)
        .position(|byte| *byte == b'\n')
    {
        Some(at) => bytes.get(..=at),
        None => longest,
    }
}

fn create(folder: &Path) -> io::Result<File> {
    OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(folder.join(CURRENT))
}

/// All that is kept of a log, oldest first.
///
/// # Errors
/// What the system says.
pub(super) fn read(folder: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    for name in [BEFORE, CURRENT] {
        match File::open(folder.join(name)) {
            // One that is being written may grow meanwhile.
            Ok(file) => drop(file.take(MAX_LOG_FILE_BYTES).read_to_end(&mut bytes)?),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_say_whose_they_are_and_long_ones_come_in_pieces() {
        let folder = tempfile::tempdir().unwrap();
        let log = Log::new(folder.path()).unwrap();
        let long = "x".repeat(MAX_LINE_BYTES + 1);

        log.copy("3", format!("one\n\n{long}\nend").as_bytes());

        let text = String::from_utf8(read(folder.path()).unwrap()).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[..2], ["[3] one", "[3] "]);
        assert_eq!((lines[2].len(), lines[3]), (MAX_LINE_BYTES + 4, "[3] x"));
        assert_eq!(lines[4..], ["[3] end"]);
    }

    #[test]
    fn a_flood_keeps_its_end_and_stays_within_the_bound() {
        let folder = tempfile::tempdir().unwrap();
        let log = Log::new(folder.path()).unwrap();
        let line = [b'y'; 4000];

        for number in 0..4000 {
            log.line(&number.to_string(), &line);
        }

        let bytes = read(folder.path()).unwrap();
        assert!(bytes.len() as u64 <= 2 * MAX_LOG_FILE_BYTES);
        assert!(bytes.len() as u64 > MAX_LOG_FILE_BYTES);
        let text = String::from_utf8(bytes).unwrap();
        assert!(text.lines().last().unwrap().starts_with("[3999] "));
        assert!(!text.contains("[0] "));
    }
}
