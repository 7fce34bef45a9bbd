//! The one thread that a sandbox has: it starts the machine's process, speaks with it and with the agent,
//! keeps the deadlines, and leaves nothing behind.
//!
//! It waits in one `poll` for all of: a request from a user's thread, a message from the machine's process, one
//! from the agent, the process's end, its last words, the streams that nobody reads, and the next deadline.
//! Users' threads wait for the state in [`Shared`] that it changes.

mod agent;
mod cpu_time;
mod machine;
#[cfg(feature = "fuzzing")]
pub(crate) mod scripted;

use std::collections::VecDeque;
use std::error::Error;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use jailer::MachineProcess;
use protocol::message::ToAgent;
use protocol::port;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use vmm::control::{ControlSocket, ToMachine};

use crate::clock::{nanos, now_ns};
use crate::control_stream::ControlStream;
use crate::crash::{Crash, CrashKind};
use crate::error::StartError;
use crate::event::EventKind;
use crate::limit::Limit;
use crate::shared::{ANSWER_LIMIT, Shared, frame_of};
use crate::state::{Over, Phase, Request, State};
use agent::misbehaved;
use cpu_time::CpuTime;

/// How long a boot may take when the sandbox's own time does not end it before: a second on metal, some
/// tens where the processor is emulated and shared.
pub(crate) const BOOT_LIMIT: Duration = Duration::from_secs(120);

/// How long a machine's process may take until it is in its cell: some milliseconds on metal.
const ENTRY_LIMIT: Duration = Duration::from_secs(60);

/// How long the agent has, after the sandbox's time is over, to kill what runs and to send its last output.
/// Then the machine is killed: whatever the guest does, it does not live longer.
pub(crate) const CLOSING_GRACE: Duration = Duration::from_secs(1);

/// Bytes read at one time of a stream that nobody wants.
const DISCARD_CHUNK_BYTES: usize = 64 << 10;

/// Most pieces read from the agent, or from the process's standard error, after the process is gone: more than
/// a socket or pipe can hold.
const MAX_LAST_PIECES: usize = 256;

/// All that a machine is started from.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) program: PathBuf,
    pub(crate) cell: jailer::Options,
    /// The first message: a start or a restore.
    pub(crate) order: ToMachine,
    /// What belongs to it, in its order.
    pub(crate) descriptors: Vec<OwnedFd>,
    /// The guest's host name, where one was chosen.
    pub(crate) hostname: Option<String>,
    /// End of the sandbox's time on `CLOCK_MONOTONIC`, and how long that time was.
    pub(crate) deadline: Option<(u64, Duration)>,
    /// The most processor time of its process, and how many of its threads can use that at one time.
    pub(crate) cpu_time: Option<(Duration, u32)>,
}

/// Why a machine is over.
#[derive(Debug)]
enum Reason {
    Asked,
    TimeIsOver(Duration),
    CpuTimeIsOver,
    Crashed(Crash),
    NotStarted(StartError),
}

#[derive(Debug)]
struct Supervisor {
    shared: Arc<Shared>,
    socket: ControlSocket,
    process: MachineProcess,
    to_machine: VecDeque<(ToMachine, Vec<OwnedFd>)>,
    /// What users have asked of a guest that has not greeted yet: it goes out right behind the answer to its greeting. Bounded as
    /// commands are, and by [`State::push`].
    early: Vec<Request>,
    agent: Option<ControlStream>,
    agent_has_ended: bool,
    discarded: Vec<OwnedFd>,
    hostname: Option<String>,
    /// Whether a restored guest was told what is new, and has not said yet that it took that.
    resuming: bool,
    deadline: Option<(u64, Duration)>,
    boot_deadline_ns: u64,
    closing_deadline_ns: Option<u64>,
    cpu_time: Option<CpuTime>,
    agent_end_deadline_ns: Option<u64>,
}

/// What a turn of the loop has to look at.
#[derive(Debug, Default)]
struct Ready {
    machine: bool,
    agent: bool,
    process: bool,
    stderr: bool,
    discarded: Vec<bool>,
}

