//! The thread that carries a sandbox's calls: it reads them, has them run, keeps their deadlines and sends what came of them.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::{Duration, Instant};

use protocol::call::{Answer, FromBridge, MAX_CALL_BYTES, MAX_FRAME_BYTES, MAX_NAME_BYTES};
use protocol::frame::{self, Decoder};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::SendFlags;

use super::wire::{self, Call, Failure, Kind};
use super::{Function, lock};
use crate::event::EventKind;
use crate::shared::Shared;

/// Most calls of a sandbox that wait for their turn, and most bytes of them. While there are that many no further one is read: the
/// guest's own queue holds it.
const MAX_WAITING: usize = 64;
const MAX_WAITING_BYTES: usize = 4 * MAX_CALL_BYTES;

/// Most threads of a sandbox that run calls, those past their deadline included.
const MAX_RUNNING: usize = 256;

/// Bytes of answers that wait for the guest to take them, above which no call is begun.
const MAX_OUTGOING_BYTES: usize = 1 << 20;

/// Bytes read at one time.
const CHUNK_BYTES: usize = 64 << 10;

/// How many calls may still come now: refilled by time.
#[derive(Debug)]
pub(super) struct Bucket {
    rate_per_s: f64,
    left: f64,
    at: Instant,
}

impl Bucket {
    pub(super) fn full(rate_per_s: u32, now: Instant) -> Self {
        Self {
            rate_per_s: rate_per_s.into(),
            left: rate_per_s.into(),
            at: now,
        }
    }

    /// Whether one more may come; it counts then.
    fn take(&mut self, now: Instant) -> bool {
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        self.at = now;
        self.left = (self.left + passed * self.rate_per_s).min(self.rate_per_s);
        if self.left < 1.0 {
            return false;
        }
        self.left -= 1.0;
        true
    }
}

/// A call whose function has not begun.
struct Waiting {
    id: u32,
    line: Vec<u8>,
    has_args: bool,
    function: Arc<Function>,
    deadline: Option<Instant>,
}

/// A call whose function runs.
struct Running {
    /// The call's number, until it was answered.
    id: Option<u32>,
    function: Arc<Function>,
    deadline: Option<Instant>,
}

/// A call that was not answered: what it calls, and when it came.
struct Open {
    function: String,
    at: Instant,
}

/// What the call of this ticket came to.
type Returned = (u64, Result<Vec<u8>, Failure>);

/// Where the threads that run calls leave their answers.
struct Done {
    answers: Mutex<Vec<Returned>>,
    wake: OwnedFd,
}

struct Dispatcher {
    shared: Weak<Shared>,
    stream: UnixStream,
    decoder: Decoder,
    outgoing: VecDeque<u8>,
    /// Calls that were not answered, by the number that the bridge has given them.
    open: HashMap<u32, Open>,
    waiting: VecDeque<Waiting>,
    running: HashMap<u64, Running>,
    last_ticket: u64,
    done: Arc<Done>,
}

/// The stream is of no more use: its end, the sandbox's, or words that no bridge says.
struct Over;

/// Starts the thread; it ends with the stream.
pub(super) fn start(shared: &Arc<Shared>, stream: UnixStream) -> io::Result<()> {
    stream.set_nonblocking(true)?;
    let done = Done {
        answers: Mutex::default(),
        wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
    };
    let mut dispatcher = Dispatcher {
        shared: Arc::downgrade(shared),
        stream,
        decoder: Decoder::new(MAX_FRAME_BYTES),
        outgoing: VecDeque::new(),
        open: HashMap::new(),
        waiting: VecDeque::new(),
        running: HashMap::new(),
        last_ticket: 0,
        done: Arc::new(done),
    };
    thread::Builder::new()
        .name("sandvmm calls".to_owned())
        .spawn(move || {
            while dispatcher.turn().is_ok() {}
            if let Some(shared) = dispatcher.shared.upgrade() {
                shared.calls.clear();
            }
        })?;
    Ok(())
}

impl Dispatcher {
    fn turn(&mut self) -> Result<(), Over> {
        let now = Instant::now();
        self.expire(now);
        self.begin(now);
        self.send()?;
        let readable = self.wait()?;
        self.take_done();
        if readable {
            self.receive()?;
        }
        Ok(())
    }

