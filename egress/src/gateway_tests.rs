//! Gateways with real sockets on this machine's loopback, which the policies of these tests name.

use std::io::{Read, Write};
use std::net::{IpAddr, TcpListener};
use std::sync::mpsc::{Receiver, channel};

use super::*;
use crate::name::HostName;

const CONNECTED: &[u8] = b"+";

/// Every name is this machine.
struct Loopback;

impl Resolver for Loopback {
    fn resolve(&self, _: &HostName) -> io::Result<Vec<IpAddr>> {
        Ok(vec!["127.0.0.1".parse().unwrap()])
    }
}

struct Rig {
    gateway: Gateway,
    records: Receiver<Record>,
    listener: TcpListener,
    port: u16,
}

impl Rig {
    /// One whose policy allows `a.example` on a port where this test listens.
    fn new(is_raw: bool, change: impl FnOnce(&mut Options)) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let mut policy = Policy::new();
        policy.allow(format!("a.example:{port}").parse().unwrap());
        policy.allow(format!("127.0.0.1:{port}").parse().unwrap());
        if is_raw {
            policy.raw_port(port);
        }
        let (sender, records) = channel();
        let mut options = Options {
            sandbox: "test".to_owned(),
            policy,
            resolver: Arc::new(Loopback),
            sink: Some(Arc::new(move |record: &Record| {
                let _ = sender.send(record.clone());
            })),
            ..Options::default()
        };
        change(&mut options);
        Self {
            gateway: Gateway::new(options),
            records,
            listener,
            port,
        }
    }

    fn attempt(&self, host: &str) -> Attempt {
        Attempt {
            target: match host.parse() {
                Ok(address) => Target::Address(address),
                Err(_) => Target::Name(HostName::parse(host).unwrap()),
            },
            port: self.port,
            process: Some(Process::new(7, "curl")),
        }
    }

    fn open(&self, host: &str) -> UnixStream {
        let (client, guest) = UnixStream::pair().unwrap();
        let attempt = self.attempt(host);
        self.gateway.take(guest, move |_| Ok(attempt), CONNECTED);
        client
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        client
    }

    fn record(&self) -> Record {
        self.records.recv_timeout(Duration::from_secs(20)).unwrap()
    }
}

fn rest(mut stream: &UnixStream) -> Vec<u8> {
    let mut rest = Vec::new();
    // A reset says the same as an end.
    let _ = stream.read_to_end(&mut rest);
    rest
}

#[test]
fn an_allowed_connection_is_carried_and_told() {
    let rig = Rig::new(false, |_| {});
    let mut client = rig.open("a.example");
    let request = format!("GET / HTTP/1.1\r\nHost: a.example:{}\r\n\r\n", rig.port);
    client.write_all(request.as_bytes()).unwrap();
    let (mut server, _) = rig.listener.accept().unwrap();
    let mut received = vec![0; request.len()];
    server.read_exact(&mut received).unwrap();
    server.write_all(b"answer").unwrap();
    drop(server);

    assert_eq!(rest(&client), b"+answer");
    drop(client);
    let record = rig.record();
    assert_eq!(received, request.as_bytes());
    assert_eq!(record.verdict, Verdict::Allowed);
    assert_eq!(record.rule, Some(format!("a.example:{}", rig.port)));
    assert_eq!(record.address, Some("127.0.0.1".parse().unwrap()));
    assert_eq!(
        (record.bytes_out, record.bytes_in),
        (request.len() as u64, 6)
    );
    assert_eq!(record.process, Some(Process::new(7, "curl")));
    assert_eq!(rig.gateway.totals().allowed, 1);
}

#[test]
fn what_is_not_allowed_is_closed_at_once_and_nothing_is_resolved() {
    struct Never;
    impl Resolver for Never {
        fn resolve(&self, _: &HostName) -> io::Result<Vec<IpAddr>> {
            panic!("a name left that was not allowed");
        }
    }
    let rig = Rig::new(false, |options| options.resolver = Arc::new(Never));
    for host in [
        "b.example",
        "aa.example",
        "secret-bytes.a.example",
        "127.0.0.2",
        "169.254.169.254",
        "::1",
    ] {
        let client = rig.open(host);
        assert_eq!(rest(&client), b"", "{host}");
        let record = rig.record();
        assert_eq!(
            (record.verdict, record.host.as_str()),
            (Verdict::Denied, host)
        );
        assert!(
            record.line().contains("not allowed; add --allow-host"),
            "{}",
            record.line()
        );
    }
}

