//! One run, from the machine's start to its end.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use sandvmm::cell::Cell;
use sandvmm::{
    Child, Command, Completion, FileError, Files, Limit, MAX_FILE_BYTES, Sandbox, SpawnError,
    StartError, Stdio, Usage,
};

use super::args::RunArgs;
use super::input::Input;
use super::parts::{self, Parts};
use super::plan::{PYTHON, Plan, Target};
use super::relay::{Relay, Relayed};
use super::report::Report;
use super::shared::Shared;
use super::verdict::{FAILED, Failure, Limits, Verdict};
use super::{announce, console, copies, events, signals};
use crate::{cell, machine, notice, template, terminal};

/// Permission bits of a script in the guest.
const SCRIPT_MODE: u32 = 0o755;

/// Where a script goes whose user has no home to write to.
const COMMON_FOLDER: &str = "/tmp";

/// Name in the guest of a script that came on standard input.
const INPUT_NAME: &str = "script";

/// How long output is still written after the machine was ended before its time: what is left is in sockets,
/// and whoever reads ours may never read again.
const DRAIN_GRACE: Duration = Duration::from_secs(2);

/// How long the kernel's last words may take to be shown.
const CONSOLE_GRACE: Duration = Duration::from_secs(1);

/// How often a run at a terminal looks whether the terminal's size has changed.
const RESIZE_PERIOD: Duration = Duration::from_millis(50);

/// One run.
#[derive(Debug)]
pub(super) struct Session {
    args: RunArgs,
    plan: Plan,
    called_at: Instant,
    shared: Shared,
    /// How the machine comes to be, once that is decided.
    path: OnceLock<template::Path>,
    resized: Option<Arc<AtomicBool>>,
    /// What writes the events down, until the end.
    events: Mutex<Option<events::Writer>>,
}

/// What is to be run.
#[derive(Debug)]
struct Prepared {
    words: Vec<OsString>,
    /// Whether the program gets our standard input: then with what has been read of it already.
    input: Option<Vec<u8>>,
    /// A short script, which is sent along: its name and content.
    file: Option<(PathBuf, Vec<u8>)>,
}

/// What came of a command.
#[derive(Debug, Default)]
struct Told {
    verdict: Option<Verdict>,
    streams: Relayed,
    usage: Usage,
    limits_hit: Vec<Limit>,
    warm: bool,
}

impl From<Verdict> for Told {
    fn from(verdict: Verdict) -> Self {
        Self {
            verdict: Some(verdict),
            ..Self::default()
        }
    }
}

impl Session {
    /// Gets ready; from now on changes of the terminal's size are noticed.
    ///
    /// # Errors
    /// When the system refuses a signal's handler.
    pub(super) fn new(
        args: &RunArgs,
        plan: Plan,
        called_at: Instant,
        shared: Shared,
    ) -> io::Result<Self> {
        Ok(Self {
            args: args.clone(),
            plan,
            called_at,
            shared,
            path: OnceLock::new(),
            resized: args.tty.then(signals::resized).transpose()?,
            events: Mutex::default(),
        })
    }

    /// Runs it, says how it ended, and gives the exit code.
    pub(super) fn run(self) -> u8 {
        let console = self.args.verbose.then(console::open).transpose();
        let (sink, console_over) = match console {
            Ok(console) => console.unzip(),
            Err(error) => return self.conclude(Verdict::system(&error).into(), None),
        };
        let deadline = self
            .args
            .timeout
            .0
            .and_then(|limit| Instant::now().checked_add(limit));
        let mut told = match self.start(sink) {
            Ok(sandbox) => match self.execute(sandbox, deadline) {
                Ok(told) => told,
                Err(verdict) => verdict.into(),
            },
            Err(verdict) => verdict.into(),
        };
        terminal::restore();
        self.shared.programs.end();
        let ended = self.shared.sandbox.get().map(Sandbox::end);
        // Output of a command that had ended may have been lost with the machine.
        if let (Some(crash), Some(verdict)) = (
            ended.as_ref().and_then(|ended| ended.crash.as_ref()),
            &told.verdict,
        ) && verdict.is_programs_own()
        {
            told.verdict = Some(Verdict::crashed(crash));
        }
        let writer = self.events.lock().ok().and_then(|mut events| events.take());
        if let (Some(writer), true) = (writer, ended.is_some()) {
            writer.finish();
        }
        if let Some(over) = console_over {
            // Silence or the end, either will do.
            let _ = over.recv_timeout(CONSOLE_GRACE);
        }
        self.conclude(told, ended)
    }

