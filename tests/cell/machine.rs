//! One machine in its cell: this program again, with the jailer's whole cell around it.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use jailer::{
    BlockDevice, Bounds, Cell, Inside, MachineProcess, Options, Part, ProcessEnd, Thread,
};
use rustix::net::RecvFlags;
use sandvmm_tests::hostile_guest::{DISK_SECTORS, disk};
use vmm::control::{
    ControlSocket, DiskConfig, FromMachine, MachineConfig, RestoreConfig, Then, ToMachine,
};
use vmm::{Hooks, Served, ThreadKind};

use crate::attack;
use crate::order::Order;

/// Memory of the guest.
pub(crate) const MEMORY_MIB: u32 = 32;

/// A limit for what must happen soon, on the slowest machine.
pub(crate) const SOON: Duration = Duration::from_secs(60);

/// Whether the attack has begun.
static ATTACKED: AtomicBool = AtomicBool::new(false);

/// Exit status of a process that did not get to serve.
const FAILED: i32 = 99;

/// By how much the heap is made to grow: more than the allocator keeps in reserve.
const HEAP_GROWTH_BYTES: usize = 4 << 20;

/// First byte of the message that starts a machine; an order's is a letter.
const START: u8 = 0;

/// Longest order.
const MAX_ORDER_BYTES: usize = 256;

/// What the machine's process does: enters its cell, hears its order, and serves.
pub(crate) fn serve() -> ! {
    let inside = match jailer::enter() {
        Ok(inside) => inside,
        Err(error) => fail(&format!("{error}: {:?}", std::error::Error::source(&error))),
    };
    let socket = io::stdin()
        .as_fd()
        .try_clone_to_owned()
        .unwrap_or_else(|error| fail(&error.to_string()));
    let order = order(&socket).unwrap_or_else(|| fail("no order came"));
    let hooks: Arc<dyn Hooks> = Arc::new(InCell { inside, order });
    over(vmm::serve_with(socket.into(), &hooks))
}

/// The order, in front of the machine's start; a supervisor that sends none is the command's, and gets an attack.
fn order(socket: &OwnedFd) -> Option<Order> {
    let mut first = [START];
    rustix::net::recv(socket, &mut first, RecvFlags::PEEK).ok()?;
    if first == [START] {
        let target = attack::Target::default();
        return Some(Order::Attack(Thread::Main, Some(0), target));
    }
    let mut words = [0; MAX_ORDER_BYTES];
    let count = rustix::io::read(socket, &mut words).ok()?;
    Order::from_words(std::str::from_utf8(words.get(..count)?).ok()?)
}

fn fail(why: &str) -> ! {
    eprintln!("{why}");
    jailer::exit(FAILED)
}

fn over(served: Served) -> ! {
    jailer::exit(match served {
        Served::Closed | Served::Ended => 0,
        Served::NoStart => FAILED,
    })
}

/// Whether the end of the heap's free part is met in a life of a machine is chance: here it is sure to be.
fn grow() {
    let block = std::hint::black_box(vec![1_u8; HEAP_GROWTH_BYTES]);
    drop(block);
}

/// As the command's own: closes the cell of each thread. Then it does what it was ordered.
#[derive(Debug)]
struct InCell {
    inside: Inside,
    order: Order,
}

impl Hooks for InCell {
    fn before_serving(&self, kind: ThreadKind) -> io::Result<()> {
        let thread = match kind {
            ThreadKind::Main => Thread::Main,
            ThreadKind::Vcpu => Thread::Vcpu,
        };
        self.inside.close(thread).map_err(io::Error::other)?;
        match self.order {
            Order::Serve => {}
            Order::Grow(wanted) if wanted == thread => grow(),
            Order::Panic(wanted) if wanted == thread => panic!("of all things"),
            Order::Attack(wanted, only, target) if wanted == thread => {
                // One processor's thread is enough.
                if ATTACKED.swap(true, Ordering::Relaxed) {
                    loop {
                        std::thread::park();
                    }
                }
                attack::make(only, &target)
            }
            Order::Grow(_) | Order::Panic(_) | Order::Attack(..) => {}
        }
        Ok(())
    }

    fn over(&self, served: Served) {
        over(served)
    }
}