/// The thread: starts a machine's process and stays with it until it is gone.
pub(crate) fn run(shared: &Arc<Shared>, plan: Plan) {
    // Users' threads wait for this one: also if it fails, they must hear of it.
    let reason = catch_unwind(AssertUnwindSafe(|| match Supervisor::start(shared, plan) {
        Ok(supervisor) => supervisor.supervise(),
        Err(error) => Reason::NotStarted(error),
    }));
    finish(
        shared,
        reason.unwrap_or_else(|_| supervisor_failed("it panicked")),
    );
}

/// The machine is gone, and its users hear of it.
fn finish(shared: &Shared, reason: Reason) {
    let mut state = shared.lock();
    state.clocks.all_gone = Some(now_ns());
    state.requests.clear();
    let ended = reason.event();
    if matches!(state.phase, Phase::Booting) {
        state.start_error = Some(reason.start_error());
        state.phase = Phase::Over(Over::Ended);
    } else {
        state.phase = Phase::Over(reason.over());
    }
    drop(state);
    shared.events.emit(ended);
    shared.notify();
}

impl Reason {
    fn event(&self) -> EventKind {
        let (reason, message) = match self {
            Self::Asked => ("ended", None),
            Self::TimeIsOver(_) => ("timeout", None),
            Self::CpuTimeIsOver => ("limit", Some(Limit::CpuTime.to_string())),
            Self::Crashed(crash) => ("crash", Some(crash.to_string())),
            Self::NotStarted(error) => ("crash", Some(error.to_string())),
        };
        EventKind::Ended { reason, message }
    }

    fn over(self) -> Over {
        match self {
            Self::TimeIsOver(_) => Over::Limit(Limit::WallTime),
            Self::CpuTimeIsOver => Over::Limit(Limit::CpuTime),
            Self::Crashed(crash) => Over::Crashed(crash),
            Self::Asked => Over::Ended,
            // Only a machine's process that was taken over says so after its guest was ready.
            Self::NotStarted(error) => {
                Over::Crashed(Crash::new(CrashKind::HostFailed, error.to_string()))
            }
        }
    }

    fn start_error(self) -> StartError {
        match self {
            Self::TimeIsOver(limit) => StartError::TimedOut { limit },
            Self::CpuTimeIsOver => StartError::LimitExceeded(Limit::CpuTime),
            Self::Crashed(crash) => StartError::Crashed(crash),
            Self::NotStarted(error) => error,
            Self::Asked => StartError::Ended,
        }
    }
}

/// Why there is no process, in the words of a start.
fn not_started(
    error: jailer::StartError,
    failed: impl FnOnce(io::Error) -> StartError,
) -> StartError {
    match error {
        jailer::StartError::Program(source) => failed(source),
        jailer::StartError::Cgroup { why } => StartError::NoCgroup { why },
        jailer::StartError::Silent { .. } => {
            failed(io::Error::new(io::ErrorKind::TimedOut, error.to_string()))
        }
        error => {
            let source = error
                .source()
                .map_or_else(String::new, |source| format!(": {source}"));
            failed(io::Error::other(format!("{error}{source}")))
        }
    }
}

fn system(action: &'static str) -> impl FnOnce(io::Error) -> StartError {
    move |source| StartError::System { action, source }
}

/// The fault is this library's.
fn supervisor_failed(what: &str) -> Reason {
    Reason::Crashed(Crash::new(
        CrashKind::HostFailed,
        format!("The machine's supervisor failed: {what}"),
    ))
}

impl Supervisor {
    fn start(shared: &Arc<Shared>, plan: Plan) -> Result<Self, StartError> {
        let (ours, theirs) = ControlSocket::pair().map_err(system("Making a control socket"))?;
        let failed = |source| StartError::Process {
            program: plan.program.clone(),
            source,
        };
        let process = jailer::start(&plan.program, theirs.into(), plan.cell)
            .map_err(|error| not_started(error, failed))?;
        let mut supervisor = Self::new(shared, ours, process, plan.hostname, plan.deadline)
            .with_order(plan.order, plan.descriptors);
        supervisor.cpu_time = plan
            .cpu_time
            .map(|(limit, threads)| CpuTime::new(supervisor.process.id(), limit, threads));
        shared.events.emit(EventKind::Started);
        // It finds its orders when it has entered its cell.
        if supervisor.send_to_machine().is_ok() {
            supervisor.wait_for_entry(failed)?;
        }
        Ok(supervisor)
    }

