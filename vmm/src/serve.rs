//! A machine's process from its first message to its last.

use std::error::Error;
use std::fmt::Write as _;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::time::{ClockId, clock_gettime};

use crate::builder::{self, Parts};
use crate::control::{
    ControlSocket, EndReason, FromMachine, MAX_CONSOLE_TAIL_BYTES, MachineConfig, ToMachine,
};
use crate::event_loop::{self, Offer, Over};

/// How long the last message waits for a supervisor that does not read.
const MAX_LAST_WORD_WAIT: Duration = Duration::from_secs(1);

/// How a machine's process is to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Served {
    /// The supervisor closed the socket: it wants no more of the machine.
    Closed,
    /// The machine ended by itself, and the supervisor was told so.
    Ended,
    /// What came first on the socket was no start: there was never a machine.
    NoStart,
}

/// Serves one machine: builds what the first message asks for, runs it, and returns when it is over.
///
/// It returns at once when the supervisor closes the socket. All threads of the machine have ended then.
#[must_use]
pub fn serve(socket: ControlSocket) -> Served {
    let process_started_ns = monotonic_ns();
    let (config, descriptors) = match socket.receive() {
        Ok((ToMachine::Start(config), descriptors)) => (config, descriptors),
        _ => return Served::NoStart,
    };
    let socket = Arc::new(socket);
    let (reason, console_tail) = match run(&socket, &config, descriptors, process_started_ns) {
        Life::Closed => return Served::Closed,
        Life::Ended(reason, console_tail) => (reason, console_tail),
    };
    say_last(
        &socket,
        &FromMachine::Ended {
            reason,
            console_tail,
        },
    );
    Served::Ended
}

/// How it went.
enum Life {
    Closed,
    Ended(EndReason, Vec<u8>),
}

fn run(
    socket: &Arc<ControlSocket>,
    config: &MachineConfig,
    descriptors: Vec<OwnedFd>,
    process_started_ns: u64,
) -> Life {
    let Parts {
        machine,
        subscribers,
        vsock,
    } = match builder::build(config, descriptors, Box::new(Offer(Arc::clone(socket)))) {
        Ok(parts) => parts,
        Err(error) => return Life::Ended(EndReason::StartFailed(sentence(&error)), Vec::new()),
    };
    let running = FromMachine::Running {
        process_started_ns,
        vcpu_running_ns: monotonic_ns(),
    };
    for vcpu in &machine.vcpus {
        vcpu.resume();
    }
    // Refused only where the supervisor is gone, which the loop sees next.
    let _ = socket.try_send(&running, &[]);
    match event_loop::run(socket, &machine.end, &vsock, subscribers) {
        Ok(Over::Supervisor) => Life::Closed,
        Ok(Over::Machine(reason)) => Life::Ended(reason, tail(machine.serial.tail())),
        Err(error) => Life::Ended(
            EndReason::HostFailed(sentence(&error)),
            tail(machine.serial.tail()),
        ),
    }
}

fn tail(mut console: Vec<u8>) -> Vec<u8> {
    let surplus = console.len().saturating_sub(MAX_CONSOLE_TAIL_BYTES);
    console.drain(..surplus);
    console
}

/// Sends the last message; a supervisor that has no room for it is given a moment.
fn say_last(socket: &ControlSocket, message: &FromMachine) {
    if socket.try_send(message, &[]).is_ok() {
        return;
    }
    let wait = Timespec {
        tv_sec: i64::try_from(MAX_LAST_WORD_WAIT.as_secs()).unwrap_or(1),
        tv_nsec: 0,
    };
    let _ = poll(&mut [PollFd::new(socket, PollFlags::OUT)], Some(&wait));
    let _ = socket.try_send(message, &[]);
}

/// An error with what caused it, in one line.
fn sentence(error: &dyn Error) -> String {
    let mut sentence = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        // Writing to a string can't fail.
        let _ = write!(sentence, ": {error}");
        cause = error.source();
    }
    sentence
}

/// `CLOCK_MONOTONIC` in nanoseconds.
fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}
