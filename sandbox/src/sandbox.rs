//! A running sandbox.

use std::ffi::OsStr;
use std::fmt::Display;
use std::fs::File;
use std::io::{self, Read};
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tracing::info_span;

use crate::builder::SandboxBuilder;
use crate::calls::{self, CallLimits, HostFunctionError};
use crate::child::Child;
use crate::clock::Clocks;
use crate::command::Command;
use crate::egress::EgressHandle;
use crate::error::{FileError, StartError};
use crate::files::{Entry, Files};
use crate::images::Images;
use crate::outcome::Ended;
use crate::publish::{PublishedPort, publish};
use crate::python::{Python, PythonError};
use crate::shared::{CommandInfo, Shared};
use crate::state::Request;
use crate::template::Template;

/// The interpreter of contexts, and the one that can be warmed.
const PYTHON: &str = "python3";

/// One virtual machine, ready for commands. Dropping it ends it: nothing is left. Threads may share it.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # sandvmm::init();
/// let sandbox = sandvmm::Sandbox::builder().memory_mib(512).start()?;
/// sandbox.write("in.csv", &b"1,2\n"[..])?;
/// let output = sandbox.command("wc").arg("-c").arg("in.csv").output()?;
/// assert_eq!(output.stdout, b"4 in.csv\n");
/// assert!(sandbox.end().crash.is_none());
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Sandbox {
    shared: Arc<Shared>,
    /// What it was started from.
    origin: Origin,
    /// The supervisor thread, until it has been joined.
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// What a sandbox was started from.
#[derive(Debug, Clone)]
pub(crate) struct Origin {
    pub(crate) images: Images,
    /// The root image as it was opened.
    pub(crate) rootfs: Arc<File>,
    pub(crate) cpus: u8,
    pub(crate) memory_mib: u32,
    pub(crate) has_workspace: bool,
    /// The template that it is a fork of.
    pub(crate) template: Option<Template>,
}

impl Sandbox {
    /// What a sandbox is made from.
    #[must_use]
    pub fn builder() -> SandboxBuilder {
        SandboxBuilder::new()
    }

    pub(crate) fn new(shared: Arc<Shared>, origin: Origin, thread: JoinHandle<()>) -> Self {
        Self {
            shared,
            origin,
            thread: Mutex::new(Some(thread)),
        }
    }

    pub(crate) fn shared(&self) -> &Shared {
        &self.shared
    }

    pub(crate) fn origin(&self) -> &Origin {
        &self.origin
    }

    /// A command to run in the sandbox: a path when it has a slash, else looked up in the guest's `PATH`.
    #[must_use]
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        Command::new(&self.shared, program.as_ref())
    }

    /// The commands that run, and those that have ended and whose handle is kept or detached; oldest first.
    #[must_use]
    pub fn commands(&self) -> Vec<CommandInfo> {
        self.shared.command_infos()
    }

    /// A handle of a command that [`Child::detach`] has left to itself, with its streams, also if it has ended since. `None` where there
    /// is no such command, or somebody has its handle.
    #[must_use]
    pub fn attach(&self, id: u32) -> Option<Child> {
        let streams = self.shared.take_kept(id)?;
        Some(Child::attached(&self.shared, id, streams))
    }

    /// A command that starts `python3` in the guest, runs `code` in it, and has it stay: it has ended, with code 0, when
    /// the code has run, and later commands `python3` of the same user are forked from it, with all its imports,
    /// where that makes no difference to them. Its user can be set, and so can where its output goes, to see the
    /// traceback of a code that fails (code 1). `docs/snapshots.md` says what is the same in a fork and what is not.
    #[must_use]
    pub fn warm_up(&self, code: &str) -> Command {
        let mut command = Command::new(&self.shared, OsStr::new(PYTHON)).stay();
        command.arg("-c").arg(code);
        command
    }

    /// Starts a Python that keeps its state between runs, as the guest's unprivileged user; [`Command::python`] for another
    /// interpreter, user or folder.
    ///
    /// # Errors
    /// See [`PythonError`].
    pub fn python(&self) -> Result<Python, PythonError> {
        self.command(PYTHON).python()
    }

    /// The guest's files, as its unprivileged user sees them.
    #[must_use]
    pub fn files(&self) -> Files<'_> {
        Files::new(&self.shared)
    }

    /// Writes a file in the guest; short for [`Files::write`] of [`Self::files`].
    ///
    /// # Errors
    /// See [`FileError`].
    pub fn write(&self, path: impl AsRef<Path>, content: impl Read) -> Result<PathBuf, FileError> {
        self.files().write(path, content)
    }

    /// Reads a whole file of the guest; short for [`Files::read`] of [`Self::files`].
    ///
    /// # Errors
    /// See [`FileError`].
    pub fn read(&self, path: impl AsRef<Path>) -> Result<Vec<u8>, FileError> {
        self.files().read(path)
    }

    /// What is in a folder of the guest; short for [`Files::list`] of [`Self::files`].
    ///
    /// # Errors
    /// See [`FileError`].
    pub fn list(&self, path: impl AsRef<Path>) -> Result<Vec<Entry>, FileError> {
        self.files().list(path)
    }

    /// Lets the guest call a function of this process by name, once the sandbox is ready: `from sandvmm import host;
    /// host.lookup(id=3)` in Python, `sandvmm-call lookup '{"id":3}'` in a shell. Arguments and result are JSON, typed by
    /// [`serde`]; what it fails with, its panic included, is the caller's error. Nothing else can be called.
    ///
    /// It runs on a thread of its own for each call, several at once, within [`CallLimits::default`];
    /// [`Self::host_function_with`] sets others. What it is given is a hostile guest's. It may use this sandbox, but should not own it: the
    /// sandbox owns the function up to its end.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # sandvmm::init();
    /// # let sandbox = sandvmm::Sandbox::builder().start()?;
    /// #[derive(serde::Deserialize)]
    /// struct Lookup { id: u32 }
    ///
    /// sandbox.host_function("lookup", |args: Lookup| match args.id {
    ///     3 => Ok("three"),
    ///     id => Err(format!("There is no row {id}")),
    /// })?;
    /// let code = "from sandvmm import host; print(host.lookup(id=3))";
    /// let output = sandbox.command("python3").arg("-c").arg(code).output()?;
    /// assert_eq!(output.stdout, b"three\n");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// See [`HostFunctionError`].
    pub fn host_function<T, R, E>(
        &self,
        name: &str,
        function: impl Fn(T) -> Result<R, E> + Send + Sync + 'static,
    ) -> Result<(), HostFunctionError>
    where
        T: DeserializeOwned,
        R: Serialize,
        E: Display,
    {
        self.host_function_with(name, CallLimits::default(), function)
    }

    /// Like [`Self::host_function`], within these limits.
    ///
    /// # Errors
    /// See [`HostFunctionError`].
    pub fn host_function_with<T, R, E>(
        &self,
        name: &str,
        limits: CallLimits,
        function: impl Fn(T) -> Result<R, E> + Send + Sync + 'static,
    ) -> Result<(), HostFunctionError>
    where
        T: DeserializeOwned,
        R: Serialize,
        E: Display,
    {
        calls::register(&self.shared, name, limits, function)
    }

    /// Lets the guest call a function no more; calls that run go on. Says whether there was one.
    pub fn remove_host_function(&self, name: &str) -> bool {
        self.shared.calls.remove(name)
    }

    /// Waits until the guest of a sandbox that [`SandboxBuilder::begin`] began is ready for commands.
    ///
    /// # Errors
    /// See [`StartError`]: told once, to the first who asks. Nothing of the sandbox is left then.
    pub fn wait_ready(&self) -> Result<(), StartError> {
        self.shared.wait_ready()
    }

    /// The phases reached so far.
    #[must_use]
    pub fn clocks(&self) -> Clocks {
        self.shared.clocks()
    }

    /// What is on of the cell around the machine's process.
    #[must_use]
    pub fn cell(&self) -> Option<crate::cell::Cell> {
        self.shared.lock().cell.clone()
    }

    /// What leaves the sandbox, to be changed while it runs; `None` where nothing may ([`SandboxBuilder::allow_host`]).
    #[must_use]
    pub fn egress(&self) -> Option<EgressHandle> {
        self.shared.egress.as_ref().map(EgressHandle::new)
    }

    /// A stream to a port that a program in the guest listens on, on its loopback. Needs [`SandboxBuilder::ports_in`], or a
    /// sandbox that connections may leave.
    ///
    /// # Errors
    /// `ConnectionRefused` where nobody listens, `NotConnected` where the machine is gone, `Unsupported` where ports are not
    /// reached.
    pub fn connect(&self, port: u16) -> io::Result<UnixStream> {
        if self.shared.egress.is_none() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        self.shared.connect_inward(port)
    }

    /// Carries all that connects to `listener` to a port that a program in the guest listens on, until the sandbox ends. Needs
    /// what [`Self::connect`] does.
    ///
    /// # Errors
    /// `Unsupported` where ports are not reached; when there is no room for a thread.
    pub fn publish(&self, listener: TcpListener, port: u16) -> io::Result<()> {
        if self.shared.egress.is_none() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        publish(&self.shared, listener, port)
    }

    /// What [`Self::publish`] was called for, in that order.
    #[must_use]
    pub fn published(&self) -> Vec<PublishedPort> {
        self.shared.published()
    }

    /// Ends the sandbox at once, from any thread: kills the machine's process and reaps it. What came from
    /// the guest before can still be read from the streams. Calling it again returns the same.
    pub fn end(&self) -> Ended {
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = thread.take() {
            let _span = info_span!(parent: self.shared.events.span(), "end").entered();
            // Refused only when the machine is gone already.
            let _ = self.shared.request(Request::End);
            // Its panic was caught, and told as the machine's end.
            let _ = thread.join();
        }
        self.shared.ended()
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        self.end();
    }
}
