//! The other end: xtask as the first process of the emulated host. Mounts what a program expects, runs the command, carries
//! its three streams, and says how it ended.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount};
use rustix::process::{Pid, Resource, Rlimit, WaitOptions};
use rustix::system::RebootCommand;
use rustix::time::{ClockId, Timespec};

use super::wire::{DATA_BYTES_MAX, Frame, Start, WireError, share_tag};

/// Name of the virtio-serial port between xtask and its agent.
pub(super) const PORT_NAME: &str = "xtask";
/// 9p options of a folder that is shared for writing: like the root folder's. What is written is on the other side when the
/// command has ended ([`rustix::fs::sync`]).
const SHARE_OPTIONS: &str = "trans=virtio,version=9p2000.L,msize=512000,cache=loose";
/// Where copies of files in memory are, before they are mounted over the files.
const RESIDENT: &str = "/run/resident";
/// Open files that the command may have: what systemd gives a service on a Debian machine. (The kernel's own default for the
/// first process is 4096.)
const OPEN_FILES: Rlimit = Rlimit {
    current: Some(1024),
    maximum: Some(1_048_576),
};
/// How long the port may take to be connected after it was opened.
const CONNECT_MAX: Duration = Duration::from_secs(10);
/// Pause between two looks at it.
const CONNECT_PAUSE: Duration = Duration::from_millis(5);

/// Why the agent could not serve.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AgentError {
    /// A system call or file operation failed.
    #[error("Could not {action}")]
    Io {
        /// What was tried.
        action: String,
        /// Why it failed.
        source: io::Error,
    },
    /// It would mount over what this machine has.
    #[error("This is for the first process of an emulated host, which `cargo xtask host` starts")]
    NotInit,
    /// xtask is gone, or it said something strange.
    #[error(transparent)]
    Wire(#[from] WireError),
}

fn failed(action: impl Into<String>) -> impl FnOnce(io::Error) -> AgentError {
    let action = action.into();
    move |source| AgentError::Io { action, source }
}

/// Runs as the first process. It does not return where it is that: the machine is switched off.
pub(crate) fn serve() -> Result<(), AgentError> {
    if rustix::process::getpid() != Pid::INIT {
        return Err(AgentError::NotInit);
    }
    let served = mount_system().and_then(|()| converse());
    if let Err(error) = &served {
        eprintln!(
            "emulated host: {error}: {:?}",
            std::error::Error::source(error)
        );
    }
    rustix::fs::sync();
    // It returns only where it fails; then the kernel panics on the return below, and QEMU ends as well.
    let _ = rustix::system::reboot(RebootCommand::Restart);
    served
}

/// The system's own file systems, as a service manager mounts them.
fn mount_system() -> Result<(), AgentError> {
    let no_exec = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    let no_device = MountFlags::NOSUID | MountFlags::NODEV;
    attach("proc", "proc", "/proc", no_exec, "")?;
    attach("sysfs", "sysfs", "/sys", no_exec, "")?;
    attach(
        "devtmpfs",
        "devtmpfs",
        "/dev",
        MountFlags::NOSUID,
        "mode=755",
    )?;
    for folder in ["/dev/pts", "/dev/shm"] {
        std::fs::create_dir(folder).map_err(failed(format!("create {folder}")))?;
    }
    attach(
        "devpts",
        "devpts",
        "/dev/pts",
        MountFlags::NOSUID,
        "mode=620,gid=5,ptmxmode=666",
    )?;
    attach("tmpfs", "tmpfs", "/dev/shm", no_device, "mode=1777")?;
    attach("tmpfs", "tmpfs", "/run", no_device, "mode=755")?;
    // Without it each virtual machine waits for a grace period when it is made and when it goes: KVM starts a thread in the caller's
    // group, before Linux 6.13.
    attach(
        "cgroup2",
        "cgroup2",
        "/sys/fs/cgroup",
        no_exec,
        "favordynmods",
    )?;
    for (name, target) in [
        ("fd", ""),
        ("stdin", "/0"),
        ("stdout", "/1"),
        ("stderr", "/2"),
    ] {
        let name = format!("/dev/{name}");
        std::os::unix::fs::symlink(format!("/proc/self/fd{target}"), &name)
            .map_err(failed(format!("create {name}")))?;
    }
    std::fs::write("/proc/sys/kernel/hostname", "kvm-host").map_err(failed("set the host name"))?;
    rustix::process::setrlimit(Resource::Nofile, OPEN_FILES)
        .map_err(io::Error::from)
        .map_err(failed("set the limit of open files"))
}

