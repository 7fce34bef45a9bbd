//! A session's log as it grows: its two files are read as they take each other's place.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read};
use std::path::PathBuf;
use std::thread;

use super::folder::Alive;
use super::log;

/// What stands where a file was begun and filled since the last look, and another one perhaps as well, which is gone then; and at the end, where
/// the session took away a last file that was not looked for in time.
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
            if count > 0 || buffer.is_empty() {
                return Ok(count);
            }
            let is_more = if is_over {
                self.log.turn_at_the_end()?
            } else {
                self.log.turn()?
            };
            match (is_more, is_over) {
                (true, _) => {}
                (false, true) => return Ok(0),
                (false, false) => thread::sleep(log::FOLLOW_PERIOD),
            }
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

    /// The last look, when the session is over: the one that was read may have been filled, and another one begun, since the look before. The next
    /// session of that name has its log in the same place, so only a file that comes right behind the one that was read is this log's; where that
    /// is not to be had any more, a word says so.
    fn turn_at_the_end(&mut self) -> io::Result<bool> {
        let Some(Part::File(newest)) = self.parts.back() else {
            return Ok(false);
        };
        if !log::is_followed(newest)? {
            return Ok(false);
        }
        let known = log::inode(Some(newest))?;
        let [before, current] = log::open_both(&self.folder)?;
        self.parts.push_back(match current {
            Some(current) if log::inode(before.as_ref())? == known => Part::File(current),
            _ => Part::Word(GAP),
        });
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::time::Duration;

    use super::super::Session;
    use super::super::folder::{self, SessionInfo};
    use super::super::log::{Log, MAX_LOG_FILE_BYTES};
    use super::*;

    /// A session that lives, its log, and who follows that and has read all so far.
    fn followed(base: &Path) -> (folder::Claimed, Log, LogFollower) {
        let root = base.join("sessions");
        let info = SessionInfo {
            name: "dev".into(),
            ..SessionInfo::default()
        };
        let claimed = folder::claim(&root, &info).unwrap();
        let log = Log::new(&claimed.path).unwrap();
        log.line("1", b"first");
        let mut follower = Session::open_below(&root, "dev")
            .unwrap()
            .follow_log()
            .unwrap();
        let mut first = [0; "[1] first\n".len()];
        follower.read_exact(&mut first).unwrap();
        (claimed, log, follower)
    }

    fn private() -> tempfile::TempDir {
        tempfile::Builder::new()
            .permissions(fs::Permissions::from_mode(0o700))
            .tempdir()
            .unwrap()
    }

    fn rest(follower: &mut LogFollower) -> String {
        let mut text = String::new();
        follower.read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn a_file_that_was_begun_just_before_the_end_is_read_too() {
        let base = private();
        let (claimed, log, mut follower) = followed(base.path());
        fill(&log, "2");
        log.line("3", b"last");
        // As a supervisor that was killed leaves it: nobody has the lock, and the files are there.
        fs::remove_file(claimed.path.join("lock")).unwrap();
        drop(claimed);

        let text = rest(&mut follower);

        assert!(text.starts_with("[2] ") && text.ends_with("[3] last\n"));
        assert!(!text.contains("[session]"));
    }

    #[test]
    fn a_file_that_went_with_the_session_before_it_was_seen_is_told_of() {
        let base = private();
        let (claimed, log, mut follower) = followed(base.path());
        fill(&log, "2");
        log.line("3", b"last");
        drop(claimed);
        // The next session's, which is none of this one's.
        let (_claimed, next, _) = followed(base.path());
        fill(&next, "4");

        let text = rest(&mut follower);

        let (before, word) = text.split_once("[session] ").unwrap();
        assert!(before.starts_with("[2] ") && word.ends_with("lost here\n"));
        assert!(!text.contains("[4]"));
    }

    #[test]
    fn the_end_waits_for_followers_only_where_a_file_was_begun_just_now() {
        let base = private();
        let (claimed, log, mut follower) = followed(base.path());
        log.settle();
        let reader = std::thread::spawn(move || rest(&mut follower));
        let before = std::time::Instant::now();
        fill(&log, "2");
        log.line("3", b"last");

        log.settle();
        assert!(before.elapsed() >= log::SETTLE_TIME);
        drop(claimed);

        let text = reader.join().unwrap();
        // On a busy machine a reader may be slower than that, and is told.
        assert!(text.ends_with("[3] last\n") || text.as_bytes().ends_with(GAP));
    }

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
