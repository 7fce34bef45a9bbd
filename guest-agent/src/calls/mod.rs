//! Calls of the host's functions: the *bridge* between programs of the guest and the host, a process of its own that lives as
//! long as its data stream ([`protocol::call`] has the words).
//!
//! It reads lines and carries them; what they say is the host's to judge. One thread for each program's connection, which waits
//! for one answer at a time; one for the host's answers.

pub mod client;
mod install;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::{self, File, Permissions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use protocol::call::{Answer, FromBridge, MAX_CALL_BYTES, MAX_FRAME_BYTES};
use protocol::frame;
use serde::{Deserialize, Serialize};

use crate::limits::{CALL_THREAD_STACK_BYTES, MAX_CALL_CONNECTIONS, MAX_DISCARDED_CALL_BYTES};

/// The socket's name in the folder.
const SOCKET_FILE: &str = "host.sock";

/// What a program gets whose line is too long; its connection is closed after it.
const TOO_LONG: &[u8] = br#"{"error":{"kind":"too_large","message":"A call has 1 MiB at most"}}"#;

/// Where the bridge puts what programs need.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Of its own, in memory: socket, program, Python's module.
    pub folder: PathBuf,
    /// The image's root, which gets the links by which programs find these.
    pub image: PathBuf,
}

impl Place {
    /// Makes the links by which Python finds its module. Where there is a warm interpreter, before that starts: it remembers
    /// which modules there are.
    pub fn link_python(&self) {
        install::link_python(self);
    }
}

/// The whole life of the bridge, up to the end of the host's stream.
///
/// # Errors
/// When the guest has no room for its files or threads, or the stream broke.
pub fn serve(stream: File, place: &Place) -> io::Result<()> {
    install::install(place)?;
    let listener = listen(&place.folder.join(SOCKET_FILE))?;
    let mut answers = stream.try_clone()?;
    let bridge = Arc::new(Bridge {
        host: Mutex::new(stream),
        callers: Mutex::default(),
        connections: Mutex::new(0),
        closed: Condvar::new(),
    });
    bridge.say(&FromBridge::Ready)?;
    let accepting = Arc::clone(&bridge);
    std::thread::Builder::new().spawn(move || accept(&accepting, &listener))?;
    loop {
        let answer: Answer = match frame::read(&mut answers, MAX_FRAME_BYTES) {
            Ok(answer) => answer,
            Err(frame::FrameError::Ended) => return Ok(()),
            Err(error) => return Err(io::Error::other(error)),
        };
        let caller = lock(&bridge.callers).waiting.remove(&answer.id);
        // One that has gone away wants no answer.
        let _ = caller.map(|caller| caller.send(answer.line));
    }
}

/// Listens where every user of the guest may connect.
fn listen(path: &Path) -> io::Result<UnixListener> {
    // A bridge of a former machine, or stream, has left its own.
    if let Err(error) = fs::remove_file(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        return Err(error);
    }
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, Permissions::from_mode(0o666))?;
    Ok(listener)
}

#[derive(Debug)]
struct Bridge {
    host: Mutex<File>,
    callers: Mutex<Callers>,
    /// How many programs are connected, and what tells that one has gone.
    connections: Mutex<usize>,
    closed: Condvar,
}

#[derive(Debug, Default)]
struct Callers {
    last_id: u32,
    waiting: HashMap<u32, SyncSender<Vec<u8>>>,
}

/// Nothing panics while it holds one of these.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Bridge {
    fn say(&self, message: &FromBridge) -> io::Result<()> {
        let mut host = lock(&self.host);
        frame::write(&mut *host, message, MAX_FRAME_BYTES).map_err(io::Error::other)
    }

    /// Hands a call on and waits for its answer; none comes when the host is gone, and this process is then too.
    fn ask(&self, line: Vec<u8>) -> io::Result<Vec<u8>> {
        let (caller, answer) = sync_channel(1);
        let id = {
            let mut callers = lock(&self.callers);
            // As many numbers as connections are in use at most.
            loop {
                callers.last_id = callers.last_id.wrapping_add(1);
                let id = callers.last_id;
                if let Entry::Vacant(free) = callers.waiting.entry(id) {
                    free.insert(caller);
                    break id;
                }
            }
        };
        self.say(&FromBridge::Call { id, line })?;
        answer.recv().map_err(io::Error::other)
    }
}

/// Takes programs' connections, [`MAX_CALL_CONNECTIONS`] at one time; others wait in the listener's queue.
fn accept(bridge: &Arc<Bridge>, listener: &UnixListener) {
    loop {
        let free = bridge
            .closed
            .wait_while(lock(&bridge.connections), |count| {
                *count >= MAX_CALL_CONNECTIONS
            });
        *free.unwrap_or_else(PoisonError::into_inner) += 1;
        let connection = Connection(Arc::clone(bridge));
        let Ok((stream, _)) = listener.accept() else {
            // Out of descriptors or of the program's patience: the next one may do.
            std::thread::yield_now();
            continue;
        };
        // Where there is no room for a thread the program finds its connection closed.
        let _ = std::thread::Builder::new()
            .stack_size(CALL_THREAD_STACK_BYTES)
            .spawn(move || {
                // A program that goes away, and one that breaks off, needs nothing more.
                let _ = talk(&connection.0, &stream);
            });
    }
}

/// Counts a program's connection while it is there.
struct Connection(Arc<Bridge>);

impl Drop for Connection {
    fn drop(&mut self) {
        *lock(&self.0.connections) -= 1;
        self.0.closed.notify_one();
    }
}

/// Answers a program's calls, one after the other.
fn talk(bridge: &Bridge, mut stream: &UnixStream) -> io::Result<()> {
    let mut lines = BufReader::new(stream);
    loop {
        let mut line = Vec::new();
        lines
            .by_ref()
            .take(MAX_CALL_BYTES as u64 + 1)
            .read_until(b'\n', &mut line)?;
        if line.pop_if(|last| *last == b'\n').is_none() {
            if line.is_empty() {
                return Ok(());
            }
            if line.len() > MAX_CALL_BYTES {
                answer(stream, TOO_LONG)?;
                // It may not look for an answer before it has written all.
                io::copy(&mut lines.take(MAX_DISCARDED_CALL_BYTES), &mut io::sink())?;
                return Ok(());
            }
        }
        let said = bridge.ask(line)?;
        answer(stream, &said)?;
        stream.flush()?;
    }
}

fn answer(mut stream: &UnixStream, line: &[u8]) -> io::Result<()> {
    let mut bytes = Vec::with_capacity(line.len() + 1);
    bytes.extend_from_slice(line);
    bytes.push(b'\n');
    stream.write_all(&bytes)
}

#[cfg(test)]
mod tests;
