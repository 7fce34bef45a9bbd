//! The stage: the process between the agent and a program.
//!
//! It has one thread, so that the system calls that change a thread's user change the process's. Descriptor 0
//! is its end of a socket pair; the agent sends one byte over it with the descriptors that the order needs,
//! the first of them a memory file with the [`Order`] itself, which therefore never blocks the agent. The stage
//! answers with one [`Report`]. The socket closes with the stage's exec or end.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, IoSliceMut, Seek};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};

use protocol::file::FileRequest;
use protocol::frame::{self, MAX_TO_AGENT_BYTES};
use protocol::message::{Spawn, SpawnFailure, Stdio};
use rustix::fs::{FileType, Gid, Mode, Uid};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use rustix::process::{Resource, Rlimit};
use serde::{Deserialize, Serialize};

use crate::calls::Place;
use crate::limits::{COMMAND_DESCRIPTORS_SOFT, MAX_REPORT_BYTES};
use crate::program::{self, Failure, quoted};
use crate::users::{Accounts, User};
use crate::{calls, cgroup, files};

/// Name that the binary is started under (`argv[0]`) to be a stage.
pub const NAME: &str = "sandvmm-stage";

/// Most descriptors that come with an order: itself, standard input, output and error.
pub const MAX_DESCRIPTORS: usize = 4;

/// Folders in which programs are looked for; Debian's, those of the administrator included.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Permission bits that new files lack.
const UMASK: Mode = Mode::WGRP.union(Mode::WOTH);

/// What a stage is to do.
#[derive(Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Order {
    /// Become a program. Descriptors: standard input if it is piped, output, error; or the terminal.
    Run {
        /// The cgroup's folder.
        cgroup: Vec<u8>,
        /// The program.
        spawn: Spawn,
        /// Where to put the links by which Python finds the module for calls of the host, before a warm interpreter starts.
        link_calls: Option<Place>,
    },
    /// Carry calls of the host's functions for as long as the data stream lasts. Descriptor: that stream.
    Calls {
        /// The cgroup's folder.
        cgroup: Vec<u8>,
        /// Where to put what programs need for it.
        place: Place,
    },
    /// Do something with a file. Descriptor: the data stream, on which the answer goes too.
    File {
        /// The cgroup's folder.
        cgroup: Vec<u8>,
        /// What.
        request: FileRequest,
    },
}

/// What a stage says to the agent.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Report {
    /// Everything is prepared, exec comes next. If the socket then closes without another report, it worked.
    Ready,
    /// The program can't be started.
    Failed {
        /// What kind of failure.
        kind: SpawnFailure,
        /// A sentence for the user.
        message: String,
    },
    /// A process of the warm interpreter can't be this command; nothing of it ran. No stage says this.
    Unfit,
}

