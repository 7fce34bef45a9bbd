//! From the kernel's hand-over to the loop.
//!
//! What the host need not wait for is done after `Hello`: while the greeting travels and is answered, the guest
//! finishes its preparations, and it takes no message before they are done.

use std::fs;
use std::io::{self, Read};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::ExitCode;

use protocol::VERSION;
use protocol::call;
use protocol::frame::{self, MAX_FROM_AGENT_BYTES};
use protocol::message::{FromAgent, Hello};
use rustix::process::{Resource, Rlimit};
use rustix::system::RebootCommand;
use rustix::time::ClockId;
use socket2::Socket;

use crate::agent::{Agent, Setup};
use crate::calls::Place;
use crate::cgroup::{self, Workload};
use crate::limits::{COMMAND_DESCRIPTORS_HARD, FATAL_WAIT, MAX_AGENT_DESCRIPTORS};
use crate::{control, identity, kmsg, network, renew, root, spawn};

/// Where the warm interpreter's program is, and what calls of the host's functions need: in memory, and gone with the machine.
const WARM_FOLDER: &str = call::FOLDER;

/// The life of PID 1. Returns only if even the restart of the machine fails, upon which the kernel panics.
#[must_use]
pub fn run() -> ExitCode {
    let init_started_ns = boottime_ns();
    let Err(message) = serve(init_started_ns);
    kmsg::error(&message);
    let _ = rustix::system::reboot(RebootCommand::Restart);
    ExitCode::FAILURE
}

/// Boots, then runs the loop until it fails, and returns the last sentence.
fn serve(init_started_ns: u64) -> Result<std::convert::Infallible, String> {
    let disk = root::enter().map_err(|error| fatal(None, error.to_string()))?;
    let listener =
        control::listen().map_err(|error| format!("The agent can't listen on vsock: {error}"))?;
    let stream = control::dial()
        .map_err(|error| format!("The agent can't reach the host over vsock: {error}"))?;
    greet(&stream, init_started_ns)
        .map_err(|error| format!("The agent can't greet the host: {error}"))?;
    let workload = match prepare() {
        Ok(workload) => workload,
        Err(message) => return Err(fatal(Some(stream), message)),
    };
    let setup = Setup {
        control: stream,
        listener,
        workload,
        stage_program: spawn::OWN_PROGRAM.to_owned(),
        warm_folder: WARM_FOLDER.into(),
        calls_place: Place {
            folder: call::FOLDER.into(),
            image: "/".into(),
        },
        configure: identity::apply,
        prepare_renewal: renew::prepare,
        renew: renew::apply,
        workspace: disk.filter(|_| !root::is_scratch()),
        redial: control::dial,
    };
    let mut agent =
        Agent::new(setup).map_err(|error| format!("The agent's loop can't start: {error}"))?;
    Err(agent.run().to_string())
}

fn greet(stream: &OwnedFd, init_started_ns: u64) -> io::Result<()> {
    let hello = FromAgent::Hello(Hello {
        version: VERSION,
        init_started_ns,
        sent_ns: boottime_ns(),
    });
    let bytes = frame::encode(&hello, MAX_FROM_AGENT_BYTES).map_err(io::Error::other)?;
    rustix::io::write(stream, &bytes)?;
    Ok(())
}

/// Everything between `Hello` and the first message.
fn prepare() -> Result<Workload, String> {
    root::complete().map_err(|error| error.to_string())?;
    // Out of memory, the kernel kills programs, never the agent (proc_pid_oom_score_adj(5)).
    fs::write("/proc/self/oom_score_adj", "-1000").map_err(|error| {
        format!("The agent can't protect itself from running out of memory: {error}")
    })?;
    let limit = Rlimit {
        current: Some(MAX_AGENT_DESCRIPTORS),
        maximum: Some(COMMAND_DESCRIPTORS_HARD),
    };
    rustix::process::setrlimit(Resource::Nofile, limit)
        .map_err(|errno| format!("The agent can't set its own limits: {errno}"))?;
    let system = rustix::system::sysinfo();
    // What is free now, not all there is: the kernel's own share, the initramfs and this process are no command's.
    let memory_bytes = system.freeram.saturating_mul(system.mem_unit.into());
    let workload = Workload::create(Path::new(cgroup::MOUNT_POINT), memory_bytes)
        .map_err(|error| format!("The guest's cgroups can't be set up: {error}"))?;
    network::loopback_up()
        .map_err(|error| format!("The guest's loopback can't be set up: {error}"))?;
    Ok(workload)
}

/// Tells the host why the guest is of no use and waits until the host ends it; returns the sentence.
fn fatal(stream: Option<OwnedFd>, message: String) -> String {
    kmsg::error(&message);
    let told = stream.map_or_else(control::dial, Ok).and_then(|stream| {
        let bytes = frame::encode(
            &FromAgent::Fatal {
                message: message.clone(),
            },
            MAX_FROM_AGENT_BYTES,
        )
        .map_err(io::Error::other)?;
        let mut stream = Socket::from(stream);
        rustix::io::write(&stream, &bytes)?;
        stream.shutdown(Shutdown::Write)?;
        stream.set_read_timeout(Some(FATAL_WAIT))?;
        let mut nothing = [0; 64];
        while stream.read(&mut nothing)? > 0 {}
        Ok(())
    });
    if let Err(error) = told {
        kmsg::error(&format!("The host was perhaps not told: {error}"));
    }
    message
}

/// The guest's `CLOCK_BOOTTIME`, in nanoseconds.
pub(crate) fn boottime_ns() -> u64 {
    let now = rustix::time::clock_gettime(ClockId::Boottime);
    let seconds = u64::try_from(now.tv_sec).unwrap_or_default();
    let nanos = u64::try_from(now.tv_nsec).unwrap_or_default();
    seconds.saturating_mul(1_000_000_000).saturating_add(nanos)
}