    /// Says how it ended, unless someone did already.
    fn conclude(&self, told: Told, ended: Option<sandvmm::Ended>) -> u8 {
        let verdict = self
            .shared
            .interruption()
            .or(told.verdict)
            .unwrap_or_else(|| Verdict::failed(FAILED, Failure::Start, "Nothing was run".into()));
        if !self.shared.may_announce() {
            return verdict.exit_code;
        }
        let clocks = ended.map(|ended| ended.clocks).unwrap_or_default();
        if self.args.verbose {
            for (name, reached) in machine::phases(&clocks, machine::GUEST_INIT) {
                if let Some(reached) = reached {
                    notice::say(&format!(
                        "After {:.1} ms: {name}",
                        reached.as_secs_f64() * 1e3
                    ));
                }
            }
        }
        if let (Some(sandbox), false) = (self.shared.sandbox.get(), self.is_silent()) {
            self.plan.network.say_unrecorded(sandbox);
        }
        announce(&self.args, &verdict, || {
            let streams = &told.streams;
            Report::new(
                &verdict,
                &streams.stdout.captured,
                &streams.stderr.captured,
                clocks,
                told.usage,
            )
            .with_limits(&told.limits_hit)
            .with_path(self.path.get(), told.warm)
            .with_network(self.plan.network.report(self.shared.sandbox.get()))
            .with_cell(self.shared.sandbox.get().and_then(Sandbox::cell).as_ref())
        })
    }

    fn limits(&self) -> Limits {
        Limits {
            timeout: self.args.timeout.0,
            memory_mib: self
                .path
                .get()
                .map_or(self.args.sandbox.machine.memory, |path| path.memory_mib),
        }
    }

    fn start(&self, console: Option<File>) -> Result<&Sandbox, Verdict> {
        let Parts {
            mut builder,
            path,
            events,
        } = parts::parts(
            &self.args.sandbox,
            self.args.timeout.0,
            &self.plan.network,
            self.is_silent(),
            self.called_at,
        )?;
        let _ = self.path.set(path);
        if let Ok(mut writer) = self.events.lock() {
            *writer = events;
        }
        if let Some(console) = console {
            builder = builder.console(console);
        }
        let sandbox = builder.begin().map_err(|error| Verdict::start(&error))?;
        // From here on a signal ends it.
        let sandbox = self.shared.sandbox.get_or_init(|| sandbox);
        self.plan
            .network
            .publish(sandbox, self.args.quiet)
            .map_err(|error| Verdict::system(&error))?;
        match self.shared.interruption() {
            Some(verdict) => Err(verdict),
            None => Ok(sandbox),
        }
    }

    /// Waits until the guest is ready. A program that needs nothing before it is asked for without that.
    fn wait_ready(&self, sandbox: &Sandbox) -> Result<(), Verdict> {
        sandbox
            .wait_ready()
            .map_err(|error| self.not_ready(&error))?;
        self.shared.interruption().map_or(Ok(()), Err)
    }

    /// Why the guest is not ready, with the files that it was to boot from.
    fn not_ready(&self, error: &StartError) -> Verdict {
        Verdict::start(error).about(machine::named_files(&self.args.sandbox.machine).as_deref())
    }

    /// Why the program does not run: that the machine did not start says more than that it is gone.
    fn not_spawned(&self, sandbox: &Sandbox, error: &SpawnError) -> Verdict {
        match sandbox.wait_ready() {
            Err(start) => self.not_ready(&start),
            Ok(()) => Verdict::spawn(error, self.limits()),
        }
    }

