//! What a sandbox does, as spans of `tracing`, for whoever has a subscriber: `sandbox` from its beginning to its end, and within it `start` up to the
//! guest's readiness and `command` for each that runs; `fork` and `end` are around the calls of that name.
//!
//! Nothing is said at a rate that a guest controls.

use std::collections::HashMap;

use tracing::{Span, debug, field, info_span};

use crate::event::EventKind;

/// The spans that are open.
#[derive(Debug, Default)]
pub(crate) struct Spans {
    sandbox: Option<Span>,
    start: Option<Span>,
    /// As many as commands run.
    commands: HashMap<u32, Span>,
}

impl Spans {
    /// A sandbox begins, within the caller's own span.
    pub(crate) fn new(cpus: u8, memory_mib: u32, is_fork: bool) -> Self {
        let sandbox = info_span!("sandbox", cpus, memory_mib, is_fork, ended = field::Empty);
        let start = info_span!(parent: &sandbox, "start");
        Self {
            sandbox: Some(sandbox),
            start: Some(start),
            commands: HashMap::new(),
        }
    }

    /// The sandbox's own, as long as it lives.
    pub(crate) fn sandbox(&self) -> Span {
        self.sandbox.clone().unwrap_or_else(Span::none)
    }

    /// Opens and closes what an event opens and closes.
    pub(crate) fn follow(&mut self, kind: &EventKind) {
        let Some(sandbox) = &self.sandbox else {
            return;
        };
        match kind {
            EventKind::Ready => self.start = None,
            EventKind::CommandStarted {
                command,
                program,
                warm,
            } => {
                let span = info_span!(parent: sandbox, "command", id = command, ?program, warm, outcome = field::Empty);
                self.commands.insert(*command, span);
            }
            EventKind::CommandFailed {
                command,
                program,
                message,
            } => {
                debug!(parent: sandbox, id = command, ?program, ?message, "A command did not start")
            }
            EventKind::CommandEnded {
                command, outcome, ..
            } => {
                if let Some(span) = self.commands.remove(command) {
                    span.record("outcome", field::debug(outcome));
                }
            }
            EventKind::LimitHit { limit, command } => {
                debug!(parent: sandbox, limit = limit.name(), command, "A ceiling was met");
            }
            EventKind::Ended { reason, .. } => {
                sandbox.record("ended", reason);
                *self = Self::default();
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};

    use super::*;
    use crate::event::Events;
    use crate::outcome::{Outcome, Usage};

    /// Writes down which spans open and close. References are counted as a subscriber has to.
    #[derive(Debug, Clone, Default)]
    struct Recorder(Arc<Mutex<Seen>>);

    #[derive(Debug, Default)]
    struct Seen {
        lines: Vec<String>,
        /// Name and references, by number.
        spans: HashMap<u64, (&'static str, u32)>,
    }

    impl Subscriber for Recorder {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }

        fn new_span(&self, attributes: &Attributes<'_>) -> Id {
            let mut seen = self.0.lock().unwrap();
            let name = attributes.metadata().name();
            let number = seen.spans.len() as u64 + 1;
            seen.lines.push(format!("+{name}"));
            seen.spans.insert(number, (name, 1));
            Id::from_u64(number)
        }

        fn record(&self, _: &Id, values: &Record<'_>) {
            self.0.lock().unwrap().lines.push(format!("{values:?}"));
        }

        fn record_follows_from(&self, _: &Id, _: &Id) {}

        fn event(&self, _: &Event<'_>) {}

        fn enter(&self, _: &Id) {}

        fn exit(&self, _: &Id) {}

        fn clone_span(&self, id: &Id) -> Id {
            let mut seen = self.0.lock().unwrap();
            seen.spans.get_mut(&id.into_u64()).unwrap().1 += 1;
            id.clone()
        }

        fn try_close(&self, id: Id) -> bool {
            let mut seen = self.0.lock().unwrap();
            let (name, count) = seen.spans.get_mut(&id.into_u64()).unwrap();
            *count -= 1;
            let (name, is_last) = (*name, *count == 0);
            if is_last {
                seen.lines.push(format!("-{name}"));
            }
            is_last
        }
    }

    #[test]
    fn spans_open_and_close_with_what_they_are_about() {
        let recorder = Recorder::default();
        tracing::subscriber::with_default(recorder.clone(), || {
            let events = Events::new(None, 0, Spans::new(1, 256, false));
            events.emit(EventKind::Started);
            events.emit(EventKind::Ready);
            events.emit(EventKind::CommandStarted {
                command: 3,
                program: "sh".into(),
                warm: false,
            });
            events.emit(EventKind::CommandEnded {
                command: 3,
                outcome: Outcome::TimedOut,
                usage: Usage::default(),
            });
            events.emit(EventKind::Ended {
                reason: "ended",
                message: None,
            });
        });

        let seen = &recorder.0.lock().unwrap().lines;
        let [
            sandbox,
            start,
            started,
            command,
            outcome,
            ended,
            reason,
            over,
        ] = <&[String; 8]>::try_from(seen.as_slice()).unwrap();
        assert_eq!(
            [sandbox, start, started, command, ended, over],
            [
                "+sandbox", "+start", "-start", "+command", "-command", "-sandbox"
            ]
        );
        assert!(outcome.contains("TimedOut"), "{outcome}");
        assert!(reason.contains("ended"), "{reason}");
    }
}
