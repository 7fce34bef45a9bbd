//! What a session's detached commands print: lines in two files of bounded size, of which the older one is dropped.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Bytes of one of the two files: a session's log takes twice as many of the host's disk, or memory.
pub const MAX_LOG_FILE_BYTES: u64 = 4 << 20;

/// Longest line in bytes; a longer one comes in pieces.
const MAX_LINE_BYTES: usize = 8 << 10;

/// How often both files are opened anew because one was begun meanwhile: each time 4 MiB have been printed.
const OPEN_TRIES: u32 = 16;

/// Pause between two looks of a follower for more.
pub(super) const FOLLOW_PERIOD: Duration = Duration::from_millis(100);

/// Bytes read at once.
const BUFFER_BYTES: usize = 64 << 10;

/// How long a session's end waits after another file was begun: some looks of its followers.
pub(super) const SETTLE_TIME: Duration = FOLLOW_PERIOD.saturating_mul(3);

/// Permissions of a file that another one follows: who has it open sees by them that it is not the last, also when their names are gone.
const FOLLOWED: u32 = 0o400;

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
    /// When another file was begun last.
    turned: Option<Instant>,
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
                turned: None,
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
            let renamed = match fs::rename(self.folder.join(CURRENT), self.folder.join(BEFORE)) {
                // Renamed already, when there was no new one to be had.
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                renamed => renamed,
            };
            match renamed.and_then(|()| create(&self.folder)) {
                Ok(file) => {
                    // Before a line is in the new one. Where it fails, who was slow does not learn that there is more.
                    let _ = open
                        .file
                        .set_permissions(fs::Permissions::from_mode(FOLLOWED));
                    let turned = Some(Instant::now());
                    *open = Open {
                        file,
                        bytes: 0,
                        turned,
                    };
                }
                Err(_) => return,
            }
        }
        if open.file.write_all(&bytes).is_ok() {
            open.bytes = open.bytes.saturating_add(bytes.len() as u64);
        }
    }

    /// Waits until followers that keep up have seen the newest file, where that was begun just now: the session's end takes its name away.
    pub(super) fn settle(&self) {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let turned = open.turned;
        drop(open);
        if let Some(turned) = turned {
            thread::sleep(SETTLE_TIME.saturating_sub(turned.elapsed()));
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
    for file in open_both(folder)?.into_iter().flatten() {
        // One that is being written may grow meanwhile.
        file.take(MAX_LOG_FILE_BYTES).read_to_end(&mut bytes)?;
    }
    Ok(bytes)
}

/// Both files, where they are there, the older one first. If the later one is what it was when both were open, the other is what comes before it.
pub(super) fn open_both(folder: &Path) -> io::Result<[Option<File>; 2]> {
    let mut tries_left = OPEN_TRIES;
    loop {
        let current = open(folder, CURRENT)?;
        let before = open(folder, BEFORE)?;
        tries_left -= 1;
        let is_same = inode(current.as_ref())? == inode(open(folder, CURRENT)?.as_ref())?;
        if is_same || tries_left == 0 {
            return Ok([before, current]);
        }
    }
}

fn open(folder: &Path, name: &str) -> io::Result<Option<File>> {
    match File::open(folder.join(name)) {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether another file was begun after an open one.
pub(super) fn is_followed(file: &File) -> io::Result<bool> {
    Ok(file.metadata()?.permissions().mode() & 0o777 == FOLLOWED)
}

pub(super) fn inode(file: Option<&File>) -> io::Result<Option<u64>> {
    file.map(|file| Ok(file.metadata()?.ino())).transpose()
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
    fn a_log_that_could_not_be_begun_anew_goes_on_when_it_can() {
        let folder = tempfile::tempdir().unwrap();
        let log = Log::new(folder.path()).unwrap();
        log.line("1", b"first");
        // As after a rename that no new file came after.
        log.open.lock().unwrap().bytes = MAX_LOG_FILE_BYTES;
        fs::rename(folder.path().join(CURRENT), folder.path().join(BEFORE)).unwrap();

        log.line("1", b"second");

        assert_eq!(read(folder.path()).unwrap(), b"[1] first\n[1] second\n");
    }

    #[test]
    fn what_is_read_has_no_gap_however_fast_it_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let log = Log::new(folder.path()).unwrap();
        let is_done = std::sync::atomic::AtomicBool::new(false);
        let number_of = |line: &[u8]| -> u32 {
            let end = line.iter().position(|byte| *byte == b']').unwrap();
            std::str::from_utf8(&line[1..end]).unwrap().parse().unwrap()
        };

        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut number = 0;
                while !is_done.load(std::sync::atomic::Ordering::SeqCst) {
                    log.line(&number.to_string(), &[b'z'; MAX_LINE_BYTES]);
                    number += 1;
                }
            });
            let read = std::panic::catch_unwind(|| {
                for _ in 0..300 {
                    let bytes = read(folder.path()).unwrap();
                    let lines = bytes.split_inclusive(|byte| *byte == b'\n');
                    // The last may be half written.
                    let whole = lines.filter(|line| line.ends_with(b"\n"));
                    let numbers: Vec<u32> = whole.map(number_of).collect();
                    for pair in numbers.windows(2) {
                        assert_eq!(pair[0] + 1, pair[1]);
                    }
                }
            });
            is_done.store(true, std::sync::atomic::Ordering::SeqCst);
            read.unwrap();
        });
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
