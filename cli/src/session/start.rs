//! `start` and `resume`: this program once more, as the process that stays.
//!
//! Who calls waits for a byte on the standard input of the one that stays, a socket: it comes when the session is ready. When none comes, the
//! other has said why not, and its exit code is the caller's. A caller that is gone before takes the session along.

use std::ffi::OsString;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::stdio::{dup2_stderr, dup2_stdin, stdin};
use sandvmm::session::{SessionClaim, SessionError};
use sandvmm::{PauseError, Sandbox, StillPaused};

use super::args::{ResumeArgs, StartArgs};
use crate::run::copies;
use crate::run::events::Writer;
use crate::run::functions::Programs;
use crate::run::network::Network;
use crate::run::parts::{Parts, parts};
use crate::run::signals;
use crate::run::verdict::{FAILED, Failure, Limits, USAGE, Verdict};
use crate::{cell, machine, notice, output};

/// The program that runs, also after its file was replaced.
const PROGRAM: &str = "/proc/self/exe";

/// What is said when the session is ready.
const READY: &[u8] = b"r";

/// What is said where a session that was paused does not go on.
const STILL_PAUSED: &str = "; it is paused as before";

/// Starts a session, and gives the exit code.
pub(crate) fn start(args: &StartArgs, line: &[OsString], called_at: Instant) -> u8 {
    if args.supervise {
        let (timeout, idle) = (args.timeout.0, args.idle.0);
        let stay = Stay::default();
        let claim = || SessionClaim::new(&args.name);
        return supervise(claim, timeout, idle, &stay, |stay| {
            make(args, called_at, stay)
        });
    }
    call("start", line)
}

/// Goes on with a session that was paused, and gives the exit code.
pub(crate) fn resume(args: &ResumeArgs, line: &[OsString]) -> u8 {
    if args.supervise {
        let stay = Stay {
            outlives_caller: true,
            ..Stay::default()
        };
        let claim = || SessionClaim::to_resume(&args.name);
        return supervise(claim, None, args.idle.0, &stay, |stay| {
            let failed = |error: &PauseError| {
                Verdict::failed(FAILED, Failure::Start, notice::sentence(error))
            };
            let (sandbox, paused) =
                Sandbox::begin_resume(&args.name).map_err(|error| failed(&error))?;
            stay.lock().paused = Some(paused);
            let sandbox = stay.have(sandbox);
            sandbox
                .wait_ready()
                .map_err(|error| failed(&PauseError::Start(error)))?;
            Ok(sandbox)
        });
    }
    call("resume", line)
}

/// Starts the process that stays, and waits until the session is ready or will not be.
fn call(task: &str, line: &[OsString]) -> u8 {
    let called = UnixStream::pair().and_then(|(ours, theirs)| {
        // What somebody forgot to close would stay open as long as the session.
        sandvmm::keep_descriptors();
        let child = Command::new(PROGRAM)
            .arg0("sandvmm")
            .args([task, "--supervise"])
            .args(line.iter().skip(2))
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::null())
            .spawn()?;
        Ok((ours, child))
    });
    let (mut ours, mut child) = match called {
        Ok(called) => called,
        Err(error) => return refused(&Verdict::system(&error)),
    };
    let mut byte = [0];
    if matches!(ours.read(&mut byte), Ok(1)) {
        return 0;
    }
    let code = child.wait().ok().and_then(|status| status.code());
    code.and_then(|code| u8::try_from(code).ok())
        .unwrap_or(FAILED)
}

fn refused(verdict: &Verdict) -> u8 {
    if let Some(message) = &verdict.message {
        notice::say(message);
    }
    verdict.exit_code
}

/// What the threads of the process that stays know.
#[derive(Debug, Clone, Default)]
struct Stay {
    sandbox: Arc<OnceLock<Sandbox>>,
    progress: Arc<Mutex<Progress>>,
    /// Whether the session is one that was paused: that its caller is gone before it is ready is no reason to end it.
    outlives_caller: bool,
    programs: Programs,
    /// What writes the events down, until the end.
    events: Arc<Mutex<Option<Writer>>>,
}

/// How far the session is.
#[derive(Debug, Default)]
struct Progress {
    /// Whether a signal has come, or the caller left before the session was ready.
    is_over: bool,
    is_ready: bool,
    /// The sandbox on disk that the session goes on with, until it is ready: whatever comes before, it is paused still.
    paused: Option<StillPaused>,
}

impl Stay {
    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self) {
        self.lock().is_over = true;
        if let Some(sandbox) = self.sandbox.get() {
            sandbox.end();
        }
    }

    /// The sandbox, from the beginning of its start on: from here on a signal ends it.
    fn have(&self, sandbox: Sandbox) -> &Sandbox {
        let sandbox = self.sandbox.get_or_init(|| sandbox);
        if self.lock().is_over {
            self.end();
        }
        sandbox
    }

    /// From here on the session is ready, unless it was told to end before: a sandbox that was paused is not on disk any more, or it is and is
    /// nowhere else.
    fn go_on(&self) -> Result<(), Verdict> {
        let mut progress = self.lock();
        let failed = |said| Err(Verdict::failed(FAILED, Failure::Start, said));
        if progress.is_over {
            return failed("It was told to end before it was ready".to_owned());
        }
        if let Some(paused) = progress.paused.take()
            && let Err(error) = paused.remove()
        {
            return failed(notice::sentence(&error) + STILL_PAUSED);
        }
        progress.is_ready = true;
        Ok(())
    }

    /// Lets go of a sandbox that was to go on and did not.
    fn leave_paused(&self, why: &mut Verdict) {
        let paused = self.lock().paused.take();
        if let (Some(_), Some(message)) = (paused, &mut why.message) {
            message.push_str(STILL_PAUSED);
        }
    }

    /// Ends the session by the signals that end a process, and by the caller's end before it is ready.
    fn listen(&self) -> io::Result<()> {
        let (told, heard) = channel();
        signals::forward(told, |_| ())?;
        let stay = self.clone();
        thread::Builder::new()
            .name("ending".into())
            .spawn(move || {
                if heard.recv().is_ok() {
                    stay.end();
                }
            })
            .map_err(sandvmm::host::name_limit)?;
        let stay = self.clone();
        let caller = rustix::io::fcntl_dupfd_cloexec(stdin(), 3)?;
        thread::Builder::new()
            .name("caller".into())
            .spawn(move || {
                // The caller says nothing: this is its end.
                let _ = UnixStream::from(caller).read(&mut [0]);
                if !stay.outlives_caller && !stay.lock().is_ready {
                    stay.end();
                }
            })
            .map_err(sandvmm::host::name_limit)?;
        Ok(())
    }
}

