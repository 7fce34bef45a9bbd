//! The supervisor of one machine: hears its guest, serves its streams, and judges.

use std::fmt::Write as _;
use std::io::{ErrorKind, Read};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vmm::control::{ControlError, EndReason, FromMachine, ToMachine};

use crate::machine::Machine;
use crate::measure;
use crate::streams::{RESUME_PORT, Stream};
use crate::table::{self, Case, End, Outcome};

/// The case whose guest fills streams that nobody reads.
const STALLED_CASE: &str = "connections_to_the_cap";

/// How long a case may take. An emulated processor is slow, and others may use it too.
const CASE_MAX: Duration = Duration::from_secs(240);

/// How long a machine may live on after its guest did what ends it.
const END_MAX: Duration = Duration::from_secs(1);

/// How long a guest that goes on for ever is watched.
const WATCHED: Duration = Duration::from_millis(300);

/// The most of what the guest says that is kept for a failure's message, in bytes.
const SAID_BYTES_MAX: usize = 4 << 10;

/// Longest line: what is longer is no line of the guest's, but a flood.
const LINE_BYTES_MAX: usize = 512;

/// What the guest or its machine has come to.
#[derive(Debug)]
enum Step {
    Done,
    Failed(String),
    GoesOn,
    Ended(EndReason),
}

struct Supervisor {
    machine: Machine,
    streams: Vec<Stream>,
    line: Vec<u8>,
    said: String,
    names: Vec<String>,
    reads_console: bool,
    descriptors_max: usize,
    /// When the guest did what ends it.
    now: Option<Instant>,
    deadline: Instant,
}

/// Runs one case.
pub(crate) fn run(case: &Case) -> Result<(), String> {
    let mut supervisor = Supervisor::start(case.name)?;
    let result = supervisor
        .next_step()
        .and_then(|step| supervisor.judge(case.outcome, step));
    let said = std::mem::take(&mut supervisor.said);
    result
        .and_then(|has_ended| match has_ended {
            true => supervisor.machine.has_ended(),
            false => supervisor.machine.close(),
        })
        .map_err(|reason| format!("{reason}; the guest said:\n{said}"))
}

/// A guest has as many streams as it may, with data that nobody reads; another machine beside it is served as ever, and the first one
/// holds no more than its bound.
pub(crate) fn run_beside_stopped_readers(case: &Case) -> Result<(), String> {
    let mut stalled = Supervisor::start(STALLED_CASE)?;
    match stalled.next_step()? {
        Step::Done => {}
        other => return Err(format!("{STALLED_CASE}: {other:?}")),
    }
    run(case)?;
    measure::is_idle(stalled.machine.pid())?;
    measure::memory_is_bounded(stalled.machine.pid())?;
    stalled.machine.close()
}

/// The names of the guest's cases.
pub(crate) fn list() -> Result<Vec<String>, String> {
    let mut supervisor = Supervisor::start("")?;
    match supervisor.next_step()? {
        Step::Done => {
            supervisor.machine.close()?;
            Ok(supervisor.names)
        }
        other => Err(format!("{other:?}")),
    }
}

impl Supervisor {
    /// Starts a case, or the guest's list of cases where the name is empty.
    fn start(name: &str) -> Result<Self, String> {
        let cmdline = if name.is_empty() {
            String::new()
        } else {
            format!("case={name}")
        };
        let machine = Machine::start(cmdline).map_err(|error| error.to_string())?;
        Ok(Self {
            machine,
            streams: Vec::new(),
            line: Vec::new(),
            said: String::new(),
            names: Vec::new(),
            reads_console: true,
            descriptors_max: table::descriptors_max(name),
            now: None,
            deadline: Instant::now() + CASE_MAX,
        })
    }

    /// Whether what it came to is right, and the process too; whether it has ended.
    fn judge(&mut self, outcome: Outcome, step: Step) -> Result<bool, String> {
        let pid = self.machine.pid();
        match (outcome, step) {
            (_, Step::Failed(reason)) => Err(reason),
            (Outcome::Refused | Outcome::NeedsReset, Step::Done) => {
                for stream in &mut self.streams {
                    stream.press()?;
                }
                measure::is_idle(pid)?;
                self.is_bounded()?;
                Ok(false)
            }
            (Outcome::GoesOn, Step::GoesOn) => {
                std::thread::sleep(WATCHED);
                if let Err(reason) = self.is_bounded() {
                    // A process that is gone has said why.
                    self.deadline = Instant::now() + WATCHED;
                    return Err(format!("{reason}; it came to {:?}", self.next_step()));
                }
                Ok(false)
            }
            (Outcome::Ends(wanted), Step::Ended(reason)) => {
                let since = self.now.ok_or("the machine ended too early")?.elapsed();
                let is_wanted = match (wanted, &reason) {
                    (End::Reset, EndReason::Reset) | (End::TripleFault, EndReason::TripleFault) => {
                        true
                    }
                    (End::VcpuFailed, EndReason::VcpuFailed(sentence)) => !sentence.is_empty(),
                    _ => false,
                };
                if !is_wanted || since > END_MAX {
                    return Err(format!("the machine ended after {since:?}: {reason:?}"));
                }
                Ok(true)
            }
            (_, step) => Err(format!("it came to {step:?}")),
        }
    }

