//! Functions of this process that the guest may call, by name.
//!
//! One data stream, opened when the first function is registered, carries all calls of a sandbox; a thread ([`dispatch`])
//! reads it, keeps the bounds and the deadlines, and has each call run on a thread of its own. What comes on that stream is the guest's, and
//! is checked: see [`wire`].

mod dispatch;
mod wire;

use std::collections::HashMap;
use std::fmt::Display;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use protocol::call::{FromBridge, MAX_FRAME_BYTES, MAX_NAME_BYTES, is_name};
use protocol::frame;
use protocol::message::{StreamHeader, StreamKind};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::crash::Crash;
use crate::limit::Limit;
use crate::shared::{ANSWER_LIMIT, Shared};
use crate::state::{Over, Refused, Request};
use dispatch::Bucket;
use wire::Failure;

/// Most functions of a sandbox.
pub const MAX_HOST_FUNCTIONS: usize = 256;

/// Most calls of one function that can be let run at one time.
pub const MAX_CONCURRENCY: usize = 256;

/// How long after a broken stream the supervisor may take to notice that the machine is gone: it reaps it first.
const OVER_GRACE: Duration = Duration::from_secs(2);

/// What a function of the host may be asked for. What a call meets at a bound, the guest is told by kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallLimits {
    deadline: Duration,
    concurrency: usize,
    rate_per_s: u32,
}

impl Default for CallLimits {
    /// 30 s, 16 calls at one time, 1000 calls a second.
    fn default() -> Self {
        Self {
            deadline: Duration::from_secs(30),
            concurrency: 16,
            rate_per_s: 1000,
        }
    }
}

impl CallLimits {
    /// How long a call may take, from its arrival on. Then the guest is told `deadline`, or `busy` if the function has not begun; one that
    /// runs is not stopped, its result is dropped, and it counts as running until it returns.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// How many calls run at one time, 1 to [`MAX_CONCURRENCY`]; others wait for their turn up to their deadline.
    #[must_use]
    pub fn concurrency(mut self, count: usize) -> Self {
        self.concurrency = count;
        self
    }

    /// How many calls may come in a second, and at once, at least 1; the guest is told `rate` of further ones.
    #[must_use]
    pub fn rate_per_s(mut self, count: u32) -> Self {
        self.rate_per_s = count;
        self
    }
}

/// Why a function could not be registered. The guest can't call it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostFunctionError {
    /// No such names.
    #[error(
        "A function of the host can't be called {0:?}: letters, digits and `_` are possible, no digit first, {MAX_NAME_BYTES} at most"
    )]
    Name(String),
    /// There is one.
    #[error("There is a function {0:?} already: remove it first")]
    Taken(String),
    /// The limits are none.
    #[error("A function runs 1 to {MAX_CONCURRENCY} times at one time, and at least once a second")]
    Limits,
    /// There are too many.
    #[error("A sandbox has {MAX_HOST_FUNCTIONS} functions of the host at most")]
    TooMany,
    /// The system refused a socket pair or a thread, or the stream to the guest failed.
    #[error("The stream for calls of functions failed")]
    Stream(#[source] io::Error),
    /// The machine has ended.
    #[error("{0}")]
    MachineCrashed(Crash),
    /// The sandbox's time is over.
    #[error("The sandbox's time is over")]
    TimedOut,
    /// The sandbox has met another of its ceilings.
    #[error("The sandbox had used up its {0}")]
    LimitExceeded(Limit),
    /// The sandbox was ended.
    #[error("The sandbox was ended")]
    SandboxEnded,
}

impl From<Over> for HostFunctionError {
    fn from(over: Over) -> Self {
        match over {
            Over::Ended => Self::SandboxEnded,
            Over::Limit(Limit::WallTime) => Self::TimedOut,
            Over::Limit(limit) => Self::LimitExceeded(limit),
            Over::Crashed(crash) => Self::MachineCrashed(crash),
        }
    }
}

/// What runs a call, from its line to the line that answers it.
type Body = Box<dyn Fn(&wire::Call<'_>) -> Result<Vec<u8>, Failure> + Send + Sync>;

/// A registered function.
struct Function {
    body: Body,
    limits: CallLimits,
    rate: Mutex<Bucket>,
}

/// A sandbox's functions.
#[derive(Default)]
pub(crate) struct Calls {
    functions: Mutex<HashMap<String, Arc<Function>>>,
    /// Whether there is a stream. Held while it is opened.
    has_stream: Mutex<bool>,
}

impl std::fmt::Debug for Calls {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let functions = lock(&self.functions);
        formatter.debug_set().entries(functions.keys()).finish()
    }
}

