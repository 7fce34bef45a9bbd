//! One sandbox's way out: takes its streams, decides, connects, carries, and tells what became of each. Bounded in
//! everything that a guest can ask for.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::audit::{Process, Record, Verdict, as_rule, millis};
use crate::connect::{self, Resolver, SystemResolver};
use crate::guard::Guard;
use crate::interception::Interception;
use crate::name::HostName;
use crate::policy::{Policy, Target};
use crate::relay::{Count, End, MAX_HELD_BYTES, relay};
use crate::tally::Tally;
pub use crate::tally::{Sink, Totals};

/// How long a guest may take to say where a stream is to go, and its client to say its first words where these are looked
/// into. A client may read its list of certificates in between, and its processor be slow or emulated: pip was seen to take ten seconds.
pub const FIRST_WORDS_LIMIT: Duration = Duration::from_secs(30);

/// Stack of a connection's thread.
const STACK_BYTES: usize = 256 << 10;

/// The same where TLS may be opened: two handshakes, with chains of certificates of a server's choice.
const OPENING_STACK_BYTES: usize = 1 << 20;

/// Attempts above the bound of connections that are read at one time, so that it is told where to they were. Further ones are counted.
const REFUSING_PLACES: usize = 16;

/// What a guest may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Connections at one time; one more is refused.
    pub connections: usize,
    /// Attempts in a second, over some seconds; one more is refused. Each attempt is a record, so that this bounds them too.
    pub attempts_per_second: u32,
    /// Bytes of all connections in both directions together; at the bound all connections end.
    pub bytes: u64,
}

impl Default for Limits {
    /// 256 connections, 100 attempts a second, 64 GiB.
    fn default() -> Self {
        Self {
            connections: 256,
            attempts_per_second: 100,
            bytes: 64 << 30,
        }
    }
}

impl Limits {
    /// These connections at one time.
    #[must_use]
    pub fn connections(mut self, connections: usize) -> Self {
        self.connections = connections;
        self
    }

    /// These attempts in a second.
    #[must_use]
    pub fn attempts_per_second(mut self, attempts: u32) -> Self {
        self.attempts_per_second = attempts;
        self
    }

    /// These bytes of all connections together.
    #[must_use]
    pub fn bytes(mut self, bytes: u64) -> Self {
        self.bytes = bytes;
        self
    }
}

/// A connection that a guest wants to make.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Attempt {
    /// Where to.
    pub target: Target,
    /// The port.
    pub port: u16,
    /// Which process of the guest, as far as the guest says.
    pub process: Option<Process>,
}

impl Attempt {
    /// Of this process, to this port of this host.
    #[must_use]
    pub fn new(target: Target, port: u16, process: Option<Process>) -> Self {
        Self {
            target,
            port,
            process,
        }
    }
}

/// An application's word on one attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Decision {
    /// It may be made, within the checks of addresses and contents.
    Allow,
    /// It may not; the reason is told in the record.
    Deny(String),
}

/// Decides on each attempt; the rule that would allow it comes with it.
pub type Decide = dyn Fn(&Attempt, Option<&str>) -> Decision + Send + Sync;

/// What a gateway is made from.
#[derive(Clone)]
pub struct Options {
    /// The sandbox's name, for the records.
    pub sandbox: String,
    /// What may leave.
    pub policy: Policy,
    /// Decides in place of the policy's rules.
    pub decide: Option<Arc<Decide>>,
    /// Finds addresses.
    pub resolver: Arc<dyn Resolver>,
    /// What the guest may use.
    pub limits: Limits,
    /// Is told of each attempt.
    pub sink: Option<Arc<Sink>>,
    /// Secrets, and the TLS that is opened for them.
    pub interception: Option<Arc<Interception>>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            sandbox: String::new(),
            policy: Policy::new(),
            decide: None,
            resolver: Arc::new(SystemResolver),
            limits: Limits::default(),
            sink: None,
            interception: None,
        }
    }
}

impl fmt::Debug for Options {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Options")
            .field("sandbox", &self.sandbox)
            .field("policy", &self.policy)
            .field("limits", &self.limits)
            .field("interception", &self.interception)
            .finish_non_exhaustive()
    }
}