#[test]
fn a_name_is_asked_for_once_a_connection_and_behind_its_checks() {
    struct Counting(Arc<AtomicUsize>);
    impl Resolver for Counting {
        fn resolve(&self, name: &HostName) -> io::Result<Vec<IpAddr>> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Loopback.resolve(name)
        }
    }
    let asked = Arc::new(AtomicUsize::new(0));
    let resolver = Arc::new(Counting(Arc::clone(&asked)));
    let rig = Rig::new(false, |options| options.resolver = resolver);
    for (host, times) in [("b.example", 0), ("a.example", 1), ("b.example", 1)] {
        let mut client = rig.open("a.example");
        let request = format!("GET / HTTP/1.1\r\nHost: {host}:{}\r\n\r\n", rig.port);
        client.write_all(request.as_bytes()).unwrap();
        client.shutdown(std::net::Shutdown::Write).unwrap();
        if host == "a.example" {
            drop(rig.listener.accept().unwrap());
        }
        rest(&client);
        rig.record();
        assert_eq!(asked.load(Ordering::Relaxed), times, "{host}");
    }
}

#[test]
fn words_for_another_host_never_reach_the_server() {
    let rig = Rig::new(false, |_| {});
    let port = rig.port;
    for words in [
        "GET / HTTP/1.1\r\nHost: b.example\r\n\r\n".to_owned(),
        format!("CONNECT a.example:{port} HTTP/1.1\r\nHost: a.example\r\n\r\n"),
        "SSH-2.0-x\r\n\r\n".to_owned(),
    ] {
        let mut client = rig.open("a.example");
        client.write_all(words.as_bytes()).unwrap();
        assert_eq!(rest(&client), b"", "{words}");
        assert_eq!(rig.record().verdict, Verdict::Denied, "{words}");
    }
    rig.listener.set_nonblocking(true).unwrap();
    rig.listener.accept().unwrap_err();
}

#[test]
fn a_raw_port_carries_anything_and_the_server_may_speak_first() {
    let rig = Rig::new(true, |_| {});
    let client = rig.open("a.example");
    let (mut server, _) = rig.listener.accept().unwrap();
    server.write_all(b"220 hello\r\n").unwrap();
    drop(server);
    assert_eq!(rest(&client), b"+220 hello\r\n");
}

#[test]
fn the_policy_changes_while_it_runs() {
    let rig = Rig::new(true, |_| {});
    let rule = format!("b.example:{}", rig.port);
    assert_eq!(rest(&rig.open("b.example")), b"");
    rig.gateway.change(|policy| {
        policy.allow(rule.parse().unwrap());
    });
    let client = rig.open("b.example");
    drop(rig.listener.accept().unwrap());
    assert_eq!(rest(&client), b"+");
    rig.gateway.change(|policy| {
        policy.forbid(&rule.parse().unwrap());
    });
    assert_eq!(rest(&rig.open("b.example")), b"");
}

#[test]
fn an_application_decides_with_name_port_and_process() {
    let rig = Rig::new(true, |options| {
        options.decide = Some(Arc::new(|attempt, rule| {
            let is_curl = attempt
                .process
                .as_ref()
                .is_some_and(|process| process.name == "curl");
            if is_curl && attempt.target.to_string() == "c.example" && rule.is_none() {
                Decision::Allow
            } else {
                Decision::Deny("only curl, only c.example".to_owned())
            }
        }));
    });
    let client = rig.open("c.example");
    drop(rig.listener.accept().unwrap());
    assert_eq!(rest(&client), b"+");
    drop(client);
    assert_eq!(rig.record().verdict, Verdict::Allowed);
    assert_eq!(rest(&rig.open("a.example")), b"");
    assert_eq!(rig.record().reason.unwrap(), "only curl, only c.example");
}

