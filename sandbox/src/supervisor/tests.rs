//! The state machine against a scripted machine and agent, over real sockets and with a real process. Whole
//! machines are tested elsewhere: here stand the ends and the lies that a real one does not show on demand.

#[cfg(feature = "tokio")]
mod asynchronous;
mod calls;
mod commands;
mod events;
mod files;
mod gate;
mod python;
mod restore;
mod save;
mod sessions;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Instant;

use protocol::frame::{self, MAX_FROM_AGENT_BYTES, MAX_TO_AGENT_BYTES};
use protocol::message::{
    ExitStatus, Exited, FromAgent, Hello, Spawn, SpawnFailure, StreamHeader, StreamKind,
};
use vmm::control::{ControlError, EndReason, FromMachine};

use super::*;
use crate::clock::realtime_ns;
use crate::egress::EgressOptions;
use crate::error::SpawnError;
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
        let supervisor = Supervisor::new(&supervised, socket, process, hostname, deadline);
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
        disk_used_bytes: 8192,
        disk_free_bytes: 1 << 20,
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

#[test]
fn a_greeting_makes_the_sandbox_ready_and_its_clocks_are_in_order() {
    let (sandbox, peer) = sandbox(None);
    let started_ns = now_ns();
    let running = FromMachine::Running {
        process_started_ns: started_ns,
        vcpu_running_ns: started_ns + 1,
    };
    peer.machine.send(&running, &[]).unwrap();
    let mut agent = peer.dial(port::CONTROL, port::CONTROL);
    say(&mut agent, &hello(protocol::VERSION));

    peer.shared.wait_ready().unwrap();
    let configure = hear(&mut agent);

    let ToAgent::Configure(configure) = configure else {
        panic!("{configure:?}");
    };
    assert_eq!(configure.hostname, "scripted");
    assert_ne!(configure.entropy, [0; 32]);
    assert!(configure.realtime_ns.abs_diff(realtime_ns()) < nanos(SOON));
    let clocks = sandbox.clocks();
    let phases = [
        clocks.process_started,
        clocks.vcpu_running,
        clocks.guest_init,
        clocks.agent_ready,
        sandbox.end().clocks.all_gone,
    ];
    assert!(phases.iter().all(Option::is_some), "{phases:?}");
    assert!(phases.is_sorted(), "{phases:?}");
}

#[test]
fn only_the_agents_own_dial_is_taken_and_only_once() {
    let (_sandbox, peer) = sandbox(None);
    let mut byte = [0];
    for (host_port, guest_port) in [(port::CONTROL, 1024), (port::STREAMS, port::CONTROL)] {
        let mut other = peer.dial(host_port, guest_port);
        assert_eq!(other.read(&mut byte).unwrap(), 0);
    }
    let mut agent = peer.dial(port::CONTROL, port::CONTROL);
    say(&mut agent, &hello(protocol::VERSION));
    peer.shared.wait_ready().unwrap();

    let mut second = peer.dial(port::CONTROL, port::CONTROL);

    assert_eq!(second.read(&mut byte).unwrap(), 0);
    assert!(matches!(hear(&mut agent), ToAgent::Configure(_)));
}

#[test]
fn a_flood_of_the_guests_dials_is_closed_and_keeps_no_command_waiting() {
    let (sandbox, peer, mut agent) = ready_sandbox(None);
    let (mut flood, theirs) = UnixStream::pair().unwrap();
    flood.set_read_timeout(Some(SOON)).unwrap();
    for port in 0..4096 {
        let message = FromMachine::GuestConnected {
            host_port: port,
            guest_port: port,
        };
        peer.machine.send(&message, &[theirs.as_fd()]).unwrap();
    }
    drop(theirs);

    let (child, _stdout, _stderr) = running(&sandbox, &peer, &mut agent);

    // The end of file: nobody holds one of the 4096 copies.
    assert_eq!(flood.read(&mut [0]).unwrap(), 0);
    drop(child);
}

