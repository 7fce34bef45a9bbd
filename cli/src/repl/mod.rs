//! `sandvmm repl`: a prompt of Python in a sandbox.
//!
//! A thread reads lines, one waits for signals; the main thread puts code together, has it run and shows what it comes to. A Ctrl-C
//! interrupts code that runs, and else drops what was typed.

pub(crate) mod args;
mod show;

use std::error::Error;
use std::io::BufRead;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use sandvmm::{Evaluation, Python, PythonError, Sandbox, SandboxBuilder, Template};

use crate::run::{Network, signals};
use crate::{environment, machine, notice, terminal};
use args::ReplArgs;
use show::Screen;

/// Exit code of sandvmm's own failure.
const FAILED: u8 = 125;
/// Exit code when the time was over.
const TIMED_OUT: u8 = 124;
/// Exit code of a wrong command line.
const USAGE: u8 = 2;
/// Exit code when the last input ended by an exception, where nobody was there to see it.
const EXCEPTION: u8 = 1;
/// Added to a signal's number for an exit code, as of a shell.
const SIGNAL_BASE: i32 = 128;
/// `SIGINT`.
const INTERRUPT: i32 = 2;

/// The exception by which Python code ends its program.
const EXIT: &str = "SystemExit";

/// Python's name in the guest.
const PYTHON: &str = "python3";

/// Longest input line, in bytes; a longer one ends the input.
const MAX_LINE_BYTES: u64 = 1 << 20;

/// What the main thread waits for.
#[derive(Debug)]
enum Event {
    Line(String),
    End,
    Signal(i32),
}

/// What is known of the prompt by the thread that hears signals.
#[derive(Debug, Clone, Default)]
struct Shared {
    sandbox: Arc<OnceLock<Sandbox>>,
    python: Arc<OnceLock<Python>>,
    is_running: Arc<AtomicBool>,
}

/// Runs it and gives the exit code.
pub(crate) fn repl(args: &ReplArgs, called_at: Instant) -> u8 {
    let shared = Shared::default();
    let (sender, events) = channel();
    let code = match listen(&shared, sender).and_then(|()| begin(args, called_at, &shared)) {
        Ok(python) => Prompt::new(args, &shared, python, &events).serve(),
        Err((code, sentence)) => {
            notice::say(&sentence);
            code
        }
    };
    if let Some(sandbox) = shared.sandbox.get() {
        sandbox.end();
    }
    code
}

fn failed(error: &dyn Error) -> (u8, String) {
    (FAILED, notice::sentence(error))
}

/// Hears signals and lines from now on.
fn listen(shared: &Shared, sender: Sender<Event>) -> Result<(), (u8, String)> {
    let (told, heard) = channel();
    signals::forward(told, |signal| signal).map_err(|error| failed(&error))?;
    let (hearing, signals) = (shared.clone(), sender.clone());
    let started = std::thread::Builder::new()
        .name("interrupts".into())
        .spawn(move || {
            for signal in heard {
                let is_running = hearing.is_running.load(Ordering::SeqCst);
                match (signal, hearing.python.get()) {
                    (INTERRUPT, Some(python)) if is_running => {
                        // A guest that does not take it is ended by its time, or by another signal.
                        let _ = python.interrupt();
                    }
                    (INTERRUPT, Some(_)) => drop(signals.send(Event::Signal(signal))),
                    _ => {
                        let _ = signals.send(Event::Signal(signal));
                        // Whatever the main thread waits for ends by this.
                        if let Some(sandbox) = hearing.sandbox.get() {
                            sandbox.end();
                        }
                    }
                }
            }
        });
    let reading = std::thread::Builder::new().name("lines".into());
    started
        .and_then(|_| reading.spawn(move || read(&sender)))
        .map(drop)
        .map_err(|error| failed(&sandvmm::host::name_limit(error)))
}

