//! The state machine against a scripted machine and agent, over real sockets and with a real process. Whole
//! machines are tested elsewhere: here stand the ends and the lies that a real one does not show on demand.

#[cfg(feature = "tokio")]
mod asynchronous;
mod calls;
mod commands;
mod crashes;
mod end;
mod events;
mod files;
mod gate;
mod python;
mod restore;
mod save;
mod sessions;
mod start;

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Instant;

use protocol::frame::{self, MAX_FROM_AGENT_BYTES, MAX_TO_AGENT_BYTES};
use protocol::message::{
    ExitStatus, Exited, FromAgent, Hello, Spawn, SpawnFailure, StreamHeader, StreamKind, ToAgent,
};
use protocol::port;
use vmm::control::{ControlError, EndReason, FromMachine};

use super::deadlines::CLOSING_GRACE;
use super::*;
use crate::clock::realtime_ns;
use crate::crash::CrashKind;
use crate::egress::EgressOptions;
use crate::error::{SpawnError, StartError};
use crate::event::Events;
use crate::images::Images;
use crate::outcome::Outcome;
use crate::sandbox::{Origin, Sandbox};
use crate::{Child, Stdio};

/// A limit for what must happen soon, on the slowest machine.
const SOON: Duration = Duration::from_secs(20);

const BOUNDS: jailer::Bounds = jailer::Bounds {
    memory_mib: 32,
    vcpus: 1,
    max_file_bytes: 0,
};

/// The other side: what the machine's process and the agent in its guest would hold.
struct Peer {
    machine: ControlSocket,
    /// The process's standard input: a shell that does what is written here.
    process: UnixStream,
    shared: Arc<Shared>,
}

/// A sandbox whose guest is not ready yet, and its other side.
fn sandbox(timeout: Option<Duration>) -> (Sandbox, Peer) {
    sandbox_called(Some("scripted"), timeout)
}

fn sandbox_called(hostname: Option<&str>, timeout: Option<Duration>) -> (Sandbox, Peer) {
    sandbox_telling(hostname, timeout, Events::default())
}

fn sandbox_telling(
    hostname: Option<&str>,
    timeout: Option<Duration>,
    events: Events,
) -> (Sandbox, Peer) {
    let shared = Shared::new(now_ns(), events).unwrap();
    sandbox_of(hostname, timeout, shared)
}

fn sandbox_with(timeout: Option<Duration>, egress: EgressOptions) -> (Sandbox, Peer) {
    let events = Events::default();
    let egress = egress.open("scripted", &events).unwrap();
    let shared = Shared::new(now_ns(), events).unwrap();
    sandbox_of(Some("scripted"), timeout, shared.with_egress(egress))
}

fn sandbox_of(
    hostname: Option<&str>,
    timeout: Option<Duration>,
    shared: Shared,
) -> (Sandbox, Peer) {
    let hostname = hostname.map(str::to_owned);
    let now_ns = now_ns();
    let shared = Arc::new(shared);
    let (socket, machine) = ControlSocket::pair().unwrap();
    let (process, stdin) = UnixStream::pair().unwrap();
    let deadline = timeout.map(|timeout| (now_ns + nanos(timeout), timeout));
    let supervised = Arc::clone(&shared);
    let thread = std::thread::spawn(move || {
        // A shell enters no cell.
        let options = jailer::Options {
            leave_out: jailer::Part::ALL.into_iter().collect(),
            ..jailer::Options::new(BOUNDS)
        };
        let process = jailer::start(Path::new("/bin/sh"), stdin.into(), options).unwrap();
        let guest = GuestOptions {
            hostname,
            max_processes: Some(64),
        };
        let supervisor = Supervisor::new(&supervised, socket, process, guest, deadline);
        finish(&supervised, supervisor.supervise());
    });
    let origin = Origin {
        images: Images {
            kernel: "/kernel".into(),
            initrd: "/initrd".into(),
            rootfs: "/rootfs".into(),
        },
        rootfs: Arc::new(std::fs::File::open("/dev/null").unwrap()),
        cpus: 1,
        memory_mib: 128,
        has_workspace: false,
        template: None,
    };
    let sandbox = Sandbox::new(Arc::clone(&shared), origin, thread);
    let peer = Peer {
        machine,
        process,
        shared,
    };
    (sandbox, peer)
}