    fn is_bounded(&mut self) -> Result<(), String> {
        let pid = self.machine.pid();
        let kib = measure::memory_is_bounded(pid)?;
        let now = measure::descriptors(pid)?;
        let _ = writeln!(self.said, "note {kib} KiB at most, {now:?} descriptors");
        let allowed = self.descriptors_max + self.streams.len();
        match now {
            Some(now) if now > allowed => Err(format!(
                "the process has {now} descriptors, more than {allowed}"
            )),
            _ => Ok(()),
        }
    }

    /// Serves until something has come to an end.
    fn next_step(&mut self) -> Result<Step, String> {
        loop {
            let left = self
                .deadline
                .checked_duration_since(Instant::now())
                .ok_or("the guest takes too long")?;
            let (control, console, streams) = self.wait(left)?;
            if console && let Some(step) = self.hear_guest()? {
                return Ok(step);
            }
            if control && let Some(step) = self.hear_machine()? {
                return Ok(step);
            }
            let mut events = streams.into_iter();
            self.streams.retain_mut(|stream| match events.next() {
                Some(events) if !events.is_empty() => stream.serve(events),
                _ => true,
            });
        }
    }

    /// Waits for events: of the control socket, the console, and each stream.
    fn wait(&self, left: Duration) -> Result<(bool, bool, Vec<PollFlags>), String> {
        let socket = self.machine.socket.as_ref().ok_or("the socket is closed")?;
        let console = if self.reads_console {
            PollFlags::IN
        } else {
            PollFlags::empty()
        };
        let mut polled = vec![
            PollFd::new(socket, PollFlags::IN),
            PollFd::new(&self.machine.console, console),
        ];
        polled.extend(
            self.streams
                .iter()
                .map(|stream| PollFd::new(stream.socket(), stream.interest())),
        );
        let left = Timespec::try_from(left).map_err(|error| error.to_string())?;
        poll(&mut polled, Some(&left)).map_err(|error| error.to_string())?;
        let mut events = polled.iter().map(PollFd::revents);
        let [control, console] = [events.next(), events.next()]
            .map(|events| events.is_some_and(|events| !events.is_empty()));
        Ok((control, console && self.reads_console, events.collect()))
    }

    /// Takes one message.
    fn hear_machine(&mut self) -> Result<Option<Step>, String> {
        let socket = self.machine.socket.as_ref().ok_or("the socket is closed")?;
        let (message, descriptors) = match socket.try_receive() {
            Ok(Some(received)) => received,
            Ok(None) => return Ok(None),
            Err(ControlError::Closed) => return Err("the process is gone".into()),
            Err(error) => return Err(error.to_string()),
        };
        match message {
            FromMachine::Running { .. } => {}
            FromMachine::GuestConnected { host_port, .. } => {
                let stream = descriptors.into_iter().next().ok_or("no descriptor")?;
                if host_port == RESUME_PORT {
                    self.reads_console = true;
                    if let Some(step) = self.hear_guest()? {
                        return Ok(Some(step));
                    }
                }
                let stream = Stream::to_port(host_port, UnixStream::from(stream))
                    .map_err(|error| error.to_string())?;
                self.streams.extend(stream);
            }
            FromMachine::Ended { reason, .. } => return Ok(Some(Step::Ended(reason))),
            other => return Err(format!("{other:?}")),
        }
        Ok(None)
    }

    /// Reads all that there is on the console.
    fn hear_guest(&mut self) -> Result<Option<Step>, String> {
        let mut buffer = [0; 16 << 10];
        loop {
            let count = match self.machine.console.read(&mut buffer) {
                // The machine has ended: it says so on its socket.
                Ok(0) => {
                    self.reads_console = false;
                    return Ok(None);
                }
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(error.to_string()),
            };
            for byte in &buffer[..count] {
                if *byte != b'\n' {
                    if self.line.len() < LINE_BYTES_MAX {
                        self.line.push(*byte);
                    }
                    continue;
                }
                let line = std::mem::take(&mut self.line);
                let line = String::from_utf8_lossy(&line).into_owned();
                if let Some(step) = self.hear_line(&line)? {
                    return Ok(Some(step));
                }
                if !self.reads_console {
                    return Ok(None);
                }
            }
        }
    }

    fn hear_line(&mut self, line: &str) -> Result<Option<Step>, String> {
        // Zeros come before it where the guest wrote them to every port.
        let line = line.trim_start_matches('\0');
        if self.said.len() < SAID_BYTES_MAX {
            let _ = writeln!(self.said, "{line}");
        }
        match line.split_once(' ').unwrap_or((line, "")) {
            ("DONE", _) => return Ok(Some(Step::Done)),
            ("FOREVER", _) => return Ok(Some(Step::GoesOn)),
            ("FAIL", reason) => return Ok(Some(Step::Failed(reason.into()))),
            ("NOW", _) => self.now = Some(Instant::now()),
            ("case", name) => self.names.push(name.into()),
            ("@stop-reading", _) => self.reads_console = false,
            ("@connect", port) => self.connect(port.parse().map_err(|_| "no port")?)?,
            _ => {}
        }
        Ok(None)
    }

    /// Connects to a port of the guest, and writes.
    fn connect(&mut self, port: u32) -> Result<(), String> {
        let (ours, theirs) = UnixStream::pair().map_err(|error| error.to_string())?;
        ours.set_nonblocking(true)
            .map_err(|error| error.to_string())?;
        let socket = self.machine.socket.as_ref().ok_or("the socket is closed")?;
        socket
            .send(&ToMachine::Connect { port }, &[theirs.as_fd()])
            .map_err(|error| error.to_string())?;
        let mut stream = Stream::Connected(ours, 0);
        stream.press()?;
        self.streams.push(stream);
        Ok(())
    }
}