    fn wants_calls(&self) -> bool {
        let bytes: usize = self.waiting.iter().map(|call| call.line.len()).sum();
        self.waiting.len() < MAX_WAITING
            && bytes < MAX_WAITING_BYTES
            && self.outgoing.len() < MAX_OUTGOING_BYTES
    }

    /// Waits for a call, an answer, room for answers, or a deadline. Says whether there is something to read.
    fn wait(&self) -> Result<bool, Over> {
        let mut wanted = PollFlags::empty();
        if self.wants_calls() {
            wanted |= PollFlags::IN;
        }
        if !self.outgoing.is_empty() {
            wanted |= PollFlags::OUT;
        }
        let waiting = self.waiting.iter().map(|call| call.deadline);
        let running = self.running.values().filter(|call| call.id.is_some());
        let deadline = waiting
            .chain(running.map(|call| call.deadline))
            .flatten()
            .min();
        let timeout = deadline.map(|at| {
            // A poll that ends early by its own rounding would find nothing due.
            let left = at.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
            Timespec::try_from(left).unwrap_or(Timespec {
                tv_sec: i64::MAX,
                tv_nsec: 0,
            })
        });
        let mut polled = [
            PollFd::new(&self.stream, wanted),
            PollFd::new(&self.done.wake, PollFlags::IN),
        ];
        match poll(&mut polled, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return Err(Over),
        }
        let [stream, _] = polled.map(|polled| polled.revents());
        // The machine is gone; what it has sent before wants no answer.
        if stream.intersects(PollFlags::HUP | PollFlags::ERR) {
            return Err(Over);
        }
        Ok(stream.contains(PollFlags::IN))
    }

    /// Reads one piece, and takes the calls that it completes.
    fn receive(&mut self) -> Result<(), Over> {
        let mut chunk = vec![0; CHUNK_BYTES];
        match rustix::io::read(&self.stream, &mut chunk) {
            Ok(0) => return Err(Over),
            Ok(count) => self.decoder.push(chunk.get(..count).unwrap_or_default()),
            Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
            Err(_) => return Err(Over),
        }
        while let Some(message) = self.decoder.next().map_err(|_| Over)? {
            let FromBridge::Call { id, line } = message else {
                return Err(Over);
            };
            // As no bridge would: it was taken over.
            let open = Open {
                function: String::new(),
                at: Instant::now(),
            };
            if line.len() > MAX_CALL_BYTES || self.open.insert(id, open).is_some() {
                return Err(Over);
            }
            if let Err(failure) = self.take_call(id, line) {
                self.answer(id, Err(failure));
            }
        }
        Ok(())
    }

    fn take_call(&mut self, id: u32, line: Vec<u8>) -> Result<(), Failure> {
        let now = Instant::now();
        let (name, has_args) = wire::named(&line)?;
        if let Some(open) = self.open.get_mut(&id) {
            open.function.clone_from(&name);
        }
        let shared = self.shared.upgrade();
        let function = shared.and_then(|shared| shared.calls.find(&name));
        let function = function.ok_or_else(|| {
            Failure::new(
                Kind::Unknown,
                format!("The host has no function {name:?} for this sandbox"),
            )
        })?;
        if !lock(&function.rate).take(now) {
            return Err(Failure::new(
                Kind::Rate,
                format!(
                    "{name:?} can be called {} times a second",
                    function.limits.rate_per_s
                ),
            ));
        }
        // A deadline beyond what the clock can count is none.
        let deadline = now.checked_add(function.limits.deadline);
        self.waiting.push_back(Waiting {
            id,
            line,
            has_args,
            function,
            deadline,
        });
        Ok(())
    }

    /// Answers the calls whose time is over.
    fn expire(&mut self, now: Instant) {
        let passed = |deadline: Option<Instant>| deadline.is_some_and(|at| at <= now);
        let mut late = Vec::new();
        self.waiting.retain(|call| {
            let is_late = passed(call.deadline);
            if is_late {
                late.push((call.id, Kind::Busy));
            }
            !is_late
        });
        for call in self.running.values_mut() {
            if passed(call.deadline)
                && let Some(id) = call.id.take()
            {
                late.push((id, Kind::Deadline));
            }
        }
        for (id, kind) in late {
            let message = match kind {
                Kind::Busy => "The function could not begin in time: too many calls run",
                _ => "The function took too long, and may go on",
            };
            self.answer(id, Err(Failure::new(kind, message)));
        }
    }