    /// Says which walls are missing that the host did not give: with `-v` all of them, else only what weighs.
    fn tell_of(&self, cell: &Cell) {
        if self.args.verbose {
            for missing in &cell.missing {
                notice::say(&format!("The cell has no {missing}"));
            }
        } else if let (Some(warning), false) = (cell::warning(cell), self.is_silent()) {
            notice::say(&warning);
        }
    }

    fn execute(&self, sandbox: &Sandbox, deadline: Option<Instant>) -> Result<Told, Verdict> {
        // What waits for somebody else, or changes the terminal, is not begun for a machine that does not start.
        let waits = self.args.tty || matches!(self.plan.target, Target::Input(_));
        if waits
            || !self.args.sandbox.upload.is_empty()
            || !self.args.sandbox.host_function.is_empty()
        {
            self.wait_ready(sandbox)?;
        }
        copies::upload(
            &self.files(sandbox),
            &self.args.sandbox.upload,
            self.is_silent(),
        )
        .map_err(|error| Verdict::copy(&error, self.limits()))?;
        self.shared
            .programs
            .register(sandbox, &self.args.sandbox.host_function)
            .map_err(|error| Verdict::host_function(&error, self.limits()))?;
        let Prepared { words, input, file } = self.prepare(sandbox)?;
        let mut command = self.command(sandbox, &words, input.is_some())?;
        if let Some((name, content)) = file {
            command.file(name, SCRIPT_MODE, content);
        }
        if self.args.tty {
            terminal::make_raw().map_err(|error| Verdict::system(&error))?;
        }
        let mut child = command
            .spawn()
            .map_err(|error| self.not_spawned(sandbox, &error))?;
        if let Some(cell) = sandbox.cell() {
            self.tell_of(&cell);
        }
        self.shared.running.store(true, Ordering::SeqCst);
        let mut relay = Relay::start(
            &mut child,
            input.unwrap_or_default(),
            self.args.json,
            &self.shared,
        )
        .map_err(|error| Verdict::system(&error))?;
        let completion = if self.args.tty {
            self.wait_at_terminal(sandbox, &mut child, &mut relay)
        } else {
            child.wait()
        };
        let mut verdict = Verdict::outcome(&completion.outcome, self.limits());
        let cut_short = !verdict.is_programs_own();
        let streams = relay.drain(cut_short.then_some(DRAIN_GRACE));
        if let Some(broken) = self.shared.broken.get() {
            verdict = broken.clone();
        } else if let Some(other) = streams.verdict(&completion.outcome) {
            verdict = other;
        } else if verdict.is_programs_own() && deadline.is_some_and(|at| Instant::now() >= at) {
            // The machine was ended while its output was still being written: some may be lost.
            verdict = Verdict::timed_out(self.limits().timeout);
        }
        if verdict.is_programs_own()
            && let Err(error) =
                copies::download(&self.files(sandbox), &self.args.download, self.is_silent())
        {
            verdict = verdict.without_download(&error, self.limits());
        }
        Ok(Told {
            verdict: Some(verdict),
            streams,
            usage: completion.usage,
            limits_hit: completion.limits_hit,
            warm: completion.warm,
        })
    }

    /// What is to be run. A script that is not sent along is put into the guest first.
    fn prepare(&self, sandbox: &Sandbox) -> Result<Prepared, Verdict> {
        let plain_input = || self.plan.has_input.then(Vec::new);
        let prepared = |words, input| Prepared {
            words,
            input,
            file: None,
        };
        match &self.plan.target {
            Target::Words(words) => Ok(prepared(words.clone(), plain_input())),
            Target::Script(script, rest) => {
                let name = PathBuf::from(script.name());
                // In the user's home it has its bare name, and a short one comes with the request to run it.
                if self.args.program.user.is_none()
                    && self.args.program.workdir.is_none()
                    && let Some(content) = script.short(MAX_FILE_BYTES)
                {
                    let mut words = script.command_line(&name);
                    words.extend_from_slice(rest);
                    return Ok(Prepared {
                        words,
                        input: plain_input(),
                        file: Some((name, content)),
                    });
                }
                let (written, is_home) = self.put(sandbox, &name, script.reader())?;
                // In its own folder a script is called by its bare name; from another one that can't be.
                let path = if self.args.program.workdir.is_some() || !is_home {
                    &written
                } else {
                    &name
                };
                let mut words = script.command_line(path);
                words.extend_from_slice(rest);
                Ok(prepared(words, plain_input()))
            }
            Target::Input(rest) => {
                let input =
                    Input::look(rustix::stdio::stdin()).map_err(|error| Verdict::input(&error))?;
                let (first, ahead) = if input.names_interpreter() {
                    let (written, _) =
                        self.put(sandbox, Path::new(INPUT_NAME), input.into_script())?;
                    (vec![written.into_os_string()], None)
                } else {
                    // As Python does it: it reads the script itself, as it comes.
                    (vec![PYTHON.into(), "-".into()], Some(input.into_head()))
                };
                let words = first.into_iter().chain(rest.iter().cloned()).collect();
                Ok(prepared(words, ahead))
            }
        }
    }