/// The whole life of a stage.
#[must_use]
pub fn main() -> ExitCode {
    let Ok((socket, descriptors)) = receive() else {
        return ExitCode::FAILURE;
    };
    let mut descriptors = descriptors.into_iter();
    let order = match descriptors.next().map(read_order) {
        Some(Ok(order)) => order,
        _ => return ExitCode::FAILURE,
    };
    match order {
        Order::Run {
            cgroup,
            spawn,
            link_calls,
        } => {
            if let Some(place) = link_calls {
                place.link_python();
            }
            let Err(failure) = run(&socket, &cgroup, &spawn, &mut descriptors);
            let Failure { kind, message } = failure;
            report(&socket, &Report::Failed { kind, message });
        }
        Order::File { cgroup, request } => {
            let Some(stream) = descriptors.next() else {
                return ExitCode::FAILURE;
            };
            drop(socket);
            let prepared = join_cgroup(&cgroup).and_then(|()| become_user(request.user.as_deref()));
            files::serve(&stream.into(), &request, prepared);
        }
        Order::Calls { cgroup, place } => {
            let Some(stream) = descriptors.next() else {
                return ExitCode::FAILURE;
            };
            drop(socket);
            // Its end is the host's only sign that it failed: the stream closes.
            if join_cgroup(&cgroup).is_err() || calls::serve(stream.into(), &place).is_err() {
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::SUCCESS
}

/// Waits for the order's byte and descriptors; moves the socket off descriptor 0.
fn receive() -> io::Result<(UnixStream, Vec<OwnedFd>)> {
    let socket = rustix::io::fcntl_dupfd_cloexec(io::stdin().as_fd(), 3)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let received = rustix::net::recvmsg(
        &socket,
        &mut [IoSliceMut::new(&mut byte)],
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    if received.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let mut descriptors = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            descriptors.extend(received);
        }
    }
    Ok((socket.into(), descriptors))
}

fn read_order(descriptor: OwnedFd) -> io::Result<Order> {
    let mut file = fs::File::from(descriptor);
    file.rewind()?;
    frame::read(&mut file, MAX_TO_AGENT_BYTES * 2).map_err(io::Error::other)
}

/// Tells the agent. If it is gone, so is the machine.
fn report(mut socket: &UnixStream, report: &Report) {
    let _ = frame::write(&mut socket, report, MAX_REPORT_BYTES);
}

/// Becomes the program; returns only if that failed.
fn run(
    socket: &UnixStream,
    cgroup: &[u8],
    spawn: &Spawn,
    descriptors: &mut impl Iterator<Item = OwnedFd>,
) -> Result<std::convert::Infallible, Failure> {
    join_cgroup(cgroup)?;
    rustix::process::setsid().map_err(preparing("start a session"))?;
    let terminal = matches!(spawn.stdio, Stdio::Terminal(_));
    let [input, output, error] = standard_streams(spawn.stdio, descriptors)?;
    if terminal {
        rustix::process::ioctl_tiocsctty(&input).map_err(preparing("take the terminal"))?;
    }
    set_limits()?;
    let user = find_user(spawn.user.as_deref())?;
    own_streams(user.uid, [&input, &output, &error].map(AsFd::as_fd))
        .map_err(preparing("give a standard stream to the user"))?;
    act_as(&user)?;
    let env = environment(spawn, &user, terminal);
    rustix::process::umask(UMASK);
    if let Some(file) = &spawn.file {
        files::put(file, &user.home)
            .map_err(|sentence| Failure::new(SpawnFailure::Invalid, sentence))?;
    }
    let folder = spawn.cwd.as_deref().map(OsStr::from_bytes);
    enter_folder(folder, &user)?;

    // As execvp(3) does, where there is none.
    let path = env
        .get(OsStr::new("PATH"))
        .map_or(DEFAULT_PATH.as_bytes(), |path| path.as_bytes());
    let file = program::find(&spawn.program, path)?;
    program::check_format(&file)?;
    check_variables(spawn)?;
    rustix::stdio::dup2_stdin(&input)
        .and_then(|()| rustix::stdio::dup2_stdout(&output))
        .and_then(|()| rustix::stdio::dup2_stderr(&error))
        .map_err(preparing("connect the standard streams"))?;
    report(socket, &Report::Ready);
    drop_rights(&user)?;
    // The standard library empties the signal mask and resets SIGPIPE before it execs.
    let error = Command::new(&file)
        .arg0(OsStr::from_bytes(&spawn.program))
        .args(
            spawn
                .args
                .iter()
                .map(|argument| OsStr::from_bytes(argument)),
        )
        .env_clear()
        .envs(&env)
        .exec();
    Err(program::exec_failure(&file, &error))
}

fn join_cgroup(path: &[u8]) -> Result<(), Failure> {
    cgroup::join(Path::new(OsStr::from_bytes(path))).map_err(preparing("join the cgroup"))
}

/// The agent can't be killed for lack of memory, what it starts can: the setting is inherited.
fn set_limits() -> Result<(), Failure> {
    fs::write("/proc/self/oom_score_adj", "0").map_err(preparing("reset oom_score_adj"))?;
    // The hard bounds are inherited: the agent has set them.
    for (resource, bound) in [
        (Resource::Nofile, COMMAND_DESCRIPTORS_SOFT),
        (Resource::Core, 0),
    ] {
        let maximum = rustix::process::getrlimit(resource).maximum;
        let current = Some(maximum.map_or(bound, |maximum| maximum.min(bound)));
        rustix::process::setrlimit(resource, Rlimit { current, maximum })
            .map_err(preparing("set the resource limits"))?;
    }
    Ok(())
}

fn standard_streams(
    stdio: Stdio,
    descriptors: &mut impl Iterator<Item = OwnedFd>,
) -> Result<[OwnedFd; 3], Failure> {
    let mut next = || {
        descriptors.next().ok_or_else(|| {
            Failure::new(
                SpawnFailure::Exhausted,
                "A standard stream did not reach the stage",
            )
        })
    };
    let duplicate = |descriptor: &OwnedFd| {
        descriptor
            .try_clone()
            .map_err(preparing("duplicate the terminal"))
    };
    match stdio {
        Stdio::Terminal(_) => {
            let terminal = next()?;
            Ok([duplicate(&terminal)?, duplicate(&terminal)?, terminal])
        }
        Stdio::Pipes { stdin: true } => Ok([next()?, next()?, next()?]),
        _ => {
            let null = fs::File::open("/dev/null").map_err(preparing("open /dev/null"))?;
            Ok([null.into(), next()?, next()?])
        }
    }
}

/// Gives pipes and terminal to the user, or opening `/dev/stdout` by name would be forbidden.
///
/// # Errors
/// Those of fstat(2) and fchown(2).
pub(crate) fn own_streams<'a>(
    uid: u32,
    streams: impl IntoIterator<Item = BorrowedFd<'a>>,
) -> io::Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    for stream in streams {
        let status = rustix::fs::fstat(stream)?;
        let (kind, is_null) = (
            FileType::from_raw_mode(status.st_mode),
            status.st_rdev == NULL_DEVICE,
        );
        if kind == FileType::Fifo || kind == FileType::CharacterDevice && !is_null {
            // The terminal's group is `tty`, by the mount's options.
            rustix::fs::fchown(stream, Some(Uid::from_raw(uid)), None)?;
        }
    }
    Ok(())
}