    /// Begins the calls whose turn it is, those of one function in the order in which they came.
    fn begin(&mut self, now: Instant) {
        let mut place = 0;
        while let Some(call) = self.waiting.get(place) {
            if self.running.len() >= MAX_RUNNING || self.outgoing.len() >= MAX_OUTGOING_BYTES {
                return;
            }
            let function = &call.function;
            let runs = self
                .running
                .values()
                .filter(|running| Arc::ptr_eq(&running.function, function))
                .count();
            if runs >= function.limits.concurrency {
                place += 1;
                continue;
            }
            if let Some(call) = self.waiting.remove(place) {
                self.run(call, now);
            }
        }
    }

    fn run(&mut self, call: Waiting, now: Instant) {
        self.last_ticket += 1;
        let ticket = self.last_ticket;
        let done = Arc::clone(&self.done);
        let Waiting {
            id,
            line,
            has_args,
            function,
            deadline,
        } = call;
        let called = Arc::clone(&function);
        let started = thread::Builder::new()
            .name("sandvmm call".to_owned())
            .spawn(move || {
                let call = Call::new(&line, has_args);
                // Its own lock may be poisoned then, which is its own affair.
                let result = catch_unwind(AssertUnwindSafe(|| (called.body)(&call)));
                let answer = result
                    .unwrap_or_else(|_| Err(Failure::failed("The function panicked".to_owned())));
                drop(called);
                lock(&done.answers).push((ticket, answer));
                // It fails only when the counter is full, and then the thread is awake.
                let _ = rustix::io::write(&done.wake, &1_u64.to_ne_bytes());
            });
        if started.is_err() {
            let failure = Failure::new(Kind::Busy, "The host is out of threads");
            self.answer(id, Err(failure));
            return;
        }
        let running = Running {
            id: Some(id),
            function,
            deadline: deadline.map(|at| at.max(now)),
        };
        self.running.insert(ticket, running);
    }

    fn take_done(&mut self) {
        let mut counter = [0; 8];
        // The counter alone: the answers are in their list.
        let _ = rustix::io::read(&self.done.wake, &mut counter);
        let answers = std::mem::take(&mut *lock(&self.done.answers));
        for (ticket, answer) in answers {
            let call = self.running.remove(&ticket);
            // One that was answered at its deadline is answered once.
            if let Some(id) = call.and_then(|call| call.id) {
                self.answer(id, answer);
            }
        }
    }

    fn answer(&mut self, id: u32, answer: Result<Vec<u8>, Failure>) {
        let result = answer
            .as_ref()
            .map_or_else(|failure| failure.kind().name(), |_| "ok");
        if let (Some(open), Some(shared)) = (self.open.remove(&id), self.shared.upgrade()) {
            shared.events.emit(EventKind::HostCall {
                function: open.function.chars().take(MAX_NAME_BYTES).collect(),
                result,
                wall: open.at.elapsed(),
            });
        }
        let line = answer.unwrap_or_else(|failure| failure.line());
        // All lines are within their bound.
        if let Ok(frame) = frame::encode(&Answer { id, line }, MAX_FRAME_BYTES) {
            self.outgoing.extend(frame);
        }
    }

    /// Sends what the stream takes now.
    fn send(&mut self) -> Result<(), Over> {
        while !self.outgoing.is_empty() {
            let (front, _) = self.outgoing.as_slices();
            match rustix::net::send(self.stream.as_fd(), front, SendFlags::NOSIGNAL) {
                Ok(count) => drop(self.outgoing.drain(..count)),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(()),
                Err(_) => return Err(Over),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_gives_its_rate_and_refills_by_time() {
        let start = Instant::now();
        let mut bucket = Bucket::full(2, start);

        assert!(bucket.take(start) && bucket.take(start));
        assert!(!bucket.take(start));
        assert!(!bucket.take(start + Duration::from_millis(400)));
        assert!(bucket.take(start + Duration::from_millis(600)));
        assert!(!bucket.take(start + Duration::from_millis(700)));
        let later = start + Duration::from_secs(100);
        assert!(bucket.take(later) && bucket.take(later) && !bucket.take(later));
    }
}
