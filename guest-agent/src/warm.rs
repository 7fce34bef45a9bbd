//! The warm interpreter, from the agent's side: a server process that was started as a command is, the socket to it, and
//! the one process that it has in reserve. What the server does stands at the top of `warm/server.py`.
//!
//! The server is a process of the user whose commands are forked from it, and has no rights beyond that user's. What it
//! says is checked: only a process of its own cgroup can become a command.

use std::fs::{self, File, Permissions};
use std::io::{self, IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use protocol::message::{Spawn, Stdio};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use rustix::process::Pid;

use crate::cgroup::Cgroup;
use crate::limits::{MAX_SMALL_FILE_BYTES, MAX_WARM_ORDER_BYTES};
use crate::relay::set_nonblocking;
use crate::stage::MAX_DESCRIPTORS;

/// The server's program. It is carried by the agent so that every root image has the one that fits.
const SERVER: &str = include_str!("warm/server.py");
/// Its name in the agent's folder.
const SERVER_FILE: &str = "warm.py";
/// The argument in front of the code that warms, as of `python3 -c`.
const CODE_OPTION: &[u8] = b"-c";

/// What asks the server for a process in reserve; shorter than any order.
const REQUEST: &[u8] = b"?";

/// A warm interpreter.
#[derive(Debug)]
pub struct Warm {
    /// Which commands it is for: their program and user, word for word.
    program: Vec<u8>,
    user: Option<String>,
    socket: OwnedFd,
    state: State,
}

#[derive(Debug)]
enum State {
    /// It is a command that has not ended, and runs the code that warms it.
    Warming {
        command_id: u32,
        /// What that command is given as its standard input.
        input: Option<OwnedFd>,
    },
    /// It waits for orders.
    Ready {
        server: Pid,
        cgroup: Cgroup,
        /// The process in reserve, and the cgroup that is its alone.
        spare: Option<(Pid, Cgroup)>,
        /// Whether the server was asked for one.
        asked: bool,
    },
}

/// What came of reading a server's message.
#[derive(Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Said {
    /// Nothing yet.
    Nothing,
    /// This process is in reserve.
    Spare(Pid),
    /// The server is gone, or talks nonsense.
    Gone,
}

