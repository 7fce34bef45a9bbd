//! A KVM host anywhere: this machine where it has hardware virtualization, else one that QEMU emulates.
//!
//! The emulated host sees this machine's files at their own paths, so that a command runs there as it would here, but with
//! a `/dev/kvm` that is `kvm-amd` on an emulated processor with SVM.

pub(crate) mod agent;
mod emulator;
mod guest;
mod mend;
mod qemu;
mod resident;
mod wire;

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, SystemTime};

use crate::cache::{Cache, CacheError};
use crate::packages::{self, Need, PackageError};
use crate::progress::Progress;
use crate::workspace::Workspace;
use emulator::Emulator;
use guest::{Guest, GuestError};
use qemu::{Plan, Qemu, QemuError};
use wire::{DATA_BYTES_MAX, Frame, Start, WireError};

/// Exit code of xtask where the host, and not the command, failed.
pub(crate) const EXIT_HOST_FAILED: u8 = 125;
/// Bytes of a shown output's end that the caller gets: enough for a batch of tests that fail and print much.
const SHOWN_END_BYTES: usize = 8 << 20;
/// Exit code of a command that SIGPIPE ended: what this process returns when nobody reads its output any more.
const EXIT_BROKEN_PIPE: u8 = 141;
/// How long the emulated host may take to boot: it takes 4 s on an idle machine, and a busy one may have a tenth of that for it.
const BOOT_MAX: Duration = Duration::from_secs(180);
/// What the emulated host is run by.
const NEEDS: [Need; 1] = [Need::new("setpriv", "util-linux")];

/// Why a command could not be run on a KVM host.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HostError {
    /// The cache could not be used.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A package is missing.
    #[error(transparent)]
    Package(#[from] PackageError),
    /// There is nothing to boot.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// QEMU did not start.
    #[error(transparent)]
    Qemu(#[from] QemuError),
    /// This machine did not say something about itself.
    #[error("Could not {action}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// The emulated host did not come up.
    #[error("The emulated host did not boot, for which it has {} s; the end of its console:\n{console}", BOOT_MAX.as_secs())]
    Boot {
        /// What was seen last.
        console: String,
        /// How the wait ended.
        source: WireError,
    },
    /// The emulated host ended before the command.
    #[error("The emulated host ended before the command did; the end of its console:\n{console}")]
    Died {
        /// What was seen last.
        console: String,
        /// How the connection ended.
        source: WireError,
    },
    /// The command did not start.
    #[error("{reason}")]
    NotRun {
        /// 127 for a command that was not found, 126 for one that could not be started, 125 for a host that failed.
        code: u8,
        /// Why.
        reason: String,
    },
}

/// A command for a KVM host.
#[derive(Debug)]
pub(crate) struct HostCommand {
    /// Program and arguments.
    pub(crate) command: Vec<OsString>,
    /// Changes to this process's environment.
    pub(crate) environment: Vec<(OsString, OsString)>,
    /// Always the emulated host, where one instruction is one nanosecond.
    pub(crate) count_instructions: bool,
    /// With `count_instructions`: files that the command opens. They are copied into memory first, as the program and its
    /// libraries are: a wait for this machine's file system moves the counting clock on by an arbitrary amount.
    pub(crate) resident: Vec<PathBuf>,
}

/// Whether this machine runs virtual machines by itself: its processor can, and `/dev/kvm` opens. A processor that cannot may
/// still have a `/dev/kvm`, served by software, in which Linux does not run.
pub(crate) fn is_here() -> bool {
    let processor = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let has_extension = processor
        .lines()
        .filter(|line| line.starts_with("flags"))
        .any(|line| {
            line.split_whitespace()
                .any(|flag| flag == "svm" || flag == "vmx")
        });
    has_extension
        && File::options()
            .read(true)
            .write(true)
            .open("/dev/kvm")
            .is_ok()
}

/// How many hosts this machine has at a time: itself, or as many emulated ones as it has processors and memory for, and one at least.
pub(crate) fn at_a_time() -> usize {
    if is_here() { 1 } else { qemu::at_a_time() }
}

/// Gets and builds what an emulated host consists of, so that those that are started next do not do it at the same time.
pub(crate) fn prepare(progress: &Progress) -> Result<(), HostError> {
    parts(progress).map(drop)
}

fn parts(progress: &Progress) -> Result<(Guest, Emulator), HostError> {
    packages::ensure(&NEEDS, progress)?;
    let cache = Cache::open()?;
    let guest = guest::prepare(&cache, progress)?;
    let emulator = Emulator::find(&cache, progress)?;
    Ok((guest, emulator))
}

/// When a command's standard output is shown that is watched.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Showing {
    /// As it comes.
    AtOnce,
    /// When the command has ended, in one piece: that of another one is shown meanwhile.
    AtTheEnd,
}

/// Where the command's standard output goes; standard input and standard error are this process's.
enum Output {
    /// To this process's.
    Inherited,
    /// To the caller.
    Kept(Vec<u8>),
    /// To this process's, and its end to the caller.
    Shown(Vec<u8>),
}

