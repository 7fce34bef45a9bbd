//! Commands to run in a sandbox.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use protocol::frame;
use protocol::message::{
    MAX_NEW_FILE_BYTES, NewFile, Spawn, SpawnFailure, StreamHeader, StreamKind, TerminalSize,
    ToAgent,
};

use crate::child::Child;
use crate::error::SpawnError;
use crate::limit::Limit;
use crate::meter::Meter;
use crate::outcome::Completion;
use crate::python::{Python, PythonError};
use crate::shared::{MAX_COMMANDS, Shared, Started, frame_of};
use crate::state::{Over, Refused, Request};
use crate::stream::{ChildStderr, ChildStdin, ChildStdout, ChildTerminal};

/// Bytes that [`Command::output`] keeps of each stream unless told otherwise: 64 MiB.
pub const DEFAULT_OUTPUT_LIMIT_BYTES: usize = 64 << 20;

/// Longest content of [`Command::file`], in bytes.
pub const MAX_FILE_BYTES: usize = MAX_NEW_FILE_BYTES;

/// Where a stream of a command goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stdio {
    piped: bool,
}

impl Stdio {
    /// Nowhere: reads end at once, writes vanish.
    #[must_use]
    pub fn null() -> Self {
        Self { piped: false }
    }

    /// To the host: see [`Child`]'s fields.
    #[must_use]
    pub fn piped() -> Self {
        Self { piped: true }
    }
}

/// A command to run in a sandbox, built as [`std::process::Command`] is. Standard input is null unless said
/// otherwise, standard output and error are piped.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # sandvmm::init();
/// # let sandbox = sandvmm::Sandbox::builder().start()?;
/// let output = sandbox
///     .command("sh")
///     .args(["-c", "echo $WHO in $(pwd); exit 3"])
///     .env("WHO", "somebody")
///     .current_dir("/tmp")
///     .output()?;
/// assert_eq!(output.stdout, b"somebody in /tmp\n");
/// assert_eq!(output.completion.outcome, sandvmm::Outcome::Exited(3));
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Command {
    shared: Arc<Shared>,
    program: OsString,
    args: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
    env_clear: bool,
    env_remove: Vec<OsString>,
    current_dir: Option<PathBuf>,
    user: Option<String>,
    stdin: Stdio,
    stdout: Stdio,
    stderr: Stdio,
    terminal: Option<TerminalSize>,
    output_limit_bytes: usize,
    max_output_bytes: u64,
    /// Whether the program stays, to be forked for later commands.
    stays: bool,
    /// Whether a secret's variable must be left as it is.
    keeps_secrets: bool,
    file: Option<NewFile>,
}

impl Command {
    pub(crate) fn new(shared: &Arc<Shared>, program: &OsStr) -> Self {
        Self {
            shared: Arc::clone(shared),
            program: program.to_owned(),
            args: Vec::new(),
            env: Vec::new(),
            env_clear: false,
            env_remove: Vec::new(),
            current_dir: None,
            user: None,
            stdin: Stdio::null(),
            stdout: Stdio::piped(),
            stderr: Stdio::piped(),
            terminal: None,
            output_limit_bytes: DEFAULT_OUTPUT_LIMIT_BYTES,
            max_output_bytes: u64::MAX,
            stays: false,
            keeps_secrets: false,
            file: None,
        }
    }

    /// Makes it an interpreter that stays.
    pub(crate) fn stay(mut self) -> Self {
        self.stays = true;
        self
    }

    /// Has it not start where a secret's variable is set otherwise, which most often would give the value to the program.
    pub(crate) fn keep_secrets(&mut self) -> &mut Self {
        self.keeps_secrets = true;
        self
    }

    /// Adds an argument.
    pub fn arg(&mut self, arg: impl AsRef<OsStr>) -> &mut Self {
        self.args.push(arg.as_ref().to_owned());
        self
    }

