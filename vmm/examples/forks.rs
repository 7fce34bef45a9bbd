//! Measures forks of a bare-metal guest, each in a process of its own, on this machine's `/dev/kvm`.
//!
//! ```text
//! cargo run --release -p sandvmm-vmm --example forks -- [FORKS] [ALIVE]
//! ```
//!
//! A guest counts and prints. It is snapshotted and forked `FORKS` times (1,000), one after the other; a fork's clock runs until
//! the number that follows the snapshot's has come out of it, once from before its process is made (*process*), and once
//! from before the message to a process that waits for one (*shell*). Then `ALIVE` forks (100) live at once, and the private memory of their
//! processes is read when all have answered. A fork halts after a few answers, so that it takes no time from the next. There is no cell around
//! these processes. On a busy host the processor time of a fork, which is given too, says more than its clock.
#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a measurement that fails is none"
)]

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use sandvmm_vmm::control::{
    ControlSocket, FromMachine, MachineConfig, RestoreConfig, Then, ToMachine,
};
use sandvmm_vmm::serve;

#[path = "../tests/bare_metal/elf.rs"]
mod elf;
#[path = "../tests/bare_metal/payload.rs"]
mod payload;

use elf::{elf, file};
use payload::payload;

/// The word in the arguments that makes this program a machine's process.
const MACHINE: &str = "--machine";

/// Memory of the guest in MiB.
const MEMORY_MIB: u32 = 128;

/// Bytes of an answer.
const ANSWER_BYTES: usize = 2;

/// Where the guest has the number of lines that it still prints. It wraps around, so that the guest that becomes the template does not
/// stop; for its forks the number is set in the memory file.
const LINES_LEFT: u64 = 0x30_0008;

/// Lines that a fork prints: the snapshot may have cut one.
const LINES: u64 = 3;

payload!(
    /// Counts in memory, and prints the number's last octal digit on a line, again and again until no more lines are wanted.
    counts,
    "mov qword ptr [0x300000], 0",
    "mov qword ptr [0x300008], 0",
    "mov dx, 0x3f8",
    "2: inc qword ptr [0x300000]",
    "mov rax, [0x300000]",
    "and al, 7",
    "add al, 0x30",
    "out dx, al",
    "mov al, 10",
    "out dx, al",
    "dec qword ptr [0x300008]",
    "jnz 2b",
    "3: hlt",
    "jmp 3b",
);

/// A process that waits for its first message.
struct Shell {
    process: Child,
    socket: ControlSocket,
}

impl Shell {
    fn start() -> Self {
        let (socket, theirs) = ControlSocket::pair().unwrap();
        let process = Command::new(std::env::current_exe().unwrap())
            .arg(MACHINE)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .spawn()
            .unwrap();
        Self { process, socket }
    }

    fn end(mut self) {
        drop(self.socket);
        self.process.wait().unwrap();
    }
}

/// What forks are made of.
struct Template {
    kvm: OwnedFd,
    state: OwnedFd,
    memory: OwnedFd,
}

impl Template {
    fn make() -> Self {
        let kvm: OwnedFd = File::options()
            .read(true)
            .write(true)
            .open("/dev/kvm")
            .unwrap()
            .into();
        let shell = Shell::start();
        let (mut console, theirs) = console();
        let config = MachineConfig {
            vcpu_count: 1,
            memory_mib: MEMORY_MIB,
            cmdline: String::new(),
            guest_cid: 3,
            rng_seed: [0; 32],
            has_initramfs: false,
            has_console: true,
            disks: Vec::new(),
        };
        let kernel = file(&elf(counts(), &[]));
        shell
            .socket
            .send(
                &ToMachine::Start(config),
                &[kvm.as_fd(), kernel.as_fd(), theirs.as_fd()],
            )
            .unwrap();
        console.read_exact(&mut [0; ANSWER_BYTES]).unwrap();
        let (state, memory) = (file(&[]), file(&[]));
        File::from(memory.try_clone().unwrap())
            .set_len(u64::from(MEMORY_MIB) << 20)
            .unwrap();
        let then = Then::Stay;
        shell
            .socket
            .send(
                &ToMachine::Snapshot { then },
                &[kvm.as_fd(), state.as_fd(), memory.as_fd()],
            )
            .unwrap();
        loop {
            match shell.socket.receive::<FromMachine>().unwrap().0 {
                FromMachine::Running { .. } => {}
                FromMachine::SnapshotTaken(taken) => {
                    say(&format!("snapshot: {taken:?}"));
                    break;
                }
                other => panic!("{other:?}"),
            }
        }
        shell.end();
        let memory = File::from(memory);
        memory
            .write_all_at(&LINES.to_le_bytes(), LINES_LEFT)
            .unwrap();
        Self {
            kvm,
            state,
            memory: memory.into(),
        }
    }