    /// The guest's files as the program's user sees them.
    fn files<'a>(&self, sandbox: &'a Sandbox) -> Files<'a> {
        let files = sandbox.files();
        match &self.args.program.user {
            Some(user) => files.user(user),
            None => files,
        }
    }

    /// Whether nothing but the program's output and the end is told.
    fn is_silent(&self) -> bool {
        self.args.quiet || self.args.json
    }

    /// Puts the script into the user's home, or where everybody may write: not each user has a home. Says where it is, and
    /// whether that is the home.
    fn put(
        &self,
        sandbox: &Sandbox,
        name: &Path,
        mut script: impl Read,
    ) -> Result<(PathBuf, bool), Verdict> {
        self.wait_ready(sandbox)?;
        let files = self.files(sandbox).mode(SCRIPT_MODE);
        let failed = |error| Verdict::file(&error, self.limits());
        if self.args.program.user.is_none() {
            return Ok((files.write(name, script).map_err(failed)?, true));
        }
        // It may be a stream, and is wanted twice.
        let mut content = Vec::new();
        script
            .read_to_end(&mut content)
            .map_err(|error| Verdict::input(&error))?;
        match files.write(name, content.as_slice()) {
            Err(FileError::PermissionDenied(_)) => {
                let name = Path::new(COMMON_FOLDER).join(name);
                let written = files.write(name, content.as_slice());
                Ok((written.map_err(failed)?, false))
            }
            written => Ok((written.map_err(failed)?, true)),
        }
    }

    fn command(
        &self,
        sandbox: &Sandbox,
        words: &[OsString],
        has_input: bool,
    ) -> Result<Command, Verdict> {
        let Some((program, rest)) = words.split_first() else {
            return Err(Verdict::usage(&super::plan::PlanError::Nothing));
        };
        let mut command = sandbox.command(program);
        command
            .args(rest)
            .envs(self.plan.variables.iter().map(|(key, value)| (key, value)));
        if let Some(folder) = &self.args.program.workdir {
            command.current_dir(folder);
        }
        if let Some(user) = &self.args.program.user {
            command.user(user);
        }
        if let Some(bytes) = self.args.max_output {
            command.max_output_bytes(bytes);
        }
        if self.args.tty {
            let size = terminal::size();
            command.pty(size.columns, size.rows);
        } else if has_input {
            command.stdin(Stdio::piped());
        }
        Ok(command)
    }

    /// Waits, and hands on each new size of the terminal.
    fn wait_at_terminal(
        &self,
        sandbox: &Sandbox,
        child: &mut Child,
        relay: &mut Relay,
    ) -> Completion {
        loop {
            if let Some(completion) = child.wait_timeout(RESIZE_PERIOD) {
                return completion;
            }
            let resized = self.resized.as_ref();
            if resized.is_some_and(|flag| flag.swap(false, Ordering::SeqCst)) {
                let size = terminal::size();
                // A guest that does not take the size has a wrong one, and nothing worse.
                let _ = child.resize(size.columns, size.rows);
            }
            if relay.is_output_closed() {
                // A terminal whose screen is gone.
                sandbox.end();
            }
        }
    }
}