    /// Waits until the process is in its cell. That it has ended, or that the time is over, is seen by whoever looks next.
    fn wait_for_entry(
        &mut self,
        failed: impl FnOnce(io::Error) -> StartError,
    ) -> Result<(), StartError> {
        let limit = self.deadline.map_or(ENTRY_LIMIT, |(at_ns, _)| {
            ENTRY_LIMIT.min(Duration::from_nanos(at_ns.saturating_sub(now_ns())))
        });
        match self.process.entered(limit) {
            Ok(cell) => self.shared.lock().cell = cell,
            Err(jailer::StartError::Silent { .. }) if limit < ENTRY_LIMIT => {}
            Err(error) => return Err(not_started(error, failed)),
        }
        Ok(())
    }

    fn new(
        shared: &Arc<Shared>,
        socket: ControlSocket,
        process: MachineProcess,
        hostname: Option<String>,
        deadline: Option<(u64, Duration)>,
    ) -> Self {
        Self {
            shared: Arc::clone(shared),
            socket,
            process,
            to_machine: VecDeque::new(),
            early: Vec::new(),
            agent: None,
            agent_has_ended: false,
            discarded: Vec::new(),
            hostname,
            resuming: false,
            deadline,
            boot_deadline_ns: now_ns().saturating_add(nanos(BOOT_LIMIT)),
            closing_deadline_ns: None,
            cpu_time: None,
            agent_end_deadline_ns: None,
        }
    }

    fn with_order(mut self, order: ToMachine, descriptors: Vec<OwnedFd>) -> Self {
        self.to_machine.push_back((order, descriptors));
        self
    }

    /// Keeps the machine until it is over, then ends its process and reads what was said last.
    fn supervise(mut self) -> Reason {
        let mut reason = loop {
            if let Err(reason) = self.turn() {
                break reason;
            }
        };
        self.process.end();
        // What the machine passed on before its end is in our socket: a command that has ended has ended, and a
        // guest that could not be used said why before its kernel panicked over it.
        for _ in 0..MAX_LAST_PIECES {
            if self.agent_has_ended {
                break;
            }
            if let Err(last) = self.take_from_agent() {
                if matches!(
                    (&reason, &last),
                    (Reason::Crashed(_), Reason::NotStarted(_))
                ) {
                    reason = last;
                }
                break;
            }
        }
        reason
    }

    /// One round: deadlines, `poll`, and all that it found.
    fn turn(&mut self) -> Result<(), Reason> {
        self.keep_deadlines(now_ns())?;
        self.send_to_machine()?;
        self.send_to_agent();
        let ready = self
            .wait()
            .map_err(|source| supervisor_failed(&format!("it could not wait: {source}")))?;
        self.take_requests()?;
        if ready.agent {
            self.take_from_agent()?;
        }
        if ready.stderr {
            self.process.read_stderr();
        }
        if ready.machine || ready.process {
            self.take_from_machine()?;
        }
        if ready.process {
            return Err(self.process_is_gone());
        }
        self.discard(&ready.discarded);
        Ok(())
    }