/// `/dev/null`'s device number: major 1, minor 3 (`Documentation/admin-guide/devices.txt`).
const NULL_DEVICE: u64 = 0x103;

fn find_user(spec: Option<&str>) -> Result<User, Failure> {
    let user = Accounts::read()
        .resolve(spec)
        .map_err(|error| Failure::new(SpawnFailure::Invalid, error.to_string()))?;
    if user.make_home && fs::create_dir(&user.home).is_ok() {
        std::os::unix::fs::chown(&user.home, Some(user.uid), Some(user.gid))
            .map_err(preparing("make the user's home"))?;
    }
    Ok(user)
}

/// Becomes the user for writing files.
fn become_user(spec: Option<&str>) -> Result<User, Failure> {
    let user = find_user(spec)?;
    act_as(&user)?;
    rustix::process::umask(UMASK);
    Ok(user)
}

/// Acts as the user from here on, with nothing but the user's rights: the kernel goes by the effective and the file system's ids, and
/// clears all effective capabilities with a change of the effective one (capabilities(7)). The real and the saved user stay the agent's: who may
/// send a signal is decided by these (kill(2)), so that no program of the user's stops or ends a stage.
fn act_as(user: &User) -> Result<(), Failure> {
    let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
    if !rustix::process::geteuid().is_root() {
        if rustix::process::geteuid() == uid && rustix::process::getegid() == gid {
            return Ok(());
        }
        return Err(Failure::new(
            SpawnFailure::Invalid,
            "Only root can run commands as another user",
        ));
    }
    let groups: Vec<Gid> = user
        .groups
        .iter()
        .map(|group| Gid::from_raw(*group))
        .collect();
    rustix::thread::set_thread_groups(&groups)
        .and_then(|()| rustix::thread::set_thread_res_gid(gid, gid, gid))
        .and_then(|()| rustix::thread::set_thread_res_uid(None, uid, None))
        .map_err(preparing("become the user"))
}

/// Becomes the user for good, which a program does before it runs: behind [`act_as`] no right is needed for it.
fn drop_rights(user: &User) -> Result<(), Failure> {
    let uid = Uid::from_raw(user.uid);
    rustix::thread::set_thread_res_uid(uid, uid, uid).map_err(preparing("become the user"))
}

/// Enters the requested folder. The user's home is only a suggestion: without it the command starts in `/`, as
/// with login(1).
fn enter_folder(folder: Option<&OsStr>, user: &User) -> Result<(), Failure> {
    let Some(folder) = folder else {
        return rustix::process::chdir(user.home.as_str())
            .or_else(|_| rustix::process::chdir("/"))
            .map_err(preparing("enter a working folder"));
    };
    rustix::process::chdir(folder).map_err(|errno| {
        let name = quoted(folder.as_bytes());
        let message = match errno {
            rustix::io::Errno::NOENT => format!("The working folder {name:?} does not exist"),
            rustix::io::Errno::NOTDIR => format!("The working folder {name:?} is no folder"),
            rustix::io::Errno::ACCESS => {
                format!(
                    "The user {:?} may not enter the working folder {name:?}",
                    user.name
                )
            }
            errno => format!(
                "The working folder {name:?} can't be entered: {}",
                io::Error::from(errno)
            ),
        };
        Failure::new(SpawnFailure::Invalid, message)
    })
}

