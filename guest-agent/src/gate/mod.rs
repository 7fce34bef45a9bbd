//! The gate: the process through which connections leave and enter, started when the host wants one.
//!
//! Every address is made this guest's own (`routes`). Names are answered with addresses that mean something here alone
//! ([`dns`], [`names`]); for those that the rules allow there are sockets that listen (`listeners`), and each connection
//! becomes a stream to the host with the name in front (`carry`). Everything else the kernel refuses at once, and the
//! host is told (`knocks`, `refusals`). The host decides on each connection again: what is here is not trusted.

mod carry;
pub mod dns;
mod knocks;
mod listeners;
pub mod names;
mod process;
mod refusals;
mod routes;
mod streams;
mod trust;

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use protocol::frame::{self, FrameError, MAX_TO_AGENT_BYTES};
use protocol::gate::{FromGate, MAX_GATE_FRAME_BYTES, Open, Process, Refusal, Refused, Rules};
use rustix::event::epoll::{self, Event};
use socket2::Socket;

use crate::limits::MAX_EVENTS;
use knocks::Knocks;
use listeners::Listeners;
use names::Names;
use refusals::{Kind, Refusals, Trial};
use streams::Streams;

/// Name that the binary is started under (`argv[0]`) to be the gate.
pub const NAME: &str = "sandvmm-gate";

/// Where questions about names are taken.
const DNS: (Ipv4Addr, u16) = (Ipv4Addr::LOCALHOST, 53);

/// How long a question over TCP may take to come whole; one is taken after another.
const DNS_TCP_LIMIT: Duration = Duration::from_secs(2);

/// Stack of the gate's threads.
const STACK_BYTES: usize = 128 << 10;

/// What one of the gate's threads does until the gate ends.
type Work = Box<dyn FnOnce(&Gate) + Send>;

/// What the threads share.
#[derive(Debug)]
struct Gate {
    table: Mutex<Table>,
    control: Mutex<Socket>,
    refusals: Refusals,
    streams: Streams,
}

#[derive(Debug)]
struct Table {
    names: Names,
    rules: Rules,
    listeners: Listeners,
}

/// The whole life of the gate: it ends when the host is gone, or is another one.
#[must_use]
pub fn main() -> ExitCode {
    let Ok(control) = streams::dial_control() else {
        return ExitCode::FAILURE;
    };
    let Ok(mut words) = control.try_clone() else {
        return ExitCode::FAILURE;
    };
    if let Err((step, error)) = run(control) {
        let message = format!("The guest has no way out: {step}: {error}");
        // A host that is gone needs no reason.
        let _ = frame::write(
            &mut words,
            &FromGate::Failed { message },
            MAX_GATE_FRAME_BYTES,
        );
    }
    ExitCode::SUCCESS
}

fn run(control: Socket) -> Result<(), (&'static str, io::Error)> {
    let at = |step: &'static str| move |error: io::Error| (step, error);
    routes::set_up().map_err(at("its routes can't be set"))?;
    let udp = UdpSocket::bind(DNS).map_err(at("port 53 can't be taken"))?;
    let tcp = TcpListener::bind(DNS).map_err(at("port 53 can't be taken"))?;
    routes::set_resolver().map_err(at("/etc/resolv.conf can't be written"))?;
    let knocks = Knocks::new().map_err(at("refused connections can't be seen"))?;
    let datagrams = Knocks::datagrams().map_err(at("refused datagrams can't be seen"))?;
    let inward = streams::listen().map_err(at("streams can't be taken"))?;
    let listeners = Listeners::new().map_err(at("connections can't be taken"))?;
    let events = listeners
        .epoll()
        .map_err(at("connections can't be taken"))?;
    let mut orders = control.try_clone().map_err(at("its stream is no stream"))?;
    let gate = Arc::new(Gate {
        table: Mutex::new(Table {
            names: Names::default(),
            rules: Rules::default(),
            listeners,
        }),
        control: Mutex::new(control),
        refusals: Refusals::default(),
        streams: Streams::default(),
    });
    let threads: [Work; 7] = [
        Box::new(move |gate| gate.answer_udp(&udp)),
        Box::new(move |gate| gate.answer_tcp(&tcp)),
        Box::new(move |gate| gate.watch(&knocks)),
        Box::new(move |gate| gate.watch_datagrams(&datagrams)),
        Box::new(|gate| gate.tell_what_was_counted()),
        Box::new(move |gate| gate.take(&events)),
        Box::new(move |gate| gate.streams.take_inward(&inward)),
    ];
    for work in threads {
        let gate = Arc::clone(&gate);
        thread::Builder::new()
            .stack_size(STACK_BYTES)
            .spawn(move || work(&gate))
            .map_err(at("there is no room for its threads"))?;
    }
    gate.obey(&mut orders)
        .map_err(|error| ("the host sent no rules", io::Error::other(error)))
}

impl Gate {
    /// Takes rules from the host until it is gone.
    fn obey(&self, orders: &mut Socket) -> Result<(), FrameError> {
        loop {
            let rules: Rules = match frame::read(orders, MAX_TO_AGENT_BYTES) {
                Ok(rules) => rules,
                Err(FrameError::Ended | FrameError::Stream(_)) => return Ok(()),
                Err(error) => return Err(error),
            };
            if let Some(trust) = &rules.trust
                && let Err(error) = trust::install(trust)
            {
                let message = format!("The sandbox's certificate can't be installed: {error}");
                self.tell(&FromGate::Failed { message });
                return Ok(());
            }
            {
                let mut table = lock(&self.table);
                let Table {
                    names, listeners, ..
                } = &mut *table;
                listeners.set(&rules, names);
                table.rules = rules;
            }
            self.tell(&FromGate::Ready);
        }
    }