    fn keep_deadlines(&mut self, now_ns: u64) -> Result<(), Reason> {
        let passed = |deadline_ns: Option<u64>| deadline_ns.is_some_and(|at| at <= now_ns);
        if passed(self.agent_end_deadline_ns) {
            return Err(Reason::Crashed(Crash::new(
                CrashKind::AgentGone,
                "The agent closed its control stream".to_owned(),
            )));
        }
        let cpu_time_is_over = self
            .cpu_time
            .as_mut()
            .is_some_and(|cpu_time| cpu_time.is_over(now_ns));
        let shared = Arc::clone(&self.shared);
        let mut state = shared.lock();
        match (&state.phase, self.deadline) {
            (Phase::Booting, _) if cpu_time_is_over => Err(Reason::CpuTimeIsOver),
            (Phase::Booting, Some((at_ns, limit))) if at_ns <= now_ns => {
                Err(Reason::TimeIsOver(limit))
            }
            (Phase::Booting, None) if self.boot_deadline_ns <= now_ns => {
                Err(Reason::TimeIsOver(BOOT_LIMIT))
            }
            (Phase::Ready, Some((at_ns, limit))) if at_ns <= now_ns => self.begin_closing(
                &mut state,
                at_ns,
                Limit::WallTime,
                Reason::TimeIsOver(limit),
            ),
            (Phase::Ready, _) if cpu_time_is_over => {
                self.begin_closing(&mut state, now_ns, Limit::CpuTime, Reason::CpuTimeIsOver)
            }
            (Phase::Closing(Limit::CpuTime), _) if passed(self.closing_deadline_ns) => {
                Err(Reason::CpuTimeIsOver)
            }
            (Phase::Closing(_), Some((_, limit))) if passed(self.closing_deadline_ns) => {
                Err(Reason::TimeIsOver(limit))
            }
            _ => Ok(()),
        }
    }

    /// The time is over, or a ceiling was met: all that runs is killed, and the machine a grace later.
    fn begin_closing(
        &mut self,
        state: &mut State,
        deadline_ns: u64,
        limit: Limit,
        reason: Reason,
    ) -> Result<(), Reason> {
        let command = None;
        self.shared
            .events
            .emit(EventKind::LimitHit { limit, command });
        let live = state.live_commands();
        if live.is_empty() {
            return Err(reason);
        }
        state.phase = Phase::Closing(limit);
        self.closing_deadline_ns = Some(deadline_ns.saturating_add(nanos(CLOSING_GRACE)));
        for command_id in live {
            if let (Some(agent), Some(frame)) =
                (&mut self.agent, frame_of(&ToAgent::Kill { command_id }))
            {
                state.queued_to_agent_bytes += frame.len();
                agent.queue(&frame);
            }
        }
        Ok(())
    }