impl Output {
    fn take(&mut self, data: &[u8]) -> Result<(), io::Error> {
        match self {
            Self::Inherited => show(&mut io::stdout(), data),
            Self::Kept(kept) => {
                kept.extend_from_slice(data);
                Ok(())
            }
            Self::Shown(end) => {
                end.extend_from_slice(data);
                let excess = end.len().saturating_sub(SHOWN_END_BYTES);
                end.drain(..excess);
                show(&mut io::stdout(), data)
            }
        }
    }

    fn bytes(self) -> Vec<u8> {
        match self {
            Self::Inherited => Vec::new(),
            Self::Kept(bytes) | Self::Shown(bytes) => bytes,
        }
    }
}

fn show(to: &mut impl Write, data: &[u8]) -> Result<(), io::Error> {
    to.write_all(data)?;
    to.flush()
}

impl HostCommand {
    /// Runs the command with this process's standard streams and returns its exit code, 128 + N for signal N.
    pub(crate) fn run(&self, workspace: &Workspace, progress: &Progress) -> Result<u8, HostError> {
        self.run_to(&mut Output::Inherited, workspace, progress)
    }

    /// Runs the command and returns its exit code and what it wrote to standard output.
    pub(crate) fn capture(
        &self,
        workspace: &Workspace,
        progress: &Progress,
    ) -> Result<(u8, Vec<u8>), HostError> {
        let mut output = Output::Kept(Vec::new());
        let code = self.run_to(&mut output, workspace, progress)?;
        Ok((code, output.bytes()))
    }

    /// Like [`Self::run`], and returns what the command wrote to standard output as well, or the end of it, also where the host died.
    pub(crate) fn watch(
        &self,
        showing: Showing,
        workspace: &Workspace,
        progress: &Progress,
    ) -> (Result<u8, HostError>, Vec<u8>) {
        let mut output = match showing {
            Showing::AtOnce => Output::Shown(Vec::new()),
            Showing::AtTheEnd => Output::Kept(Vec::new()),
        };
        let result = self.run_to(&mut output, workspace, progress);
        let output = output.bytes();
        if matches!(showing, Showing::AtTheEnd) {
            // Who does not read it any more learns the exit code all the same.
            let _ = show(&mut io::stdout().lock(), &output);
        }
        (result, output)
    }

    fn run_to(
        &self,
        output: &mut Output,
        workspace: &Workspace,
        progress: &Progress,
    ) -> Result<u8, HostError> {
        if is_here() && !self.count_instructions {
            self.run_here(output, workspace)
        } else {
            self.run_emulated(output, workspace, progress)
        }
    }

    fn run_here(&self, output: &mut Output, workspace: &Workspace) -> Result<u8, HostError> {
        let Some((program, arguments)) = self.command.split_first() else {
            return Ok(0);
        };
        let mut command = Command::new(program);
        command.args(arguments).envs(self.environment(workspace));
        if !matches!(output, Output::Inherited) {
            command.stdout(Stdio::piped());
        }
        let mut child = command.spawn().map_err(|error| {
            let (code, reason) = not_started(program, &error);
            HostError::NotRun { code, reason }
        })?;
        if let Some(mut stdout) = child.stdout.take() {
            let mut data = vec![0; DATA_BYTES_MAX];
            while let Ok(len @ 1..) = stdout.read(&mut data) {
                let read = data.get(..len).unwrap_or_default();
                output
                    .take(read)
                    .map_err(failed("write the command's output"))?;
            }
        }
        let status = child.wait().map_err(failed("wait for the command"))?;
        Ok(exit_code(status))
    }

    fn run_emulated(
        &self,
        output: &mut Output,
        workspace: &Workspace,
        progress: &Progress,
    ) -> Result<u8, HostError> {
        let (guest, emulator) = parts(progress)?;
        let shares = workspace.shares();
        let agent = own_program().map_err(failed("find this program"))?;
        let plan = Plan {
            emulator: &emulator,
            guest: &guest,
            shares: &shares,
            agent: &agent,
            count_instructions: self.count_instructions,
        };
        let start = self.start(workspace, &shares)?;
        let (machine, socket) = Qemu::start(&plan)?;
        let mut socket = match boot(socket, start) {
            Ok(socket) => socket,
            Err(source) => {
                let console = machine.stop();
                return Err(HostError::Boot { console, source });
            }
        };
        match carry(&mut socket, output) {
            Ok(code) => Ok(code),
            Err(CarryError::NotRun { code, reason }) => Err(HostError::NotRun { code, reason }),
            Err(CarryError::Output(source)) if source.kind() == ErrorKind::BrokenPipe => {
                Ok(EXIT_BROKEN_PIPE)
            }
            Err(CarryError::Output(source)) => Err(failed("write the command's output")(source)),
            Err(CarryError::Wire(source)) => {
                let console = machine.stop();
                Err(HostError::Died { console, source })
            }
        }
    }

