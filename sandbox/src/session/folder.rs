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

use rustix::fs::OFlags;
use rustix::net::sockopt::socket_peercred;
use rustix::process::Pid;
use serde::{Deserialize, Serialize};

use super::root::{failed, is_there, make_private};
use super::{SessionError, log};

/// Longest name in bytes.
const MAX_NAME_BYTES: usize = 64;

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
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let begins_well = name.starts_with(|first: char| first.is_ascii_alphanumeric());
    if begins_well && name.len() <= MAX_NAME_BYTES && name.bytes().all(plain) {
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
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn info(name: &str) -> SessionInfo {
        SessionInfo {
            name: name.into(),
            pid: 7,
            ..SessionInfo::default()
        }
    }

    fn private() -> tempfile::TempDir {
        tempfile::Builder::new()
            .permissions(fs::Permissions::from_mode(0o700))
            .tempdir()
            .unwrap()
    }

    fn is_alive(root: &Path, name: &str) -> bool {
        matches!(look(root, name).unwrap(), Found::Alive(_))
    }

    #[test]
    fn names_that_lead_elsewhere_are_none() {
        let long = "x".repeat(MAX_NAME_BYTES + 1);
        for name in ["", ".", "..", ".x", "-x", "a/b", "a\0", "ä", "a:b", &long] {
            let error = path(Path::new("/f"), name).unwrap_err();
            assert!(matches!(error, SessionError::Name { .. }), "{name}");
        }
        assert_eq!(
            path(Path::new("/f"), "a.b_C-1").unwrap(),
            Path::new("/f/a.b_C-1")
        );
    }

    #[test]
    fn of_many_that_claim_one_name_one_gets_it() {
        let base = private();
        let root = base.path().join("sessions");

        let claimed: Vec<_> = thread::scope(|scope| {
            let claims: Vec<_> = (0..8)
                .map(|_| scope.spawn(|| claim(&root, &info("dev"))))
                .collect();
            claims.into_iter().map(|one| one.join().unwrap()).collect()
        });

        assert_eq!(claimed.iter().filter(|one| one.is_ok()).count(), 1);
        for refused in claimed.iter().filter_map(|one| one.as_ref().err()) {
            assert!(matches!(refused, SessionError::Exists { .. }), "{refused}");
        }
        assert!(is_alive(&root, "dev"));
        drop(claimed);
        assert_eq!(fs::read_dir(&root).unwrap().count(), 0);
    }

    #[test]
    fn a_name_goes_from_hand_to_hand_and_is_never_had_twice() {
        let base = private();
        let root = base.path().join("sessions");
        let had = std::sync::atomic::AtomicU32::new(0);

        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let Ok(claimed) = claim(&root, &info("dev")) else {
                            continue;
                        };
                        let before = had.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                        assert_eq!(before, 0);
                        had.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                        drop(claimed);
                        look(&root, "dev").unwrap();
                    }
                });
            }
        });

        look(&root, "dev").unwrap();
        assert_eq!(fs::read_dir(&root).unwrap().count(), 0);
    }

    #[test]
    fn what_a_killed_supervisor_left_is_swept() {
        let base = private();
        let root = base.path().join("sessions");
        let claimed = claim(&root, &info("dev")).unwrap();
        let listener = claimed.listen().unwrap();
        log::read(&claimed.path).unwrap();
        assert!(is_alive(&root, "dev"));
        // As the system does it: the lock goes, all else stays.
        let Claimed { lock, .. } = &claimed;
        lock.unlock().unwrap();
        std::mem::forget(claimed);
        drop(listener);

        assert!(!is_alive(&root, "dev"));

        assert_eq!(fs::read_dir(&root).unwrap().count(), 0);
    }

    #[test]
    fn what_is_no_session_is_not_listed_and_an_empty_folder_is_swept() {
        let base = private();
        let root = base.path().join("sessions");
        let claimed = claim(&root, &info("dev")).unwrap();
        fs::write(root.join("note"), "no folder").unwrap();
        fs::create_dir(root.join("empty")).unwrap();

        assert_eq!(names(&root).unwrap(), ["dev", "empty"]);
        assert!(!is_alive(&root, "empty"));

        assert_eq!(names(&root).unwrap(), ["dev"]);
        drop(claimed);
    }

    #[test]
    fn a_folder_that_others_may_change_is_not_looked_into() {
        let base = private();
        let root = base.path().join("sessions");
        let claimed = claim(&root, &info("dev")).unwrap();

        fs::set_permissions(base.path(), fs::Permissions::from_mode(0o755)).unwrap();

        let looked = look(&root, "dev");
        assert!(matches!(looked, Err(SessionError::NotPrivate { .. })));
        let listed = names(&root);
        assert!(matches!(listed, Err(SessionError::NotPrivate { .. })));
        drop(claimed);
    }

    #[test]
    fn who_listens_is_known_by_the_kernel_and_must_be_this_user() {
        let base = private();
        let root = base.path().join("sessions");
        // What is on record is another process's number.
        let claimed = claim(&root, &info("dev")).unwrap();
        let Found::Alive(found) = look(&root, "dev").unwrap() else {
            panic!("it is held");
        };
        assert_eq!(found.supervisor(), Pid::from_raw(7));
        let _listener = claimed.listen().unwrap();

        let stream = found.connect().unwrap();

        let uid = rustix::process::geteuid().as_raw();
        let own = rustix::process::getpid();
        assert_eq!(found.supervisor(), Some(own));
        assert_eq!(listener(&stream, uid).unwrap(), own);
        let refused = listener(&stream, uid + 1).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
    }

    #[test]
    fn a_record_that_has_less_is_read() {
        let base = private();
        fs::write(base.path().join(RECORD), r#"{"pid": 7, "more": 1}"#).unwrap();

        assert_eq!(read_record(base.path()).unwrap().pid, 7);
    }

    #[test]
    fn a_session_is_reached_however_long_its_path_is() {
        let base = private();
        let root = base.path().join("x".repeat(150));
        let claimed = claim(&root, &info("dev")).unwrap();
        let Found::Alive(before) = look(&root, "dev").unwrap() else {
            panic!("it is held");
        };
        assert!(!before.info.is_ready && before.info.pid == 7 && before.is_held());

        let listener = claimed.listen().unwrap();
        let Found::Alive(found) = look(&root, "dev").unwrap() else {
            panic!("it is held");
        };
        let client = found.connect().unwrap();

        listener.accept().unwrap();
        assert!(found.info.is_ready);
        assert!(!found.wait_gone(Duration::ZERO).unwrap());
        drop((client, claimed));
        assert!(found.wait_gone(Duration::ZERO).unwrap());
    }

    #[test]
    fn a_folder_that_others_may_look_into_is_refused() {
        let base = tempfile::tempdir().unwrap();
        fs::set_permissions(base.path(), fs::Permissions::from_mode(0o755)).unwrap();

        let refused = claim(&base.path().join("sessions"), &info("dev"));

        assert!(matches!(refused, Err(SessionError::NotPrivate { .. })));
        assert_eq!(fs::read_dir(base.path()).unwrap().count(), 0);
    }
}