    /// A host that is gone is noticed where its orders are read.
    fn tell(&self, word: &FromGate) {
        let _ = frame::write(&mut *lock(&self.control), word, MAX_GATE_FRAME_BYTES);
    }

    fn answer(&self, question: &[u8]) -> Option<Vec<u8>> {
        dns::answer(question, |name| {
            let mut table = lock(&self.table);
            let Table {
                names,
                rules,
                listeners,
            } = &mut *table;
            let number = names.number(name)?;
            let is_allowed = listeners.add_name(rules, number, name);
            Some(dns::Addresses {
                v4: names::v4(number),
                // What is refused is seen over IPv4 alone.
                v6: is_allowed.then(|| names::v6(number)),
            })
        })
    }

    fn answer_udp(&self, socket: &UdpSocket) {
        let mut question = [0; dns::MAX_QUESTION_BYTES + 1];
        loop {
            let Ok((count, from)) = socket.recv_from(&mut question) else {
                continue;
            };
            if let Some(answer) = self.answer(question.get(..count).unwrap_or_default()) {
                // Who asked and went away asks again or not.
                let _ = socket.send_to(&answer, from);
            }
        }
    }

    fn answer_tcp(&self, listener: &TcpListener) {
        for stream in listener.incoming().flatten() {
            // One that breaks off is not answered.
            let _ = self.answer_stream(stream);
        }
    }

    /// One question, two bytes of length in front of it and of the answer (RFC 1035 §4.2.2).
    fn answer_stream(&self, mut stream: TcpStream) -> io::Result<()> {
        stream.set_read_timeout(Some(DNS_TCP_LIMIT))?;
        stream.set_write_timeout(Some(DNS_TCP_LIMIT))?;
        let mut length = [0; 2];
        stream.read_exact(&mut length)?;
        let length = usize::from(u16::from_be_bytes(length));
        if length > dns::MAX_QUESTION_BYTES {
            return Ok(());
        }
        let mut question = vec![0; length];
        stream.read_exact(&mut question)?;
        let Some(answer) = self.answer(&question) else {
            return Ok(());
        };
        let length = u16::try_from(answer.len()).map_err(io::Error::other)?;
        stream.write_all(&[&length.to_be_bytes()[..], &answer].concat())
    }

    /// Sees the connections that the kernel refuses. Their sockets are gone already, and nothing tells whose they were.
    fn watch(&self, knocks: &Knocks) {
        while let Ok(knock) = knocks.next() {
            let Some(knock) = knock.filter(|knock| knock.to.ip() != names::OWN_V4) else {
                continue;
            };
            if !lock(&self.table).listeners.takes(knock.to) {
                self.refused(Kind::Connection, knock.to, || None);
            }
        }
    }

    /// Sees datagrams, none of which leaves.
    fn watch_datagrams(&self, knocks: &Knocks) {
        while let Ok(knock) = knocks.next() {
            let Some(knock) = knock.filter(|knock| knock.to.ip() != names::OWN_V4) else {
                continue;
            };
            self.refused(Kind::Datagram, knock.to, || {
                process::of_datagrams(knock.from_port)
            });
        }
    }

    /// Tells the host of what was refused, or counts it.
    fn refused(&self, kind: Kind, to: SocketAddr, process: impl FnOnce() -> Option<Process>) {
        let trial = Trial { kind, to };
        if let Some(others) = self.refusals.take(trial, Instant::now()) {
            self.tell_refused(trial, process(), others);
        }
    }

    /// Tells the host of what was counted and nothing else has told of. Of the last of them it is not known any more whose it was.
    fn tell_what_was_counted(&self) {
        loop {
            let (trial, others) = self.refusals.wait();
            self.tell_refused(trial, None, others);
        }
    }

    fn tell_refused(&self, trial: Trial, process: Option<Process>, others: u32) {
        let Trial { kind, to } = trial;
        let (target, why) = {
            let mut table = lock(&self.table);
            let Table {
                names,
                rules,
                listeners,
            } = &mut *table;
            let why = match kind {
                Kind::Connection => listeners.refusal(rules, names, to),
                Kind::Datagram => Refusal::Datagram,
                Kind::Taken => Refusal::NoConnection,
            };
            (names.target(to.ip()), why)
        };
        let port = to.port();
        let open = Open {
            target,
            port,
            process,
        };
        self.tell(&FromGate::Refused(Refused { open, why, others }));
    }

    /// Takes programs' connections.
    fn take(&self, events: &OwnedFd) {
        loop {
            let mut found: Vec<Event> = Vec::with_capacity(MAX_EVENTS);
            // An interruption finds nothing.
            let _ = epoll::wait(events, rustix::buffer::spare_capacity(&mut found), None);
            for event in found {
                let number = event.data.u64();
                let Some(program) = lock(&self.table).listeners.accept(number) else {
                    continue;
                };
                let (Ok(to), Ok(from)) = (program.local_addr(), program.peer_addr()) else {
                    continue;
                };
                let Some(place) = self.streams.place() else {
                    self.refused(Kind::Taken, to, || {
                        process::of_socket(from.port(), to.port())
                    });
                    streams::reset(&program);
                    continue;
                };
                let target = lock(&self.table).names.target(to.ip());
                if !self.streams.take_outward(place, program, target, to.port()) {
                    self.refused(Kind::Taken, to, || None);
                }
            }
        }
    }
}

/// A panic while it was held ends the gate anyway.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a socket address can only be this guest's own loopback.
fn is_loopback(address: SocketAddr) -> bool {
    address.ip().to_canonical().is_loopback()
}
