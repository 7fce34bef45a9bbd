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
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use rustix::stdio::{dup2_stderr, dup2_stdin, stdin};
use sandvmm::Sandbox;
use sandvmm::session::{SessionClaim, SessionError};

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

/// Starts a session, and gives the exit code.
pub(crate) fn start(args: &StartArgs, line: &[OsString], called_at: Instant) -> u8 {
    if args.supervise {
        let (timeout, idle) = (args.timeout.0, args.idle.0);
        return supervise(&args.name, timeout, idle, |stay| {
            make(args, called_at, stay)
        });
    }
    call("start", line)
}

/// Goes on with a session that was paused, and gives the exit code.
pub(crate) fn resume(args: &ResumeArgs, line: &[OsString]) -> u8 {
    if args.supervise {
        return supervise(&args.name, None, args.idle.0, |stay| {
            stay.is_spared.store(true, Ordering::SeqCst);
            let sandbox = Sandbox::resume(&args.name).map_err(|error| {
                Verdict::failed(FAILED, Failure::Start, notice::sentence(&error))
            })?;
            Ok(stay.have(sandbox))
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
    /// Whether a signal has come, or the caller left before the session was ready.
    is_over: Arc<AtomicBool>,
    is_ready: Arc<AtomicBool>,
    /// Whether the sandbox is one that was paused, and is not served yet. It is nowhere else any more: the caller's end is none of it, and
    /// a signal does not end it, but has it paused again.
    is_spared: Arc<AtomicBool>,
    programs: Programs,
    /// What writes the events down, until the end.
    events: Arc<Mutex<Option<Writer>>>,
}

impl Stay {
    fn end(&self) {
        self.is_over.store(true, Ordering::SeqCst);
        if self.is_spared.load(Ordering::SeqCst) {
            return;
        }
        if let Some(sandbox) = self.sandbox.get() {
            sandbox.end();
        }
    }

    /// The sandbox, from the beginning of its start on: from here on a signal ends it.
    fn have(&self, sandbox: Sandbox) -> &Sandbox {
        let sandbox = self.sandbox.get_or_init(|| sandbox);
        if self.is_over.load(Ordering::SeqCst) {
            self.end();
        }
        sandbox
    }

    /// From here on the sandbox may be ended. Says whether it was spared before.
    fn spare_no_longer(&self) -> Result<bool, Verdict> {
        let was_spared = self.is_spared.swap(false, Ordering::SeqCst);
        if was_spared && self.is_over.load(Ordering::SeqCst) {
            self.is_spared.store(true, Ordering::SeqCst);
            let said = "It was told to end before it went on".to_owned();
            return Err(Verdict::failed(FAILED, Failure::Start, said));
        }
        Ok(was_spared)
    }

    /// Pauses a sandbox again that was to go on and can't be served.
    fn put_back(&self, name: &str, why: &mut Verdict) {
        let sandbox = self.sandbox.get();
        let Some(sandbox) = sandbox.filter(|_| self.is_spared.load(Ordering::SeqCst)) else {
            return;
        };
        let became = match sandbox.pause(name) {
            Ok(()) => "it is paused as before".to_owned(),
            Err(error) => format!("it is lost: {}", notice::sentence(&error)),
        };
        if let Some(message) = &mut why.message {
            *message = format!("{message}; {became}");
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
                // In this order: who is spared no longer is ready already.
                let is_spared = stay.is_spared.load(Ordering::SeqCst);
                if !is_spared && !stay.is_ready.load(Ordering::SeqCst) {
                    stay.end();
                }
            })
            .map_err(sandvmm::host::name_limit)?;
        Ok(())
    }
}

/// The process that stays.
fn supervise(
    name: &str,
    timeout: Option<Duration>,
    idle: Option<Duration>,
    make: impl FnOnce(&Stay) -> Result<&Sandbox, Verdict>,
) -> u8 {
    // No terminal's hang-up, Ctrl-C or job control reaches it. It fails where there is none already.
    let _ = rustix::process::setsid();
    let claim = match SessionClaim::new(name) {
        Ok(claim) => claim,
        Err(error) => return refused(&not_had(&error)),
    };
    // Who stops the session waits for all that is done here.
    let _keep = claim.keep();
    let stay = Stay::default();
    let mut served = serve(&stay, claim, timeout, idle, make);
    if let Err(verdict) = &mut served {
        stay.put_back(name, verdict);
    }
    stay.programs.end();
    if let Some(sandbox) = stay.sandbox.get() {
        sandbox.end();
        let writer = stay.events.lock().ok().and_then(|mut writer| writer.take());
        if let Some(writer) = writer {
            writer.finish();
        }
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
    stay.is_ready.store(true, Ordering::SeqCst);
    let was_paused = stay.spare_no_longer()?;
    let told = output::write_all(stdin(), READY);
    let left = leave_caller();
    // A caller that is not there to hear it does not know that there is a session, unless that is one that was paused.
    if !was_paused {
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
        .publish(sandbox)
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
