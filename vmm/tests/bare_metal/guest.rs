//! A test in the supervisor's place.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sandvmm_vmm::control::{
    ControlSocket, DiskConfig, EndReason, FromMachine, MachineConfig, ToMachine,
};
use sandvmm_vmm::{Served, serve};

pub(crate) use crate::elf::{elf, file};

/// How long a guest may take for what a test waits for. A software KVM is slow, and tests run beside each other.
const PATIENCE: Duration = Duration::from_secs(20);

/// What to start.
pub(crate) struct Guest {
    config: MachineConfig,
    kernel: OwnedFd,
    console: Option<OwnedFd>,
    disks: Vec<OwnedFd>,
}

/// A machine that was started.
pub(crate) struct Started {
    pub(crate) socket: ControlSocket,
    thread: JoinHandle<Served>,
}

impl Started {
    /// Sends the first message to a machine of its own, on a thread of the test's process.
    pub(crate) fn new(order: &ToMachine, descriptors: &[BorrowedFd<'_>]) -> Self {
        let (socket, theirs) = ControlSocket::pair().unwrap();
        socket.send(order, descriptors).unwrap();
        Self {
            socket,
            thread: std::thread::spawn(|| serve(theirs)),
        }
    }
}

/// The machine's own end.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) reason: EndReason,
    pub(crate) console: Vec<u8>,
}

/// `/dev/kvm`, or `None` after saying that the test is skipped.
pub(crate) fn kvm(test: &str) -> Option<OwnedFd> {
    match OpenOptions::new().read(true).write(true).open("/dev/kvm") {
        Ok(file) => Some(file.into()),
        Err(error) => {
            assert!(
                std::env::var_os("SANDVMM_KVM_HOST").is_none(),
                "{test}: a KVM host has no /dev/kvm: {error}"
            );
            // Past the test harness's capture: a skipped test is not to look like one that passed.
            let mut tty = std::io::stderr().lock();
            let _ = writeln!(tty, "SKIPPED {test}: /dev/kvm can't be opened: {error}");
            None
        }
    }
}

/// Binds the machine of a test or ends it as skipped.
macro_rules! kvm_or_skip {
    ($test:literal) => {
        match crate::guest::kvm($test) {
            Some(kvm) => kvm,
            None => return,
        }
    };
}
pub(crate) use kvm_or_skip;

impl Guest {
    /// A machine with one vCPU that runs `code`.
    pub(crate) fn new(code: &[u8]) -> Self {
        Self::with_data(code, &[])
    }

    /// A machine with one vCPU that runs `code` and has `data` in its memory, as `(address, bytes)`.
    pub(crate) fn with_data(code: &[u8], data: &[(u64, Vec<u8>)]) -> Self {
        Self {
            config: MachineConfig {
                vcpu_count: 1,
                memory_mib: 32,
                cmdline: String::new(),
                guest_cid: 3,
                rng_seed: [0; 32],
                has_initramfs: false,
                has_console: false,
                disks: Vec::new(),
            },
            kernel: file(&elf(code, data)),
            console: None,
            disks: Vec::new(),
        }
    }

    pub(crate) fn console(mut self, console: OwnedFd) -> Self {
        self.config.has_console = true;
        self.console = Some(console);
        self
    }

    pub(crate) fn vcpus(mut self, count: u8) -> Self {
        self.config.vcpu_count = count;
        self
    }

    pub(crate) fn memory_mib(mut self, memory_mib: u32) -> Self {
        self.config.memory_mib = memory_mib;
        self
    }

    pub(crate) fn kernel(mut self, bytes: &[u8]) -> Self {
        self.kernel = file(bytes);
        self
    }

    pub(crate) fn disk(mut self, disk: OwnedFd, read_only: bool) -> Self {
        self.config.disks.push(DiskConfig {
            read_only,
            serial: "disk".into(),
        });
        self.disks.push(disk);
        self
    }

    /// Starts it on a thread of the test's process.
    pub(crate) fn start(self, kvm: &OwnedFd) -> Started {
        let mut descriptors = vec![kvm.as_fd(), self.kernel.as_fd()];
        descriptors.extend(self.console.iter().map(AsFd::as_fd));
        descriptors.extend(self.disks.iter().map(AsFd::as_fd));
        Started::new(&ToMachine::Start(self.config), &descriptors)
    }
}

impl Started {
    /// The next message.
    pub(crate) fn next(&self) -> (FromMachine, Vec<OwnedFd>) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(message) = self.socket.try_receive().unwrap() {
                return message;
            }
            let left = deadline
                .checked_duration_since(Instant::now())
                .expect("the machine says nothing");
            let left = Timespec::try_from(left).unwrap();
            poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&left)).unwrap();
        }
    }

    /// Waits until the first vCPU runs.
    pub(crate) fn running(&self) {
        let (message, _) = self.next();
        assert!(
            matches!(message, FromMachine::Running { .. }),
            "{message:?}"
        );
    }

    /// Waits for the machine's own end.
    pub(crate) fn ended(self) -> Ended {
        loop {
            if let (
                FromMachine::Ended {
                    reason,
                    console_tail,
                },
                _,
            ) = self.next()
            {
                assert_eq!(self.thread.join().unwrap(), Served::Ended);
                return Ended {
                    reason,
                    console: console_tail,
                };
            }
        }
    }

    /// Closes the socket, and gives how long the machine lived on.
    pub(crate) fn close(self) -> Duration {
        drop(self.socket);
        let closed = Instant::now();
        assert_eq!(self.thread.join().unwrap(), Served::Closed);
        closed.elapsed()
    }
}
