//! What a session's supervisor does for a client.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread::{self, Scope};
use std::time::Instant;

use protocol::message::ToAgent;
use rustix::net::{Shutdown, shutdown};

use super::sentence;
use super::serve::{Busy, InList, Known, Served};
use super::wire::{Connection, Copy, Listed, NewCommand, Reply, Request, ToCommand, WireError};
use crate::child::Child;
use crate::command::{Command, Stdio};
use crate::files::CopyLimits;
use crate::outcome::{Completion, Outcome};
use crate::shared::frame_of;

/// Most detached commands at once: each has three threads.
pub const MAX_DETACHED: usize = 64;

/// Most bytes of a command's words that the list has; what comes after is left out.
const MAX_LISTED_BYTES: usize = 4096;

/// Whose the supervisor's own lines of the log are.
const OWN: &str = "session";

impl<'a> Served<'a> {
    pub(super) fn answer<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        connection: &Connection,
    ) {
        let reply = match connection.receive() {
            Ok((Request::Command(command), _)) => return self.command(scope, connection, &command),
            Ok((Request::Commands, _)) => Reply::Commands(self.commands()),
            Ok((Request::Signal { id, signal }, _)) => self.signal(id, signal),
            Ok((Request::LogEnd, _)) => match self.log.end() {
                Ok(end) => Reply::LogEnd(end),
                Err(error) => Reply::Failed(error.to_string()),
            },
            Ok((Request::Copy(copy), descriptors)) => self.copy(&copy, &descriptors),
            Ok((Request::Stop, _)) => {
                let sent = connection.send(&Reply::Done, &[]);
                self.sandbox.end();
                return drop(sent);
            }
            Ok((Request::Pause { name }, _)) => match self.sandbox.pause(&name) {
                Ok(()) => Reply::Done,
                Err(error) => Reply::Failed(sentence(&error)),
            },
            Err(WireError::Closed) => return,
            // Also to another version, which learns this one by it.
            Err(error) => Reply::Failed(error.to_string()),
        };
        // A client that has left needs no answer.
        let _ = connection.send(&reply, &[]);
    }

    fn commands(&self) -> Vec<Listed> {
        self.lock()
            .commands
            .iter()
            .map(|(id, known)| Listed {
                id: *id,
                words: known.words.clone(),
                age: known.started.elapsed(),
                is_detached: known.is_detached,
            })
            .collect()
    }

    fn signal(&self, id: u32, signal: Option<i32>) -> Reply {
        if !self.lock().commands.contains_key(&id) {
            return Reply::Failed(format!("There is no command {id} in the session"));
        }
        let message = match signal {
            Some(signal @ 1..=64) => ToAgent::Signal {
                command_id: id,
                signal,
            },
            Some(signal) => return Reply::Failed(format!("{signal} is no signal: 1 to 64 are")),
            None => {
                self.kills(id);
                ToAgent::Kill { command_id: id }
            }
        };
        let told = frame_of(&message).map(|frame| self.sandbox.shared().tell(id, frame));
        match told {
            Some(Ok(())) if signal.is_some() || self.wait_unlisted(id) => Reply::Done,
            Some(Ok(())) => Reply::Failed(untold(id)),
            _ => Reply::Failed("The guest has not taken what it was told before".into()),
        }
    }

    fn copy(&self, copy: &Copy, descriptors: &[OwnedFd]) -> Reply {
        let [folder] = descriptors else {
            return Reply::Failed("A copy needs one folder of the host".into());
        };
        let name = Path::new(OsStr::from_bytes(&copy.host_name));
        if name.components().count() != 1 || name.file_name() != Some(name.as_os_str()) {
            return Reply::Failed("A copy's name on the host is one name".into());
        }
        let _busy = self.busy();
        // The client's own folder, wherever it is.
        let folder = format!("/proc/self/fd/{}/", folder.as_raw_fd());
        let host = PathBuf::from(&folder).join(name);
        let guest = Path::new(OsStr::from_bytes(&copy.guest_path));
        let files = match &copy.user {
            Some(user) => self.sandbox.files().user(user),
            None => self.sandbox.files(),
        };
        let copied = if copy.is_out {
            files
                .copy_out(guest, &host, CopyLimits::default())
                .map(|copied| {
                    let first = copied.left_out.first().map(|path| guest.join(path));
                    (copied.left_out_count, first)
                })
        } else {
            files.copy_in(&host, guest).map(|copied| {
                let count = copied.left_out.len() as u64;
                let first = copied.left_out.into_iter().next();
                // The client knows its folder by another name.
                let own = |path: PathBuf| {
                    path.strip_prefix(&folder)
                        .map(Path::to_owned)
                        .unwrap_or(path)
                };
                (count, first.map(own))
            })
        };
        match copied {
            Ok((left_out, first)) => Reply::Copied {
                left_out,
                first: first.map_or_else(Vec::new, |path| path.as_os_str().as_bytes().to_vec()),
            },
            Err(error) => Reply::Failed(sentence(&error).replace(&folder, "")),
        }
    }

    fn command<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        connection: &Connection,
        request: &NewCommand,
    ) {
        let busy = if request.is_detached {
            self.busy_detached()
        } else {
            Some(self.busy())
        };
        let Some(busy) = busy else {
            let full = format!("The session has {MAX_DETACHED} detached commands already");
            let _ = connection.send(&Reply::Failed(full), &[]);
            return;
        };
        let mut child = match self.build(request).spawn() {
            Ok(child) => child,
            Err(error) => {
                // Who asked may be gone.
                let _ = connection.send(&Reply::NotStarted(error.into()), &[]);
                return;
            }
        };
        let id = child.id();
        let listed = self.list(&child, request);
        let streams: Vec<OwnedFd> = if request.is_detached {
            Vec::new()
        } else {
            let terminal = child.terminal.take().map(OwnedFd::from);
            let stdin = child.stdin.take().map(OwnedFd::from);
            let stdout = child.stdout.take().map(OwnedFd::from);
            let stderr = child.stderr.take().map(OwnedFd::from);
            [terminal, stdin, stdout, stderr]
                .into_iter()
                .flatten()
                .collect()
        };
        let lent: Vec<BorrowedFd<'_>> = streams.iter().map(AsFd::as_fd).collect();
        // A client that is not there to take them takes its command along: it is dropped.
        if connection.send(&Reply::Started { id }, &lent).is_err() {
            return;
        }
        drop(lent);
        // The client's are the only ones from here on: what it closes is closed.
        drop(streams);
        if request.is_detached {
            self.detach(scope, child, (busy, listed));
            return;
        }
        thread::scope(|waiting| {
            let told = thread::Builder::new()
                .name("command".into())
                .spawn_scoped(waiting, || {
                    let reply = match self.wait(&child) {
                        Some(completion) => Reply::Ended(Box::new(completion)),
                        None => Reply::Failed(untold(id)),
                    };
                    // Who waits may be gone.
                    let _ = connection.send(&reply, &[]);
                    connection.stop_hearing();
                });
            if told.is_err() {
                let _ =
                    connection.send(&Reply::Failed("There is no room for a thread".into()), &[]);
                return;
            }
            while let Ok((message, _)) = connection.receive() {
                // A guest that does not take it is ended by its time.
                let _ = match message {
                    ToCommand::Signal(signal) => child.signal(signal),
                    ToCommand::Kill => {
                        self.kills(id);
                        child.kill()
                    }
                    ToCommand::Resize { columns, rows } => child.resize(columns, rows),
                };
            }
            // The client is gone, or the command: with the one goes the other.
            self.kills(id);
            let _ = child.kill();
        });
    }

    fn build(&self, request: &NewCommand) -> Command {
        let mut command = self.sandbox.command(OsStr::from_bytes(&request.program));
        command.args(request.args.iter().map(|arg| OsStr::from_bytes(arg)));
        command.keep_secrets();
        for (key, value) in &request.env {
            command.env(OsStr::from_bytes(key), OsStr::from_bytes(value));
        }
        if let Some(folder) = &request.current_dir {
            command.current_dir(Path::new(OsStr::from_bytes(folder)));
        }
        if let Some(user) = &request.user {
            command.user(user);
        }
        match request.terminal {
            Some((columns, rows)) if !request.is_detached => {
                command.pty(columns, rows);
            }
            _ if request.has_stdin && !request.is_detached => {
                command.stdin(Stdio::piped());
            }
            _ => {}
        }
        command
    }

    /// Waits for a command's end, as [`Child::wait`] does, for a thread that does not own it. The end of one that was killed is waited for twice
    /// [`super::serve::Pace::end_limit`] at most.
    fn wait(&self, child: &Child) -> Option<Completion> {
        let (meter, limit) = (child.meter(), Some(self.pace.end_limit));
        loop {
            if let Some(completion) = child.shared().wait_done(child.id(), limit, &meter) {
                return Some(completion);
            }
            if self.is_given_up(child.id()) {
                return None;
            }
        }
    }

    /// Lets a command go on without its client, what it prints into the log.
    fn detach<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        mut child: Child,
        guards: (Busy<'scope, 'a>, InList<'scope, 'a>),
    ) {
        let id = child.id();
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let ends = [
            stdout.as_ref().map(AsFd::as_fd),
            stderr.as_ref().map(AsFd::as_fd),
        ];
        let ends = ends.into_iter().flatten();
        let ends: io::Result<Vec<OwnedFd>> = ends.map(|end| end.try_clone_to_owned()).collect();
        // Nothing is sent: that both who could are gone says that both streams are over.
        let (copying, copied) = channel::<()>();
        let copies = copying.clone();
        let thread = || thread::Builder::new().name("log".into());
        let started = ends.and_then(|ends| {
            thread().spawn_scoped(scope, move || {
                if let Some(stream) = stdout {
                    self.log.copy(&id.to_string(), stream);
                }
                drop(copying);
            })?;
            thread().spawn_scoped(scope, move || {
                if let Some(stream) = stderr {
                    self.log.copy(&id.to_string(), stream);
                }
                drop(copies);
            })?;
            Ok(ends)
        });
        let thread = thread::Builder::new().name("detached".into());
        let started = started.and_then(|ends| {
            thread.spawn_scoped(scope, move || {
                let completion = self.wait(&child);
                while let Err(RecvTimeoutError::Timeout) = copied.recv_timeout(self.pace.end_limit)
                {
                    if self.is_given_up(id) {
                        // The guest does not end them. One that is over already needs no end.
                        for end in &ends {
                            let _ = shutdown(end, Shutdown::Both);
                        }
                    }
                }
                let last = completion
                    .map_or_else(|| untold(id), |completion| said(id, &completion.outcome));
                self.log.line(OWN, last.as_bytes());
                drop(guards);
            })
        });
        if let Err(error) = started {
            self.log.line(OWN, error.to_string().as_bytes());
        }
    }

    fn list<'scope>(&'scope self, child: &Child, request: &NewCommand) -> InList<'scope, 'a> {
        let mut left = MAX_LISTED_BYTES;
        let words = std::iter::once(&request.program).chain(&request.args);
        let words = words.map_while(|word| {
            left = left.checked_sub(word.len())?;
            Some(word.clone())
        });
        let known = Known {
            words: words.collect(),
            started: Instant::now(),
            is_detached: request.is_detached,
            killed: None,
        };
        let id = child.id();
        self.lock().commands.insert(id, known);
        InList(self, id)
    }
}

/// What is said of a command that was killed without a word of the guest.
fn untold(id: u32) -> String {
    format!("Command {id} was killed, and the guest has not told its end")
}

fn said(id: u32, outcome: &Outcome) -> String {
    let how = match outcome {
        Outcome::Exited(code) => format!("exited with {code}"),
        Outcome::Signaled(signal) => format!("was ended by signal {signal}"),
        Outcome::OutOfMemory { .. } => "ran out of memory".to_owned(),
        Outcome::NotKept { .. } => {
            "ended, and not all that it wrote is on the workspace's disk".to_owned()
        }
        other => format!("was ended: {other:?}"),
    };
    format!("Command {id} {how}")
}