/// A machine that was started. Dropping it kills its process, and removes its control group.
#[derive(Debug)]
pub(crate) struct Machine {
    pub(crate) process: MachineProcess,
    pub(crate) cell: Cell,
    pub(crate) socket: Option<ControlSocket>,
    pub(crate) console: UnixStream,
}

/// What is wanted of a machine.
#[derive(Debug)]
pub(crate) struct Wanted<'a> {
    pub(crate) order: Order,
    pub(crate) leave_out: &'a [Part],
    /// The guest's case; none where it is empty.
    pub(crate) case: &'a str,
    /// The machine's end of its control socket holds few messages that are not read.
    pub(crate) narrow: bool,
    /// Largest file that it may write.
    pub(crate) max_file_bytes: u64,
    /// Devices whose use is to be bounded.
    pub(crate) devices: Vec<BlockDevice>,
    /// What is handed over in place of `/dev/kvm`, and of the disk that the guest may write.
    pub(crate) kvm: Option<OwnedFd>,
    pub(crate) disk: Option<OwnedFd>,
    /// What it goes on from; else it begins.
    pub(crate) snapshot: Option<&'a Snapshot>,
}

/// The two files of a snapshot.
#[derive(Debug)]
pub(crate) struct Snapshot {
    state: OwnedFd,
    memory: OwnedFd,
}

impl<'a> Wanted<'a> {
    /// A machine that serves this case.
    pub(crate) fn case(case: &'a str) -> Self {
        Self {
            order: Order::Serve,
            leave_out: &[],
            case,
            narrow: false,
            max_file_bytes: u64::from(DISK_SECTORS) * 512,
            devices: Vec::new(),
            kvm: None,
            disk: None,
            snapshot: None,
        }
    }
}