    /// What the agent is told.
    fn start(&self, workspace: &Workspace, shares: &[PathBuf]) -> Result<Start, HostError> {
        let environment = self.environment(workspace);
        let resident = if self.count_instructions {
            resident::files(&self.command, &environment, &self.resident)
        } else {
            Vec::new()
        };
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        Ok(Start {
            command: self.command.clone(),
            environment,
            folder: std::env::current_dir().map_err(failed("find the working folder"))?,
            shares: shares.to_vec(),
            resident,
            clock_ns: now.map_or(0, |now| u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)),
        })
    }

    /// The whole environment of the command: this process's, with the project's build first on PATH, and the changes.
    fn environment(&self, workspace: &Workspace) -> Vec<(OsString, OsString)> {
        let mut path = OsString::from(workspace.release_folder());
        if let Some(rest) = std::env::var_os("PATH") {
            path.push(":");
            path.push(rest);
        }
        let changes =
            std::iter::once(("PATH".into(), path)).chain(self.environment.iter().cloned());
        let mut all: BTreeMap<OsString, OsString> = std::env::vars_os().collect();
        all.extend(changes);
        all.into_iter().collect()
    }
}

/// This program's file. Where a build has replaced it since it was started, which the kernel marks in the name (proc_pid_exe(5)), it is
/// the new one at the same place.
fn own_program() -> Result<PathBuf, io::Error> {
    let named = std::env::current_exe()?;
    let place = named
        .as_os_str()
        .as_bytes()
        .strip_suffix(b" (deleted)")
        .map(|place| PathBuf::from(OsStr::from_bytes(place)));
    Ok(place.filter(|_| !named.exists()).unwrap_or(named))
}

/// Waits for the agent, bounded, and gives it the command and a copy of standard input.
fn boot(mut socket: UnixStream, start: Start) -> Result<UnixStream, WireError> {
    socket.set_read_timeout(Some(BOOT_MAX))?;
    match Frame::read(&mut socket)? {
        Frame::Ready => {}
        other => {
            return Err(WireError::Malformed(format!(
                "{other:?} before the agent is ready"
            )));
        }
    }
    socket.set_read_timeout(None)?;
    Frame::Start(start).write(&mut socket)?;
    let mut input = socket.try_clone()?;
    std::thread::spawn(move || {
        let mut stdin = io::stdin();
        loop {
            let mut data = vec![0; DATA_BYTES_MAX];
            // An input that cannot be read is at its end, as for a program that reads it itself.
            let len = stdin.read(&mut data).unwrap_or(0);
            data.truncate(len);
            if Frame::Stdin(data).write(&mut input).is_err() || len == 0 {
                return;
            }
        }
    });
    Ok(socket)
}

/// How the conversation ended without an exit code.
enum CarryError {
    Wire(WireError),
    Output(io::Error),
    NotRun { code: u8, reason: String },
}

/// Passes the command's output on until its exit code arrives.
fn carry(socket: &mut UnixStream, output: &mut Output) -> Result<u8, CarryError> {
    loop {
        match Frame::read(socket).map_err(CarryError::Wire)? {
            Frame::Stdout(data) => output.take(&data).map_err(CarryError::Output)?,
            Frame::Stderr(data) => show(&mut io::stderr(), &data).map_err(CarryError::Output)?,
            Frame::Exit(code) => return Ok(code),
            Frame::Failed(code, reason) => return Err(CarryError::NotRun { code, reason }),
            other => {
                let what = format!("{other:?} from the agent");
                return Err(CarryError::Wire(WireError::Malformed(what)));
            }
        }
    }
}

fn failed(action: &'static str) -> impl FnOnce(io::Error) -> HostError {
    move |source| HostError::Io { action, source }
}

/// The exit code and the reason for a program that could not be started, as a shell has them.
fn not_started(program: &OsStr, error: &io::Error) -> (u8, String) {
    let code = if error.kind() == ErrorKind::NotFound {
        127
    } else {
        126
    };
    (
        code,
        format!("Could not run {}: {error}", program.display()),
    )
}

/// The exit code of a status, as a shell has it: 128 + N for signal N.
fn exit_code(status: ExitStatus) -> u8 {
    let code = status
        .code()
        .or_else(|| status.signal().map(|signal| 128 + signal))
        .unwrap_or_else(|| i32::from(EXIT_HOST_FAILED));
    u8::try_from(code).unwrap_or(EXIT_HOST_FAILED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_are_a_shells() {
        assert_eq!(exit_code(ExitStatus::from_raw(7 << 8)), 7);
        assert_eq!(exit_code(ExitStatus::from_raw(9)), 137);
        assert_eq!(
            not_started(OsStr::new("x"), &ErrorKind::NotFound.into()).0,
            127
        );
        assert_eq!(
            not_started(OsStr::new("x"), &ErrorKind::PermissionDenied.into()).0,
            126
        );
    }
}
