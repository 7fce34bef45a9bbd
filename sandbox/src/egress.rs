//! What leaves a sandbox, and what enters it: the host's side of the gate.
//!
//! The supervisor's thread hands the gate's streams over and waits for none of them: each is served by a thread of the
//! gateway, and the gate's control stream by one here.

mod control;

use std::fmt;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

pub use egress::audit::{Process, Record, Verdict};
pub use egress::connect::{Resolver, SystemResolver};
pub use egress::gateway::{Attempt, Decision, Limits, Totals};
use egress::gateway::{Decide, Gateway, Options, Sink, Timed};
use egress::interception::Interception;
pub use egress::interception::MAX_ROOTS_BYTES;
pub use egress::name::HostName;
use egress::policy::{DEFAULT_PORTS, MAX_RULES, Pattern, Policy};
pub use egress::policy::{Rule, RuleError, Target};
pub use egress::secret::{MAX_SECRET_BYTES, Secret, SecretError};
use protocol::frame::{self, FrameError, MAX_TO_AGENT_BYTES};
use protocol::gate::{
    AUTHORITY_FILE, AddressRule, CONNECTED, EXTRA_TRUST_VARIABLE, FromGate, Inward,
    MAX_GATE_CONNECTIONS, MAX_GATE_FRAME_BYTES, MAX_GATE_LISTENERS, NameRule, Open, Refusal,
    Refused, Rules, TRUST_FILE, TRUST_VARIABLES, Trust,
};

use crate::error::StartError;
use crate::event::{EventKind, Events};
use crate::shared::Shared;
use crate::state::{Phase, Request};
use crate::text::one_line;
use control::{Control, Stream};

/// How often it is looked whether all is told.
const SETTLE_PERIOD: Duration = Duration::from_millis(1);

/// How long a port of the guest may take to answer.
const INWARD_LIMIT: Duration = Duration::from_secs(10);

/// What a builder was told of connections.
#[derive(Clone, Default)]
pub(crate) struct EgressOptions {
    pub(crate) rules: Vec<String>,
    pub(crate) raw_ports: Vec<u16>,
    pub(crate) decide: Option<Arc<Decide>>,
    pub(crate) sink: Option<Arc<Sink>>,
    pub(crate) resolver: Option<Arc<dyn Resolver>>,
    pub(crate) limits: Limits,
    pub(crate) ports_in: bool,
    pub(crate) secrets: Vec<Secret>,
    pub(crate) roots_pem: Vec<u8>,
}

impl fmt::Debug for EgressOptions {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("EgressOptions")
            .field("rules", &self.rules)
            .field("raw_ports", &self.raw_ports)
            .field("limits", &self.limits)
            .field("ports_in", &self.ports_in)
            .field("secrets", &self.secrets)
            .finish_non_exhaustive()
    }
}

impl EgressOptions {
    /// The gate's host side, where anything may leave or enter.
    pub(crate) fn open(
        self,
        sandbox: &str,
        events: &Events,
    ) -> Result<Option<Arc<Egress>>, StartError> {
        let is_closed = self.rules.is_empty() && self.secrets.is_empty();
        if is_closed && self.decide.is_none() && !self.ports_in {
            return Ok(None);
        }
        let invalid = |sentence: String| StartError::InvalidOption { sentence };
        let mut policy = Policy::new();
        for text in self.rules {
            let rule = text
                .parse()
                .map_err(|error: RuleError| invalid(error.to_string()))?;
            if !policy.allow(rule) {
                return Err(invalid(format!("More than {MAX_RULES} hosts are allowed")));
            }
        }
        // A host is allowed by being named for a secret.
        for rule in self.secrets.iter().flat_map(Secret::rules) {
            if !policy.allow(rule.clone()) {
                return Err(invalid(format!("More than {MAX_RULES} hosts are allowed")));
            }
        }
        // TLS is set up where there is a secret, and nowhere else.
        let interception = if self.secrets.is_empty() {
            None
        } else {
            let made = Interception::new(self.secrets, &self.roots_pem);
            Some(Arc::new(made.map_err(|error| invalid(error.to_string()))?))
        };
        for port in self.raw_ports {
            policy.raw_port(port);
        }
        let (events, sink) = (events.clone(), self.sink);
        let tell = move |record: &Record| {
            events.emit(EventKind::Connection(Box::new(record.clone())));
            if let Some(sink) = &sink {
                sink(record);
            }
        };
        let system = || Arc::new(SystemResolver) as Arc<dyn Resolver>;
        Ok(Some(Egress::new(Options {
            sandbox: sandbox.to_owned(),
            policy,
            decide: self.decide,
            resolver: self.resolver.unwrap_or_else(system),
            limits: self.limits,
            sink: Some(Arc::new(tell)),
            interception,
        })))
    }
}