impl Machine {
    /// A machine of the hostile guest's, in its whole cell.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "as the suite of the hostile guest has it"
    )]
    pub(crate) fn start(cmdline: String) -> io::Result<Self> {
        let case = cmdline.strip_prefix("case=").unwrap_or_default();
        Self::wanted(&Wanted::case(case))
    }

    /// Starts it, and waits until it is in its cell.
    pub(crate) fn wanted(wanted: &Wanted<'_>) -> io::Result<Self> {
        let (socket, theirs) = ControlSocket::pair()?;
        let (console, console_end) = UnixStream::pair()?;
        console.set_nonblocking(true)?;
        let disks = [file(&disk())?, file(&disk())?];
        let theirs = theirs.as_fd().try_clone_to_owned()?;
        if wanted.narrow {
            rustix::net::sockopt::set_socket_send_buffer_size(&theirs, 1)?;
        }
        rustix::io::write(&socket, wanted.order.to_words().as_bytes())?;
        let bounds = Bounds {
            memory_mib: MEMORY_MIB,
            vcpus: 2,
            max_file_bytes: wanted.max_file_bytes,
        };
        let options = Options {
            leave_out: wanted.leave_out.iter().copied().collect(),
            devices: wanted.devices.clone(),
            ..Options::new(bounds)
        };
        let mut process = jailer::start(Path::new("/proc/self/exe"), theirs, options)
            .map_err(io::Error::other)?;
        let given =
            |descriptor: &Option<OwnedFd>| descriptor.as_ref().map(OwnedFd::try_clone).transpose();
        let [writable, read_only] = disks;
        let kvm = given(&wanted.kvm)?.map_or_else(kvm, Ok)?;
        let disks = [
            given(&wanted.disk)?.unwrap_or(writable),
            read_only_again(&read_only)?,
        ];
        let (message, sources) = match wanted.snapshot {
            Some(snapshot) => (
                ToMachine::Restore(RestoreConfig {
                    has_console: true,
                    disks: disk_configs(),
                    check_host: true,
                    has_working_set: false,
                }),
                vec![snapshot.state.try_clone()?, snapshot.memory.try_clone()?],
            ),
            None => (
                ToMachine::Start(MachineConfig {
                    vcpu_count: 2,
                    memory_mib: MEMORY_MIB,
                    cmdline: format!("case={}", wanted.case),
                    guest_cid: 3,
                    rng_seed: [7; 32],
                    has_initramfs: false,
                    has_console: true,
                    disks: disk_configs(),
                }),
                vec![file(include_bytes!(env!("HOSTILE_GUEST")))?],
            ),
        };
        let descriptors: Vec<OwnedFd> = [kvm]
            .into_iter()
            .chain(sources)
            .chain([OwnedFd::from(console_end)])
            .chain(disks)
            .collect();
        let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        socket.send(&message, &borrowed).map_err(io::Error::other)?;
        let Some(cell) = process.entered(SOON).map_err(io::Error::other)? else {
            process.end();
            while process.read_stderr() {}
            let said = String::from_utf8_lossy(&process.stderr_tail()).into_owned();
            return Err(io::Error::other(said));
        };
        Ok(Self {
            process,
            cell,
            socket: Some(socket),
            console,
        })
    }

    /// Takes a snapshot; the machine goes on.
    pub(crate) fn snapshot(&self) -> Result<Snapshot, String> {
        let (state, memory) = file(&[])
            .and_then(|state| Ok((state, file(&[])?)))
            .map_err(|error| error.to_string())?;
        rustix::fs::ftruncate(&memory, u64::from(MEMORY_MIB) << 20)
            .map_err(|error| error.to_string())?;
        let kvm = kvm().map_err(|error| error.to_string())?;
        let socket = self.socket.as_ref().ok_or("no socket")?;
        let then = Then::Resume;
        let descriptors = [kvm.as_fd(), state.as_fd(), memory.as_fd()];
        socket
            .send(&ToMachine::Snapshot { then }, &descriptors)
            .map_err(|error| error.to_string())?;
        match socket.receive::<FromMachine>() {
            Ok((FromMachine::SnapshotTaken(_), _)) => Ok(Snapshot { state, memory }),
            Ok((other, _)) => Err(format!("{other:?}")),
            Err(error) => Err(error.to_string()),
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Reads the console until the guest has printed this.
    pub(crate) fn console_says(&mut self, words: &str) -> Result<(), String> {
        self.console
            .set_nonblocking(false)
            .and_then(|()| self.console.set_read_timeout(Some(SOON)))
            .map_err(|error| error.to_string())?;
        let mut said = Vec::new();
        let mut byte = [0];
        while !said.ends_with(words.as_bytes()) {
            match self.console.read(&mut byte) {
                Ok(1) => said.extend_from_slice(&byte),
                other => {
                    let said = String::from_utf8_lossy(&said);
                    return Err(format!("{other:?} after: {said}"));
                }
            }
        }
        Ok(())
    }

    /// Closes the control socket; the process is to end.
    pub(crate) fn close(mut self) -> Result<(), String> {
        self.socket = None;
        self.has_ended()
    }

    /// The process has said that the machine ended; it is to end too.
    pub(crate) fn has_ended(self) -> Result<(), String> {
        match self.ended() {
            (ProcessEnd::Exited(0), None, said) if said.is_empty() => Ok(()),
            (end, _, said) => Err(format!("the process ended with {end:?} and said: {said}")),
        }
    }

    /// How it ended, the forbidden call that ended it, and what it said.
    pub(crate) fn ended(mut self) -> (ProcessEnd, Option<String>, String) {
        let end = self.process.wait_timeout(SOON).expect("it ends");
        while self.process.read_stderr() {}
        // The console is read, so that nothing is in the way of a guest's last words.
        let mut rest = Vec::new();
        let _ = self.console.read_to_end(&mut rest);
        let said = String::from_utf8_lossy(&self.process.stderr_tail()).into_owned();
        (end, self.process.forbidden_call(), said)
    }
}

/// One that may be written, and one that may be read.
fn disk_configs() -> Vec<DiskConfig> {
    [false, true]
        .map(|read_only| DiskConfig {
            read_only,
            serial: "hostile".into(),
        })
        .into()
}

/// `/dev/kvm`.
pub(crate) fn kvm() -> io::Result<OwnedFd> {
    Ok(OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/kvm")?
        .into())
}

fn file(bytes: &[u8]) -> io::Result<OwnedFd> {
    let file = rustix::fs::memfd_create("hostile", rustix::fs::MemfdFlags::CLOEXEC)?;
    let file = File::from(file);
    file.write_all_at(bytes, 0)?;
    Ok(file.into())
}

/// The same file, open for reading alone.
fn read_only_again(file: &OwnedFd) -> io::Result<OwnedFd> {
    let number = std::os::fd::AsRawFd::as_raw_fd(file);
    Ok(File::open(format!("/proc/self/fd/{number}"))?.into())
}