#[test]
fn a_guest_that_cannot_be_used_fails_the_start_with_its_own_words() {
    let (_sandbox, peer) = sandbox(None);
    let mut agent = peer.dial(port::CONTROL, port::CONTROL);
    let message = "No root file system\x1b[2J".to_owned();
    say(&mut agent, &FromAgent::Fatal { message });

    let error = peer.shared.wait_ready().unwrap_err();

    assert!(
        matches!(error, StartError::Guest { sentence } if sentence == "No root file system [2J")
    );
}

#[test]
fn an_agent_of_another_version_fails_the_start() {
    let (_sandbox, peer) = sandbox(None);
    let mut agent = peer.dial(port::CONTROL, port::CONTROL);
    say(&mut agent, &hello(protocol::VERSION + 1));

    let error = peer.shared.wait_ready().unwrap_err();

    assert!(matches!(error, StartError::Version { .. }), "{error:?}");
}

#[test]
fn a_machine_that_cannot_be_built_fails_the_start() {
    let (_sandbox, peer) = sandbox(None);
    peer.end(EndReason::StartFailed("The kernel is none".to_owned()), b"");

    let error = peer.shared.wait_ready().unwrap_err();

    assert_eq!(error.to_string(), "The kernel is none");
    assert!(matches!(error, StartError::Machine { .. }));
}

#[test]
fn a_kernel_that_panics_while_booting_fails_the_start_with_its_reason() {
    let (_sandbox, peer) = sandbox(None);
    peer.end(
        EndReason::Reset,
        b"Kernel panic - not syncing: No working init found.\n",
    );

    let error = peer.shared.wait_ready().unwrap_err();

    assert!(matches!(&error, StartError::Crashed(crash) if crash.kind() == CrashKind::KernelPanic));
    assert!(error.to_string().contains("No working init"), "{error}");
}

#[test]
fn a_guest_that_never_gets_ready_is_given_up_at_the_end_of_its_time() {
    let (_sandbox, peer) = sandbox(Some(Duration::from_millis(50)));

    let error = peer.shared.wait_ready().unwrap_err();

    assert!(matches!(error, StartError::TimedOut { .. }), "{error:?}");
}

#[test]
fn a_program_that_serves_no_machine_fails_the_start_with_its_words() {
    let (_sandbox, mut peer) = sandbox(None);
    peer.process
        .write_all(b"echo not a machine >&2; exit 2\n")
        .unwrap();

    let error = peer.shared.wait_ready().unwrap_err().to_string();

    assert!(error.contains("status 2"), "{error}");
    assert!(error.ends_with("not a machine"), "{error}");
}

#[test]
fn a_command_runs_writes_and_ends() {
    let (sandbox, peer, mut agent) = ready_sandbox(None);
    let (mut child, mut stdout, stderr) = running(&sandbox, &peer, &mut agent);
    stdout.write_all(b"out\xff").unwrap();
    drop((stdout, stderr));
    say(&mut agent, &exited(child.id(), ExitStatus::Code(7), 0));

    let completion = child.wait();
    let mut read = Vec::new();
    child.stdout.take().unwrap().read_to_end(&mut read).unwrap();

    assert_eq!(read, b"out\xff");
    assert_eq!(completion.outcome, Outcome::Exited(7));
    assert_eq!(completion.usage.cpu_time, Duration::from_micros(1500));
    assert_eq!(completion.usage.peak_memory_bytes, 4096);
    let clocks = child.wait().clocks;
    assert!(clocks.started < clocks.exited);
    assert!(clocks.first_output.is_some());
    assert_eq!(sandbox.clocks().first_output, clocks.first_output);
}