impl Warm {
    /// Prepares a server: writes its program to `folder` and makes its socket. Returns it, and the command that starts it
    /// in the place of `spawn`, whose standard input is to be [`Self::take_input`].
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] when `spawn` is not a program, `-c` and code, without input; else that of the
    /// file or socket.
    pub fn prepare(spawn: &Spawn, folder: &Path) -> io::Result<(Self, Spawn)> {
        let (Some(code), Stdio::Pipes { stdin: false }) = (warming_code(spawn), spawn.stdio) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let file = write_server(folder)?;
        let (ours, theirs) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        set_nonblocking(&ours)?;
        let path = std::os::unix::ffi::OsStringExt::into_vec(file.into_os_string());
        let start = Spawn {
            args: vec![path, code.to_vec()],
            ..spawn.clone()
        };
        let warm = Self {
            program: spawn.program.clone(),
            user: spawn.user.clone(),
            socket: ours,
            state: State::Warming {
                command_id: spawn.command_id,
                input: Some(theirs),
            },
        };
        Ok((warm, start))
    }

    /// The command that it still is.
    #[must_use]
    pub fn warming(&self) -> Option<u32> {
        match self.state {
            State::Warming { command_id, .. } => Some(command_id),
            State::Ready { .. } => None,
        }
    }

    /// The standard input of this command, if it is the one that becomes the server.
    pub fn take_input(&mut self, id: u32) -> Option<OwnedFd> {
        match &mut self.state {
            State::Warming { command_id, input } if *command_id == id => input.take(),
            _ => None,
        }
    }

    /// It is a command no longer.
    pub fn ready(&mut self, server: Pid, cgroup: Cgroup) {
        self.state = State::Ready {
            server,
            cgroup,
            spare: None,
            // It makes the first one by itself.
            asked: true,
        };
    }

    /// The server's process, once it is a command no longer.
    #[must_use]
    pub fn server(&self) -> Option<Pid> {
        match self.state {
            State::Warming { .. } => None,
            State::Ready { server, .. } => Some(server),
        }
    }

    /// The cgroups that the server and the process in reserve leave behind.
    #[must_use]
    pub fn into_cgroups(self) -> Vec<Cgroup> {
        match self.state {
            State::Warming { .. } => Vec::new(),
            State::Ready { cgroup, spare, .. } => spare
                .map(|(_, cgroup)| cgroup)
                .into_iter()
                .chain([cgroup])
                .collect(),
        }
    }

    /// Reads one message.
    #[must_use]
    pub fn receive(&self) -> Said {
        let mut number = [0; 4];
        match rustix::io::read(&self.socket, &mut number) {
            Ok(4) => {
                let number = i32::try_from(u32::from_le_bytes(number)).ok();
                number
                    .and_then(Pid::from_raw)
                    .map_or(Said::Gone, Said::Spare)
            }
            Err(Errno::AGAIN | Errno::INTR) => Said::Nothing,
            Ok(_) | Err(_) => Said::Gone,
        }
    }

    /// The server offers a process as the one in reserve. Whether it is one of the server's own, and there is none yet.
    pub fn is_offered(&mut self, pid: Pid) -> bool {
        match &mut self.state {
            State::Ready {
                server,
                spare,
                asked,
                ..
            } => {
                *asked = false;
                spare.is_none() && is_sibling(*server, pid)
            }
            State::Warming { .. } => false,
        }
    }

    /// Takes the process that was offered, which is alone in this cgroup now, so that the command which it becomes need not wait for that.
    pub fn keep_spare(&mut self, pid: Pid, cgroup: Cgroup) {
        if let State::Ready { spare, .. } = &mut self.state {
            *spare = Some((pid, cgroup));
        }
    }

    /// A process has ended; if it was the one in reserve, the cgroup that it leaves behind.
    pub fn ended(&mut self, pid: Pid) -> Option<Cgroup> {
        let State::Ready { spare, .. } = &mut self.state else {
            return None;
        };
        let (_, cgroup) = spare.take_if(|(spare, _)| *spare == pid)?;
        Some(cgroup)
    }

    /// The process that is to become this command, if there is one and the command is of its kind. The server gives all of its own variables on.
    pub fn take_spare(&mut self, spawn: &Spawn) -> Option<(Pid, Cgroup)> {
        match &mut self.state {
            State::Ready { spare, .. }
                if spawn.program == self.program
                    && spawn.user == self.user
                    && !spawn.env_clear
                    && spawn.env_remove.is_empty() =>
            {
                spare.take()
            }
            _ => None,
        }
    }

    /// Asks for a process in reserve, if there is none.
    pub fn want_spare(&mut self) {
        if let State::Ready { spare, asked, .. } = &mut self.state
            && spare.is_none()
            && !*asked
        {
            // A socket that is full holds enough for the server to do.
            *asked = rustix::net::send(&self.socket, REQUEST, SendFlags::NOSIGNAL).is_ok();
        }
    }

    /// Gives the process in reserve, which the order names, its order: what to be, the socket to report on, and the command's streams.
    ///
    /// # Errors
    /// When the order is longer than [`MAX_WARM_ORDER_BYTES`], or the socket does not take it.
    pub fn order(&self, pid: Pid, spawn: &Spawn, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let order = encode(pid, spawn)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        rustix::net::sendmsg(
            &self.socket,
            &[IoSlice::new(&order)],
            &mut ancillary,
            SendFlags::NOSIGNAL,
        )?;
        Ok(())
    }
}

