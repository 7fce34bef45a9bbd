//! What a session's detached commands print: lines in two files of bounded size, of which the older one is dropped.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

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
    /// What has come of lines that have no end yet, by stream: none is longer than [`MAX_LINE_BYTES`].
    unfinished: BTreeMap<u64, Unfinished>,
    next_stream: u64,
}

/// Where a log ends at a moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct End {
    /// The file that is written to.
    inode: u64,
    /// What is in it.
    bytes: u64,
    unfinished: Vec<Unfinished>,
}

/// A line that has no end yet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Unfinished {
    whose: String,
    bytes: Vec<u8>,
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
                unfinished: BTreeMap::new(),
                next_stream: 0,
            }),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes one line, with whose it is in front. What the disk does not take is dropped: whoever prints goes on.
    pub(super) fn line(&self, whose: &str, line: &[u8]) {
        self.lock().line(&self.folder, whose, line);
    }

    /// Where it ends now, with the lines that have no end yet.
    ///
    /// # Errors
    /// What the system says.
    pub(super) fn end(&self) -> io::Result<End> {
        let open = self.lock();
        let file = open.file.metadata()?;
        Ok(End {
            inode: file.ino(),
            bytes: file.len(),
            unfinished: open.unfinished.values().cloned().collect(),
        })
    }

    /// Waits until followers that keep up have seen the newest file, where that was begun just now: the session's end takes its name away.
    pub(super) fn settle(&self) {
        let turned = self.lock().turned;
        if let Some(turned) = turned {
            thread::sleep(SETTLE_TIME.saturating_sub(turned.elapsed()));
        }
    }

    /// Writes all lines of a stream, until its end.
    pub(super) fn copy(&self, whose: &str, mut stream: impl Read) {
        let mut buffer = vec![0; BUFFER_BYTES];
        let mut rest = Vec::new();
        let number = self.lock().next_stream();
        loop {
            let count = match stream.read(&mut buffer) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Ok(0) | Err(_) => break,
                Ok(count) => count,
            };
            rest.extend_from_slice(buffer.get(..count).unwrap_or_default());
            let mut from = 0;
            // All at once: nobody sees a line both in the file and among those without an end.
            let mut open = self.lock();
            while let Some(line) = next_line(rest.get(from..).unwrap_or_default()) {
                open.line(
                    &self.folder,
                    whose,
                    line.strip_suffix(b"\n").unwrap_or(line),
                );
                from += line.len();
            }
            rest.drain(..from);
            open.keep(number, whose, &rest);
        }
        let mut open = self.lock();
        if !rest.is_empty() {
            open.line(&self.folder, whose, &rest);
        }
        open.keep(number, whose, &[]);
    }
}

impl Open {
    fn line(&mut self, folder: &Path, whose: &str, line: &[u8]) {
        let bytes = with_front(whose, line);
        if self.bytes.saturating_add(bytes.len() as u64) > MAX_LOG_FILE_BYTES {
            let renamed = match fs::rename(folder.join(CURRENT), folder.join(BEFORE)) {
                // Renamed already, when there was no new one to be had.
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                renamed => renamed,
            };
            match renamed.and_then(|()| create(folder)) {
                Ok(file) => {
                    // Before a line is in the new one. Where it fails, who was slow does not learn that there is more.
                    let _ = self
                        .file
                        .set_permissions(fs::Permissions::from_mode(FOLLOWED));
                    self.file = file;
                    self.bytes = 0;
                    self.turned = Some(Instant::now());
                }
                Err(_) => return,
            }
        }
        if self.file.write_all(&bytes).is_ok() {
            self.bytes = self.bytes.saturating_add(bytes.len() as u64);
        }
    }

    fn next_stream(&mut self) -> u64 {
        self.next_stream += 1;
        self.next_stream
    }

    /// What a stream's line without an end is now.
    fn keep(&mut self, stream: u64, whose: &str, rest: &[u8]) {
        if rest.is_empty() {
            self.unfinished.remove(&stream);
            return;
        }
        let line = Unfinished {
            whose: whose.to_owned(),
            bytes: rest.to_vec(),
        };
        self.unfinished.insert(stream, line);
    }
}

/// A line as the log has it.
fn with_front(whose: &str, line: &[u8]) -> Vec<u8> {
    let mut bytes = format!("[{whose}] ").into_bytes();
    bytes.extend_from_slice(line);
    bytes.push(b'\n');
    bytes
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

/// All that is kept of a log, oldest first: as it was when its writer told the end, with that; else as it is.
///
/// # Errors
/// What the system says.
pub(super) fn read(folder: &Path, end: Option<&End>) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    for file in open_both(folder)?.into_iter().flatten() {
        let end = match end {
            Some(end) if inode(Some(&file))? == Some(end.inode) => Some(end),
            _ => None,
        };
        // One that is being written may grow meanwhile.
        let most = end.map_or(MAX_LOG_FILE_BYTES, |end| end.bytes.min(MAX_LOG_FILE_BYTES));
        file.take(most).read_to_end(&mut bytes)?;
        if let Some(end) = end {
            for line in &end.unfinished {
                bytes.extend(with_front(&line.whose, &line.bytes));
            }
            // What is in another file was printed later, and may be the rest of these lines.
            return Ok(bytes);
        }
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

    fn read(folder: &Path) -> io::Result<Vec<u8>> {
        super::read(folder, None)
    }

    #[test]
    fn a_line_without_an_end_is_read_once_before_it_gets_one_and_after() {
        let folder = tempfile::tempdir().unwrap();
        let log = Log::new(folder.path()).unwrap();
        let told = || {
            let bytes = super::read(folder.path(), Some(&log.end().unwrap()));
            String::from_utf8(bytes.unwrap()).unwrap()
        };
        let (reader, mut writer) = io::pipe().unwrap();
        let wait_for = |wanted: &str| {
            let begun = Instant::now();
            while told() != wanted {
                assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", told());
                thread::sleep(Duration::from_millis(2));
            }
        };

        thread::scope(|scope| {
            scope.spawn(|| log.copy("3", reader));
            writer.write_all(b"one\nname: ").unwrap();
            wait_for("[3] one\n[3] name: \n");
            writer.write_all(b"me\n").unwrap();
            wait_for("[3] one\n[3] name: me\n");
            writer.write_all(b"end").unwrap();
            wait_for("[3] one\n[3] name: me\n[3] end\n");
            drop(writer);
        });

        assert!(log.end().unwrap().unfinished.is_empty());
        assert_eq!(told(), "[3] one\n[3] name: me\n[3] end\n");
    }

    #[test]
    fn what_is_printed_after_the_end_was_told_is_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let log = Log::new(folder.path()).unwrap();
        log.line("3", b"one");
        log.lock().keep(1, "3", b"name: ");
        let end = log.end().unwrap();
        let told = || super::read(folder.path(), Some(&end)).unwrap();
        let wanted = b"[3] one\n[3] name: \n";

        log.line("3", b"name: me");
        assert_eq!(told(), wanted);

        // Also where another file was begun meanwhile.
        log.lock().bytes = MAX_LOG_FILE_BYTES;
        log.line("3", b"later");
        assert_eq!(told(), wanted);
    }

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