/// Passes lines on; a line without an end is the last.
fn read(sender: &Sender<Event>) {
    let mut input = std::io::stdin().lock();
    loop {
        let mut line = Vec::new();
        let count = std::io::Read::take(&mut input, MAX_LINE_BYTES).read_until(b'\n', &mut line);
        let event = match (count, String::from_utf8(line)) {
            (Ok(1..), Ok(line)) => Event::Line(line),
            _ => Event::End,
        };
        let is_end = matches!(event, Event::End);
        if sender.send(event).is_err() || is_end {
            return;
        }
    }
}

/// Starts the machine and its Python.
fn begin<'a>(
    args: &ReplArgs,
    called_at: Instant,
    shared: &'a Shared,
) -> Result<&'a Python, (u8, String)> {
    let variables = environment::collect(&args.program.env_file, &args.program.env, &|name| {
        std::env::var_os(name)
    })
    .map_err(|error| (USAGE, notice::sentence(&error)))?;
    let network = Network::new(&args.network).map_err(|error| (USAGE, notice::sentence(&error)))?;
    if let Some(name) = network
        .secret_names()
        .find(|name| variables.iter().any(|(known, _)| known == *name))
    {
        return Err((USAGE, environment::given_away(name)));
    }
    let builder = builder(args, called_at)?.timeout(args.timeout.0);
    let sandbox = network
        .apply(builder, false)
        .map_err(|error| failed(&error))?
        .begin()
        .map_err(|error| failed(&error))?;
    // From here on a signal ends it.
    let sandbox = shared.sandbox.get_or_init(|| sandbox);
    network
        .publish(sandbox, false)
        .map_err(|error| failed(&error))?;
    sandbox.wait_ready().map_err(|error| failed(&error))?;
    let mut command = sandbox.command(PYTHON);
    command.envs(variables.iter().map(|(key, value)| (key, value)));
    if let Some(folder) = &args.program.workdir {
        command.current_dir(folder);
    }
    if let Some(user) = &args.program.user {
        command.user(user);
    }
    let python = command.python().map_err(|error| failed(&error))?;
    Ok(shared.python.get_or_init(|| python))
}

fn builder(args: &ReplArgs, called_at: Instant) -> Result<SandboxBuilder, (u8, String)> {
    match &args.template {
        None => Ok(machine::builder(&args.machine, called_at)),
        Some(name) => {
            let template = Template::open(name).map_err(|error| failed(&error))?;
            Ok(machine::with_cell(
                template.sandbox(),
                &args.machine,
                called_at,
            ))
        }
    }
}

/// What `sys.exit` with this argument, as text, has for an exit code, and what it says: anything but a number and nothing is said.
fn exit_code(argument: &str) -> (u8, Option<&str>) {
    match argument.parse::<i64>() {
        // exit(3) keeps the lowest byte.
        Ok(code) => (u8::try_from(code & 0xff).unwrap_or(EXCEPTION), None),
        Err(_) if matches!(argument, "" | "None") => (0, None),
        Err(_) => (EXCEPTION, Some(argument)),
    }
}

/// The conversation.
struct Prompt<'a> {
    args: &'a ReplArgs,
    shared: &'a Shared,
    python: &'a Python,
    events: &'a Receiver<Event>,
    screen: Screen,
    /// Whether somebody sits there.
    is_interactive: bool,
    /// Lines that are not complete yet.
    code: String,
    last_failed: bool,
}

impl<'a> Prompt<'a> {
    fn new(
        args: &'a ReplArgs,
        shared: &'a Shared,
        python: &'a Python,
        events: &'a Receiver<Event>,
    ) -> Self {
        Self {
            args,
            shared,
            python,
            events,
            screen: Screen::new(args.figures.clone()),
            is_interactive: terminal::is_input_terminal(),
            code: String::new(),
            last_failed: false,
        }
    }

