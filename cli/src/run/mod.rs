//! `sandvmm run`: a script or command in a machine of its own.
//!
//! The run itself happens on a thread ([`session`]); the main thread waits for its end or for a signal, so that
//! a signal is answered at once, whatever the run is waiting for.

mod console;
mod copies;
mod input;
mod plan;
mod relay;
mod report;
mod session;
mod signals;
mod stream;
mod verdict;

pub(crate) use copies::Copy;
pub(crate) use report::Timeline;

use std::ffi::OsString;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use crate::args::RunArgs;
use crate::{notice, output, terminal};
use plan::Plan;
use report::Report;
use session::{Session, Shared};
use verdict::{FAILED, Failure, Verdict};

/// How long a run that was told to end may take to say how it ended.
const END_GRACE: Duration = Duration::from_secs(2);

/// What the main thread waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    /// A signal asks sandvmm to end.
    Signal(i32),
    /// The run is over, with this exit code.
    Over(u8),
}

/// Runs it and gives the exit code; `line` is the whole command line.
pub(crate) fn run(args: &RunArgs, line: &[OsString], called_at: Instant) -> u8 {
    let plan = match Plan::new(args, line) {
        Ok(plan) => plan,
        Err(error) => return announce_failure(args, &Verdict::usage(&error)),
    };
    let shared = Shared::new();
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
    });
    let code = match started {
        Ok(_) => wait(args, &shared, &events),
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

fn wait(args: &RunArgs, shared: &Shared, events: &Receiver<Event>) -> u8 {
    let signal = match events.recv() {
        Ok(Event::Over(code)) => return code,
        Ok(Event::Signal(signal)) => signal,
        Err(_) => return FAILED,
    };
    let interrupted = Verdict::interrupted(signal);
    shared.interrupted.store(signal, Ordering::SeqCst);
    terminal::restore();
    match shared.sandbox.get() {
        Some(sandbox) => {
            sandbox.end();
            // Whether it has said how it ended or not: the signal is what ended it.
            let _ = events.recv_timeout(END_GRACE);
            interrupted.exit_code
        }
        // A machine that is still being made ends with this process.
        None if shared.may_announce() => announce_failure(args, &interrupted),
        None => interrupted.exit_code,
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