#[test]
fn what_is_asked_for_arrives_as_it_was_said() {
    let (sandbox, _peer, mut agent) = ready_sandbox(None);
    let spawn = std::thread::scope(|scope| {
        scope.spawn(|| {
            sandbox
                .command("/bin/p")
                .args(["a", "b"])
                .env("K", "1")
                .env("K", "2")
                .current_dir("/d")
                .file("f", 0o755, b"c")
                .user("0:0")
                .pty(80, 25)
                .spawn()
        });
        let heard = hear(&mut agent);
        sandbox.end();
        heard
    });

    assert_eq!(
        spawn,
        ToAgent::Spawn(Spawn {
            command_id: 1,
            program: b"/bin/p".to_vec(),
            args: vec![b"a".to_vec(), b"b".to_vec()],
            env: vec![(b"K".to_vec(), b"2".to_vec())],
            cwd: Some(b"/d".to_vec()),
            user: Some("0:0".to_owned()),
            stdio: protocol::message::Stdio::Terminal(protocol::message::TerminalSize {
                columns: 80,
                rows: 25
            }),
            file: Some(protocol::message::NewFile {
                path: b"f".to_vec(),
                mode: 0o755,
                content: b"c".to_vec(),
            }),
        })
    );
}

#[test]
fn a_command_that_does_not_start_says_why_and_may_be_tried_again() {
    let (sandbox, _peer, mut agent) = ready_sandbox(None);
    let error = std::thread::scope(|scope| {
        let spawning = scope.spawn(|| sandbox.command("absent").spawn());
        let ToAgent::Spawn(spawn) = hear(&mut agent) else {
            panic!("no spawn came");
        };
        let failed = FromAgent::SpawnFailed {
            command_id: spawn.command_id,
            kind: SpawnFailure::NotFound,
            message: "No program absent".to_owned(),
        };
        say(&mut agent, &failed);
        spawning.join().unwrap().unwrap_err()
    });

    assert!(matches!(&error, SpawnError::NotFound(message) if message == "No program absent"));
    assert!(!error.may_have_run());
}

#[test]
fn lack_of_memory_is_told_apart_from_a_signal() {
    let (sandbox, peer, mut agent) = ready_sandbox(None);
    for (status, oom_kills, expected) in [
        (
            ExitStatus::Signal(9),
            1,
            Outcome::OutOfMemory {
                status: crate::ExitStatus::Signal(9),
            },
        ),
        (
            ExitStatus::Code(1),
            2,
            Outcome::OutOfMemory {
                status: crate::ExitStatus::Code(1),
            },
        ),
        (ExitStatus::Code(0), 1, Outcome::Exited(0)),
        (ExitStatus::Signal(9), 0, Outcome::Signaled(9)),
    ] {
        let (mut child, _stdout, _stderr) = running(&sandbox, &peer, &mut agent);
        say(&mut agent, &exited(child.id(), status, oom_kills));
        assert_eq!(child.wait().outcome, expected);
    }
}

#[test]
fn an_agent_that_breaks_the_protocol_ends_the_machine() {
    type Lie = fn(u32) -> Vec<u8>;
    let lies: [Lie; 6] = [
        |_| vec![0xff; 64],
        |_| framed(&hello(protocol::VERSION)),
        |command_id| {
            framed(&FromAgent::Spawned {
                command_id,
                warm: false,
            })
        },
        |id| framed(&exited(id + 1, ExitStatus::Code(0), 0)),
        |id| framed(&exited(id, ExitStatus::Code(256), 0)),
        |id| framed(&exited(id, ExitStatus::Signal(0), 0)),
    ];
    for lie in lies {
        let (sandbox, peer, mut agent) = ready_sandbox(None);
        let (mut child, _stdout, _stderr) = running(&sandbox, &peer, &mut agent);

        agent.write_all(&lie(child.id())).unwrap();

        assert_eq!(crash_of(&child.wait()), CrashKind::AgentMisbehaved);
    }
}

#[test]
fn half_a_frame_held_for_ever_keeps_nobody_from_the_end() {
    let (sandbox, peer, mut agent) = ready_sandbox(Some(Duration::from_millis(200)));
    let (mut child, _stdout, _stderr) = running(&sandbox, &peer, &mut agent);
    agent.write_all(&[200, 0, 0, 0, 1]).unwrap();

    let completion = child.wait();

    assert_eq!(completion.outcome, Outcome::TimedOut);
}

