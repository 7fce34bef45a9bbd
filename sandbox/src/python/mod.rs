//! Python that keeps its state between runs.
//!
//! A context is a command of the guest, `python3` with the program `driver.py`, which the library carries: the image needs
//! nothing but Python. What that says is checked: [`frame`].

mod collected;
mod error;
mod frame;
mod result;
mod streams;

use std::io::{self, Read, Write};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::child::Child;
use crate::command::{Command, Stdio};
use crate::error::SignalError;
use crate::outcome::Outcome;
use crate::shared::ANSWER_LIMIT;
use crate::text::one_line;
use collected::Collected;
use frame::Frame;
use streams::Streams;

pub use error::PythonError;
pub use result::{Evaluation, PythonException, Representations};

/// The program in the guest.
const DRIVER: &str = include_str!("driver.py");

/// Compiles that under a name that no code of a user has.
const STARTER: &str = r#"import sys; exec(compile(sys.argv[1], "<sandvmm>", "exec"), {"__name__": "sandvmm driver", "__builtins__": __builtins__})"#;

/// Longest code of one run, in bytes.
pub const MAX_CODE_BYTES: usize = 16 << 20;

/// Bytes that an [`Evaluation`] keeps of each of standard output and error.
pub const MAX_EVALUATION_OUTPUT_BYTES: usize = 64 << 20;

/// Displays that an [`Evaluation`] keeps; 128 MiB of them all together.
pub const MAX_DISPLAYS: usize = 1000;

/// How long code that was interrupted at its deadline may take to end. Then its context is ended.
const INTERRUPT_GRACE: Duration = Duration::from_secs(5);

/// How long a context whose stream has broken may take to end.
const END_GRACE: Duration = Duration::from_secs(5);

/// `SIGINT`.
const INTERRUPT: i32 = 2;

/// Bytes of a Python's last words that an error shows.
const MAX_LAST_WORDS_BYTES: u64 = 4096;

/// Which of the two streams output went to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputStream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// A Python interpreter in a sandbox that keeps its state from run to run: made by [`crate::Sandbox::python`] or
/// [`Command::python`]. One run at a time; several contexts run side by side. Dropping it ends the interpreter.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # sandvmm::init();
/// # let sandbox = sandvmm::Sandbox::builder().start()?;
/// let python = sandbox.python()?;
/// python.run("x = 41")?;
/// assert_eq!(python.run("x + 1")?.text(), Some("42"));
/// let failed = python.run("1 / 0")?;
/// assert_eq!(failed.exception.unwrap().name, "ZeroDivisionError");
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Python {
    command: Command,
    /// Locked for as long as a run takes.
    streams: Mutex<Streams>,
    child: RwLock<Child>,
    /// Interrupts that this interpreter was sent: one that arrives behind the run that it was for is none of the next run's.
    interrupts: AtomicU32,
}

/// What the driver is asked.
#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Request<'a> {
    Run {
        code: &'a str,
        /// Interrupts that were sent for earlier runs.
        interrupts: u32,
    },
    Complete(&'a str),
}

/// Gets output as it comes.
type Sink<'a> = dyn FnMut(OutputStream, &[u8]) + 'a;

/// One run, before it begins: [`Python::call`]. It stays on its thread, and so may what [`Self::on_output`] is given.
pub struct PythonCall<'a> {
    python: &'a Python,
    code: &'a str,
    deadline: Option<Duration>,
    on_output: Option<Box<Sink<'a>>>,
}

impl std::fmt::Debug for PythonCall<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("PythonCall")
            .field("code", &self.code)
            .field("deadline", &self.deadline)
            .finish_non_exhaustive()
    }
}

impl PythonCall<'_> {
    /// Interrupts the code when it has run for this long, as [`Python::interrupt`] does. Default: none but the sandbox's own.
    #[must_use]
    pub fn deadline(mut self, limit: Duration) -> Self {
        self.deadline = Some(limit);
        self
    }

    /// Runs it.
    ///
    /// # Errors
    /// See [`PythonError`].
    pub fn run(mut self) -> Result<Evaluation, PythonError> {
        self.python
            .evaluate(self.code, self.deadline, self.on_output.as_deref_mut())
    }
}

impl<'a> PythonCall<'a> {
    /// Gets output as it comes, besides the [`Evaluation`].
    #[must_use]
    pub fn on_output(mut self, sink: impl FnMut(OutputStream, &[u8]) + 'a) -> Self {
        self.on_output = Some(Box::new(sink));
        self
    }
}