impl AsFd for Warm {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn warming_code(spawn: &Spawn) -> Option<&[u8]> {
    match spawn.args.as_slice() {
        [option, code] if option == CODE_OPTION => Some(code),
        _ => None,
    }
}

/// Writes the server's program where every user can read it and none can change it.
fn write_server(folder: &Path) -> io::Result<PathBuf> {
    match fs::create_dir(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => fs::set_permissions(folder, Permissions::from_mode(0o755))?,
    }
    let file = folder.join(SERVER_FILE);
    fs::write(&file, SERVER)?;
    fs::set_permissions(&file, Permissions::from_mode(0o644))?;
    Ok(file)
}

/// The order as the server's processes read it: whose it is, since one that was killed leaves its order to the next; four flags, then texts and lists, each with its length in front.
fn encode(pid: Pid, spawn: &Spawn) -> io::Result<Vec<u8>> {
    let (is_terminal, has_stdin) = match spawn.stdio {
        Stdio::Terminal(_) => (true, false),
        Stdio::Pipes { stdin } => (false, stdin),
        _ => return Err(io::ErrorKind::InvalidInput.into()),
    };
    let mut order = pid.as_raw_pid().to_le_bytes().to_vec();
    let flags = [
        is_terminal,
        has_stdin,
        spawn.cwd.is_some(),
        spawn.file.is_some(),
    ];
    order.extend(flags.map(u8::from));
    put_text(&mut order, &spawn.program);
    put_length(&mut order, spawn.args.len());
    for argument in &spawn.args {
        put_text(&mut order, argument);
    }
    put_length(&mut order, spawn.env.len());
    for (name, value) in &spawn.env {
        put_text(&mut order, name);
        put_text(&mut order, value);
    }
    if let Some(folder) = &spawn.cwd {
        put_text(&mut order, folder);
    }
    if let Some(file) = &spawn.file {
        put_text(&mut order, &file.path);
        order.extend_from_slice(&file.mode.to_le_bytes());
        put_text(&mut order, &file.content);
    }
    if order.len() > MAX_WARM_ORDER_BYTES {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    Ok(order)
}

fn put_length(order: &mut Vec<u8>, length: usize) {
    // What does not fit makes the order too long.
    let length = u32::try_from(length).unwrap_or(u32::MAX);
    order.extend_from_slice(&length.to_le_bytes());
}

fn put_text(order: &mut Vec<u8>, text: &[u8]) {
    put_length(order, text.len());
    order.extend_from_slice(text);
}

/// Whether both processes live in the same cgroup: no process leaves a command's by itself.
fn is_sibling(server: Pid, pid: Pid) -> bool {
    let cgroup = |pid: Pid| read_proc(pid, "cgroup").filter(|text| !text.is_empty());
    server != pid && cgroup(server).is_some() && cgroup(server) == cgroup(pid)
}

/// The user that a process acts as (proc_pid_status(5): real, effective, saved, file system).
#[must_use]
pub fn user_of(pid: Pid) -> Option<u32> {
    let status = read_proc(pid, "status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    line.split_ascii_whitespace().nth(1)?.parse().ok()
}

fn read_proc(pid: Pid, name: &str) -> Option<String> {
    let file = File::open(format!("/proc/{}/{name}", pid.as_raw_pid())).ok()?;
    let mut text = String::new();
    file.take(MAX_SMALL_FILE_BYTES)
        .read_to_string(&mut text)
        .ok()?;
    Some(text)
}

#[cfg(test)]
mod tests {
    use protocol::message::NewFile;

    use super::*;

    fn spawn(args: &[&[u8]]) -> Spawn {
        Spawn {
            command_id: 1,
            program: b"python3".to_vec(),
            args: args.iter().map(|argument| argument.to_vec()).collect(),
            env: vec![(b"A".to_vec(), b"b".to_vec())],
            env_clear: false,
            env_remove: Vec::new(),
            cwd: Some(b"/".to_vec()),
            user: None,
            stdio: Stdio::Pipes { stdin: false },
            file: None,
        }
    }

    #[test]
    fn an_order_has_the_bytes_that_the_server_reads() {
        let pid = Pid::from_raw(258).unwrap();

        let spawn = Spawn {
            file: Some(NewFile {
                path: b"f".to_vec(),
                mode: 0o755,
                content: b"yz".to_vec(),
            }),
            ..spawn(&[b"-c", b"x"])
        };
        let order = encode(pid, &spawn).unwrap();

        let expected = [
            &[2, 1, 0, 0, 0, 0, 1, 1][..],
            b"\x07\0\0\0python3",
            b"\x02\0\0\0\x02\0\0\0-c\x01\0\0\0x",
            b"\x01\0\0\0\x01\0\0\0A\x01\0\0\0b",
            b"\x01\0\0\0/",
            b"\x01\0\0\0f\xed\x01\0\0\x02\0\0\0yz",
        ];
        assert_eq!(order, expected.concat());
        let python = format!("MAX_ORDER_BYTES = {MAX_WARM_ORDER_BYTES}\n");
        assert!(SERVER.contains(&python), "both sides have one bound");
        let python = format!("MAX_DESCRIPTORS = {MAX_DESCRIPTORS}\n");
        assert!(SERVER.contains(&python), "both sides have one bound");
    }

    #[test]
    fn test_encode_order_above_the_bound_returns_error() {
        let long = vec![b'x'; MAX_WARM_ORDER_BYTES];
        let error = encode(Pid::INIT, &spawn(&[b"-c", &long])).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn test_prepare_anything_but_code_returns_error() {
        let folder = tempfile::tempdir().unwrap();
        let with_input = Spawn {
            stdio: Stdio::Pipes { stdin: true },
            ..spawn(&[b"-c", b"x"])
        };
        for spawn in [spawn(&[b"x.py"]), spawn(&[b"-c", b"x", b"y"]), with_input] {
            let error = Warm::prepare(&spawn, folder.path()).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        }
    }

    #[test]
    fn only_commands_of_its_program_and_user_are_forked_and_one_from_each_spare() {
        let folder = tempfile::tempdir().unwrap();
        let own = spawn(&[b"-c", b"pass"]);
        let (mut warm, _) = Warm::prepare(&own, folder.path()).unwrap();
        let workload = crate::cgroup::Workload::create(folder.path(), 1 << 30).unwrap();
        let mut child = std::process::Command::new("sleep")
            .arg("1000")
            .spawn()
            .unwrap();
        let pid = |number: u32| Pid::from_raw(number.try_into().unwrap()).unwrap();
        let (server, spare) = (pid(std::process::id()), pid(child.id()));

        let takes = |warm: &mut Warm, spawn: &Spawn| warm.take_spare(spawn).map(|(pid, _)| pid);
        assert_eq!(takes(&mut warm, &own), None);
        warm.ready(server, workload.child("warm").unwrap());
        assert_eq!(takes(&mut warm, &own), None);
        assert!(!warm.is_offered(server), "the server is no spare");
        assert!(warm.is_offered(spare));
        warm.keep_spare(spare, workload.child("spare").unwrap());
        assert!(!warm.is_offered(spare), "there is one");
        let other_program = Spawn {
            program: b"/usr/bin/python3".to_vec(),
            ..own.clone()
        };
        let other_user = Spawn {
            user: Some("root".to_owned()),
            ..own.clone()
        };
        assert_eq!(takes(&mut warm, &other_program), None);
        let cleared = Spawn {
            env_clear: true,
            ..own.clone()
        };
        let without_one = Spawn {
            env_remove: vec![b"LANG".to_vec()],
            ..own.clone()
        };
        assert_eq!(takes(&mut warm, &other_user), None);
        assert_eq!(takes(&mut warm, &cleared), None);
        assert_eq!(takes(&mut warm, &without_one), None);
        assert_eq!(takes(&mut warm, &own), Some(spare));
        assert_eq!(takes(&mut warm, &own), None);
        warm.keep_spare(spare, workload.child("spare").unwrap());
        assert!(warm.ended(server).is_none());
        assert!(warm.ended(spare).is_some());
        assert_eq!(takes(&mut warm, &own), None);

        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!warm.is_offered(spare), "a process that is gone is none");
    }

    #[test]
    fn the_user_of_a_process_is_the_effective_one() {
        let own = rustix::process::getpid();
        assert_eq!(user_of(own), Some(rustix::process::geteuid().as_raw()));
    }
}
