//! Where sessions are on disk: a folder for each, with a lock that its supervisor holds as long as it lives.
//!
//! The lock alone says whether a session lives: whatever a supervisor leaves behind that was killed is swept by whoever sees it next. The
//! lock's file goes with its folder, so who has got the lock looks whether the file is still the folder's.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, CWD, OFlags, Timespec, Timestamps, UTIME_NOW, utimensat};
use rustix::net::sockopt::socket_peercred;
use rustix::process::Pid;
use serde::{Deserialize, Serialize};

use super::root::{failed, is_there, make_private};
use super::{SessionError, log};
use crate::name::is_name;
use crate::publish::PublishedPort;

/// How often a folder that goes at the very moment is made again.
const TRIES_MAX: u32 = 100;

/// How long a lock may be taken by somebody who only looks whether it is free.
const LOOK_LIMIT: Duration = Duration::from_millis(250);

/// Pause between two looks.
const LOOK_PERIOD: Duration = Duration::from_millis(5);

/// Largest record that is read, in bytes.
const MAX_RECORD_BYTES: u64 = 64 << 10;

const LOCK: &str = "lock";
const SOCKET: &str = "socket";
const RECORD: &str = "record";
const NEW_RECORD: &str = "record.new";

/// What is on record of a session.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
// A record of another version may have less.
#[serde(default)]
#[non_exhaustive]
pub struct SessionInfo {
    /// Its name.
    pub name: String,
    /// The process number of its supervisor.
    pub pid: i32,
    /// When it was started, in seconds since 1970.
    pub started_unix_s: u64,
    /// Whether it takes commands.
    #[serde(skip_deserializing)]
    pub is_ready: bool,
    /// Its machine's processors; 0 before it is ready.
    pub cpus: u8,
    /// Its machine's memory in MiB; 0 before it is ready.
    pub memory_mib: u32,
    /// It ends when nothing runs in it for so long.
    pub idle: Option<Duration>,
    /// It ends after so long.
    pub timeout: Option<Duration>,
    /// The ports of this host that lead to it.
    pub published: Vec<PublishedPort>,
}

/// A name that is held.
#[derive(Debug)]
pub(super) struct Claimed {
    pub(super) path: PathBuf,
    lock: File,
}

/// What a look at a name finds.
#[derive(Debug)]
pub(super) enum Found {
    /// Nothing, or what was left and is swept now.
    Nothing,
    /// A session that lives.
    Alive(Alive),
}

/// A session that lives.
#[derive(Debug)]
pub(super) struct Alive {
    pub(super) path: PathBuf,
    lock: File,
    pub(super) info: SessionInfo,
}

/// A session's folder.
pub(super) fn path(root: &Path, name: &str) -> Result<PathBuf, SessionError> {
    if is_name(name) {
        return Ok(root.join(name));
    }
    Err(SessionError::Name {
        name: name.to_owned(),
    })
}

/// Opens a session's lock. A folder or a lock that is not there is `None`.
fn open_lock(path: &Path, make: bool) -> Result<Option<File>, SessionError> {
    let file = path.join(LOCK);
    let opened = OpenOptions::new()
        .read(true)
        .write(true)
        .create(make)
        .truncate(false)
        .mode(0o600)
        .custom_flags(OFlags::NOFOLLOW.bits().cast_signed())
        .open(&file);
    match opened {
        Ok(lock) => Ok(Some(lock)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed("opened", &file)(error)),
    }
}

/// Whether an open lock is still the one in its folder.
fn is_current(lock: &File, path: &Path) -> bool {
    match (lock.metadata(), fs::symlink_metadata(path.join(LOCK))) {
        (Ok(open), Ok(there)) => (open.dev(), open.ino()) == (there.dev(), there.ino()),
        _ => false,
    }
}

/// Takes a lock; `false` where somebody has it.
fn try_lock(lock: &File, path: &Path) -> Result<bool, SessionError> {
    match lock.try_lock() {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(source)) => Err(failed("locked", path)(source)),
    }
}