/// One sandbox's gate.
#[derive(Debug)]
pub(crate) struct Egress {
    gateway: Gateway,
    interception: Option<Arc<Interception>>,
    control: Control,
    /// Threads that listen to it.
    listening: AtomicUsize,
}

/// What leaves a sandbox: can be changed while it runs.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # sandvmm::init();
/// let sandbox = sandvmm::Sandbox::builder().allow_host("pypi.org").start()?;
/// let egress = sandbox.egress().ok_or("A host is allowed")?;
/// egress.allow_host("files.pythonhosted.org:443")?;
/// sandbox.command("pip").args(["install", "requests"]).status()?;
/// egress.forbid_host("pypi.org")?;
/// println!("{} bytes left", egress.totals().bytes_out);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct EgressHandle(Arc<Egress>);

impl EgressHandle {
    pub(crate) fn new(egress: &Arc<Egress>) -> Self {
        Self(Arc::clone(egress))
    }

    /// Allows one thing more, as [`crate::SandboxBuilder::allow_host`] does. Holds for connections from now on; a program that
    /// asked for the name's address before asks again within five seconds.
    ///
    /// # Errors
    /// See [`RuleError`]; nothing is changed. [`RuleError::TooMany`] where as many are allowed already as may be.
    pub fn allow_host(&self, rule: &str) -> Result<(), RuleError> {
        let rule = rule.parse()?;
        let mut is_allowed = false;
        self.0.change(|policy| is_allowed = policy.allow(rule));
        if is_allowed {
            Ok(())
        } else {
            Err(RuleError::TooMany)
        }
    }

    /// Allows one thing less: the one that was allowed in these words. Connections that are stay.
    ///
    /// # Errors
    /// See [`RuleError`]; nothing is changed.
    pub fn forbid_host(&self, rule: &str) -> Result<(), RuleError> {
        let rule = rule.parse()?;
        self.0.change(|policy| {
            policy.forbid(&rule);
        });
        Ok(())
    }

    /// What is allowed now.
    #[must_use]
    pub fn rules(&self) -> Vec<String> {
        let policy = self.0.gateway.policy();
        policy.rules().iter().map(ToString::to_string).collect()
    }

    /// Waits, at most for `limit`, until all is told of a sandbox that has ended.
    pub fn settle(&self, limit: Duration) {
        self.0.settle(limit);
    }

    /// What has left so far.
    #[must_use]
    pub fn totals(&self) -> Totals {
        self.0.gateway.totals()
    }
}

impl Egress {
    fn new(options: Options) -> Arc<Self> {
        Arc::new(Self {
            interception: options.interception.clone(),
            gateway: Gateway::new(options),
            control: Control::default(),
            listening: AtomicUsize::new(0),
        })
    }

    /// The variables of all commands: what stands for the secrets, and where the certificates are.
    pub(crate) fn variables(&self) -> Vec<(String, String)> {
        let Some(interception) = &self.interception else {
            return Vec::new();
        };
        let placeholders = interception
            .placeholders()
            .map(|(name, placeholder)| (name.to_owned(), placeholder.to_owned()));
        let trust = TRUST_VARIABLES
            .iter()
            .map(|name| (*name, TRUST_FILE))
            .chain([(EXTRA_TRUST_VARIABLE, AUTHORITY_FILE)])
            .map(|(name, path)| (name.to_owned(), path.to_owned()));
        placeholders.chain(trust).collect()
    }