impl Python {
    pub(crate) fn start(command: &Command) -> Result<Self, PythonError> {
        let mut command = command.clone();
        command
            .set_args(["-c", STARTER, DRIVER])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let (child, streams) = begin(&mut command)?;
        Ok(Self {
            command,
            streams: Mutex::new(streams),
            child: RwLock::new(child),
            interrupts: AtomicU32::new(0),
        })
    }

    /// Runs code: all statements, and the value of the last one if it is an expression.
    ///
    /// # Errors
    /// See [`PythonError`]; an exception of the code is no error.
    pub fn run(&self, code: &str) -> Result<Evaluation, PythonError> {
        self.call(code).run()
    }

    /// A run with a deadline, or whose output is seen as it comes.
    #[must_use]
    pub fn call<'a>(&'a self, code: &'a str) -> PythonCall<'a> {
        PythonCall {
            python: self,
            code,
            deadline: None,
            on_output: None,
        }
    }

    /// Raises `KeyboardInterrupt` in code that runs, from any thread, and signals what it has started; where nothing runs, nothing happens.
    /// All state stays.
    ///
    /// # Errors
    /// See [`SignalError`].
    pub fn interrupt(&self) -> Result<(), SignalError> {
        let child = self.child();
        self.interrupts.fetch_add(1, Ordering::SeqCst);
        child.signal(INTERRUPT)
    }

    /// Ends the interpreter, also from under a run, and begins a new one without any state.
    ///
    /// # Errors
    /// See [`PythonError`].
    pub fn restart(&self) -> Result<(), PythonError> {
        // One that has ended needs no end; a guest that does not take it meets the machine's end.
        let _ = self.child().kill();
        let mut streams = self.lock();
        let (child, fresh) = begin(&mut self.command.clone())?;
        let mut current = self.child.write().unwrap_or_else(PoisonError::into_inner);
        *current = child;
        self.interrupts.store(0, Ordering::SeqCst);
        drop(current);
        *streams = fresh;
        Ok(())
    }

    /// Whether a prompt would run this code now, or wait for more of it: an open bracket, a block that no empty line has ended.
    ///
    /// # Errors
    /// See [`PythonError`].
    pub fn is_complete(&self, code: &str) -> Result<bool, PythonError> {
        let mut streams = self.lock();
        self.ask(&mut streams, &Request::Complete(code))?;
        match streams.receive(Instant::now().checked_add(ANSWER_LIMIT)) {
            Ok(Some(Frame::Complete(is_complete))) => Ok(is_complete),
            Ok(Some(_)) => Err(self.misbehaved()),
            Ok(None) => Err(self.stuck()),
            Err(error) => Err(self.broken(error)),
        }
    }

    fn child(&self) -> RwLockReadGuard<'_, Child> {
        self.child.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, Streams> {
        // A sink that panicked has left a run half read: its frames are told from the next one's by nothing.
        self.streams.lock().unwrap_or_else(|poisoned| {
            let _ = self.child().kill();
            self.streams.clear_poison();
            poisoned.into_inner()
        })
    }

    fn ask(&self, streams: &mut Streams, request: &Request<'_>) -> Result<(), PythonError> {
        let body =
            serde_json::to_vec(request).map_err(|error| PythonError::Stream(error.into()))?;
        let length = u32::try_from(body.len()).map_err(|_| PythonError::TooLong(body.len()))?;
        streams
            .requests
            .write_all(&length.to_le_bytes())
            .and_then(|()| streams.requests.write_all(&body))
            .map_err(|error| self.broken(error))
    }