fn attach(
    source: &str,
    kind: &str,
    target: &str,
    flags: MountFlags,
    options: &str,
) -> Result<(), AgentError> {
    let options = std::ffi::CString::new(options).map_err(|error| failed("mount")(error.into()))?;
    mount(source, target, kind, flags, options.as_c_str())
        .map_err(io::Error::from)
        .map_err(failed(format!("mount {source} on {target}")))
}

/// Takes the command from xtask, runs it, and stays until xtask has hung up.
fn converse() -> Result<(), AgentError> {
    let mut port = open_port()?;
    let to_host = Arc::new(Mutex::new(
        port.try_clone().map_err(failed("duplicate the port"))?,
    ));
    send(&to_host, &Frame::Ready)?;
    let Frame::Start(start) = first_frame(&mut port)? else {
        return Err(WireError::Malformed("the first is no command".to_owned()).into());
    };
    let ended = match prepare(&start) {
        Ok(()) => run(&start, &port, &to_host)?,
        Err(error) => Frame::Failed(
            super::EXIT_HOST_FAILED,
            format!("{error}: {:?}", std::error::Error::source(&error)),
        ),
    };
    rustix::fs::sync();
    send(&to_host, &ended)?;
    // xtask ends QEMU when it has read that. Where it does not, it is gone, and the port reports it.
    loop {
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// Mounts the shared folders, copies files into memory, and sets the clock.
fn prepare(start: &Start) -> Result<(), AgentError> {
    for (index, folder) in start.shares.iter().enumerate() {
        attach(
            &share_tag(index),
            "9p",
            &folder.to_string_lossy(),
            MountFlags::empty(),
            SHARE_OPTIONS,
        )?;
    }
    if !start.resident.is_empty() {
        std::fs::create_dir(RESIDENT).map_err(failed(format!("create {RESIDENT}")))?;
    }
    for (index, file) in start.resident.iter().enumerate() {
        let copy = Path::new(RESIDENT).join(index.to_string());
        std::fs::copy(file, &copy)
            .and_then(|_| Ok(rustix::mount::mount_bind(&copy, file)?))
            .map_err(failed(format!("copy {} into memory", file.display())))?;
    }
    let seconds = i64::try_from(start.clock_ns / 1_000_000_000).unwrap_or(i64::MAX);
    let nanoseconds = i64::try_from(start.clock_ns % 1_000_000_000).unwrap_or(0);
    let now = Timespec {
        tv_sec: seconds,
        tv_nsec: nanoseconds,
    };
    rustix::time::clock_settime(ClockId::Realtime, now)
        .map_err(io::Error::from)
        .map_err(failed("set the clock"))
}

/// Finds the port by its name: its device node is called after numbers that depend on the order of drivers.
fn open_port() -> Result<File, AgentError> {
    let class = Path::new("/sys/class/virtio-ports");
    let listing = std::fs::read_dir(class).map_err(failed("list the serial ports"))?;
    for entry in listing.flatten() {
        let name = std::fs::read_to_string(entry.path().join("name")).unwrap_or_default();
        if name.trim() == PORT_NAME {
            let node = PathBuf::from("/dev").join(entry.file_name());
            return File::options()
                .read(true)
                .write(true)
                .open(&node)
                .map_err(failed(format!("open {}", node.display())));
        }
    }
    Err(failed("find the serial port")(ErrorKind::NotFound.into()))
}

/// Reads the first frame. A port reads as ended until the driver has been told that the other side is connected.
fn first_frame(port: &mut File) -> Result<Frame, AgentError> {
    let mut waited = Duration::ZERO;
    loop {
        match Frame::read(port) {
            Err(WireError::Io(error))
                if error.kind() == ErrorKind::UnexpectedEof && waited < CONNECT_MAX =>
            {
                std::thread::sleep(CONNECT_PAUSE);
                waited += CONNECT_PAUSE;
            }
            other => return Ok(other?),
        }
    }
}

type Sender = Arc<Mutex<File>>;

fn send(to_host: &Sender, frame: &Frame) -> Result<(), WireError> {
    frame.write(&mut *to_host.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Runs the command and returns the frame that says how it ended.
fn run(start: &Start, port: &File, to_host: &Sender) -> Result<Frame, AgentError> {
    let Some((program, arguments)) = start.command.split_first() else {
        return Ok(Frame::Failed(
            super::EXIT_HOST_FAILED,
            "No command was given".to_owned(),
        ));
    };
    let spawned = Command::new(program)
        .args(arguments)
        .env_clear()
        .envs(start.environment.iter().map(|(name, value)| (name, value)))
        .current_dir(&start.folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = match spawned {
        Ok(child) => child,
        Err(error) => {
            let (code, reason) = super::not_started(program, &error);
            return Ok(Frame::Failed(code, reason));
        }
    };
    feed(&mut child, port)?;
    let (ended, end) = rustix::pipe::pipe()
        .map_err(io::Error::from)
        .map_err(failed("create a pipe"))?;
    let ended = Arc::new(ended);
    let stdout = child.stdout.take().map(OwnedFd::from);
    let stderr = child.stderr.take().map(OwnedFd::from);
    let carriers = [
        stdout.map(|from| carry(from, Arc::clone(&ended), to_host, Frame::Stdout)),
        stderr.map(|from| carry(from, Arc::clone(&ended), to_host, Frame::Stderr)),
    ];
    let status = wait(&child)?;
    drop(end);
    for carrier in carriers.into_iter().flatten() {
        carrier
            .join()
            .map_err(|_| failed("carry the output")(ErrorKind::Other.into()))??;
    }
    Ok(Frame::Exit(super::exit_code(status)))
}

/// Gives the command its standard input, from a thread that also notices when xtask is gone, and then switches the machine off.
fn feed(child: &mut Child, port: &File) -> Result<(), AgentError> {
    let mut port = port.try_clone().map_err(failed("duplicate the port"))?;
    let mut stdin = child.stdin.take();
    std::thread::spawn(move || {
        loop {
            match Frame::read(&mut port) {
                Ok(Frame::Stdin(data)) if data.is_empty() => stdin = None,
                Ok(Frame::Stdin(data)) => {
                    // A command that has closed its input, or has ended, wants no more of it.
                    if stdin
                        .as_mut()
                        .is_some_and(|stdin| stdin.write_all(&data).is_err())
                    {
                        stdin = None;
                    }
                }
                _ => {
                    let _ = rustix::system::reboot(RebootCommand::Restart);
                    return;
                }
            }
        }
    });
    Ok(())
}

/// Sends what arrives on `from` until its end, or until the command has ended (`ended` hangs up) and nothing is left in it: a
/// background process that holds the stream open does not hold up the command.
fn carry(
    from: OwnedFd,
    ended: Arc<OwnedFd>,
    to_host: &Sender,
    frame: fn(Vec<u8>) -> Frame,
) -> std::thread::JoinHandle<Result<(), AgentError>> {
    let to_host = Arc::clone(to_host);
    std::thread::spawn(move || {
        let mut from = File::from(from);
        loop {
            let mut watched = [
                PollFd::from_borrowed_fd(from.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(ended.as_fd(), PollFlags::IN),
            ];
            match poll(&mut watched, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(failed("wait for output")(error.into())),
            }
            let [output, end] = watched.map(|watched| !watched.revents().is_empty());
            if output {
                let mut data = vec![0; DATA_BYTES_MAX];
                let len = from.read(&mut data).map_err(failed("read output"))?;
                if len == 0 {
                    return Ok(());
                }
                data.truncate(len);
                send(&to_host, &frame(data))?;
            } else if end {
                return Ok(());
            }
        }
    })
}

/// Waits for the command, and for every orphan on the way: the first process inherits them all.
fn wait(child: &Child) -> Result<ExitStatus, AgentError> {
    let id = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    loop {
        match rustix::process::wait(WaitOptions::empty()) {
            Ok(Some((pid, status))) if Some(pid) == id => {
                return Ok(ExitStatus::from_raw(status.as_raw()));
            }
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(failed("wait for the command")(error.into())),
        }
    }
}
