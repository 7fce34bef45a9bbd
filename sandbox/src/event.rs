//! What happens in a sandbox, as it happens: one stream of events for its user.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::sync::mpsc::{SyncSender, TrySendError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::{Map, Value, json};

use crate::clock::now_ns;
use crate::egress::Record;
use crate::limit::Limit;
use crate::outcome::{ExitStatus, Outcome, Usage};
use crate::spans::Spans;

/// Most [`EventKind::Denied`] of a sandbox: a guest can make as many as it likes. Further ones are told of by nothing.
pub const MAX_DENIED_EVENTS: u32 = 100;

/// Something that has happened.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Event {
    /// When, counted as in [`crate::Clocks`].
    pub at: Duration,
    /// What.
    pub kind: EventKind,
}

/// What has happened.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum EventKind {
    /// The machine's process was started.
    Started,
    /// The guest is ready for commands.
    Ready,
    /// A command runs.
    CommandStarted {
        /// Its number.
        command: u32,
        /// Its program, as it was asked for.
        program: OsString,
        /// Whether it was forked from a warm interpreter.
        warm: bool,
    },
    /// A command could not be started.
    CommandFailed {
        /// Its number.
        command: u32,
        /// Its program, as it was asked for.
        program: OsString,
        /// A sentence, the guest's.
        message: String,
    },
    /// A command has ended.
    CommandEnded {
        /// Its number.
        command: u32,
        /// How.
        outcome: Outcome,
        /// What it used, its bytes excepted, which may still be on their way.
        usage: Usage,
    },
    /// A ceiling was met.
    LimitHit {
        /// Which.
        limit: Limit,
        /// The command that met it; none where it is the sandbox's.
        command: Option<u32>,
    },
    /// The guest has called a function of the host.
    HostCall {
        /// The function's name; as the guest has it, where there is no such function.
        function: String,
        /// `ok`, or the kind of the error that the guest was told.
        result: &'static str,
        /// From the call's arrival to its answer.
        wall: Duration,
    },
    /// The guest has tried to reach something that it may not: a port of the host.
    Denied {
        /// Which.
        port: u32,
    },
    /// A connection that left the guest, or was to, is over.
    Connection(Box<Record>),
    /// The machine is gone: the last event.
    Ended {
        /// `ended` by its user, `timeout`, `limit` or `crash`.
        reason: &'static str,
        /// What is to be said of a crash.
        message: Option<String>,
    },
    /// So many events before this one did not find room in the channel.
    Lost {
        /// How many.
        count: u64,
    },
}

impl Event {
    /// The event as one JSON object: `at_us`, `event`, and what belongs to it (`docs/events.md`). Text of the guest is in it as JSON has
    /// it, control characters escaped.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let mut object = Map::new();
        object.insert("at_us".to_owned(), micros(self.at));
        let (name, fields) = self.kind.parts();
        object.insert("event".to_owned(), name.into());
        if let Value::Object(fields) = fields {
            object.extend(fields);
        }
        Value::Object(object)
    }
}

fn micros(duration: Duration) -> Value {
    u64::try_from(duration.as_micros())
        .unwrap_or(u64::MAX)
        .into()
}

fn text(program: &OsString) -> String {
    String::from_utf8_lossy(program.as_bytes()).into_owned()
}

impl EventKind {
    fn parts(&self) -> (&'static str, Value) {
        match self {
            Self::Started => ("started", Value::Null),
            Self::Ready => ("ready", Value::Null),
            Self::CommandStarted {
                command,
                program,
                warm,
            } => (
                "command_started",
                json!({"command": command, "program": text(program), "warm": warm}),
            ),
            Self::CommandFailed {
                command,
                program,
                message,
            } => (
                "command_failed",
                json!({"command": command, "program": text(program), "message": message}),
            ),
            Self::CommandEnded {
                command,
                outcome,
                usage,
            } => {
                let (outcome, status) = outcome_parts(outcome);
                let fields = json!({
                    "command": command, "outcome": outcome, "status": status,
                    "wall_us": micros(usage.wall), "cpu_time_us": micros(usage.cpu_time),
                    "peak_memory_bytes": usage.peak_memory_bytes, "oom_kills": usage.oom_kills,
                    "peak_processes": usage.peak_processes, "throttled_us": micros(usage.throttled),
                    "disk_bytes": usage.disk_bytes,
                });
                ("command_ended", fields)
            }
            Self::LimitHit { limit, command } => (
                "limit_hit",
                json!({"limit": limit.name(), "command": command}),
            ),
            Self::HostCall {
                function,
                result,
                wall,
            } => (
                "host_call",
                json!({"function": function, "result": result, "wall_us": micros(*wall)}),
            ),
            Self::Denied { port } => ("denied", json!({"port": port})),
            // Strings and numbers alone can't fail to be JSON.
            Self::Connection(record) => (
                "connection",
                serde_json::to_value(record).unwrap_or_default(),
            ),
            Self::Ended { reason, message } => {
                ("ended", json!({"reason": reason, "message": message}))
            }
            Self::Lost { count } => ("lost", json!({"count": count})),
        }
    }
}