    /// Adds arguments.
    pub fn args(&mut self, args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> &mut Self {
        for arg in args {
            self.arg(arg);
        }
        self
    }

    /// Starts the command, which is to be a Python of version 3.8 or later, as a context that keeps its state between runs. Its
    /// variables, user and working folder are those set here; arguments and streams are the context's own.
    ///
    /// # Errors
    /// See [`PythonError`].
    pub fn python(&self) -> Result<Python, PythonError> {
        Python::start(self)
    }

    /// Replaces all arguments.
    pub(crate) fn set_args<const N: usize>(&mut self, args: [&str; N]) -> &mut Self {
        self.args.clear();
        self.args(args)
    }

    /// Sets a variable, over the guest's defaults (`PATH`, `HOME`, `USER`, `LOGNAME`, `SHELL`, `LANG`, and `TERM`
    /// with a terminal). Nothing of the host's environment is given to the guest. Of one that is set twice, the
    /// last counts.
    pub fn env(&mut self, key: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> &mut Self {
        let key = key.as_ref();
        self.env.retain(|(known, _)| known != key);
        self.env.push((key.to_owned(), value.as_ref().to_owned()));
        self
    }

    /// Leaves a variable out, whether it was set here, is one of the guest's defaults ([`Self::env`]), or the sandbox's: a secret's
    /// placeholder. Setting it afterwards brings it back.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # sandvmm::init();
    /// # let sandbox = sandvmm::Sandbox::builder().start()?;
    /// let mut command = sandbox.command("env");
    /// command.env("A", "1").env("B", "2").env_remove("A").env_remove("LANG");
    /// let output = command.output()?;
    /// assert!(output.stdout.ends_with(b"B=2\n"));
    /// # Ok(()) }
    /// ```
    pub fn env_remove(&mut self, key: impl AsRef<OsStr>) -> &mut Self {
        let key = key.as_ref();
        self.env.retain(|(known, _)| known != key);
        self.env_remove.retain(|known| known != key);
        self.env_remove.push(key.to_owned());
        self
    }

    /// Leaves out all variables: those set here before, the guest's defaults, and the sandbox's. Those set afterwards are the only ones. The program
    /// is looked for in the guest's usual `PATH` then, unless that is set.
    pub fn env_clear(&mut self) -> &mut Self {
        self.env.clear();
        self.env_remove.clear();
        self.env_clear = true;
        self
    }

    /// Sets variables.
    pub fn envs(
        &mut self,
        variables: impl IntoIterator<Item = (impl AsRef<OsStr>, impl AsRef<OsStr>)>,
    ) -> &mut Self {
        for (key, value) in variables {
            self.env(key, value);
        }
        self
    }

    /// The working folder in the guest. Default: the user's home.
    pub fn current_dir(&mut self, folder: impl AsRef<Path>) -> &mut Self {
        self.current_dir = Some(folder.as_ref().to_owned());
        self
    }

    /// Who runs it: `USER[:GROUP]`, by name or number. Default: the image's unprivileged user.
    pub fn user(&mut self, user: impl Into<String>) -> &mut Self {
        self.user = Some(user.into());
        self
    }

    /// A file that the command's user writes before it starts, most often the script that is run: a path, from the user's home on,
    /// permission bits, and at most [`MAX_FILE_BYTES`]. It comes with the request, which spares what [`crate::Files::write`] takes. A file
    /// that is there is replaced; where it can't be written, the command is not started ([`SpawnError::Invalid`]).
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let sandbox = sandvmm::Sandbox::builder().start()?;
    /// let output = sandbox
    ///     .command("python3")
    ///     .arg("hello.py")
    ///     .file("hello.py", 0o644, b"print('hello')")
    ///     .output()?;
    /// assert_eq!(output.stdout, b"hello\n");
    /// # Ok(()) }
    /// ```
    pub fn file(
        &mut self,
        path: impl AsRef<Path>,
        mode: u32,
        content: impl Into<Vec<u8>>,
    ) -> &mut Self {
        self.file = Some(NewFile {
            path: path.as_ref().as_os_str().as_bytes().to_vec(),
            mode,
            content: content.into(),
        });
        self
    }

    /// Standard input. Default: null.
    pub fn stdin(&mut self, stdio: Stdio) -> &mut Self {
        self.stdin = stdio;
        self
    }

    /// Standard output. Default: piped.
    pub fn stdout(&mut self, stdio: Stdio) -> &mut Self {
        self.stdout = stdio;
        self
    }

    /// Standard error. Default: piped.
    pub fn stderr(&mut self, stdio: Stdio) -> &mut Self {
        self.stderr = stdio;
        self
    }

    /// Gives the command a terminal of this size instead of the three streams: [`Child::terminal`].
    pub fn pty(&mut self, columns: u16, rows: u16) -> &mut Self {
        self.terminal = Some(TerminalSize { columns, rows });
        self
    }

    /// The most bytes that [`Self::output`] keeps of each stream; what comes after is read and dropped, and
    /// flagged in [`Output`]. Default: [`DEFAULT_OUTPUT_LIMIT_BYTES`].
    pub fn output_limit(&mut self, bytes: usize) -> &mut Self {
        self.output_limit_bytes = bytes;
        self
    }

    /// The most bytes of output, all streams together, that are read of the command here: above, it is killed with all that it
    /// started, and ends as [`crate::Outcome::LimitExceeded`]. Output that nobody reads stops the program before that. Default: no
    /// bound.
    pub fn max_output_bytes(&mut self, bytes: u64) -> &mut Self {
        self.max_output_bytes = bytes;
        self
    }

    /// Starts the command and returns once the guest says that it runs.
    ///
    /// # Errors
    /// See [`SpawnError`].
    pub fn spawn(&mut self) -> Result<Child, SpawnError> {
        let child = self.request()?;
        let result = child.shared().wait_started(child.id());
        started(child, result)
    }

    /// Asks for the command, and for its streams.
    pub(crate) fn request(&mut self) -> Result<Child, SpawnError> {
        let file_bytes = self.file.as_ref().map_or(0, |file| file.content.len());
        if file_bytes > MAX_FILE_BYTES {
            return Err(SpawnError::Invalid(format!(
                "A file that comes with a command has at most {MAX_FILE_BYTES} bytes, and this has {file_bytes}: write it first"
            )));
        }
        if let Some(name) = self.secret_that_is_set() {
            return Err(SpawnError::Invalid(format!(
                "The variable {name} is a secret of the sandbox, and is set for this command: leave that out, for the program to use it"
            )));
        }
        let id = self
            .shared
            .register_command(&self.program)
            .map_err(SpawnError::from)?;
        let meter = Arc::new(Meter::new(&self.shared, id, self.max_output_bytes));
        // From here on, dropping the child forgets the command.
        let mut child = Child::new(
            &self.shared,
            id,
            meter,
            self.terminal.is_some(),
            self.output_limit_bytes,
        );
        let mut streams = Vec::new();
        if self.terminal.is_some() {
            let end = open_stream(id, StreamKind::Terminal, &mut streams)?;
            child.terminal = Some(ChildTerminal::new(end, child.meter()));
        } else {
            if self.stdin.piped {
                let end = open_stream(id, StreamKind::Stdin, &mut streams)?;
                child.stdin = Some(ChildStdin::new(end, child.meter()));
            }
            let stdout = open_stream(id, StreamKind::Stdout, &mut streams)?;
            if self.stdout.piped {
                child.stdout = Some(ChildStdout::new(stdout, child.meter()));
            } else {
                streams.push(Request::Discard(stdout.into()));
            }
            let stderr = open_stream(id, StreamKind::Stderr, &mut streams)?;
            if self.stderr.piped {
                child.stderr = Some(ChildStderr::new(stderr, child.meter()));
            } else {
                streams.push(Request::Discard(stderr.into()));
            }
        }
        let message = if self.stays {
            ToAgent::WarmUp(self.message(id))
        } else {
            ToAgent::Spawn(self.message(id))
        };
        let frame = frame_of(&message).ok_or_else(|| {
            SpawnError::Invalid(format!(
                "The arguments and variables take more than {} MiB",
                frame::MAX_TO_AGENT_BYTES >> 20
            ))
        })?;
        self.shared.request_command(id, frame, streams)?;
        Ok(child)
    }

    /// The name of a secret whose variable is set, where that must not be.
    fn secret_that_is_set(&self) -> Option<&str> {
        let egress = self.shared.egress.as_ref().filter(|_| self.keeps_secrets)?;
        let is_set = |name: &&str| self.env.iter().any(|(known, _)| known == *name);
        egress.secret_names().find(is_set)
    }

    /// Runs the command to its end and returns what it wrote. Standard input, if piped, ends at once.
    ///
    /// # Errors
    /// See [`SpawnError`].
    pub fn output(&mut self) -> Result<Output, SpawnError> {
        self.spawn()?.wait_with_output().map_err(SpawnError::Output)
    }

    /// Runs the command to its end and says how it ended. What it writes is read and dropped, so that it never waits for a reader. Standard
    /// input, if piped, ends at once.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # sandvmm::init();
    /// # let sandbox = sandvmm::Sandbox::builder().start()?;
    /// let completion = sandbox.command("make").arg("check").status()?;
    /// assert!(completion.outcome.success());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// See [`SpawnError`].
    pub fn status(&mut self) -> Result<Completion, SpawnError> {
        let output = self.spawn()?.finish(0).map_err(SpawnError::Output)?;
        Ok(output.completion)
    }

    fn message(&self, command_id: u32) -> Spawn {
        let bytes = |text: &OsString| text.as_bytes().to_vec();
        // Those of the sandbox first: what was set for this command holds.
        let of_sandbox = self.shared.egress.as_ref().map(|egress| egress.variables());
        let of_sandbox = of_sandbox.filter(|_| !self.env_clear);
        let of_sandbox = of_sandbox.unwrap_or_default().into_iter();
        let is_own = |key: &str| {
            let set = self.env.iter().map(|(known, _)| known);
            set.chain(&self.env_remove).any(|known| known == key)
        };
        Spawn {
            command_id,
            program: bytes(&self.program),
            args: self.args.iter().map(bytes).collect(),
            env: of_sandbox
                .filter(|(key, _)| !is_own(key))
                .map(|(key, value)| (key.into_bytes(), value.into_bytes()))
                .chain(
                    self.env
                        .iter()
                        .map(|(key, value)| (bytes(key), bytes(value))),
                )
                .collect(),
            env_clear: self.env_clear,
            env_remove: self.env_remove.iter().map(bytes).collect(),
            cwd: self
                .current_dir
                .as_ref()
                .map(|folder| folder.as_os_str().as_bytes().to_vec()),
            user: self.user.clone(),
            stdio: match self.terminal {
                Some(size) => protocol::message::Stdio::Terminal(size),
                None => protocol::message::Stdio::Pipes {
                    stdin: self.stdin.piped,
                },
            },
            file: self.file.clone(),
        }
    }
}

/// What a command wrote, and how it ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Output {
    /// How it ended.
    pub completion: Completion,
    /// What it wrote to standard output, or showed on its terminal.
    pub stdout: Vec<u8>,
    /// What it wrote to standard error.
    pub stderr: Vec<u8>,
    /// Whether `stdout` lacks what came after [`Command::output_limit`].
    pub stdout_truncated: bool,
    /// Whether `stderr` lacks what came after [`Command::output_limit`].
    pub stderr_truncated: bool,
}

/// Makes a data stream: our end is returned, with the header on its way; the machine's is to be connected.
fn open_stream(
    command_id: u32,
    kind: StreamKind,
    requests: &mut Vec<Request>,
) -> Result<UnixStream, SpawnError> {
    let (mut ours, theirs) = UnixStream::pair().map_err(SpawnError::Streams)?;
    // A fresh socket takes far more than these few bytes at once.
    frame::write(
        &mut ours,
        &StreamHeader { command_id, kind },
        frame::MAX_TO_AGENT_BYTES,
    )
    .map_err(|error| SpawnError::Streams(io::Error::other(error)))?;
    requests.push(Request::Connect(theirs.into()));
    Ok(ours)
}

/// A command that runs, or why it does not.
pub(crate) fn started(child: Child, result: Started) -> Result<Child, SpawnError> {
    match result {
        Started::Running => Ok(child),
        Started::Failed(kind, message) => Err(spawn_error(kind, message)),
        Started::Over(over) => Err(over.into()),
    }
}

fn spawn_error(kind: SpawnFailure, message: String) -> SpawnError {
    match kind {
        SpawnFailure::NotFound => SpawnError::NotFound(message),
        SpawnFailure::NotExecutable => SpawnError::NotExecutable(message),
        SpawnFailure::Exhausted => SpawnError::Exhausted(message),
        _ => SpawnError::Invalid(message),
    }
}

impl From<Over> for SpawnError {
    fn from(over: Over) -> Self {
        match over {
            Over::Ended => Self::SandboxEnded,
            Over::Limit(Limit::WallTime) => Self::TimedOut,
            Over::Limit(limit) => Self::LimitExceeded(limit),
            Over::Crashed(crash) => Self::MachineCrashed(crash),
        }
    }
}

impl From<Refused> for SpawnError {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Over(over) => over.into(),
            Refused::TooManyCommands => Self::Exhausted(format!(
                "The sandbox has {MAX_COMMANDS} commands that run or are still held: wait for some and drop them"
            )),
            Refused::QueueFull => {
                Self::Exhausted("The guest has not taken what it was told before".to_owned())
            }
        }
    }
}