    /// Sends a process its order, and gives the console.
    fn fork(&self, shell: &Shell) -> File {
        let (console, theirs) = console();
        let config = RestoreConfig {
            has_console: true,
            disks: Vec::new(),
            check_host: false,
            has_working_set: false,
        };
        shell
            .socket
            .send(
                &ToMachine::Restore(config),
                &[
                    self.kvm.as_fd(),
                    self.state.as_fd(),
                    self.memory.as_fd(),
                    theirs.as_fd(),
                ],
            )
            .unwrap();
        console
    }
}

fn console() -> (File, OwnedFd) {
    let (ours, theirs) = rustix::pipe::pipe().unwrap();
    (ours.into(), theirs)
}

/// Waits for the first whole line.
fn answer(console: &mut File) -> Vec<u8> {
    let mut answer = [0; ANSWER_BYTES + 1];
    let mut len = 0;
    // A line that the snapshot has cut comes as its end alone.
    loop {
        let count = console.read(&mut answer[len..]).unwrap();
        assert!(count > 0, "the machine has ended");
        len += count;
        let text = &answer[..len];
        if len >= 2 && text.ends_with(b"\n") && text[len - 2] != b'\n' {
            return text.to_vec();
        }
        if len == answer.len() {
            return text.to_vec();
        }
    }
}

fn say(line: &str) {
    println!("{line}");
}

fn report(name: &str, mut times: Vec<Duration>) {
    if times.is_empty() {
        return;
    }
    times.sort_unstable();
    let at = |part: f64| {
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "an index below the number of times"
        )]
        let index = ((times.len() - 1) as f64 * part).round() as usize;
        times[index].as_micros()
    };
    say(&format!(
        "{name}: {} forks, microseconds until the answer: p50 {}, p95 {}, p99 {}, most {}",
        times.len(),
        at(0.5),
        at(0.95),
        at(0.99),
        at(1.0)
    ));
}

/// Time that all threads of a process have run for, guest included (`proc(5)`, schedstat).
fn processor_time(pid: u32) -> Duration {
    let ns = std::fs::read_dir(format!("/proc/{pid}/task"))
        .unwrap()
        .map(|task| {
            let path = task.unwrap().path().join("schedstat");
            std::fs::read_to_string(path)
                .unwrap()
                .split_whitespace()
                .next()
                .unwrap()
                .parse::<u64>()
                .unwrap()
        })
        .sum();
    Duration::from_nanos(ns)
}

/// Private bytes of a process: what only it has, written or not.
fn private_kib(pid: u32) -> u64 {
    std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))
        .unwrap()
        .lines()
        .filter(|line| line.starts_with("Private_"))
        .map(|line| {
            line.split_whitespace()
                .nth(1)
                .unwrap()
                .parse::<u64>()
                .unwrap()
        })
        .sum()
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.first().is_some_and(|first| first == MACHINE) {
        let socket = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
        let _ = serve(ControlSocket::from(socket));
        return;
    }
    let number = |index: usize, default: usize| {
        arguments
            .get(index)
            .map_or(default, |text| text.parse().unwrap())
    };
    let (forks, alive) = (number(0, 1000), number(1, 100));
    let template = Template::make();

    for (name, is_prepared) in [("process", false), ("shell", true)] {
        let (times, busy) = one_after_another(&template, forks, is_prepared);
        report(name, times);
        report(&format!("{name}, its processor time alone"), busy);
    }

    let mut living = Vec::new();
    for _ in 0..alive {
        let shell = Shell::start();
        let mut console = template.fork(&shell);
        answer(&mut console);
        living.push((shell, console));
    }
    let mut kib: Vec<_> = living
        .iter()
        .map(|(shell, _)| private_kib(shell.process.id()))
        .collect();
    kib.sort_unstable();
    if let (Some(most), Some(middle)) = (kib.last(), kib.get(kib.len() / 2)) {
        say(&format!(
            "{alive} forks at once: private memory of a process after its answer: p50 {middle} KiB, most {most} KiB"
        ));
    }
    living.into_iter().for_each(|(shell, _)| shell.end());
}

/// Forks so many times, and gives how long each took until its answer, and how long its process has run for.
fn one_after_another(
    template: &Template,
    forks: usize,
    is_prepared: bool,
) -> (Vec<Duration>, Vec<Duration>) {
    (0..forks)
        .map(|_| {
            let called = Instant::now();
            let shell = Shell::start();
            let (begun, before) = if is_prepared {
                // Until it waits for its message.
                std::thread::sleep(Duration::from_millis(2));
                let before = processor_time(shell.process.id());
                (Instant::now(), before)
            } else {
                (called, Duration::ZERO)
            };
            let mut console = template.fork(&shell);
            answer(&mut console);
            let took = begun.elapsed();
            let busy = processor_time(shell.process.id()).saturating_sub(before);
            shell.end();
            (took, busy)
        })
        .unzip()
}