/// The outcome's name, and the code or signal that goes with it.
fn outcome_parts(outcome: &Outcome) -> (&'static str, Option<i32>) {
    match outcome {
        Outcome::Exited(code) => ("exited", Some(*code)),
        Outcome::Signaled(signal) => ("signal", Some(*signal)),
        Outcome::TimedOut => ("timeout", None),
        Outcome::OutOfMemory { status } => ("oom", Some(number(*status))),
        Outcome::NotKept { status } => ("not_kept", Some(number(*status))),
        Outcome::LimitExceeded(_) => ("limit", None),
        Outcome::MachineCrashed(_) => ("vm_crash", None),
        Outcome::SandboxEnded => ("ended", None),
        Outcome::Policy(_) => ("policy", None),
    }
}

fn number(status: ExitStatus) -> i32 {
    match status {
        ExitStatus::Code(number) | ExitStatus::Signal(number) => number,
    }
}

/// Where a sandbox's events go; clones lead to the same place.
#[derive(Debug, Clone, Default)]
pub(crate) struct Events(Arc<Mutex<Sink>>);

#[derive(Debug, Default)]
struct Sink {
    sender: Option<SyncSender<Event>>,
    called_ns: u64,
    lost: u64,
    denied: u32,
    spans: Spans,
}

impl Events {
    pub(crate) fn new(sender: Option<SyncSender<Event>>, called_ns: u64, spans: Spans) -> Self {
        Self(Arc::new(Mutex::new(Sink {
            sender,
            called_ns,
            spans,
            ..Sink::default()
        })))
    }

    /// The sandbox's span.
    pub(crate) fn span(&self) -> tracing::Span {
        let sink = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sink.spans.sandbox()
    }

    /// Tells of an event. Nobody waits for a reader: what finds no room is counted.
    pub(crate) fn emit(&self, kind: EventKind) {
        // Nothing panics while it is held.
        let mut sink = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let at = Duration::from_nanos(now_ns().saturating_sub(sink.called_ns));
        if matches!(kind, EventKind::Denied { .. }) {
            sink.denied = sink.denied.saturating_add(1);
            if sink.denied > MAX_DENIED_EVENTS {
                return;
            }
        }
        sink.spans.follow(&kind);
        let is_last = matches!(kind, EventKind::Ended { .. });
        if sink.lost > 0 {
            let count = sink.lost;
            let kind = EventKind::Lost { count };
            if sink.send(Event { at, kind }) {
                sink.lost = 0;
            }
        }
        if !sink.send(Event { at, kind }) {
            sink.lost += 1;
        }
        if is_last {
            // Its reader finds the end.
            sink.sender = None;
        }
    }
}

impl Sink {
    /// Whether it is the reader's now, or nobody reads.
    fn send(&mut self, event: Event) -> bool {
        let Some(sender) = &self.sender else {
            return true;
        };
        match sender.try_send(event) {
            Ok(()) => true,
            Err(TrySendError::Full(_)) => false,
            Err(TrySendError::Disconnected(_)) => {
                self.sender = None;
                true
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::sync_channel;

    use super::*;

    #[test]
    fn what_finds_no_room_is_counted_and_the_end_is_seen() {
        let (sender, events) = sync_channel(2);
        let sink = Events::new(Some(sender), 0, Spans::default());
        for _ in 0..5 {
            sink.emit(EventKind::Ready);
        }

        let first: Vec<_> = events.try_iter().map(|event| event.kind).collect();
        sink.emit(EventKind::Started);
        let second: Vec<_> = events.try_iter().map(|event| event.kind).collect();
        sink.emit(EventKind::Ended {
            reason: "ended",
            message: None,
        });

        assert_eq!(first, [EventKind::Ready, EventKind::Ready]);
        assert_eq!(second, [EventKind::Lost { count: 3 }, EventKind::Started]);
        assert_eq!(events.iter().count(), 1);
    }

    #[test]
    fn denials_are_told_of_up_to_their_bound() {
        let (sender, events) = sync_channel(1000);
        let sink = Events::new(Some(sender), 0, Spans::default());

        for port in 0..500 {
            sink.emit(EventKind::Denied { port });
        }

        assert_eq!(events.try_iter().count(), MAX_DENIED_EVENTS as usize);
    }

    #[test]
    fn json_has_the_time_the_name_and_the_fields() {
        let event = Event {
            at: Duration::from_micros(1500),
            kind: EventKind::CommandFailed {
                command: 3,
                program: "x\x1b".into(),
                message: "No \"x\"".to_owned(),
            },
        };

        assert_eq!(
            event.to_json().to_string(),
            r#"{"at_us":1500,"command":3,"event":"command_failed","message":"No \"x\"","program":"x\u001b"}"#
        );
    }
}