#[test]
fn an_agent_that_gives_up_is_a_crash_in_its_own_words() {
    let (sandbox, peer, mut agent) = ready_sandbox(None);
    let (mut child, _stdout, _stderr) = running(&sandbox, &peer, &mut agent);
    let message = "The guest's cgroups can't be set up".to_owned();

    say(
        &mut agent,
        &FromAgent::Fatal {
            message: message.clone(),
        },
    );

    let completion = child.wait();
    assert_eq!(crash_of(&completion), CrashKind::AgentGone);
    assert!(
        matches!(&completion.outcome, Outcome::MachineCrashed(crash) if crash.to_string().contains(&message))
    );
}

#[test]
fn an_agent_that_closes_its_stream_is_a_crash() {
    let (sandbox, peer, mut agent) = ready_sandbox(None);
    let (mut child, _stdout, _stderr) = running(&sandbox, &peer, &mut agent);

    drop(agent);

    assert_eq!(crash_of(&child.wait()), CrashKind::AgentGone);
}

#[test]
fn the_kernels_reason_comes_before_the_closed_stream() {
    let (sandbox, peer, mut agent) = ready_sandbox(None);
    let (mut child, _stdout, _stderr) = running(&sandbox, &peer, &mut agent);

    drop(agent);
    std::thread::sleep(Duration::from_millis(50));
    peer.end(
        EndReason::Reset,
        b"Kernel panic - not syncing: Attempted to kill init!\n",
    );

    assert_eq!(crash_of(&child.wait()), CrashKind::KernelPanic);
}

#[test]
fn a_killed_process_is_a_crash_and_output_before_it_can_be_read() {
    let (sandbox, mut peer, mut agent) = ready_sandbox(None);
    let (mut child, mut stdout, _stderr) = running(&sandbox, &peer, &mut agent);
    stdout.write_all(b"before").unwrap();
    drop(stdout);

    peer.process.write_all(b"kill -9 $$\n").unwrap();
    let completion = child.wait();
    let mut read = Vec::new();
    child.stdout.take().unwrap().read_to_end(&mut read).unwrap();

    assert_eq!(crash_of(&completion), CrashKind::ProcessKilled);
    assert_eq!(read, b"before");
    let again = sandbox.command("next").spawn().unwrap_err();
    assert!(matches!(again, SpawnError::MachineCrashed(_)), "{again:?}");
    assert!(sandbox.end().crash.is_some());
}

#[test]
fn a_command_that_ended_before_the_machine_did_has_ended() {
    let (sandbox, peer, mut agent) = ready_sandbox(None);
    let (mut child, _stdout, _stderr) = running(&sandbox, &peer, &mut agent);

    // The machine's end is there first: the supervisor must look for what was said before it.
    let said = exited(child.id(), ExitStatus::Code(3), 0);
    let state = peer.shared.lock();
    peer.end(EndReason::TripleFault, b"");
    say(&mut agent, &said);
    drop(state);

    assert_eq!(child.wait().outcome, Outcome::Exited(3));
}

#[test]
fn at_the_end_of_its_time_a_command_is_killed_and_says_what_it_used() {
    let (sandbox, peer, mut agent) = ready_sandbox(Some(Duration::from_millis(300)));
    let (mut child, _stdout, _stderr) = running(&sandbox, &peer, &mut agent);
    let command_id = child.id();

    assert_eq!(hear(&mut agent), ToAgent::Kill { command_id });
    say(&mut agent, &exited(command_id, ExitStatus::Signal(9), 0));
    let completion = child.wait();

    assert_eq!(completion.outcome, Outcome::TimedOut);
    assert_eq!(completion.usage.cpu_time, Duration::from_micros(1500));
    let late = sandbox.command("late").spawn().unwrap_err();
    assert!(matches!(late, SpawnError::TimedOut), "{late:?}");
}

