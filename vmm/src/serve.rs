//! A machine's process from its first message to its last.

use std::error::Error;
use std::fmt::{Debug, Write as _};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::time::{ClockId, clock_gettime};

use crate::builder;
use crate::control::{
    ControlSocket, EndReason, FromMachine, MAX_CONSOLE_TAIL_BYTES, Then, ToMachine,
};
use crate::event_loop::{EventLoop, Offer, Turn};
use crate::machine::{Machine, Parts};
use crate::restore;
use crate::snapshot::{self, Files};
use crate::vcpu::Vcpu;

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

/// A kind of thread of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ThreadKind {
    /// The event loop's.
    Main,
    /// A virtual processor's.
    Vcpu,
}

/// What the process around a machine wants to hear. All of it has a default that does nothing.
pub trait Hooks: Debug + Send + Sync {
    /// The calling thread is about to serve the guest, which has not executed an instruction: what it needs no more can be
    /// taken from it.
    ///
    /// # Errors
    /// The machine ends then, with this failure.
    fn before_serving(&self, kind: ThreadKind) -> io::Result<()> {
        let _ = kind;
        Ok(())
    }

    /// The machine is over and nothing of it has been taken down: a process that serves one machine alone may exit here.
    fn over(&self, served: Served) {
        let _ = served;
    }
}

/// For a machine whose process wants to hear nothing.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NoHooks;

impl Hooks for NoHooks {}

/// Serves one machine: builds what the first message asks for, runs it, and returns when it is over.
///
/// It returns at once when the supervisor closes the socket. All threads of the machine have ended then.
#[must_use]
pub fn serve(socket: ControlSocket) -> Served {
    let none: Arc<dyn Hooks> = Arc::new(NoHooks);
    serve_with(socket, &none)
}

/// As [`serve`], in a process that wants to know how far the machine is.
#[must_use]
pub fn serve_with(socket: ControlSocket, hooks: &Arc<dyn Hooks>) -> Served {
    let process_started_ns = monotonic_ns();
    let (order, descriptors) = match socket.receive::<ToMachine>() {
        Ok((order @ (ToMachine::Start(_) | ToMachine::Restore(_)), descriptors)) => {
            (order, descriptors)
        }
        _ => return Served::NoStart,
    };
    let socket = Arc::new(socket);
    let Parts {
        machine,
        subscribers,
    } = match build(order, descriptors, &socket, hooks) {
        Ok(parts) => parts,
        Err(sentence) => {
            say_last(&socket, EndReason::StartFailed(sentence), Vec::new());
            return Served::Ended;
        }
    };
    let reason = EventLoop::new(&socket, &machine.end, &machine.vsock, subscribers)
        .map_err(|error| EndReason::HostFailed(sentence(&error)))
        .and_then(|mut event_loop| {
            hooks
                .before_serving(ThreadKind::Main)
                .map_err(|error| EndReason::StartFailed(sentence(&error)))?;
            start(&socket, &machine, process_started_ns);
            run(&socket, &machine, &mut event_loop)
        });
    let reason = match reason {
        Ok(None) => {
            hooks.over(Served::Closed);
            return Served::Closed;
        }
        Ok(Some(reason)) | Err(reason) => reason,
    };
    // Before the machine goes: giving back its memory takes a while, and the supervisor need not wait for it.
    say_last(&socket, reason, tail(machine.serial.tail()));
    hooks.over(Served::Ended);
    Served::Ended
}

/// Builds what the first message asks for; a sentence where it can't be.
fn build(
    order: ToMachine,
    descriptors: Vec<OwnedFd>,
    socket: &Arc<ControlSocket>,
    hooks: &Arc<dyn Hooks>,
) -> Result<Parts, String> {
    let guest_connections = Box::new(Offer(Arc::clone(socket)));
    match order {
        ToMachine::Start(config) => {
            builder::build(&config, descriptors, guest_connections, hooks).map_err(|e| sentence(&e))
        }
        ToMachine::Restore(config) => {
            restore::restore(config, descriptors, guest_connections, hooks)
                .map_err(|error| sentence(&error))
        }
        _ => Err("The supervisor did not say what to build".to_owned()),
    }
}

/// Serves the machine until it is over: the reason, or none where the supervisor wants no more of it.
fn run(
    socket: &ControlSocket,
    machine: &Machine,
    event_loop: &mut EventLoop,
) -> Result<Option<EndReason>, EndReason> {
    loop {
        let turn = event_loop
            .run()
            .map_err(|error| EndReason::HostFailed(sentence(&error)))?;
        match turn {
            Turn::SupervisorIsGone => return Ok(None),
            Turn::Ended(reason) => return Ok(Some(reason)),
            Turn::Snapshot { then, descriptors } => {
                let taken =
                    Files::sort(descriptors).and_then(|files| snapshot::take(machine, files));
                let answer = match taken {
                    Ok(taken) => FromMachine::SnapshotTaken(taken),
                    Err(error) => FromMachine::SnapshotFailed(sentence(&error)),
                };
                if then == Then::Resume {
                    machine.vcpus.iter().for_each(Vcpu::resume);
                }
                // Waits for a supervisor that has asked and so reads; one that is gone is seen next.
                let _ = socket.send(&answer, &[]);
            }
        }
    }
}

fn start(socket: &ControlSocket, machine: &Machine, process_started_ns: u64) {
    let running = FromMachine::Running {
        process_started_ns,
        vcpu_running_ns: monotonic_ns(),
    };
    for vcpu in &machine.vcpus {
        vcpu.resume();
    }
    // Refused only where the supervisor is gone, which the loop sees next.
    let _ = socket.try_send(&running, &[]);
}

fn tail(mut console: Vec<u8>) -> Vec<u8> {
    let surplus = console.len().saturating_sub(MAX_CONSOLE_TAIL_BYTES);
    console.drain(..surplus);
    console
}

/// Sends the last message; a supervisor that has no room for it is given a moment.
fn say_last(socket: &ControlSocket, reason: EndReason, console_tail: Vec<u8>) {
    let message = FromMachine::Ended {
        reason,
        console_tail,
    };
    if socket.try_send(&message, &[]).is_ok() {
        return;
    }
    let wait = Timespec {
        tv_sec: i64::try_from(MAX_LAST_WORD_WAIT.as_secs()).unwrap_or(1),
        tv_nsec: 0,
    };
    let _ = poll(&mut [PollFd::new(socket, PollFlags::OUT)], Some(&wait));
    let _ = socket.try_send(&message, &[]);
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
