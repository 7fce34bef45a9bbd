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

/// What stands for lines that were dropped before they were read: a file of them was begun and filled meanwhile.
const LOST: &[u8] = b"[session] Lines were printed faster than they were read, and are lost here\n";

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
            let count = self.log.more(buffer)?;
            if count > 0 || is_over || buffer.is_empty() {
                return Ok(count);
            }
            thread::sleep(LOOK_PERIOD);
        }
    }
}

/// The files that are still to be read.
#[derive(Debug)]
struct Following {
    folder: PathBuf,
    /// The oldest first; the last one is the newest that was seen, and is kept when its end is reached.
    files: VecDeque<File>,
    /// What is left of a word about lost lines.
    word: &'static [u8],
}

impl Following {
    fn new(folder: PathBuf) -> io::Result<Self> {
        let files = log::open_both(&folder)?.into_iter().flatten().collect();
        Ok(Self {
            folder,
            files,
            word: &[],
        })
    }

    /// Reads what there is; 0 where there is no more yet.
    fn more(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let said = self.word.read(buffer)?;
            if said > 0 {
                return Ok(said);
            }
            let count = match self.files.front_mut() {
                Some(file) => file.read(buffer)?,
                None => 0,
            };
            if count > 0 || buffer.is_empty() {
                return Ok(count);
            }
            // Nobody writes to one any more after which another was begun.
            if self.files.len() > 1 {
                self.files.pop_front();
            } else if !self.turn()? {
                return Ok(0);
            }
        }
    }

    /// Looks whether another file was begun. The one that was read is read once more then: something may have come to it meanwhile.
    fn turn(&mut self) -> io::Result<bool> {
        let known = log::inode(self.files.back())?;
        let [before, current] = log::open_both(&self.folder)?;
        if current.is_none() || log::inode(current.as_ref())? == known {
            return Ok(false);
        }
        if log::inode(before.as_ref())? != known {
            if known.is_some() {
                self.word = LOST;
            }
            self.files.extend(before);
        }
        self.files.extend(current);
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::atomic::{AtomicBool, Ordering};

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
            match following.more(&mut buffer).unwrap() {
                0 => return String::from_utf8(bytes).unwrap(),
                count => bytes.extend_from_slice(&buffer[..count]),
            }
        }
    }

    /// Fills the file that is written to, so that the next line begins another.
    fn fill(log: &Log, whose: &str) {
        let line = [b'x'; 4086];
        for _ in 0..MAX_LOG_FILE_BYTES / 4096 {
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
    fn another_file_is_gone_on_with_and_a_lost_one_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let log = Log::new(folder.path()).unwrap();
        log.line("1", b"first");
        let mut following = follow(folder.path());
        all(&mut following);

        fill(&log, "2");
        log.line("3", b"next");
        let turned = all(&mut following);
        fill(&log, "4");
        fill(&log, "5");
        log.line("6", b"last");
        let lost = all(&mut following);

        assert!(turned.starts_with("[2] ") && turned.ends_with("[3] next\n"));
        assert!(!turned.contains("lost"), "nothing was");
        let (before, after) = lost.split_once("are lost here\n").unwrap();
        assert!(!before.contains("[5]") && after.contains("[5] ") && after.ends_with("[6] last\n"));
    }

    #[test]
    fn a_reader_that_keeps_up_gets_each_line_once() {
        let folder = tempfile::tempdir().unwrap();
        let log = Log::new(folder.path()).unwrap();
        let is_done = AtomicBool::new(false);
        // Three files of them.
        let lines = 3 * MAX_LOG_FILE_BYTES / 4000;

        let text = std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut following = follow(folder.path());
                let mut text = String::new();
                loop {
                    let was_done = is_done.load(Ordering::SeqCst);
                    text += &all(&mut following);
                    if was_done {
                        return text;
                    }
                }
            });
            for number in 0..lines {
                log.line(&number.to_string(), &[b'y'; 4000]);
                // As fast as a reader may be.
                if number % 64 == 0 {
                    std::thread::sleep(Duration::from_millis(5));
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
