//! One machine, in a process of its own: this program again.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use vmm::Served;
use vmm::control::{ControlSocket, DiskConfig, MachineConfig, ToMachine};

/// The argument with which this program is a machine's process.
pub(crate) const SERVE: &str = "serve-a-machine";

/// Memory of the guest.
pub(crate) const MEMORY_MIB: u32 = 32;

/// Sectors of each disk, as the guest knows.
const SECTORS: u16 = 2048;

/// How long a process may take to end when it is told to.
const END_MAX: Duration = Duration::from_secs(1);

/// Between two looks whether a process has ended.
const LOOK: Duration = Duration::from_millis(2);

/// Exit codes of a machine's process.
const EXIT_ENDED: u8 = 0;
const EXIT_CLOSED: u8 = 10;

/// What a machine's process does.
pub(crate) fn serve() -> ExitCode {
    let socket = io::stdin()
        .as_fd()
        .try_clone_to_owned()
        .expect("standard input is the control socket");
    match vmm::serve(socket.into()) {
        Served::Ended => EXIT_ENDED.into(),
        Served::Closed => EXIT_CLOSED.into(),
        Served::NoStart => ExitCode::FAILURE,
    }
}

/// A machine that was started. Dropping it kills its process.
#[derive(Debug)]
pub(crate) struct Machine {
    process: Child,
    pub(crate) socket: Option<ControlSocket>,
    pub(crate) console: UnixStream,
}

impl Machine {
    /// Starts the guest with these words on its command line.
    pub(crate) fn start(cmdline: String) -> io::Result<Self> {
        let (socket, theirs) = ControlSocket::pair()?;
        let (console, console_end) = UnixStream::pair()?;
        console.set_nonblocking(true)?;
        let process = Command::new(std::env::current_exe()?)
            .arg(SERVE)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stderr(Stdio::piped())
            .spawn()?;
        let config = MachineConfig {
            vcpu_count: 2,
            memory_mib: MEMORY_MIB,
            cmdline,
            guest_cid: 3,
            rng_seed: [7; 32],
            has_initramfs: false,
            has_console: true,
            disks: [false, true]
                .map(|read_only| DiskConfig {
                    read_only,
                    serial: "hostile".into(),
                })
                .into(),
        };
        let descriptors = [
            OpenOptions::new()
                .read(true)
                .write(true)
                .open("/dev/kvm")?
                .into(),
            file(include_bytes!(env!("HOSTILE_GUEST")))?,
            console_end.into(),
            disk()?,
            disk()?,
        ];
        let borrowed = descriptors.each_ref().map(AsFd::as_fd);
        socket
            .send(&ToMachine::Start(config), &borrowed)
            .map_err(io::Error::other)?;
        Ok(Self {
            process,
            socket: Some(socket),
            console,
        })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Closes the control socket; the process is to end at once.
    pub(crate) fn close(mut self) -> Result<(), String> {
        self.socket = None;
        self.ended(EXIT_CLOSED)
    }

    /// The process has said that the machine ended; it is to end at once too.
    pub(crate) fn has_ended(mut self) -> Result<(), String> {
        self.ended(EXIT_ENDED)
    }

    fn ended(&mut self, code: u8) -> Result<(), String> {
        let told = Instant::now();
        let status = loop {
            match self.process.try_wait() {
                Ok(Some(status)) => break status,
                Ok(None) if told.elapsed() < END_MAX => std::thread::sleep(LOOK),
                Ok(None) => return Err(format!("the process lives on after {END_MAX:?}")),
                Err(error) => return Err(error.to_string()),
            }
        };
        let mut said = String::new();
        if let Some(mut stderr) = self.process.stderr.take() {
            stderr
                .read_to_string(&mut said)
                .map_err(|error| error.to_string())?;
        }
        if status.code() != Some(code.into()) || !said.is_empty() {
            return Err(format!("the process ended with {status} and said: {said}"));
        }
        Ok(())
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Both fail only where it has ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn file(bytes: &[u8]) -> io::Result<OwnedFd> {
    let file = rustix::fs::memfd_create("hostile", rustix::fs::MemfdFlags::CLOEXEC)?;
    let file = File::from(file);
    file.write_all_at(bytes, 0)?;
    Ok(file.into())
}

/// A disk, with a pattern in each sector that the guest knows too.
fn disk() -> io::Result<OwnedFd> {
    let bytes: Vec<u8> = (0..SECTORS)
        .flat_map(|sector| {
            let first = sector.to_le_bytes()[0].wrapping_mul(7);
            (0..512u16).map(move |index| first.wrapping_add(index.to_le_bytes()[0]))
        })
        .collect();
    file(&bytes)
}
