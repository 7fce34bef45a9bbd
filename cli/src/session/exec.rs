//! `exec` and `shell`: a command in a sandbox that another process owns. Its streams come as descriptors, so that nothing is between them and
//! ours but this.

use std::ffi::OsString;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};
use std::{io, io::ErrorKind};

use rustix::stdio::{stderr, stdin, stdout};
use sandvmm::session::{Session, SessionChild, SessionError};
use sandvmm::{Completion, SpawnError};

use super::args::{ExecArgs, ShellArgs};
use super::failed;
use crate::run::signals;
use crate::run::stream::{Copied, copy, feed};
use crate::run::verdict::{FAILED, Limits, USAGE, Verdict};
use crate::{environment, notice, output, terminal};

/// How long output is still written when the command's sandbox was ended before it.
const DRAIN_GRACE: Duration = Duration::from_secs(2);

/// Starts the best shell that the guest has.
const SHELL: &str = "exec \"$(command -v bash || command -v sh)\"";

/// What the main thread waits for.
#[derive(Debug)]
enum Event {
    /// A signal asks the command to end.
    Signal(i32),
    /// The terminal has a new size.
    Resized,
    /// The command has ended, or what became of it is not known.
    Ended(Box<Result<Completion, SessionError>>),
    /// An output stream is over.
    Output(Copied),
    /// Our own standard input can't be read.
    Input(io::Error),
}

/// Runs a shell.
pub(crate) fn shell(args: ShellArgs) -> u8 {
    exec(&ExecArgs {
        name: args.name,
        words: ["sh", "-c", SHELL].map(OsString::from).into(),
        interactive: true,
        tty: terminal::is_input_terminal(),
        detach: false,
        quiet: false,
        program: args.program,
    })
}

/// Runs the command, and gives its exit code.
pub(crate) fn exec(args: &ExecArgs) -> u8 {
    let code = match run(args) {
        Ok(verdict) => {
            terminal::restore();
            if let (Some(message), false) = (&verdict.message, args.quiet) {
                notice::say(message);
            }
            verdict.exit_code
        }
        Err(code) => code,
    };
    terminal::restore();
    code
}

/// Says why there is no command, and gives the exit code.
fn not_run(error: &SessionError, limits: Limits) -> u8 {
    terminal::restore();
    match error {
        SessionError::Spawn(error) => say_spawn(error, limits),
        error => failed(error),
    }
}

fn say_spawn(error: &SpawnError, limits: Limits) -> u8 {
    let verdict = Verdict::spawn(error, limits);
    if let Some(message) = &verdict.message {
        notice::say(message);
    }
    verdict.exit_code
}

fn usage(error: &dyn std::error::Error) -> u8 {
    notice::say(&notice::sentence(error));
    USAGE
}

fn system(error: &io::Error) -> u8 {
    terminal::restore();
    notice::say(&format!(
        "The system refuses a thread or the terminal's raw mode: {error}"
    ));
    FAILED
}

fn run(args: &ExecArgs) -> Result<Verdict, u8> {
    let variables = environment::collect(&args.program.env_file, &args.program.env, &|name| {
        std::env::var_os(name)
    })
    .map_err(|error| usage(&error))?;
    if args.tty && !terminal::is_input_terminal() {
        notice::say(
            "Standard input is not a terminal: leave out -t, or say -i for plain standard input",
        );
        return Err(USAGE);
    }
    let session = Session::open(&args.name).map_err(|error| failed(&error))?;
    let limits = Limits {
        timeout: session.info().timeout,
        memory_mib: session.info().memory_mib,
    };
    let Some((program, rest)) = args.words.split_first() else {
        return Err(USAGE);
    };
    let mut command = session.command(program);
    command.args(rest);
    for (key, value) in &variables {
        command.env(key, value);
    }
    if let Some(folder) = &args.program.workdir {
        command.current_dir(folder);
    }
    if let Some(user) = &args.program.user {
        command.user(user);
    }
    if args.detach {
        let id = command
            .spawn_detached()
            .map_err(|error| not_run(&error, limits))?;
        return match output::print(&format!("{id}\n"), 0) {
            0 => Ok(Verdict::outcome(&sandvmm::Outcome::Exited(0), limits)),
            code => Err(code),
        };
    }
    if args.tty {
        let size = terminal::size();
        command.pty(size.columns, size.rows);
    } else if args.interactive {
        command.piped_stdin();
    }
    // Until there is a command, a signal's own action is right, and so is a terminal that makes one of Ctrl-C: a supervisor or guest may be
    // long with its answer, and a client that is gone takes along what it has started.
    let child = command.spawn().map_err(|error| not_run(&error, limits))?;
    let (sender, events) = channel();
    signals::forward(sender.clone(), Event::Signal).map_err(|error| system(&error))?;
    if args.tty {
        terminal::make_raw().map_err(|error| system(&error))?;
    }
    let attached = Attached::new(child, args.tty, &sender).map_err(|error| system(&error))?;
    attached
        .wait(&events, limits)
        .map_err(|error| not_run(&error, limits))
}