/// A sandbox that is ready, its other side, and the agent's end of the control stream.
fn ready_sandbox(timeout: Option<Duration>) -> (Sandbox, Peer, UnixStream) {
    let (sandbox, peer) = sandbox(timeout);
    let agent = greet(&peer);
    (sandbox, peer, agent)
}

/// The guest becomes ready: the agent's end of the control stream.
fn greet(peer: &Peer) -> UnixStream {
    let mut agent = peer.dial(port::CONTROL, port::CONTROL);
    say(&mut agent, &hello(protocol::VERSION));
    peer.shared.wait_ready().unwrap();
    assert!(matches!(hear(&mut agent), ToAgent::Configure(_)));
    agent
}

impl Peer {
    /// The guest dials: the agent's end of the stream.
    fn dial(&self, host_port: u32, guest_port: u32) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(SOON)).unwrap();
        let message = FromMachine::GuestConnected {
            host_port,
            guest_port,
        };
        self.machine.send(&message, &[theirs.as_fd()]).unwrap();
        ours
    }

    /// The host dials: the guest's end of the stream, and what the host says that it is.
    fn accept(&self) -> (UnixStream, StreamHeader) {
        let (message, mut descriptors) = self.machine.receive::<ToMachine>().unwrap();
        assert_eq!(
            message,
            ToMachine::Connect {
                port: port::STREAMS
            }
        );
        let mut stream = UnixStream::from(descriptors.remove(0));
        let header = frame::read(&mut stream, MAX_TO_AGENT_BYTES).unwrap();
        (stream, header)
    }

    fn end(&self, reason: EndReason, console: &[u8]) {
        let message = FromMachine::Ended {
            reason,
            console_tail: console.to_vec(),
        };
        self.machine.send(&message, &[]).unwrap();
    }
}

fn hello(version: u32) -> FromAgent {
    FromAgent::Hello(Hello {
        version,
        init_started_ns: 1_000,
        sent_ns: 2_000,
    })
}

fn framed(message: &FromAgent) -> Vec<u8> {
    frame::encode(message, MAX_FROM_AGENT_BYTES).unwrap()
}

fn say(agent: &mut UnixStream, message: &FromAgent) {
    frame::write(agent, message, MAX_FROM_AGENT_BYTES).unwrap();
}

fn hear(agent: &mut UnixStream) -> ToAgent {
    frame::read(agent, MAX_TO_AGENT_BYTES).unwrap()
}

fn exited(command_id: u32, status: ExitStatus, oom_kills: u32) -> FromAgent {
    FromAgent::Exited(Exited {
        command_id,
        status,
        oom_kills,
        peak_memory_bytes: 4096,
        cpu_time_us: 1500,
        process_limit_hits: 0,
        peak_processes: 3,
        disk_used_bytes: 8192,
        disk_free_bytes: 1 << 20,
        is_kept: true,
    })
}

/// Spawns a command while the other side says that it runs: the child, its id, and the guest's ends of standard
/// output and error.
fn running(
    sandbox: &Sandbox,
    peer: &Peer,
    agent: &mut UnixStream,
) -> (Child, UnixStream, UnixStream) {
    std::thread::scope(|scope| {
        let spawning = scope.spawn(|| sandbox.command("program").arg("one").spawn());
        let ToAgent::Spawn(spawn) = hear(agent) else {
            panic!("no spawn came");
        };
        let (stdout, header) = peer.accept();
        assert_eq!(header.kind, StreamKind::Stdout);
        assert_eq!(header.command_id, spawn.command_id);
        let (stderr, header) = peer.accept();
        assert_eq!(header.kind, StreamKind::Stderr);
        let command_id = spawn.command_id;
        say(
            agent,
            &FromAgent::Spawned {
                command_id,
                warm: false,
            },
        );
        (spawning.join().unwrap().unwrap(), stdout, stderr)
    })
}

fn crash_of(completion: &crate::Completion) -> CrashKind {
    match &completion.outcome {
        Outcome::MachineCrashed(crash) => crash.kind(),
        other => panic!("{other:?}"),
    }
}
