//! The threads that move a command's streams, and what became of each.

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::stdio::{stderr, stdin, stdout};
use sandvmm::{Child, Outcome};

use super::shared::Shared;
use super::stream::{Captured, Copied, capture, copy, feed};
use super::verdict::Verdict;

/// Which of our descriptors an end belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Which {
    Stdout,
    Stderr,
}

/// The end of one stream.
#[derive(Debug, Default)]
pub(super) struct End {
    /// How the copying ended; `None` while it goes on, or when the stream was captured.
    copied: Option<Copied>,
    /// What was kept of it.
    pub(super) captured: Captured,
}

/// What became of a command's output.
#[derive(Debug, Default)]
pub(super) struct Relayed {
    /// Standard output, or the terminal.
    pub(super) stdout: End,
    /// Standard error.
    pub(super) stderr: End,
}

/// The threads of a command that runs.
#[derive(Debug)]
pub(super) struct Relay {
    ends: Receiver<(Which, End)>,
    /// Streams whose end is still to come.
    open: usize,
    relayed: Relayed,
    shared: Shared,
}

impl Relay {
    /// Starts a thread for each stream of `child`, and takes the streams out of it. `ahead` is what has been read of our
    /// standard input already.
    ///
    /// # Errors
    /// When the system refuses a thread.
    pub(super) fn start(
        child: &mut Child,
        mut ahead: Vec<u8>,
        is_captured: bool,
        shared: &Shared,
    ) -> io::Result<Self> {
        let (sender, ends) = channel();
        let mut relay = Self {
            ends,
            open: 0,
            relayed: Relayed::default(),
            shared: shared.clone(),
        };
        if let Some(terminal) = child.terminal.take() {
            let keys = terminal.try_clone()?;
            let ahead = std::mem::take(&mut ahead);
            // Detached: it may wait for a key for ever.
            spawn("keys", move || {
                // A terminal that hangs up types no more.
                let _ = feed(stdin(), &ahead, keys);
            })?;
            relay.output(Which::Stdout, terminal, is_captured, &sender)?;
        }
        if let Some(stream) = child.stdout.take() {
            relay.output(Which::Stdout, stream, is_captured, &sender)?;
        }
        if let Some(stream) = child.stderr.take() {
            relay.output(Which::Stderr, stream, is_captured, &sender)?;
        }
        if let Some(stream) = child.stdin.take() {
            // Detached as well.
            let shared = shared.clone();
            spawn("stdin", move || {
                if let Err(error) = feed(stdin(), &ahead, stream) {
                    shared.give_up(Verdict::input(&error));
                }
            })?;
        }
        Ok(relay)
    }

    fn output(
        &mut self,
        which: Which,
        stream: impl io::Read + AsFd + Send + 'static,
        is_captured: bool,
        sender: &Sender<(Which, End)>,
    ) -> io::Result<()> {
        let sender = sender.clone();
        let shared = self.shared.clone();
        let (name, sink): (_, BorrowedFd<'static>) = match which {
            Which::Stdout => ("stdout", stdout()),
            Which::Stderr => ("stderr", stderr()),
        };
        spawn(name, move || {
            let end = if is_captured {
                End {
                    copied: None,
                    captured: capture(stream),
                }
            } else {
                End {
                    copied: Some(copy(stream, sink)),
                    captured: Captured::default(),
                }
            };
            // A program whose reader left learns it by itself; one whose output is lost would go on in vain.
            if let Some(Copied::Lost(error)) = &end.copied
                && error.kind() != ErrorKind::BrokenPipe
            {
                shared.give_up(Verdict::output(error));
            }
            // Nobody may wait any more.
            let _ = sender.send((which, end));
        })?;
        self.open += 1;
        Ok(())
    }

    /// Whether an output stream has ended since our own side takes no more.
    pub(super) fn is_output_closed(&mut self) -> bool {
        while let Ok(end) = self.ends.try_recv() {
            self.record(end);
        }
        let is_closed =
            |end: &End| matches!(end.copied, Some(Copied::ReaderGone | Copied::Lost(_)));
        is_closed(&self.relayed.stdout) || is_closed(&self.relayed.stderr)
    }

    /// Waits until all output is written or kept, at most for `bound` if there is one.
    pub(super) fn drain(mut self, bound: Option<Duration>) -> Relayed {
        let deadline = bound.and_then(|bound| Instant::now().checked_add(bound));
        while self.open > 0 {
            let end = match deadline {
                None => self.ends.recv().ok(),
                Some(at) => {
                    let left = at.saturating_duration_since(Instant::now());
                    self.ends.recv_timeout(left).ok()
                }
            };
            match end {
                Some(end) => self.record(end),
                None => break,
            }
        }
        self.relayed
    }

    fn record(&mut self, (which, end): (Which, End)) {
        self.open = self.open.saturating_sub(1);
        match which {
            Which::Stdout => self.relayed.stdout = end,
            Which::Stderr => self.relayed.stderr = end,
        }
    }
}

impl Relayed {
    /// A verdict that overrides that of `outcome`, where output could not be written.
    pub(super) fn verdict(&self, outcome: &Outcome) -> Option<Verdict> {
        [&self.stdout, &self.stderr].into_iter().find_map(|end| {
            match (end.copied.as_ref()?, outcome) {
                // A local program would have met SIGPIPE; one that minds fails in its own way.
                (Copied::Lost(error), Outcome::Exited(0))
                    if error.kind() == ErrorKind::BrokenPipe =>
                {
                    Some(Verdict::reader_gone())
                }
                (Copied::Lost(error), Outcome::Exited(_) | Outcome::Signaled(_))
                    if error.kind() != ErrorKind::BrokenPipe =>
                {
                    Some(Verdict::output(error))
                }
                (Copied::ReaderGone | Copied::Lost(_), Outcome::SandboxEnded) => {
                    Some(Verdict::reader_gone())
                }
                _ => None,
            }
        })
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new()
        .name(name.into())
        .spawn(work)
        .map(drop)
        .map_err(sandvmm::host::name_limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lost(kind: ErrorKind) -> Relayed {
        Relayed {
            stdout: End {
                copied: Some(Copied::Lost(kind.into())),
                ..End::default()
            },
            ..Relayed::default()
        }
    }

    fn code(relayed: &Relayed, outcome: &Outcome) -> Option<u8> {
        relayed.verdict(outcome).map(|verdict| verdict.exit_code)
    }

    #[test]
    fn lost_output_is_never_success() {
        let success = Outcome::Exited(0);

        assert_eq!(code(&lost(ErrorKind::BrokenPipe), &success), Some(141));
        assert_eq!(code(&lost(ErrorKind::StorageFull), &success), Some(125));
        assert_eq!(code(&Relayed::default(), &success), None);
    }

    #[test]
    fn a_program_that_minds_its_reader_keeps_its_own_end() {
        let lost = lost(ErrorKind::BrokenPipe);

        assert_eq!(code(&lost, &Outcome::Exited(3)), None);
        assert_eq!(code(&lost, &Outcome::Signaled(13)), None);
        assert_eq!(code(&lost, &Outcome::TimedOut), None);
    }
}