/// The process that stays.
fn supervise(
    claim: impl FnOnce() -> Result<SessionClaim, SessionError>,
    timeout: Option<Duration>,
    idle: Option<Duration>,
    stay: &Stay,
    make: impl FnOnce(&Stay) -> Result<&Sandbox, Verdict>,
) -> u8 {
    // No terminal's hang-up, Ctrl-C or job control reaches it. It fails where there is none already.
    let _ = rustix::process::setsid();
    let claim = match claim() {
        Ok(claim) => claim,
        Err(error) => return refused(&not_had(&error)),
    };
    // Who stops the session waits for all that is done here.
    let _keep = claim.keep();
    let mut served = serve(stay, claim, timeout, idle, make);
    stay.programs.end();
    if let Some(sandbox) = stay.sandbox.get() {
        sandbox.end();
        let writer = stay.events.lock().ok().and_then(|mut writer| writer.take());
        if let Some(writer) = writer {
            writer.finish();
        }
    }
    // When nothing of it runs any more, and before its name is free.
    if let Err(verdict) = &mut served {
        stay.leave_paused(verdict);
    }
    match served {
        Ok(()) => 0,
        Err(verdict) => refused(&verdict),
    }
}

fn serve(
    stay: &Stay,
    claim: SessionClaim,
    timeout: Option<Duration>,
    idle: Option<Duration>,
    make: impl FnOnce(&Stay) -> Result<&Sandbox, Verdict>,
) -> Result<(), Verdict> {
    stay.listen().map_err(|error| Verdict::system(&error))?;
    let sandbox = make(stay)?;
    let server = claim
        .listen(sandbox, timeout, idle)
        .map_err(|error| not_had(&error))?;
    stay.go_on()?;
    let told = output::write_all(stdin(), READY);
    let left = leave_caller();
    // A caller that is not there to hear it does not know that there is a session, unless that is one that was paused.
    if !stay.outlives_caller {
        told.and(left).map_err(|error| Verdict::system(&error))?;
    }
    server
        .run(sandbox)
        .map(drop)
        .map_err(|error| Verdict::system(&error))
}

fn not_had(error: &SessionError) -> Verdict {
    match error {
        SessionError::Name { .. } => {
            Verdict::failed(USAGE, Failure::Usage, notice::sentence(error))
        }
        _ => Verdict::failed(FAILED, Failure::Start, notice::sentence(error)),
    }
}

/// Lets go of the caller's standard error, and of the socket to it.
fn leave_caller() -> io::Result<()> {
    let null = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/null")?;
    dup2_stdin(&null)?;
    dup2_stderr(&null)?;
    Ok(())
}

/// Makes the sandbox by the options.
fn make<'a>(args: &StartArgs, called_at: Instant, stay: &'a Stay) -> Result<&'a Sandbox, Verdict> {
    let network = Network::new(&args.sandbox.network).map_err(|error| Verdict::usage(&error))?;
    copies::check(&args.sandbox.upload).map_err(|error| Verdict::usage(&error))?;
    Programs::check(&args.sandbox.host_function).map_err(|error| Verdict::usage(&error))?;
    let Parts {
        builder,
        path,
        events,
    } = parts(
        &args.sandbox,
        args.timeout.0,
        &network,
        args.quiet,
        called_at,
    )?;
    if let Ok(mut writer) = stay.events.lock() {
        *writer = events;
    }
    let sandbox = builder.begin().map_err(|error| Verdict::start(&error))?;
    let sandbox = stay.have(sandbox);
    network
        .publish(sandbox, args.quiet)
        .map_err(|error| Verdict::system(&error))?;
    sandbox.wait_ready().map_err(|error| {
        Verdict::start(&error).about(machine::named_files(&args.sandbox.machine).as_deref())
    })?;
    if let (Some(warning), false) = (sandbox.cell().as_ref().and_then(cell::warning), args.quiet) {
        notice::say(&warning);
    }
    let limits = Limits {
        timeout: args.timeout.0,
        memory_mib: path.memory_mib,
    };
    copies::upload(&sandbox.files(), &args.sandbox.upload, args.quiet)
        .map_err(|error| Verdict::copy(&error, limits))?;
    stay.programs
        .register(sandbox, &args.sandbox.host_function)
        .map_err(|error| Verdict::host_function(&error, limits))?;
    Ok(sandbox)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_told_to_end_does_not_become_ready_and_what_is_ready_is_told_by_its_sandbox() {
        let (early, late) = (Stay::default(), Stay::default());

        early.end();
        let refused = early.go_on().unwrap_err();
        late.go_on().unwrap();
        late.end();

        assert_eq!(refused.exit_code, FAILED);
        assert!(!early.lock().is_ready);
        assert!(late.lock().is_ready);
    }
}