/// Takes a name, if no session that lives has it.
///
/// # Errors
/// See [`SessionError`].
pub(super) fn claim(root: &Path, info: &SessionInfo) -> Result<Claimed, SessionError> {
    let path = path(root, &info.name)?;
    if let Some(base) = root.parent() {
        make_private(base)?;
    }
    make_private(root)?;
    for _ in 0..TRIES_MAX {
        // Whoever sweeps may be as fast as to remove it between two of these.
        if !make_private(&path)? {
            continue;
        }
        let Some(lock) = open_lock(&path, true)? else {
            continue;
        };
        let until = Instant::now() + LOOK_LIMIT;
        while !try_lock(&lock, &path)? {
            if Instant::now() >= until {
                return Err(SessionError::Exists {
                    name: info.name.clone(),
                });
            }
            thread::sleep(LOOK_PERIOD);
        }
        if is_current(&lock, &path) {
            empty(&path);
            let claimed = Claimed { path, lock };
            claimed.record(info)?;
            return Ok(claimed);
        }
    }
    Err(SessionError::Exists {
        name: info.name.clone(),
    })
}

/// Removes what a session has in its folder, but not the lock.
fn empty(path: &Path) {
    for name in [SOCKET, RECORD, NEW_RECORD].iter().chain(&log::FILES) {
        // What can't be removed is in nobody's way: names are made anew.
        let _ = fs::remove_file(path.join(name));
    }
}

/// Removes a session's folder, whose lock the caller has.
fn remove(path: &Path) {
    empty(path);
    let _ = fs::remove_file(path.join(LOCK));
    let _ = fs::remove_dir(path);
}

impl Claimed {
    /// Puts this on record.
    ///
    /// # Errors
    /// See [`SessionError`].
    pub(super) fn record(&self, info: &SessionInfo) -> Result<(), SessionError> {
        let (new, path) = (self.path.join(NEW_RECORD), self.path.join(RECORD));
        let json = serde_json::to_vec(info).unwrap_or_default();
        let written = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&new)
            .and_then(|mut file| file.write_all(&json))
            .and_then(|()| fs::rename(&new, &path));
        written.map_err(failed("written", &path))
    }

    /// Whether the name is still held: somebody may have removed the folder, as programs do that tidy up where files are old. So that these have
    /// no reason, the files are made new.
    pub(super) fn refresh(&self) -> bool {
        if !is_current(&self.lock, &self.path) {
            return false;
        }
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: UTIME_NOW,
        };
        let now = Timestamps {
            last_access: now,
            last_modification: now,
        };
        let files = [LOCK, SOCKET, RECORD].into_iter().chain(log::FILES);
        let files = files.map(|name| self.path.join(name));
        // Up to the folder of all sessions, and the one that is in.
        for path in files.chain(self.path.ancestors().take(3).map(Path::to_owned)) {
            // What is not there needs nothing, and one that fails is no reason to end.
            let _ = utimensat(CWD, &path, &now, AtFlags::SYMLINK_NOFOLLOW);
        }
        true
    }

    /// Makes the socket: from now on the session is ready.
    ///
    /// # Errors
    /// See [`SessionError`].
    pub(super) fn listen(&self) -> Result<UnixListener, SessionError> {
        let socket = self.path.join(SOCKET);
        through(&self.path, UnixListener::bind).map_err(failed("made", &socket))
    }
}

impl Drop for Claimed {
    fn drop(&mut self) {
        if is_current(&self.lock, &self.path) {
            remove(&self.path);
        }
    }
}

/// Uses a session's socket by a short path: an address has 108 bytes (unix(7)), and a folder's path may have more.
fn through<T>(folder: &Path, with: impl FnOnce(PathBuf) -> io::Result<T>) -> io::Result<T> {
    let folder = File::open(folder)?;
    with(PathBuf::from(format!(
        "/proc/self/fd/{}/{SOCKET}",
        folder.as_raw_fd()
    )))
}