    fn serve(mut self) -> u8 {
        if self.is_interactive {
            notice::say("Python in a sandbox: Ctrl-C interrupts, Ctrl-D ends");
        }
        loop {
            if self.is_interactive {
                self.screen.prompt(self.code.is_empty());
            }
            let done = match self.events.recv() {
                Ok(Event::Line(line)) => self.take_line(&line),
                Ok(Event::Signal(INTERRUPT)) if self.is_interactive => {
                    self.code.clear();
                    self.screen.line("\nKeyboardInterrupt");
                    Ok(())
                }
                Ok(Event::Signal(signal)) => {
                    return u8::try_from(SIGNAL_BASE + signal).unwrap_or(FAILED);
                }
                Ok(Event::End) | Err(_) => return self.finish(),
            };
            if let Err(code) = done {
                return code;
            }
        }
    }

    /// The input is over: what was typed last is run as it is.
    fn finish(mut self) -> u8 {
        if self.is_interactive {
            self.screen.line("");
        } else if !self.code.trim().is_empty()
            && let Err(code) = self.run()
        {
            return code;
        }
        if self.last_failed && !self.is_interactive {
            return EXCEPTION;
        }
        0
    }

    fn take_line(&mut self, line: &str) -> Result<(), u8> {
        if self.code.is_empty() && line.trim().is_empty() {
            return Ok(());
        }
        self.code.push_str(line);
        // A last line end would already be the empty line that ends a block.
        let typed = self.code.strip_suffix('\n').unwrap_or(&self.code);
        match self.python.is_complete(typed) {
            Ok(true) => self.run(),
            Ok(false) => Ok(()),
            Err(error) => self.failed(&error),
        }
    }

    /// Runs what was typed. An error is the exit code.
    fn run(&mut self) -> Result<(), u8> {
        let code = std::mem::take(&mut self.code);
        self.shared.is_running.store(true, Ordering::SeqCst);
        let screen = &self.screen;
        let mut call = self
            .python
            .call(&code)
            .on_output(|stream, bytes| screen.output(stream, bytes));
        if let Some(limit) = self.args.deadline.0 {
            call = call.deadline(limit);
        }
        let result = call.run();
        self.shared.is_running.store(false, Ordering::SeqCst);
        match result {
            Ok(evaluation) => self.show(&evaluation),
            Err(error) => self.failed(&error),
        }
    }

    /// Shows what came of it. The exit code is an error: the code has asked for the end.
    fn show(&mut self, evaluation: &Evaluation) -> Result<(), u8> {
        self.last_failed = evaluation.exception.is_some();
        for shown in evaluation.displays.iter().chain(&evaluation.value) {
            self.screen.representations(shown);
        }
        match &evaluation.exception {
            Some(exit) if exit.name == EXIT => {
                let (code, text) = exit_code(&exit.value);
                if let Some(text) = text {
                    notice::say(text);
                }
                return Err(code);
            }
            Some(exception) => self.screen.traceback(&exception.traceback),
            None => {}
        }
        if evaluation.timed_out {
            notice::say("The code was interrupted at its deadline; --deadline sets another");
        }
        Ok(())
    }

    /// An interpreter that is gone is replaced, where somebody may go on; a machine that is gone is the end.
    fn failed(&mut self, error: &PythonError) -> Result<(), u8> {
        self.last_failed = true;
        self.code.clear();
        // A signal has ended it.
        if let (PythonError::SandboxEnded, Ok(Event::Signal(signal))) =
            (error, self.events.try_recv())
        {
            return Err(u8::try_from(SIGNAL_BASE + signal).unwrap_or(FAILED));
        }
        notice::say(&notice::sentence(error));
        match error {
            PythonError::TimedOut => Err(TIMED_OUT),
            PythonError::Ended(_) | PythonError::Stuck if self.is_interactive => {
                notice::say("A new Python begins");
                self.python.restart().map_err(|error| {
                    notice::say(&notice::sentence(&error));
                    FAILED
                })
            }
            _ => Err(FAILED),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exit_has_the_code_that_python_gives_it() {
        for (argument, code, text) in [
            ("", 0, None),
            ("None", 0, None),
            ("3", 3, None),
            ("-1", 255, None),
            ("256", 0, None),
            ("no more", 1, Some("no more")),
        ] {
            assert_eq!(exit_code(argument), (code, text), "{argument:?}");
        }
    }
}