fn environment(spawn: &Spawn, user: &User, terminal: bool) -> BTreeMap<OsString, OsString> {
    let mut env = BTreeMap::new();
    let mut set = |name: &str, value: &str| {
        let is_removed = spawn.env_remove.iter().any(|one| one == name.as_bytes());
        if !spawn.env_clear && !is_removed {
            env.insert(name.into(), value.into());
        }
    };
    set("PATH", DEFAULT_PATH);
    set("HOME", &user.home);
    set("USER", &user.name);
    set("LOGNAME", &user.name);
    set("SHELL", &user.shell);
    set("LANG", "C.UTF-8");
    if terminal {
        set("TERM", "xterm-256color");
    }
    for (name, value) in &spawn.env {
        env.insert(
            OsString::from_vec(name.clone()),
            OsString::from_vec(value.clone()),
        );
    }
    env
}

fn check_variables(spawn: &Spawn) -> Result<(), Failure> {
    match spawn
        .env
        .iter()
        .find(|(name, _)| name.is_empty() || name.contains(&b'='))
    {
        Some((name, _)) => Err(Failure::new(
            SpawnFailure::Invalid,
            format!("A variable can't be called {:?}", quoted(name)),
        )),
        None => Ok(()),
    }
}

/// Turns a failed step of the preparation into a sentence. The guest is out of something, or the step would not
/// have failed.
fn preparing<E: Into<io::Error>>(step: &'static str) -> impl Fn(E) -> Failure {
    move |error| {
        let error: io::Error = error.into();
        Failure::new(
            SpawnFailure::Exhausted,
            format!("The command could not be prepared: {step}: {error}"),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spawn(env: &[(&str, &str)]) -> Spawn {
        Spawn {
            command_id: 1,
            program: b"true".to_vec(),
            args: Vec::new(),
            env: env
                .iter()
                .map(|(name, value)| (name.as_bytes().into(), value.as_bytes().into()))
                .collect(),
            env_clear: false,
            env_remove: Vec::new(),
            cwd: None,
            user: None,
            stdio: Stdio::Pipes { stdin: false },
            file: None,
        }
    }

    #[test]
    fn the_requests_variables_win_over_the_defaults() {
        let user = Accounts::default().resolve(None).unwrap();

        let env = environment(&spawn(&[("LANG", "C"), ("X", "")]), &user, false);

        assert_eq!(env[OsStr::new("LANG")], "C");
        assert_eq!(env[OsStr::new("X")], "");
        assert_eq!(env[OsStr::new("HOME")], "/home/sandbox");
        assert!(!env.contains_key(OsStr::new("TERM")));
    }

    #[test]
    fn defaults_that_are_not_wanted_are_left_out() {
        let user = Accounts::default().resolve(None).unwrap();
        let some = Spawn {
            env_remove: vec![b"LANG".to_vec(), b"TERM".to_vec(), b"X".to_vec()],
            ..spawn(&[("X", "1")])
        };
        let none = Spawn {
            env_clear: true,
            ..some.clone()
        };

        let some = environment(&some, &user, true);
        let none = environment(&none, &user, true);

        let names: Vec<_> = some.keys().collect();
        assert_eq!(names, ["HOME", "LOGNAME", "PATH", "SHELL", "USER", "X"]);
        let names: Vec<_> = none.keys().collect();
        assert_eq!(names, ["X"]);
    }

    #[test]
    fn test_check_variables_impossible_name_returns_invalid() {
        assert_eq!(
            check_variables(&spawn(&[("A=B", "")])).unwrap_err().kind,
            SpawnFailure::Invalid
        );
        assert_eq!(
            check_variables(&spawn(&[("", "x")])).unwrap_err().kind,
            SpawnFailure::Invalid
        );
        assert_eq!(check_variables(&spawn(&[("A", "=")])), Ok(()));
    }
}
