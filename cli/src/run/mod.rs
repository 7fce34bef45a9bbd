//! `sandvmm run`: a script or command in a machine of its own.
//!
//! The run itself happens on a thread ([`session`]); the main thread waits for its end or for a signal, so that
//! a signal is answered at once, whatever the run is waiting for.

pub(crate) mod args;
mod console;
pub(crate) mod copies;
pub(crate) mod events;
pub(crate) mod functions;
mod input;
pub(crate) mod network;
pub(crate) mod parts;
mod plan;
mod relay;
mod report;
mod secret;
mod session;
mod shared;
pub(crate) mod signals;
pub(crate) mod stream;
pub(crate) mod verdict;

pub(crate) use copies::Copy;
pub(crate) use functions::HostFunction;
pub(crate) use network::{Network, NetworkError, Publish, parse_publish, parse_rule};
pub(crate) use report::Timeline;

use std::ffi::OsString;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use crate::{notice, output, terminal};
use args::RunArgs;
use plan::Plan;
use report::Report;
use session::Session;
use shared::Shared;
use verdict::{FAILED, Failure, USAGE, Verdict};

/// How long a run that was told to end may take to say how it ended.
const END_GRACE: Duration = Duration::from_secs(2);

/// How long after the time is over the run itself may take to say so.
const TIMEOUT_GRACE: Duration = Duration::from_secs(1);

/// What the main thread waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    /// A signal asks sandvmm to end.
    Signal(i32),
    /// The run is over, with this exit code.
    Over(u8),
}

/// Answers a command line that is none with the object that it asks for, and gives the exit code.
pub(crate) fn refuse(sentence: &str) -> u8 {
    let verdict = Verdict::failed(USAGE, Failure::Usage, sentence.to_owned());
    output::print(&Report::of_failure(&verdict).line(), verdict.exit_code)
}

/// Runs it and gives the exit code; `line` is the whole command line.
pub(crate) fn run(args: &RunArgs, line: &[OsString], called_at: Instant) -> u8 {
    let plan = match Plan::new(args, line) {
        Ok(plan) => plan,
        Err(error) => return announce_failure(args, &Verdict::usage(&error)),
    };
    let deadline = args
        .timeout
        .0
        .and_then(|limit| Instant::now().checked_add(limit + TIMEOUT_GRACE));
    let shared = Shared::default();
    let (sender, events) = channel();
    let session = match Session::new(args, plan, called_at, shared.clone()) {
        Ok(session) => session,
        Err(error) => return announce_failure(args, &refused(&error)),
    };
    let started = signals::forward(sender.clone(), Event::Signal).and_then(|()| {
        std::thread::Builder::new()
            .name("run".into())
            .spawn(move || {
                // Tells of the end also if the run panics.
                let mut over = Over(sender, FAILED);
                over.1 = session.run();
            })
            .map_err(sandvmm::host::name_limit)
    });
    let code = match started {
        Ok(_) => wait(args, &shared, &events, deadline),
        Err(error) => announce_failure(args, &refused(&error)),
    };
    terminal::restore();
    code
}

/// Sends its exit code when dropped.
struct Over(std::sync::mpsc::Sender<Event>, u8);

impl Drop for Over {
    fn drop(&mut self) {
        // Without a main thread nobody needs to know.
        let _ = self.0.send(Event::Over(self.1));
    }
}

fn wait(
    args: &RunArgs,
    shared: &Shared,
    events: &Receiver<Event>,
    deadline: Option<Instant>,
) -> u8 {
    let verdict = loop {
        match next(
            events,
            deadline.filter(|_| !shared.running.load(Ordering::SeqCst)),
        ) {
            Ok(Event::Over(code)) => return code,
            Ok(Event::Signal(signal)) => break Verdict::interrupted(signal),
            Err(RecvTimeoutError::Disconnected) => return FAILED,
            // The program has been started meanwhile: the machine keeps its time.
            Err(RecvTimeoutError::Timeout) if shared.running.load(Ordering::SeqCst) => {}
            // The run waits for what is not the machine's: a script on a standard input that says nothing.
            Err(RecvTimeoutError::Timeout) => break Verdict::timed_out(args.timeout.0),
        }
    };
    let _ = shared.ended_early.set(verdict.clone());
    terminal::restore();
    shared.programs.end();
    let mut said = None;
    if let Some(sandbox) = shared.sandbox.get() {
        sandbox.end();
        if let Ok(Event::Over(code)) = events.recv_timeout(END_GRACE) {
            said = Some(code);
        }
    }
    if shared.may_announce() {
        announce_failure(args, &verdict);
        return verdict.exit_code;
    }
    // The run has said how it ended: by this, or by itself just before.
    said.unwrap_or(verdict.exit_code)
}

fn next(events: &Receiver<Event>, deadline: Option<Instant>) -> Result<Event, RecvTimeoutError> {
    match deadline {
        Some(at) => events.recv_timeout(at.saturating_duration_since(Instant::now())),
        None => events.recv().map_err(|_| RecvTimeoutError::Disconnected),
    }
}

fn refused(error: &std::io::Error) -> Verdict {
    Verdict::failed(
        FAILED,
        Failure::Start,
        format!("The system refuses a thread or a signal's handler: {error}"),
    )
}

/// Tells of a run that never came to a machine, and gives its exit code.
fn announce_failure(args: &RunArgs, verdict: &Verdict) -> u8 {
    announce(args, verdict, || Report::of_failure(verdict))
}

/// Says how a run ended: one object with `--json`, else a sentence where there is one.
fn announce(args: &RunArgs, verdict: &Verdict, report: impl FnOnce() -> Report) -> u8 {
    terminal::restore();
    if args.json {
        return output::print(&report().line(), verdict.exit_code);
    }
    if let (Some(message), false) = (&verdict.message, args.quiet) {
        notice::say(message);
    }
    verdict.exit_code
}