/// A command whose streams are ours.
struct Attached {
    child: Arc<SessionChild>,
    has_terminal: bool,
    /// Output streams that are not over.
    open: usize,
}

impl Attached {
    fn new(
        mut child: SessionChild,
        has_terminal: bool,
        sender: &Sender<Event>,
    ) -> io::Result<Self> {
        let streams = (
            child.terminal.take(),
            child.stdin.take(),
            child.stdout.take(),
            child.stderr.take(),
        );
        let mut attached = Self {
            child: Arc::new(child),
            has_terminal,
            open: 0,
        };
        let (terminal, input, output, errors) = streams;
        if let Some(terminal) = terminal {
            signals::forward_resizes(sender.clone(), || Event::Resized)?;
            let keys = terminal.try_clone()?;
            spawn("keys", move || {
                // A terminal that hangs up types no more.
                let _ = feed(stdin(), &[], keys);
            })?;
            attached.output("stdout", terminal, stdout(), sender)?;
        }
        if let Some(stream) = input {
            let sender = sender.clone();
            spawn("stdin", move || {
                if let Err(error) = feed(stdin(), &[], stream) {
                    let _ = sender.send(Event::Input(error));
                }
            })?;
        }
        if let Some(stream) = output {
            attached.output("stdout", stream, stdout(), sender)?;
        }
        if let Some(stream) = errors {
            attached.output("stderr", stream, stderr(), sender)?;
        }
        let (child, sender) = (Arc::clone(&attached.child), sender.clone());
        spawn("end", move || {
            // Nobody may wait any more.
            let _ = sender.send(Event::Ended(Box::new(child.wait())));
        })?;
        Ok(attached)
    }

    fn output(
        &mut self,
        name: &str,
        stream: UnixStream,
        sink: BorrowedFd<'static>,
        sender: &Sender<Event>,
    ) -> io::Result<()> {
        let sender = sender.clone();
        spawn(name, move || {
            let _ = sender.send(Event::Output(copy(stream, sink.as_fd())));
        })?;
        self.open += 1;
        Ok(())
    }

    /// Waits for the end, hands signals and sizes on, and says how it ended. A second signal does not wait any longer: the command is killed
    /// when we are gone.
    fn wait(mut self, events: &Receiver<Event>, limits: Limits) -> Result<Verdict, SessionError> {
        let mut ended: Option<Verdict> = None;
        let mut trouble = None;
        let mut was_told = false;
        let mut deadline = None;
        while ended.is_none() || self.open > 0 {
            match next(events, deadline) {
                Ok(Event::Ended(completion)) => {
                    let completion = (*completion)?;
                    let verdict = Verdict::outcome(&completion.outcome, limits);
                    if !verdict.is_programs_own() {
                        deadline = Some(Instant::now() + DRAIN_GRACE);
                    }
                    ended = Some(verdict);
                }
                Ok(Event::Signal(signal)) if was_told || ended.is_some() => {
                    return Ok(Verdict::interrupted(signal));
                }
                Ok(Event::Signal(signal)) => {
                    was_told = true;
                    self.child.signal(signal)?;
                }
                Ok(Event::Resized) => {
                    let size = terminal::size();
                    self.child.resize(size.columns, size.rows)?;
                }
                Ok(Event::Input(error)) => return Ok(Verdict::input(&error)),
                Ok(Event::Output(copied)) => {
                    self.open -= 1;
                    match copied {
                        Copied::Whole => {}
                        // A terminal whose screen is gone.
                        _ if self.has_terminal => return Ok(Verdict::reader_gone()),
                        // Its program learns it by itself, if it writes more.
                        Copied::ReaderGone => {}
                        Copied::Lost(error) if error.kind() == ErrorKind::BrokenPipe => {
                            trouble = Some(Verdict::reader_gone());
                        }
                        Copied::Lost(error) => return Ok(Verdict::output(&error)),
                    }
                }
                Err(_) => break,
            }
        }
        let verdict = ended.unwrap_or_else(|| Verdict::interrupted(0));
        match trouble {
            Some(trouble) if verdict.exit_code == 0 => Ok(trouble),
            _ => Ok(verdict),
        }
    }
}

fn next(events: &Receiver<Event>, deadline: Option<Instant>) -> Result<Event, RecvTimeoutError> {
    match deadline {
        Some(at) => events.recv_timeout(at.saturating_duration_since(Instant::now())),
        None => events.recv().map_err(|_| RecvTimeoutError::Disconnected),
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new()
        .name(name.into())
        .spawn(work)
        .map(drop)
        .map_err(sandvmm::host::name_limit)
}