/// One sandbox's way out. Clones are the same.
#[derive(Debug, Clone)]
pub struct Gateway(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    options: Options,
    policy: Mutex<Policy>,
    connections: AtomicUsize,
    /// Those above the bound, which are being read.
    refusing: AtomicUsize,
    bytes_left: AtomicU64,
    tally: Tally,
}

/// A connection's place; dropping it gives it back.
#[derive(Debug)]
struct Place {
    inner: Arc<Inner>,
    /// Whether it is one of [`REFUSING_PLACES`].
    is_above: bool,
}

impl Place {
    fn new(inner: &Arc<Inner>) -> Option<Self> {
        [false, true].into_iter().find_map(|is_above| {
            let place = Self {
                inner: Arc::clone(inner),
                is_above,
            };
            let (taken, most) = match is_above {
                false => (&inner.connections, inner.options.limits.connections),
                true => (&inner.refusing, REFUSING_PLACES),
            };
            (taken.fetch_add(1, Ordering::Relaxed) < most).then_some(place)
        })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let taken = match self.is_above {
            false => &self.inner.connections,
            true => &self.inner.refusing,
        };
        taken.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Gateway {
    /// One for a sandbox that has started nothing yet.
    #[must_use]
    pub fn new(options: Options) -> Self {
        Self(Arc::new(Inner {
            policy: Mutex::new(options.policy.clone()),
            connections: AtomicUsize::new(0),
            refusing: AtomicUsize::new(0),
            bytes_left: AtomicU64::new(options.limits.bytes),
            tally: Tally::new(options.limits.attempts_per_second, options.sink.clone()),
            options,
        }))
    }

    /// What may leave now.
    #[must_use]
    pub fn policy(&self) -> Policy {
        lock(&self.0.policy).clone()
    }

    /// Changes what may leave: it holds for attempts from now on, and not for connections that are.
    pub fn change(&self, change: impl FnOnce(&mut Policy)) {
        change(&mut lock(&self.0.policy));
    }

    /// Whether an application decides on each attempt.
    #[must_use]
    pub fn has_decide(&self) -> bool {
        self.0.options.decide.is_some()
    }

    /// How many connections there are, with those that are being refused.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.0.connections.load(Ordering::Relaxed) + self.0.refusing.load(Ordering::Relaxed)
    }

    /// What has left so far.
    #[must_use]
    pub fn totals(&self) -> Totals {
        self.0.tally.totals()
    }

    /// Tells of attempts that were counted since the last record. They are told of with the next one anyway, if there is one.
    pub fn tell_rest(&self) {
        self.0.tally.tell_rest();
    }

    /// Takes a stream that the guest has opened and serves it on a thread of its own; never waits. `first_words` reads from it
    /// where it is to go, all of it within [`FIRST_WORDS_LIMIT`]; `connected` is written to it in front of the server's
    /// first byte. Above the bounds the stream is closed; as far as there are `REFUSING_PLACES` it is read before, for the record.
    pub fn take<F>(&self, stream: UnixStream, first_words: F, connected: &'static [u8])
    where
        F: FnOnce(&mut Timed<'_>) -> io::Result<Attempt> + Send + 'static,
    {
        let Some(place) = Place::new(&self.0) else {
            self.count_refused(1);
            return;
        };
        let is_above = place.is_above;
        let gateway = self.clone();
        let stack_bytes = match self.0.options.interception {
            Some(_) => OPENING_STACK_BYTES,
            None => STACK_BYTES,
        };
        let started = thread::Builder::new()
            .name("egress".to_owned())
            .stack_size(stack_bytes)
            .spawn(move || {
                let _place = place;
                let mut stream = stream;
                match first_words(&mut Timed::new(&stream)) {
                    Ok(attempt) if is_above => gateway.refuse_above(&attempt),
                    Ok(attempt) => gateway.serve(&attempt, &mut stream, connected),
                    // It says where to, but that is no place.
                    Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                        gateway.count_refused(1);
                    }
                    Err(_) => {}
                }
            });
        // Where the system has no thread the closed stream is the refusal.
        if started.is_err() {
            self.count_refused(1);
        }
    }

    /// Takes note of an attempt that the guest's own side has refused: why, with the verdict, unless it is for want of a rule; and of how
    /// many others of which nothing more is known.
    pub fn refused(&self, attempt: &Attempt, why: Option<(Verdict, &str)>, others: u32) {
        self.count_refused(others);
        let record = self.record(attempt);
        if !self.0.tally.admits(&record) {
            return;
        }
        self.0.tally.tell(match why {
            Some((verdict, reason)) => record.because(verdict, reason),
            None => self.not_allowed(record, attempt),
        });
    }

    /// Takes note of attempts of which nothing more is known.
    pub fn count_refused(&self, attempts: u32) {
        self.0.tally.count(attempts.into());
    }

    fn refuse_above(&self, attempt: &Attempt) {
        let most = self.0.options.limits.connections;
        let reason = format!("more than {most} connections at once");
        self.refused(attempt, Some((Verdict::Limited, &reason)), 0);
    }

    fn record(&self, attempt: &Attempt) -> Record {
        let mut record = Record::new(&self.0.options.sandbox, &attempt.target, attempt.port);
        record.process.clone_from(&attempt.process);
        record
    }

    fn not_allowed(&self, record: Record, attempt: &Attempt) -> Record {
        let rule = as_rule(&attempt.target, attempt.port);
        record.because(
            Verdict::Denied,
            &format!("not allowed; add --allow-host {rule}"),
        )
    }

    /// One attempt from its first word to its record.
    fn serve(&self, attempt: &Attempt, stream: &mut UnixStream, connected: &[u8]) {
        let began_at = Instant::now();
        let mut record = self.record(attempt);
        if !self.0.tally.admits(&record) {
            return;
        }
        record = match self.decide(attempt) {
            Ok((policy, rule)) => {
                record.rule = rule;
                self.carry(attempt, &policy, stream, connected, record)
            }
            Err(None) => self.not_allowed(record, attempt),
            Err(Some(reason)) => record.because(Verdict::Denied, &reason),
        };
        record.duration_ms = millis(began_at.elapsed());
        self.0.tally.tell(record);
    }

    /// The policy as it is at this moment and the rule that allows the attempt; or why it is denied, if not for want of a
    /// rule.
    fn decide(&self, attempt: &Attempt) -> Result<(Policy, Option<String>), Option<String>> {
        let policy = self.policy();
        let rule = policy
            .rule_for(&attempt.target, attempt.port)
            .map(ToString::to_string);
        match &self.0.options.decide {
            None if rule.is_none() => Err(None),
            None => Ok((policy, rule)),
            Some(decide) => match decide(attempt, rule.as_deref()) {
                Decision::Allow => Ok((policy, rule)),
                Decision::Deny(reason) => Err(Some(reason)),
            },
        }
    }

    fn carry(
        &self,
        attempt: &Attempt,
        policy: &Policy,
        stream: &mut UnixStream,
        connected: &[u8],
        mut record: Record,
    ) -> Record {
        let opened = self.opened(attempt);
        let mut guard = match opened {
            Some(_) => Guard::tls(&attempt.target, attempt.port),
            None => Guard::new(&attempt.target, attempt.port, policy.is_raw(attempt.port)),
        };
        let first = match first_words(stream, &mut guard) {
            Ok(first) => first,
            Err(First::Refused(reason)) => return record.because(Verdict::Denied, &reason),
            Err(First::Silent(reason)) => return record.because(Verdict::Failed, reason),
        };
        let connected_to = connect::open(
            &attempt.target,
            attempt.port,
            policy,
            &*self.0.options.resolver,
        );
        let server = match connected_to {
            Ok(server) => server,
            Err(error) => {
                let verdict = if error.is_denial() {
                    Verdict::Denied
                } else {
                    Verdict::Failed
                };
                return record.because(verdict, &error.to_string());
            }
        };
        record.address = server.peer_addr().ok().map(|address| address.ip());
        let mut count = Count::new(&self.0.bytes_left);
        count.out = first.0.len() as u64;
        let end = if !count.take(first.0.len()) {
            Ok(End::Budget)
        } else if let Some((interception, host)) = opened {
            let upstream = match interception.connect(host, &server, &first.0) {
                Ok(upstream) => upstream,
                Err(error) if error.is_denial() => {
                    return record.because(Verdict::Denied, &error.to_string());
                }
                Err(error) => return record.because(Verdict::Failed, &error.to_string()),
            };
            ready(stream, &server, connected).and_then(|()| {
                let between = (&*stream, &server);
                let host = (host, attempt.port);
                interception.carry(host, between, upstream, &first.0, &mut count)
            })
        } else {
            ready(stream, &server, connected).and_then(|()| {
                relay(
                    stream.as_fd(),
                    server.as_fd(),
                    &mut guard,
                    first,
                    &mut count,
                )
            })
        };
        record.bytes_out = count.out;
        record.bytes_in = count.inward;
        record.verdict = Verdict::Allowed;
        match end {
            Ok(End::Closed) => record,
            Ok(End::Refused(error)) => record.because(Verdict::Denied, &error.to_string()),
            Ok(End::Broken(reason)) => record.because(Verdict::Failed, &reason),
            Ok(End::Idle) => record.because(Verdict::Failed, "nothing moved for an hour"),
            Ok(End::Budget) => record.because(Verdict::Limited, "the sandbox's bytes are used up"),
            Err(error) => record.because(Verdict::Failed, &error.to_string()),
        }
    }

    /// What opens this connection's TLS, if that is done, and the host that it is for.
    fn opened<'a>(&'a self, attempt: &'a Attempt) -> Option<(&'a Interception, &'a HostName)> {
        let interception = self.0.options.interception.as_deref()?;
        match &attempt.target {
            Target::Name(name) if interception.covers(&attempt.target, attempt.port) => {
                Some((interception, name))
            }
            _ => None,
        }
    }
}

/// Tells the guest that it is connected; from now on nobody waits for a stream alone.
fn ready(stream: &mut UnixStream, server: &TcpStream, connected: &[u8]) -> io::Result<()> {
    stream.write_all(connected)?;
    stream.set_nonblocking(true)?;
    server.set_nonblocking(true)
}

/// Why there are no first words that may pass.
#[derive(Debug)]
enum First {
    Refused(String),
    Silent(&'static str),
}

/// A guest's stream while it says its first words: all reads together take [`FIRST_WORDS_LIMIT`] at most, however little each of them
/// brings. Then they fail with [`io::ErrorKind::TimedOut`].
#[derive(Debug)]
pub struct Timed<'a> {
    stream: &'a UnixStream,
    deadline: Instant,
}

impl<'a> Timed<'a> {
    fn new(stream: &'a UnixStream) -> Self {
        Self {
            stream,
            deadline: Instant::now() + FIRST_WORDS_LIMIT,
        }
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        match (&mut &*self.stream).read(buffer) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                Err(io::ErrorKind::TimedOut.into())
            }
            read => read,
        }
    }
}

/// Reads what the client says until some of it may pass: all of it, and how much may.
fn first_words(stream: &mut UnixStream, guard: &mut Guard) -> Result<(Vec<u8>, usize), First> {
    if !guard.waits_for_client() {
        return Ok((Vec::new(), 0));
    }
    const LATE: First = First::Silent("the client did not say its first words in time");
    let mut stream = Timed::new(stream);
    let mut held = Vec::new();
    let mut chunk = [0; 4096];
    loop {
        if held.len() >= MAX_HELD_BYTES {
            return Err(LATE);
        }
        match stream.read(&mut chunk) {
            Ok(0) => return Err(First::Silent("the client closed without its first words")),
            Ok(count) => held.extend_from_slice(chunk.get(..count).unwrap_or_default()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::TimedOut => return Err(LATE),
            Err(_) => return Err(First::Silent("the guest's stream is gone")),
        }
        match guard.client(&held) {
            Ok(0) => {}
            Ok(passed) => return Ok((held, passed)),
            Err(error) => return Err(First::Refused(error.to_string())),
        }
    }
}

/// A panic while it was held has left a number or a policy, each of them whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[path = "gateway_tests.rs"]
mod tests;