/// Nothing panics while it holds one of these.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Calls {
    fn find(&self, name: &str) -> Option<Arc<Function>> {
        lock(&self.functions).get(name).map(Arc::clone)
    }

    pub(crate) fn remove(&self, name: &str) -> bool {
        lock(&self.functions).remove(name).is_some()
    }

    fn insert(&self, name: &str, function: Function) -> Result<(), HostFunctionError> {
        let mut functions = lock(&self.functions);
        if functions.contains_key(name) {
            return Err(HostFunctionError::Taken(name.to_owned()));
        }
        if functions.len() >= MAX_HOST_FUNCTIONS {
            return Err(HostFunctionError::TooMany);
        }
        functions.insert(name.to_owned(), Arc::new(function));
        Ok(())
    }

    /// The stream is no more: what the functions hold is let go.
    fn clear(&self) {
        lock(&self.functions).clear();
    }
}

/// Whether a function of the host may have this name: one of Python's, of 64 bytes at most.
///
/// ```
/// assert!(sandvmm::is_host_function_name("look_up"));
/// assert!(!sandvmm::is_host_function_name("look-up"));
/// ```
#[must_use]
pub fn is_host_function_name(name: &str) -> bool {
    is_name(name)
}

/// Registers a function, and opens the stream if it is the first.
pub(crate) fn register<T, R, E>(
    shared: &Arc<Shared>,
    name: &str,
    limits: CallLimits,
    function: impl Fn(T) -> Result<R, E> + Send + Sync + 'static,
) -> Result<(), HostFunctionError>
where
    T: DeserializeOwned,
    R: Serialize,
    E: Display,
{
    if !is_name(name) {
        return Err(HostFunctionError::Name(name.to_owned()));
    }
    if !(1..=MAX_CONCURRENCY).contains(&limits.concurrency) || limits.rate_per_s == 0 {
        return Err(HostFunctionError::Limits);
    }
    let body: Body = Box::new(move |call| {
        let result = function(call.arguments()?);
        wire::value(&result.map_err(|error| Failure::failed(error.to_string()))?)
    });
    let calls = &shared.calls;
    let function = Function {
        body,
        limits,
        rate: Mutex::new(Bucket::full(limits.rate_per_s, Instant::now())),
    };
    calls.insert(name, function)?;
    let mut has_stream = lock(&calls.has_stream);
    if !*has_stream {
        open_stream(shared).inspect_err(|_| {
            calls.remove(name);
        })?;
        *has_stream = true;
    }
    Ok(())
}

/// Opens the stream, and waits until programs in the guest can call.
fn open_stream(shared: &Arc<Shared>) -> Result<(), HostFunctionError> {
    let (mut stream, theirs) = UnixStream::pair().map_err(HostFunctionError::Stream)?;
    let header = StreamHeader {
        command_id: 0,
        kind: StreamKind::Calls,
    };
    // A fresh socket takes far more than these few bytes at once.
    frame::write(&mut stream, &header, frame::MAX_TO_AGENT_BYTES)
        .map_err(|error| HostFunctionError::Stream(io::Error::other(error)))?;
    match shared.request(Request::Connect(theirs.into())) {
        Ok(()) => {}
        Err(Refused::Over(over)) => return Err(over.into()),
        Err(Refused::TooManyCommands | Refused::QueueFull) => {
            return Err(HostFunctionError::Stream(io::ErrorKind::WouldBlock.into()));
        }
    }
    stream
        .set_read_timeout(Some(ANSWER_LIMIT))
        .map_err(HostFunctionError::Stream)?;
    let broken = |error: io::Error| match shared.wait_over(OVER_GRACE) {
        Some(over) => over.into(),
        None => HostFunctionError::Stream(error),
    };
    match frame::read(&mut stream, MAX_FRAME_BYTES) {
        Ok(FromBridge::Ready) => {}
        Ok(FromBridge::Call { .. }) => {
            return Err(HostFunctionError::Stream(io::ErrorKind::InvalidData.into()));
        }
        Err(frame::FrameError::Stream(error)) => return Err(broken(error)),
        Err(error) => return Err(broken(io::Error::other(error))),
    }
    dispatch::start(shared, stream).map_err(HostFunctionError::Stream)
}