    /// The variables in which placeholders are.
    pub(crate) fn secret_names(&self) -> impl Iterator<Item = &str> {
        let placeholders = self.interception.iter().flat_map(|all| all.placeholders());
        placeholders.map(|(name, _)| name)
    }

    /// Waits, at most for `limit`, until all is told of a machine that is gone.
    pub(crate) fn settle(&self, limit: Duration) {
        let deadline = Instant::now() + limit;
        let is_busy =
            || self.gateway.connections() > 0 || self.listening.load(Ordering::Relaxed) > 0;
        while is_busy() && Instant::now() < deadline {
            thread::sleep(SETTLE_PERIOD);
        }
        self.gateway.tell_rest();
    }

    fn change(&self, change: impl FnOnce(&mut Policy)) {
        // The gate first hears of what the host already does.
        self.gateway.change(change);
        self.send_rules(None);
    }

    /// To the control stream that is; with `only`, if it is that one. A gate that does not take them has ended, or will be ended with its machine; the host's rules hold in any case.
    fn send_rules(&self, only: Option<&Arc<Stream>>) {
        self.control.tell(only, |is_first| {
            frame::encode(&self.rules(is_first), MAX_TO_AGENT_BYTES).ok()
        });
    }

    /// What the gate has to know; the certificates once, as they stay.
    fn rules(&self, is_first: bool) -> Rules {
        let policy = self.gateway.policy();
        let interception = self.interception.as_ref().filter(|_| is_first);
        let mut rules = Rules {
            trust: interception.map(|interception| Trust {
                authority: interception.authority_pem(),
                host_roots: interception.host_roots_pem().to_owned(),
            }),
            ..Rules::default()
        };
        for rule in policy.rules() {
            let ports = rule.ports().to_vec();
            match rule.pattern() {
                Pattern::Name(name) => rules.names.push(NameRule {
                    name: name.to_string(),
                    below: false,
                    ports,
                }),
                Pattern::Below(domain) => rules.names.push(NameRule {
                    name: domain.to_string(),
                    below: true,
                    ports,
                }),
                Pattern::Range(range) => rules.addresses.push(AddressRule {
                    address: range.network(),
                    prefix_bits: range.prefix_len(),
                    ports,
                }),
                // A kind of rule that this library does not know is the host's to decide on.
                _ => {}
            }
        }
        if self.gateway.has_decide() {
            let named = policy.rules().iter().flat_map(|rule| rule.ports());
            rules.every = DEFAULT_PORTS
                .iter()
                .chain(policy.raw_ports())
                .chain(named)
                .copied()
                .collect();
            rules.every.sort_unstable();
            rules.every.dedup();
        }
        rules
    }

