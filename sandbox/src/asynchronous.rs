//! The asynchronous face, for programs on tokio (feature `tokio`): the same types over the same core, with futures in place of waits.
//!
//! A future that is dropped undoes what it was about: a start ends its sandbox, and what starts a command, or has it, kills it.

use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;

use crate::builder::SandboxBuilder;
use crate::child::Child;
use crate::command::{Command, Output, started};
use crate::error::{SpawnError, StartError};
use crate::meter::Meter;
use crate::outcome::{Completion, Ended};
use crate::sandbox::Sandbox;
use crate::shared::{ANSWER_LIMIT, Shared};
use crate::state::Request;
use crate::stream::{ChildStderr, ChildStdin, ChildStdout, ChildTerminal};

/// Bytes that [`Command::output_async`] reads at one time.
const CHUNK_BYTES: usize = 64 << 10;

impl SandboxBuilder {
    /// As [`Self::start`].
    ///
    /// # Errors
    /// See [`StartError`]; nothing is left behind.
    ///
    /// # Panics
    /// Outside of a runtime of tokio.
    pub async fn start_async(self) -> Result<Sandbox, StartError> {
        let sandbox = blocking(move || self.begin()).await?;
        changed(sandbox.shared(), Shared::try_ready).await?;
        Ok(sandbox)
    }
}

impl Sandbox {
    /// As [`Self::end`].
    ///
    /// # Panics
    /// Outside of a runtime of tokio.
    pub async fn end_async(self) -> Ended {
        blocking(move || self.end()).await
    }

    /// Does something with the sandbox that blocks, on a thread for that: files, contexts of Python.
    ///
    /// ```no_run
    /// # use std::sync::Arc;
    /// # async fn example(sandbox: Arc<sandvmm::Sandbox>) -> Result<(), sandvmm::FileError> {
    /// let content = sandbox.blocking(|sandbox| sandbox.read("out.csv")).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Panics
    /// Where `work` does, and outside of a runtime of tokio.
    pub async fn blocking<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> T + Send + 'static,
    ) -> T {
        let sandbox = Arc::clone(self);
        blocking(move || work(&sandbox)).await
    }
}

impl Command {
    /// As [`Self::spawn`].
    ///
    /// # Errors
    /// See [`SpawnError`].
    pub async fn spawn_async(&mut self) -> Result<Child, SpawnError> {
        let child = self.request()?;
        let look = |shared: &Shared| shared.try_started(child.id());
        let answer = tokio::time::timeout(ANSWER_LIMIT, changed(child.shared(), look)).await;
        let result = match answer {
            Ok(result) => result,
            Err(_) => {
                // The supervisor ends the machine, which ends the wait; a machine that is gone has ended it already.
                let _ = child.shared().request(Request::Unanswered);
                changed(child.shared(), look).await
            }
        };
        started(child, result)
    }

    /// As [`Self::output`].
    ///
    /// # Errors
    /// See [`SpawnError`].
    pub async fn output_async(&mut self) -> Result<Output, SpawnError> {
        let child = self.spawn_async().await?;
        let output = child.wait_with_output_async().await;
        output.map_err(SpawnError::Output)
    }

    /// As [`Self::status`].
    ///
    /// # Errors
    /// See [`SpawnError`].
    pub async fn status_async(&mut self) -> Result<Completion, SpawnError> {
        let child = self.spawn_async().await?;
        let output = child.finish_async(0).await.map_err(SpawnError::Output)?;
        Ok(output.completion)
    }
}

impl Child {
    /// As [`Self::wait`]. Dropping the future leaves the command as it is.
    pub async fn wait_async(&mut self) -> Completion {
        self.stdin = None;
        changed(self.shared(), |_| self.try_wait()).await
    }

    /// As [`Self::wait_with_output`].
    ///
    /// # Errors
    /// When a stream can't be read. The command is killed then.
    pub async fn wait_with_output_async(self) -> io::Result<Output> {
        let limit_bytes = self.output_limit_bytes();
        self.finish_async(limit_bytes).await
    }

    async fn finish_async(mut self, limit_bytes: usize) -> io::Result<Output> {
        self.stdin = None;
        let first = match (self.terminal.take(), self.stdout.take()) {
            (Some(terminal), _) => Some(terminal.into_async()),
            (None, stdout) => stdout.map(ChildStdout::into_async),
        };
        let first = first.transpose()?;
        let second = self.stderr.take().map(ChildStderr::into_async);
        let second = second.transpose()?;
        let (stdout, stderr) = tokio::join!(read(first, limit_bytes), read(second, limit_bytes));
        let ((stdout, stdout_truncated), (stderr, stderr_truncated)) = (stdout?, stderr?);
        Ok(Output {
            completion: self.wait_async().await,
            stdout,
            stderr,
            stdout_truncated,
            stderr_truncated,
        })
    }
}

/// Looks after each change of the state, until there is something.
async fn changed<T>(shared: &Shared, look: impl Fn(&Shared) -> Option<T>) -> T {
    loop {
        // Hears of changes from here on, also of those before it is waited for.
        let changed = shared.async_changed.notified();
        match look(shared) {
            Some(found) => return found,
            None => changed.await,
        }
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        // It was not cancelled: nobody has its handle.
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}

/// Reads a stream to its end; says what is kept of it, and whether that lacks something.
async fn read(stream: Option<AsyncEnd>, limit_bytes: usize) -> io::Result<(Vec<u8>, bool)> {
    let (mut kept, mut truncated) = (Vec::new(), false);
    let Some(mut stream) = stream else {
        return Ok((kept, truncated));
    };
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        match stream.read(&mut chunk).await {
            Ok(0) => return Ok((kept, truncated)),
            Ok(count) => {
                let room = limit_bytes.saturating_sub(kept.len());
                truncated |= count > room;
                kept.extend(chunk.iter().take(count.min(room)));
            }
            // The machine went away with unread bytes of ours: its end all the same.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                return Ok((kept, truncated));
            }
            Err(error) => return Err(error),
        }
    }
}

/// One of a command's streams, for tokio. Dropping it closes the command's end, as with the blocking ones.
#[derive(Debug)]
pub struct AsyncEnd {
    stream: UnixStream,
    meter: Arc<Meter>,
}

impl AsyncEnd {
    fn new(end: OwnedFd, meter: Arc<Meter>) -> io::Result<Self> {
        let stream = std::os::unix::net::UnixStream::from(end);
        stream.set_nonblocking(true)?;
        let stream = UnixStream::from_std(stream)?;
        Ok(Self { stream, meter })
    }
}

macro_rules! into_async {
    ($($name:ident),+) => {$(
        impl $name {
            /// The stream for tokio.
            ///
            /// # Errors
            /// When the runtime has no room for it.
            ///
            /// # Panics
            /// Outside of a runtime of tokio.
            pub fn into_async(self) -> io::Result<AsyncEnd> {
                let meter = self.meter();
                AsyncEnd::new(self.into(), meter)
            }
        }
    )+};
}

into_async!(ChildStdin, ChildStdout, ChildStderr, ChildTerminal);

impl AsyncRead for AsyncEnd {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(context, buffer);
        self.meter.read(buffer.filled().len() - before);
        polled
    }
}

impl AsyncWrite for AsyncEnd {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        // Without a `SIGPIPE`, as tokio's own writes to sockets are.
        let polled = Pin::new(&mut self.stream).poll_write(context, bytes);
        if let Poll::Ready(Ok(count)) = polled {
            self.meter.wrote(count);
        }
        polled
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