/// Looks whether a session lives, and sweeps one that does not.
///
/// # Errors
/// See [`SessionError`].
pub(super) fn look(root: &Path, name: &str) -> Result<Found, SessionError> {
    let path = path(root, name)?;
    if !is_there(root)? {
        return Ok(Found::Nothing);
    }
    let Some(lock) = open_lock(&path, false)? else {
        // Of who was killed while it made or removed it. One that is being made is made once more.
        let _ = fs::remove_dir(&path);
        return Ok(Found::Nothing);
    };
    if try_lock(&lock, &path)? {
        if is_current(&lock, &path) {
            remove(&path);
        }
        return Ok(Found::Nothing);
    }
    let mut info = read_record(&path).unwrap_or_default();
    name.clone_into(&mut info.name);
    info.is_ready = path.join(SOCKET).exists();
    Ok(Found::Alive(Alive { path, lock, info }))
}

fn read_record(path: &Path) -> Option<SessionInfo> {
    let file = File::open(path.join(RECORD)).ok()?;
    serde_json::from_reader(io::Read::take(file, MAX_RECORD_BYTES)).ok()
}

/// All names that there are folders of.
///
/// # Errors
/// See [`SessionError`].
pub(super) fn names(root: &Path) -> Result<Vec<String>, SessionError> {
    if !is_there(root)? {
        return Ok(Vec::new());
    }
    let entries = match fs::read_dir(root) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed("listed", root)(error)),
    };
    let mut names: Vec<String> = entries
        .flatten()
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| path(root, name).is_ok())
        .collect();
    names.sort();
    Ok(names)
}

impl Alive {
    /// Connects to its supervisor, which is a process of this user.
    pub(super) fn connect(&self) -> io::Result<UnixStream> {
        let stream = through(&self.path, UnixStream::connect)?;
        listener(&stream, rustix::process::geteuid().as_raw())?;
        Ok(stream)
    }

    /// The process that listens, by what the kernel says; where none does yet, or none is heard, the one on record now.
    pub(super) fn supervisor(&self) -> Option<Pid> {
        let uid = rustix::process::geteuid().as_raw();
        through(&self.path, UnixStream::connect)
            .and_then(|stream| listener(&stream, uid))
            .ok()
            .or_else(|| Pid::from_raw(read_record(&self.path)?.pid))
    }

    /// Waits until its supervisor is gone, for `limit` at most, and sweeps what it left. Says whether it is.
    ///
    /// # Errors
    /// See [`SessionError`].
    pub(super) fn wait_gone(&self, limit: Duration) -> Result<bool, SessionError> {
        let until = Instant::now() + limit;
        loop {
            if try_lock(&self.lock, &self.path)? {
                if is_current(&self.lock, &self.path) {
                    remove(&self.path);
                }
                return Ok(true);
            }
            if Instant::now() >= until {
                return Ok(false);
            }
            thread::sleep(LOOK_PERIOD);
        }
    }

    /// Whether its supervisor lives; who has opened a process by the number on record asks before it is told anything.
    pub(super) fn is_held(&self) -> bool {
        match self.lock.try_lock() {
            Ok(()) => {
                let _ = self.lock.unlock();
                false
            }
            Err(_) => true,
        }
    }
}

/// The process that listens at the other end of a client's connection, if it is this user's (`SO_PEERCRED`, unix(7)).
fn listener(stream: &UnixStream, uid: u32) -> io::Result<Pid> {
    let peer = socket_peercred(stream)?;
    if peer.uid.as_raw() == uid {
        return Ok(peer.pid);
    }
    Err(io::Error::new(
        io::ErrorKind::PermissionDenied,
        "its supervisor is another user's process",
    ))
}

#[cfg(test)]
mod tests;
