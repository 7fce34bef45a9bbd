//! What leaves a sandbox, as an application controls it: its own resolver, its own decisions, changes while it runs.

use std::io::{Read, Write};
use std::net::{IpAddr, TcpListener};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use sandvmm::egress::{Decision, HostName, Record, Resolver, Verdict};
use sandvmm::{Sandbox, SandboxBuilder};

use crate::{HUNG_AFTER, Test, printed};

pub(crate) const TESTS: &[Test] = &[
    ("rules_change_while_the_sandbox_runs", rules_change),
    (
        "an_application_decides_on_each_connection",
        application_decides,
    ),
    ("a_resolver_that_rebinds_gets_nowhere", rebinding),
    ("a_stream_leads_to_a_port_of_the_guest", streams_in),
];

/// Connects to each `HOST` of the arguments on a port, and says what it reads to the end.
const CONNECT: &str = "
import socket, sys
def read(host, port):
    try:
        with socket.create_connection((host, port), 60) as stream:
            return stream.makefile().read()
    except OSError as error:
        return type(error).__name__
";

/// Answers each name with the next address, and the last one from then on.
#[derive(Debug)]
struct Answers(Mutex<Vec<IpAddr>>);

impl Resolver for Answers {
    fn resolve(&self, _: &HostName) -> std::io::Result<Vec<IpAddr>> {
        let mut left = self.0.lock().unwrap();
        let next = left[0];
        if left.len() > 1 {
            left.remove(0);
        }
        Ok(vec![next])
    }
}

fn answers(addresses: &[&str]) -> Answers {
    Answers(Mutex::new(
        addresses.iter().map(|text| text.parse().unwrap()).collect(),
    ))
}

/// A server on this host's loopback that says one word; its port.
fn server() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let mut stream = stream;
            let _ = stream.write_all(b"hello");
        }
    });
    port
}

fn builder(port: u16) -> SandboxBuilder {
    Sandbox::builder()
        .timeout(Some(HUNG_AFTER))
        .allow_host(format!("a.test:{port}"))
        .allow_host(format!("127.0.0.1:{port}"))
        .raw_port(port)
}

fn rules_change() {
    let port = server();
    let sandbox = builder(port)
        .egress_resolver(answers(&["127.0.0.1"]))
        .start()
        .unwrap();
    let read = |host: &str| {
        printed(
            &sandbox,
            "python3",
            &format!("{CONNECT}print(read('{host}', {port}))"),
        )
    };
    let egress = sandbox.egress().unwrap();

    assert_eq!(read("a.test"), "hello\n");
    assert_eq!(read("b.test"), "ConnectionRefusedError\n");
    egress.allow_host(&format!("b.test:{port}")).unwrap();
    assert_eq!(read("b.test"), "hello\n");
    egress.forbid_host(&format!("a.test:{port}")).unwrap();
    assert_eq!(read("a.test"), "ConnectionRefusedError\n");
    assert_eq!(egress.rules().len(), 2);
    sandbox.end();
    egress.settle(Duration::from_secs(10));
    let totals = egress.totals();
    assert_eq!((totals.allowed, totals.denied, totals.bytes_in), (2, 2, 10));
}

fn application_decides() {
    let port = server();
    let (sender, asked) = channel();
    let (told, records) = channel::<Record>();
    let sandbox = builder(port)
        .egress_resolver(answers(&["127.0.0.1"]))
        .decide_egress(move |attempt, rule| {
            let name = attempt.target.to_string();
            let is_known = rule.is_some();
            let process = attempt.process.clone().map(|process| process.name);
            let _ = sender.send((name.clone(), attempt.port, process, is_known));
            if name == "c.test" {
                Decision::Allow
            } else {
                Decision::Deny("only c.test".to_owned())
            }
        })
        .on_egress(move |record| {
            let _ = told.send(record.clone());
        })
        .start()
        .unwrap();

    let code = format!("{CONNECT}print(read('c.test', {port}), read('a.test', {port}))");
    assert_eq!(
        printed(&sandbox, "python3", &code),
        "hello ConnectionResetError\n"
    );

    let python = Some("python3".to_owned());
    let asked: Vec<_> = asked.try_iter().collect();
    assert_eq!(
        asked,
        [
            ("c.test".to_owned(), port, python.clone(), false),
            ("a.test".to_owned(), port, python, true)
        ]
    );
    let records: Vec<Record> = (0..2)
        .map(|_| records.recv_timeout(HUNG_AFTER).unwrap())
        .collect();
    assert_eq!(records[0].verdict, Verdict::Allowed);
    assert_eq!(records[1].verdict, Verdict::Denied);
    assert_eq!(records[1].reason.as_deref(), Some("only c.test"));
}

fn rebinding() {
    let port = server();
    let reasons = Arc::new(Mutex::new(Vec::new()));
    let told = Arc::clone(&reasons);
    let sandbox = builder(port)
        .egress_resolver(answers(&["127.0.0.1", "169.254.169.254"]))
        .on_egress(move |record| told.lock().unwrap().extend(record.reason.clone()))
        .start()
        .unwrap();

    let code = format!("{CONNECT}print(read('a.test', {port}), read('a.test', {port}))");

    assert_eq!(
        printed(&sandbox, "python3", &code),
        "hello ConnectionResetError\n"
    );
    let reasons = reasons.lock().unwrap();
    assert_eq!(reasons.len(), 1);
    assert!(
        reasons[0].starts_with("it stands for 169.254.169.254, which is link-local"),
        "{reasons:?}"
    );
}

fn streams_in() {
    let sandbox = Sandbox::builder()
        .timeout(Some(HUNG_AFTER))
        .ports_in(true)
        .start()
        .unwrap();
    let refused = sandbox.connect(8000).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
    let mut server = sandbox.command("python3");
    let child = server
        .args(["-m", "http.server", "--bind", "127.0.0.1", "8000"])
        .spawn()
        .unwrap();
    let deadline = Instant::now() + HUNG_AFTER;
    let mut stream = loop {
        match sandbox.connect(8000) {
            Ok(stream) => break stream,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        thread::sleep(Duration::from_millis(100));
    };
    stream.write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.contains("Directory listing"), "{answer}");
    drop(child);
}