#[test]
fn a_command_that_is_killed_before_it_runs_is_out_of_time_too() {
    let (sandbox, _peer, mut agent) = ready_sandbox(Some(Duration::from_millis(300)));
    let error = std::thread::scope(|scope| {
        let spawning = scope.spawn(|| sandbox.command("slow").spawn());
        assert!(matches!(hear(&mut agent), ToAgent::Spawn(_)));
        let ToAgent::Kill { command_id } = hear(&mut agent) else {
            panic!("no kill came");
        };
        let failed = FromAgent::SpawnFailed {
            command_id,
            kind: SpawnFailure::Exhausted,
            message: "It was killed".to_owned(),
        };
        say(&mut agent, &failed);
        spawning.join().unwrap().unwrap_err()
    });

    assert!(matches!(error, SpawnError::TimedOut), "{error:?}");
}

#[test]
fn a_guest_that_ignores_the_end_of_its_time_is_killed_after_the_grace() {
    let timeout = Duration::from_millis(300);
    let began = Instant::now();
    let (sandbox, peer, mut agent) = ready_sandbox(Some(timeout));
    let (mut child, _stdout, _stderr) = running(&sandbox, &peer, &mut agent);

    let completion = child.wait();

    assert_eq!(completion.outcome, Outcome::TimedOut);
    assert!(began.elapsed() >= timeout + CLOSING_GRACE);
    assert!(began.elapsed() < timeout + CLOSING_GRACE + SOON);
    assert_eq!(sandbox.end().crash, None);
}

#[test]
fn ending_the_sandbox_ends_every_wait() {
    let (sandbox, peer, mut agent) = ready_sandbox(None);
    let (mut child, _stdout, _stderr) = running(&sandbox, &peer, &mut agent);
    assert!(child.wait_timeout(Duration::from_millis(10)).is_none());

    std::thread::scope(|scope| {
        let spawning = scope.spawn(|| sandbox.command("never answered").spawn());
        assert!(matches!(hear(&mut agent), ToAgent::Spawn(_)));
        let waiting = scope.spawn(|| child.wait());
        let first = sandbox.end();

        let error = spawning.join().unwrap().unwrap_err();
        assert!(matches!(error, SpawnError::SandboxEnded), "{error:?}");
        assert!(error.may_have_run());
        assert_eq!(waiting.join().unwrap().outcome, Outcome::SandboxEnded);
        assert_eq!(sandbox.end(), first);
    });
    let gone = peer.machine.receive::<ToMachine>();
    assert!(gone.is_ok() || matches!(gone, Err(ControlError::Closed)));
}

#[test]
fn a_dial_that_was_given_up_is_not_the_agents_last() {
    let (sandbox, peer) = sandbox(None);
    for _ in 0..3 {
        drop(peer.dial(port::CONTROL, port::CONTROL));
    }
    let mut agent = peer.dial(port::CONTROL, port::CONTROL);
    say(&mut agent, &hello(protocol::VERSION));

    peer.shared.wait_ready().unwrap();
    assert!(matches!(hear(&mut agent), ToAgent::Configure(_)));
    // From the greeting on there is one control stream, and its end is the agent's.
    drop(agent);
    let mut second = peer.dial(port::CONTROL, port::CONTROL);
    assert_eq!(second.read(&mut [0]).unwrap(), 0);
    sandbox.command("x").spawn().unwrap_err();
}

#[test]
fn a_stream_that_nobody_wants_does_not_hold_the_command_up() {
    let (sandbox, peer, mut agent) = ready_sandbox(None);
    let (mut stdout, mut child) = std::thread::scope(|scope| {
        let spawning = scope.spawn(|| sandbox.command("loud").stdout(Stdio::null()).spawn());
        let ToAgent::Spawn(spawn) = hear(&mut agent) else {
            panic!("no spawn came");
        };
        let (stdout, _) = peer.accept();
        let (_stderr, _) = peer.accept();
        let command_id = spawn.command_id;
        say(
            &mut agent,
            &FromAgent::Spawned {
                command_id,
                warm: false,
            },
        );
        (stdout, spawning.join().unwrap().unwrap())
    });

    stdout.set_write_timeout(Some(SOON)).unwrap();
    stdout.write_all(&vec![b'x'; 4 << 20]).unwrap();
    say(&mut agent, &exited(child.id(), ExitStatus::Code(0), 0));

    assert!(child.stdout.is_none());
    assert_eq!(child.wait().outcome, Outcome::Exited(0));
}