    fn evaluate(
        &self,
        code: &str,
        limit: Option<Duration>,
        mut sink: Option<&mut Sink<'_>>,
    ) -> Result<Evaluation, PythonError> {
        if code.len() > MAX_CODE_BYTES {
            return Err(PythonError::TooLong(code.len()));
        }
        let mut streams = self.lock();
        let began = Instant::now();
        // A limit beyond what the clock can count is none.
        let mut deadline = limit.and_then(|limit| began.checked_add(limit));
        let interrupts = self.interrupts.load(Ordering::SeqCst);
        self.ask(&mut streams, &Request::Run { code, interrupts })?;
        let mut found = Collected::default();
        loop {
            // Code that writes without an end leaves no moment in which there is nothing to read.
            let is_late = deadline.is_some_and(|at| at <= Instant::now());
            let received = if is_late {
                Ok(None)
            } else {
                streams.receive(deadline)
            };
            let frame = match received {
                Ok(Some(frame)) => frame,
                Ok(None) if found.evaluation.timed_out => return Err(self.stuck()),
                Ok(None) => {
                    found.evaluation.timed_out = true;
                    deadline = Instant::now().checked_add(INTERRUPT_GRACE);
                    // Where the guest does not take it, the grace ends the context.
                    let _ = self.interrupt();
                    continue;
                }
                Err(error) => return Err(self.broken(error)),
            };
            if let Some(sink) = &mut sink {
                match &frame {
                    Frame::Output(bytes) => sink(OutputStream::Stdout, bytes),
                    Frame::Error(bytes) => sink(OutputStream::Stderr, bytes),
                    _ => {}
                }
            }
            match frame {
                Frame::Over => break,
                Frame::Complete(_) => return Err(self.misbehaved()),
                frame => found.take(frame),
            }
        }
        found.evaluation.wall = began.elapsed();
        Ok(found.evaluation)
    }

    fn stuck(&self) -> PythonError {
        let _ = self.child().kill();
        PythonError::Stuck
    }

    fn misbehaved(&self) -> PythonError {
        let _ = self.child().kill();
        PythonError::Misbehaved
    }

    /// Why the stream broke.
    fn broken(&self, error: io::Error) -> PythonError {
        if error.kind() == io::ErrorKind::InvalidData {
            return self.misbehaved();
        }
        let mut child = self.child.write().unwrap_or_else(PoisonError::into_inner);
        // One that has closed its stream and lives is of no more use.
        let completion = child.wait_timeout(END_GRACE).or_else(|| {
            let _ = child.kill();
            child.wait_timeout(END_GRACE)
        });
        match completion.map(|completion| completion.outcome) {
            None => PythonError::Stream(error),
            Some(Outcome::MachineCrashed(crash)) => PythonError::MachineCrashed(crash),
            Some(Outcome::TimedOut) => PythonError::TimedOut,
            Some(Outcome::LimitExceeded(limit)) => PythonError::LimitExceeded(limit),
            Some(Outcome::SandboxEnded) => PythonError::SandboxEnded,
            Some(outcome) => PythonError::Ended(outcome),
        }
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        // The sandbox's end is its end too.
        let _ = self.child().kill();
    }
}

/// Starts an interpreter, and waits until it takes code.
fn begin(command: &mut Command) -> Result<(Child, Streams), PythonError> {
    let mut child = command.spawn()?;
    let (Some(requests), Some(frames)) = (child.stdin.take(), child.stdout.take()) else {
        return Err(PythonError::Misbehaved);
    };
    // A Python that waits for code reads it at once.
    requests
        .limit_writes(ANSWER_LIMIT)
        .map_err(PythonError::Stream)?;
    let mut streams = Streams { requests, frames };
    let error = match streams.receive(Instant::now().checked_add(ANSWER_LIMIT)) {
        Ok(Some(Frame::Over)) => {
            // From here on the code's own output comes in frames.
            child.stderr = None;
            return Ok((child, streams));
        }
        Ok(Some(_)) => PythonError::Misbehaved,
        Ok(None) => PythonError::Unfit(format!("it said nothing in {} s", ANSWER_LIMIT.as_secs())),
        Err(_) => why_unfit(&mut child),
    };
    let _ = child.kill();
    Err(error)
}

fn why_unfit(child: &mut Child) -> PythonError {
    let outcome = child.wait_timeout(END_GRACE).map(|done| done.outcome);
    match outcome {
        Some(Outcome::MachineCrashed(crash)) => return PythonError::MachineCrashed(crash),
        Some(Outcome::TimedOut) => return PythonError::TimedOut,
        Some(Outcome::LimitExceeded(limit)) => return PythonError::LimitExceeded(limit),
        Some(Outcome::SandboxEnded) => return PythonError::SandboxEnded,
        _ => {}
    }
    let mut words = Vec::new();
    if let (Some(stderr), Some(_)) = (child.stderr.take(), outcome) {
        // Its command has ended: the stream ends.
        let _ = stderr.take(MAX_LAST_WORDS_BYTES).read_to_end(&mut words);
    }
    let last = words.trim_ascii_end().rsplit(|byte| *byte == b'\n').next();
    PythonError::Unfit(one_line(last.unwrap_or_default()))
}
