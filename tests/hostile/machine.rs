//! One machine, in a process of its own and in its cell: this program again, started as the library starts it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use jailer::{Bounds, MachineProcess, Options, ProcessEnd};
use sandvmm_tests::hostile_guest::{DISK_SECTORS, disk};
use vmm::control::{ControlSocket, DiskConfig, MachineConfig, ToMachine};

use crate::IN_KVM_HOST;

/// Memory of the guest.
pub(crate) const MEMORY_MIB: u32 = 32;

/// Processors of the guest.
const VCPUS: u8 = 2;

/// How long a process may take until it is in its cell: the host may be emulated.
const ENTRY_MAX: Duration = Duration::from_secs(60);

/// How long a process may take to end when it is told to.
const END_MAX: Duration = Duration::from_secs(1);

/// A machine that was started. Dropping it kills its process.
#[derive(Debug)]
pub(crate) struct Machine {
    process: MachineProcess,
    pub(crate) socket: Option<ControlSocket>,
    pub(crate) console: UnixStream,
}

impl Machine {
    /// Starts the guest with these words on its command line.
    pub(crate) fn start(cmdline: String) -> io::Result<Self> {
        let (socket, theirs) = ControlSocket::pair()?;
        let (console, console_end) = UnixStream::pair()?;
        console.set_nonblocking(true)?;
        let options = Options::new(Bounds {
            memory_mib: MEMORY_MIB,
            vcpus: VCPUS,
            // The disk that may be written to.
            max_file_bytes: u64::from(DISK_SECTORS) * 512,
        });
        let program = std::env::current_exe()?;
        let mut process =
            jailer::start(&program, theirs.into(), options).map_err(io::Error::other)?;
        let cell = process
            .entered(ENTRY_MAX)
            .map_err(io::Error::other)?
            .ok_or_else(|| io::Error::other("the process ended before it was in its cell"))?;
        // The KVM host of the project's own tests has all that a cell is made of.
        if std::env::var_os(IN_KVM_HOST).is_some() && !cell.missing.is_empty() {
            return Err(io::Error::other(format!(
                "the cell lacks {:?}",
                cell.missing
            )));
        }
        let config = MachineConfig {
            vcpu_count: VCPUS,
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
            file(&disk())?,
            file(&disk())?,
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
        self.has_ended()
    }

    /// The process was told to end, or has said that the machine ended: it is to end at once.
    pub(crate) fn has_ended(mut self) -> Result<(), String> {
        let end = self
            .process
            .wait_timeout(END_MAX)
            .ok_or_else(|| format!("the process lives on after {END_MAX:?}"))?;
        while self.process.read_stderr() {}
        let said = self.process.stderr_tail();
        if end != ProcessEnd::Exited(0) || !said.is_empty() {
            let said = String::from_utf8_lossy(&said);
            let call = self.process.forbidden_call();
            return Err(format!(
                "the process ended with {end:?} (forbidden system call: {call:?}) and said: {said}"
            ));
        }
        Ok(())
    }
}

fn file(bytes: &[u8]) -> io::Result<OwnedFd> {
    let file = rustix::fs::memfd_create("hostile", rustix::fs::MemfdFlags::CLOEXEC)?;
    let file = File::from(file);
    file.write_all_at(bytes, 0)?;
    Ok(file.into())
}