    /// Takes a connection that a program wants to make.
    pub(crate) fn take(&self, stream: OwnedFd) {
        let first_words = |stream: &mut Timed<'_>| {
            let open: Open = frame::read(stream, MAX_GATE_FRAME_BYTES).map_err(io::Error::other)?;
            attempt(open).ok_or_else(|| io::ErrorKind::InvalidData.into())
        };
        self.gateway.take(stream.into(), first_words, &[CONNECTED]);
    }

    /// Takes the gate's control stream, in place of a former one: tells it the rules, and listens on a thread of its own. Never
    /// waits.
    pub(crate) fn take_control(self: &Arc<Self>, stream: OwnedFd, shared: &Arc<Shared>) {
        let stream = UnixStream::from(stream);
        let Ok(mut words) = stream.try_clone() else {
            return;
        };
        let stream = self.control.replace(stream);
        let (egress, shared) = (Arc::clone(self), Arc::clone(shared));
        // Without a thread the guest is not ready in time, which says it.
        self.listening.fetch_add(1, Ordering::Relaxed);
        let started = thread::Builder::new()
            .name("gate".to_owned())
            .spawn(move || {
                egress.send_rules(Some(&stream));
                while let Ok(word) = frame::read(&mut words, MAX_GATE_FRAME_BYTES) {
                    egress.gate_says(word, &shared);
                }
                egress.listening.fetch_sub(1, Ordering::Relaxed);
            });
        if started.is_err() {
            self.listening.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn gate_says(&self, word: FromGate, shared: &Shared) {
        match word {
            FromGate::Ready => shared.gate_is_ready(),
            FromGate::Failed { message } => shared.gate_failed(one_line(message.as_bytes())),
            FromGate::Refused(refused) => self.gate_refused(refused),
            _ => {}
        }
    }

    fn gate_refused(&self, Refused { open, why, others }: Refused) {
        let Some(attempt) = attempt(open) else {
            return self.gateway.count_refused(others.saturating_add(1));
        };
        let port = attempt.port;
        let why = match why {
            Refusal::NotAllowed => None,
            Refusal::Datagram => Some((
                Verdict::Denied,
                "UDP, and QUIC with it, does not leave; most programs take TCP then".to_owned(),
            )),
            Refusal::NoListener => Some((
                Verdict::Limited,
                format!(
                    "allowed, but the guest has its {MAX_GATE_LISTENERS} listeners: one for each allowed address and port, two for each \
                     port of a name that was asked for; use or allow fewer"
                ),
            )),
            Refusal::PortTaken => Some((
                Verdict::Failed,
                format!(
                    "a program in the guest listens on port {port} of all addresses, and has got it"
                ),
            )),
            Refusal::NoConnection => Some((
                Verdict::Limited,
                format!(
                    "more than {MAX_GATE_CONNECTIONS} connections of the guest at once, or no memory for one more"
                ),
            )),
            _ => Some((Verdict::Denied, "the guest has refused it".to_owned())),
        };
        let why = why
            .as_ref()
            .map(|(verdict, reason)| (*verdict, reason.as_str()));
        self.gateway.refused(&attempt, why, others);
    }
}

/// What the gate says, checked; `None` where it names neither a host nor an address.
fn attempt(open: Open) -> Option<Attempt> {
    let target = match open.target {
        protocol::gate::Target::Name(name) => Target::Name(HostName::parse(&name).ok()?),
        protocol::gate::Target::Address(address) => Target::Address(address.to_canonical()),
    };
    let process = open
        .process
        .map(|process| Process::new(process.pid, &process.name));
    Some(Attempt::new(target, open.port, process))
}

impl Shared {
    /// The gate's rules hold: what waited for them runs.
    fn gate_is_ready(&self) {
        let mut state = self.lock();
        if state.awaits_gate && matches!(state.phase, Phase::Booting) {
            state.awaits_gate = false;
            self.is_ready(&mut state, crate::clock::now_ns());
            drop(state);
            self.notify();
            // Its deadline is another one now.
            self.wake();
        }
    }

    fn gate_failed(&self, sentence: String) {
        // Refused only when the machine is gone already.
        let _ = self.request(Request::GateFailed(sentence));
    }

    /// A stream to a port of the guest's loopback.
    pub(crate) fn connect_inward(&self, port: u16) -> io::Result<UnixStream> {
        let (mut ours, theirs) = UnixStream::pair()?;
        self.request(Request::ConnectGate(theirs.into()))
            .map_err(|_| io::Error::from(io::ErrorKind::NotConnected))?;
        ours.set_read_timeout(Some(INWARD_LIMIT))?;
        frame::write(&mut ours, &Inward { port }, MAX_GATE_FRAME_BYTES).map_err(
            |error| match error {
                FrameError::Stream(error) => error,
                other => io::Error::other(other),
            },
        )?;
        let mut word = [0];
        match ours.read_exact(&mut word) {
            Ok(()) if word == [CONNECTED] => {}
            Ok(()) => return Err(io::ErrorKind::InvalidData.into()),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return Err(io::ErrorKind::ConnectionRefused.into());
            }
            Err(error) => return Err(error),
        }
        ours.set_read_timeout(None)?;
        Ok(ours)
    }
}
