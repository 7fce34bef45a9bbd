//! A session's log as it grows: its two files are read as they take each other's place.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read};
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use super::folder::Alive;
use super::log;

/// Pause between two looks for more.
const LOOK_PERIOD: Duration = Duration::from_millis(100);

/// What stands where a file was begun and filled since the last look, and another one perhaps as well, which is gone then.
const GAP: &[u8] =
    b"[session] Lines were printed faster than they were read, and some may be lost here\n";

/// A log as it grows, from what is kept of it on ([`Session::follow_log`](super::Session::follow_log)). A read waits for more; the end is the
/// session's.
#[derive(Debug)]
pub struct LogFollower {
    log: Following,
    alive: Alive,
}

impl LogFollower {
    pub(super) fn new(alive: Alive) -> io::Result<Self> {
        Ok(Self {
            log: Following::new(alive.path.clone())?,
            alive,
        })
    }
}

impl Read for LogFollower {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            // Asked before the look: what was written before its end is seen by that.
            let is_over = !self.alive.is_held();
            let count = self.log.known(buffer)?;
            if count > 0 || is_over || buffer.is_empty() {
                return Ok(count);
            }
            // Not after its end: the next session of that name has its log in the same place.
            if self.log.turn()? {
                continue;
            }
            thread::sleep(LOOK_PERIOD);
        }
    }
}

/// What is still to be read, the oldest first.
#[derive(Debug)]
struct Following {
    folder: PathBuf,
    /// The last one is the newest file that was seen, and is kept when its end is reached.
    parts: VecDeque<Part>,
}

#[derive(Debug)]
enum Part {
    File(File),
    /// What is left of a word of this side's.
    Word(&'static [u8]),
}

impl Following {
    fn new(folder: PathBuf) -> io::Result<Self> {
        let files = log::open_both(&folder)?.into_iter().flatten();
        let parts = files.map(Part::File).collect();
        Ok(Self { folder, parts })
    }

    /// Reads what there is in the files that were seen; 0 at their end.
    fn known(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let count = match self.parts.front_mut() {
                Some(Part::File(file)) => file.read(buffer)?,
                Some(Part::Word(word)) => word.read(buffer)?,
                None => 0,
            };
            // Nobody writes to a file any more after which another was begun.
            if count > 0 || buffer.is_empty() || self.parts.len() < 2 {
                return Ok(count);
            }
            self.parts.pop_front();
        }
    }

    /// Looks whether another file was begun. The one that was read is read once more then: something may have come to it meanwhile.
    fn turn(&mut self) -> io::Result<bool> {
        let newest = match self.parts.back() {
            Some(Part::File(file)) => Some(file),
            _ => None,
        };
        let known = log::inode(newest)?;
        let [before, current] = log::open_both(&self.folder)?;
        if current.is_none() || log::inode(current.as_ref())? == known {
            return Ok(false);
        }
        if log::inode(before.as_ref())? != known {
            if known.is_some() {
                self.parts.push_back(Part::Word(GAP));
            }
            self.parts.extend(before.map(Part::File));
        }
        self.parts.extend(current.map(Part::File));
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    use super::super::log::{Log, MAX_LOG_FILE_BYTES};
    use super::*;

    fn follow(folder: &Path) -> Following {
        Following::new(folder.to_owned()).unwrap()
    }

    /// All that there is at the moment.
    fn all(following: &mut Following) -> String {
        let mut bytes = Vec::new();
        let mut buffer = [0; 4096];
        loop {
            match following.known(&mut buffer).unwrap() {
                0 if following.turn().unwrap() => {}
                0 => return String::from_utf8(bytes).unwrap(),
                count => bytes.extend_from_slice(&buffer[..count]),
            }
        }
    }

    /// Fills a file, whatever is in it: what is left of it is filled, and another one begun.
    fn fill(log: &Log, whose: &str) {
        let line = [b'x'; 4090];
        for _ in 0..MAX_LOG_FILE_BYTES / 4090 {
            log.line(whose, &line);
        }
    }

    #[test]
    fn what_is_kept_comes_first_and_then_what_is_added() {
        let folder = tempfile::tempdir().unwrap();
        let log = Log::new(folder.path()).unwrap();
        log.line("1", b"before");
        let mut following = follow(folder.path());

        assert_eq!(all(&mut following), "[1] before\n");
        assert_eq!(all(&mut following), "");
        log.line("1", b"after");

        assert_eq!(all(&mut following), "[1] after\n");
    }

    #[test]
    fn another_file_is_gone_on_with() {
        let folder = tempfile::tempdir().unwrap();
        let log = Log::new(folder.path()).unwrap();
        log.line("1", b"first");
        let mut following = follow(folder.path());
        all(&mut following);

        fill(&log, "2");
        log.line("3", b"next");
        let turned = all(&mut following);

        let [before, _] = log::open_both(folder.path()).unwrap();
        assert!(before.is_some(), "another one was begun");
        assert!(turned.starts_with("[2] ") && turned.ends_with("[3] next\n"));
        assert!(!turned.contains("lost"), "nothing was");
    }

    #[test]
    fn a_lost_file_is_said_where_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let log = Log::new(folder.path()).unwrap();
        log.line("1", b"first");
        let mut following = follow(folder.path());
        all(&mut following);

        for whose in ["2", "3", "4", "5"] {
            fill(&log, whose);
        }
        log.line("6", b"last");
        let text = all(&mut following);

        // The rest of the known file, the word, and the two files that are kept.
        let (before, after) = text.split_once("[session] ").unwrap();
        let (word, after) = after.split_once('\n').unwrap();
        assert!(word.ends_with("lost here"));
        assert!(before.starts_with("[2] ") && before.ends_with("x\n"));
        assert!(!text.contains("[3] ") && after.ends_with("[6] last\n"));
        assert!(after.starts_with('[') && after.contains("[5] "));
    }

    #[test]
    fn a_reader_that_keeps_up_gets_each_line_once() {
        let folder = tempfile::tempdir().unwrap();
        let log = Log::new(folder.path()).unwrap();
        let is_done = AtomicBool::new(false);
        let read_bytes = AtomicU64::new(0);
        // Three files of them.
        let lines = 3 * MAX_LOG_FILE_BYTES / 4000;

        let text = std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut following = follow(folder.path());
                let mut text = String::new();
                loop {
                    let was_done = is_done.load(Ordering::SeqCst);
                    text += &all(&mut following);
                    read_bytes.store(text.len() as u64, Ordering::SeqCst);
                    if was_done {
                        return text;
                    }
                }
            });
            for number in 0..lines {
                log.line(&number.to_string(), &[b'y'; 4000]);
                // Less than a file ahead of the reader.
                while number * 4000 > read_bytes.load(Ordering::SeqCst) + MAX_LOG_FILE_BYTES / 2 {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            is_done.store(true, Ordering::SeqCst);
            reader.join().unwrap()
        });

        let numbers: Vec<u64> = text
            .lines()
            .map(|line| line[1..line.find(']').unwrap()].parse().unwrap())
            .collect();
        assert!(numbers.into_iter().eq(0..lines));
    }
}