#[test]
fn connections_at_one_time_are_bounded_and_places_come_back() {
    let rig = Rig::new(true, |options| options.limits.connections = 3);
    let mut clients = Vec::new();
    for _ in 0..3 {
        let mut client = rig.open("a.example");
        let mut byte = [0];
        client.read_exact(&mut byte).unwrap();
        clients.push((client, rig.listener.accept().unwrap().0));
    }
    assert_eq!(rest(&rig.open("a.example")), b"");
    let above = rig.record();
    assert_eq!(above.verdict, Verdict::Limited);
    assert_eq!(
        above.line(),
        format!(
            "denied: a.example:{} (more than 3 connections at once)",
            rig.port
        )
    );
    assert_eq!(above.process, Some(Process::new(7, "curl")));
    clients.pop();
    rig.record();
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut byte = [0];
    // The place is given back a moment after the record.
    while rig.open("a.example").read_exact(&mut byte).is_err() {
        assert!(Instant::now() < deadline);
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn attempts_in_a_second_are_bounded_and_told_once() {
    let rig = Rig::new(true, |options| options.limits.attempts_per_second = 5);
    for _ in 0..200 {
        rig.gateway.refused(&rig.attempt("b.example"), None, 1);
    }
    rig.gateway.tell_rest();
    let told: Vec<Record> = rig.records.try_iter().collect();
    assert!((12..30).contains(&told.len()), "{}", told.len());
    let above = told
        .iter()
        .find(|record| record.verdict == Verdict::Limited)
        .unwrap();
    let reason = above.reason.as_deref().unwrap();
    assert!(
        reason.starts_with("more than 5 attempts a second"),
        "{reason}"
    );
    let all: u64 = told.iter().map(|record| 1 + record.unrecorded).sum();
    assert_eq!((all, rig.gateway.totals().denied), (400, 400));
}

#[test]
fn what_the_guest_has_refused_has_its_reason() {
    let rig = Rig::new(true, |_| {});
    let attempt = rig.attempt("a.example");
    rig.gateway.refused(&attempt, None, 0);
    let record = rig.record();
    let reason = format!("not allowed; add --allow-host a.example:{}", rig.port);
    assert_eq!(
        (record.verdict, record.reason),
        (Verdict::Denied, Some(reason))
    );

    rig.gateway
        .refused(&attempt, Some((Verdict::Limited, "no room")), 3);
    let record = rig.record();
    assert_eq!((record.verdict, record.unrecorded), (Verdict::Limited, 3));
    assert_eq!(record.reason.as_deref(), Some("no room"));
}

#[test]
fn a_flood_above_the_bound_of_connections_is_read_within_a_bound_and_counted() {
    let rig = Rig::new(true, |options| options.limits.connections = 0);
    // None of them says where to.
    let silent: Vec<UnixStream> = (0..100)
        .map(|_| {
            let (client, guest) = UnixStream::pair().unwrap();
            rig.gateway.take(
                guest,
                |stream| {
                    stream.read_exact(&mut [0])?;
                    Err(io::ErrorKind::InvalidData.into())
                },
                CONNECTED,
            );
            client
        })
        .collect();
    let denied = |count: u64| {
        let deadline = Instant::now() + Duration::from_secs(20);
        while rig.gateway.totals().denied < count && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(5));
        }
        rig.gateway.totals().denied
    };
    assert_eq!(rig.gateway.connections(), REFUSING_PLACES);
    assert_eq!(denied(1), 100 - REFUSING_PLACES as u64);
    for mut client in silent {
        let _ = client.write_all(b".");
    }
    // What says no place is counted as well.
    assert_eq!(denied(100), 100);
    assert_eq!(rig.gateway.totals().unrecorded, 100);
}

#[test]
fn a_client_that_says_nothing_is_not_waited_for_for_ever() {
    let rig = Rig::new(false, |_| {});
    let client = rig.open("a.example");
    client.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(rest(&client), b"");
    let record = rig.record();
    assert_eq!(record.verdict, Verdict::Failed);
    assert_eq!(record.address, None);
}

#[test]
fn the_bytes_of_all_connections_are_bounded_together() {
    let rig = Rig::new(true, |options| options.limits.bytes = 100_000);
    let mut client = rig.open("a.example");
    let (server, _) = rig.listener.accept().unwrap();
    let reader = thread::spawn(move || {
        let mut received = Vec::new();
        let mut server = server;
        let _ = server.read_to_end(&mut received);
        received.len()
    });
    let _ = client.write_all(&vec![0; 1_000_000]);
    assert!(reader.join().unwrap() <= 100_000);
    assert_eq!(
        rig.record().reason.unwrap(),
        "the sandbox's bytes are used up"
    );
}

#[test]
fn where_to_go_is_said_in_time_however_slowly_it_is_said() {
    // Another second for each byte would go on for ever.
    let rig = Rig::new(false, |_| {});
    let (mut client, guest) = UnixStream::pair().unwrap();
    let begun = Instant::now();
    rig.gateway.take(
        guest,
        |stream| {
            let mut word = [0; 600];
            stream.read_exact(&mut word)?;
            Err(io::ErrorKind::InvalidData.into())
        },
        CONNECTED,
    );

    while client.write_all(b".").is_ok() && begun.elapsed() < FIRST_WORDS_LIMIT * 3 {
        thread::sleep(Duration::from_millis(500));
    }

    let took = begun.elapsed();
    while rig.gateway.connections() > 0 && begun.elapsed() < FIRST_WORDS_LIMIT * 3 {
        thread::sleep(Duration::from_millis(5));
    }
    assert!(
        (FIRST_WORDS_LIMIT..FIRST_WORDS_LIMIT * 2).contains(&took),
        "{took:?}"
    );
    assert_eq!(rig.gateway.connections(), 0);
}

#[test]
fn a_clients_first_words_are_waited_for_in_all_and_not_for_each_of_them() {
    let rig = Rig::new(false, |_| {});
    let mut client = rig.open("a.example");
    let begun = Instant::now();

    client.write_all(b"GET /").unwrap();
    while client.write_all(b"x").is_ok() && begun.elapsed() < FIRST_WORDS_LIMIT * 3 {
        thread::sleep(Duration::from_millis(500));
    }

    let took = begun.elapsed();
    assert!(
        (FIRST_WORDS_LIMIT..FIRST_WORDS_LIMIT * 2).contains(&took),
        "{took:?}"
    );
    let record = rig.record();
    assert_eq!(record.verdict, Verdict::Failed);
    assert!(record.reason.unwrap().ends_with("first words in time"));
}