    fn next_deadline_ns(&self) -> Option<u64> {
        let phase_deadline_ns = match self.shared.lock().phase {
            Phase::Booting => Some(
                self.deadline
                    .map_or(self.boot_deadline_ns, |(at_ns, _)| at_ns),
            ),
            Phase::Ready => self.deadline.map(|(at_ns, _)| at_ns),
            Phase::Closing(_) | Phase::Over(_) => self.closing_deadline_ns,
        };
        let cpu_time_look_ns = self.cpu_time.as_ref().map(CpuTime::next_look_ns);
        [
            phase_deadline_ns,
            self.agent_end_deadline_ns,
            cpu_time_look_ns,
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// Waits until something is to be done. An interrupted wait finds nothing.
    fn wait(&mut self) -> io::Result<Ready> {
        let timeout = self.next_deadline_ns().map(|at_ns| {
            let left = Duration::from_nanos(at_ns.saturating_sub(now_ns()));
            Timespec::try_from(left).unwrap_or(Timespec {
                tv_sec: i64::MAX,
                tv_nsec: 0,
            })
        });
        let wanted = |wants_to_send: bool| {
            if wants_to_send {
                PollFlags::IN | PollFlags::OUT
            } else {
                PollFlags::IN
            }
        };
        let agent = self
            .agent
            .as_ref()
            .filter(|_| !self.agent_has_ended)
            .map(|agent| (agent.as_fd(), wanted(agent.wants_to_send())));
        // One row for each kind of descriptor: what is absent is a row that is not polled.
        let fixed: [Option<(BorrowedFd<'_>, PollFlags)>; 5] = [
            Some((self.shared.wake.as_fd(), PollFlags::IN)),
            Some((self.socket.as_fd(), wanted(!self.to_machine.is_empty()))),
            Some((self.process.pidfd(), PollFlags::IN)),
            self.process.stderr().map(|stderr| (stderr, PollFlags::IN)),
            agent,
        ];
        let mut descriptors: Vec<PollFd<'_>> = fixed
            .iter()
            .flatten()
            .copied()
            .chain(
                self.discarded
                    .iter()
                    .map(|end| (end.as_fd(), PollFlags::IN)),
            )
            .map(|(descriptor, flags)| PollFd::from_borrowed_fd(descriptor, flags))
            .collect();
        match poll(&mut descriptors, timeout.as_ref()) {
            Ok(_) => {}
            Err(Errno::INTR) => return Ok(Ready::default()),
            Err(errno) => return Err(errno.into()),
        }
        let mut found = descriptors
            .iter()
            .map(|polled| !polled.revents().is_empty());
        let mut of = |row: usize| {
            fixed.get(row).is_some_and(Option::is_some) && found.next().unwrap_or(false)
        };
        let (_wake, machine, process, stderr, agent) = (of(0), of(1), of(2), of(3), of(4));
        Ok(Ready {
            machine,
            agent,
            process,
            stderr,
            discarded: found.collect(),
        })
    }

    fn take_requests(&mut self) -> Result<(), Reason> {
        let mut counter = [0; 8];
        // The counter alone: what is asked for is in the queue.
        let _ = rustix::io::read(&self.shared.wake, &mut counter);
        let requests = std::mem::take(&mut self.shared.lock().requests);
        let takes_requests = self.pass_on_early();
        for request in requests {
            match request {
                // A restored guest ends all its connections before it greets: a stream would be lost.
                Request::ToAgent(_) | Request::Connect(_) | Request::ConnectGate(_)
                    if !takes_requests =>
                {
                    self.early.push(request);
                }
                Request::End => return Err(Reason::Asked),
                Request::EndAt(at_ns, limit) => self.deadline = Some((at_ns, limit)),
                Request::Unanswered => {
                    return Err(misbehaved(&format!(
                        "it did not say within {} s whether a command runs",
                        ANSWER_LIMIT.as_secs()
                    )));
                }
                Request::GateFailed(sentence) => {
                    // Later it is one program's lie, or the loss of the way out alone.
                    if matches!(self.shared.lock().phase, Phase::Booting) {
                        return Err(Reason::NotStarted(StartError::Guest { sentence }));
                    }
                }
                Request::ToAgent(_) | Request::Connect(_) | Request::ConnectGate(_) => {
                    self.pass_on(request);
                }
                Request::Save(then, files) => {
                    self.to_machine
                        .push_back((ToMachine::Snapshot { then }, files));
                }
                Request::Discard(end) => self.discarded.push(end),
            }
        }
        self.send_to_machine()?;
        self.send_to_agent();
        Ok(())
    }

    /// Hands on what the guest is asked, in the order in which it was.
    fn pass_on(&mut self, request: Request) {
        match request {
            Request::ToAgent(frame) => match &mut self.agent {
                Some(agent) => agent.queue(&frame),
                None => self.shared.lock().taken_by_agent(frame.len()),
            },
            Request::Connect(end) => self.connect(port::STREAMS, end),
            Request::ConnectGate(end) => self.connect(port::GATE, end),
            _ => {}
        }
    }

    /// Has the machine open a stream to a port in the guest.
    fn connect(&mut self, port: u32, end: OwnedFd) {
        self.to_machine
            .push_back((ToMachine::Connect { port }, vec![end]));
    }

    /// Reads one piece of each stream that nobody wants and that has one; those at their end are closed.
    fn discard(&mut self, ready: &[bool]) {
        let mut ready = ready.iter().copied();
        self.discarded.retain(|end| {
            if !ready.next().unwrap_or(false) {
                return true;
            }
            let mut chunk = [0; DISCARD_CHUNK_BYTES];
            match rustix::io::read(end, &mut chunk) {
                Ok(count) => count > 0,
                Err(errno) => matches!(errno, Errno::INTR | Errno::AGAIN),
            }
        });
    }
}

/// 32 bytes of the system's generator, which has been seeded since early in the host's boot.
pub(crate) fn random_bytes() -> io::Result<[u8; 32]> {
    let mut bytes = [0; 32];
    let count = getrandom(&mut bytes, GetRandomFlags::empty())?;
    if count == bytes.len() {
        return Ok(bytes);
    }
    Err(io::ErrorKind::UnexpectedEof.into())
}

#[cfg(test)]
mod tests;
