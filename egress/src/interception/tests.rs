//! Whole connections through a gateway to real TLS servers.

mod ends;
mod http2;

use std::io::{Read, Write};
use std::net::{IpAddr, TcpListener};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rustls::pki_types::PrivatePkcs8KeyDer;
use rustls::pki_types::pem::PemObject;
use rustls::{RootCertStore, ServerConfig, StreamOwned};

use super::*;
use crate::audit::{Record, Verdict};
use crate::connect::Resolver;
use crate::gateway::{Attempt, Gateway, Options};
use crate::policy::Policy;

const VALUE: &str = "s3cr3t-value-of-the-host";

/// Every name is this host.
struct Here;

impl Resolver for Here {
    fn resolve(&self, _: &HostName) -> io::Result<Vec<IpAddr>> {
        Ok(vec![[127, 0, 0, 1].into()])
    }
}

/// A server, what it was sent, and a gateway of a sandbox that has a secret for it.
struct Case {
    gateway: Gateway,
    interception: Arc<Interception>,
    port: u16,
    received: Receiver<Vec<u8>>,
    records: Receiver<Record>,
}

fn key_and_certificate(names: &[&str]) -> (rcgen::KeyPair, rcgen::Certificate) {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::new(names).unwrap();
    params.is_ca = rcgen::IsCa::ExplicitNoCa;
    let certificate = params.self_signed(&key).unwrap();
    (key, certificate)
}

/// A server with a certificate for these names, and the certificate.
fn server_config(names: &[&str]) -> (ServerConfig, String) {
    let (key, certificate) = key_and_certificate(names);
    let key = PrivatePkcs8KeyDer::from(key.serialize_der());
    let config =
        ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate.der().clone()], key.into())
            .unwrap();
    (config, certificate.pem())
}

/// A connection as the server has it.
type AtServer = StreamOwned<ServerConnection, TcpStream>;

/// What serves each of them, and tells what it was sent.
type Serve = dyn Fn(&mut AtServer, &Sender<Vec<u8>>) + Send + Sync;

/// Answers each request, of which only the head is read and sent back in a field, with `answer`.
fn answering(answer: &'static str) -> Arc<Serve> {
    Arc::new(move |stream, sender| {
        while let Some(head) = read_head(stream, sender) {
            let token = head
                .lines()
                .find_map(|line| line.strip_prefix("X-Token: "))
                .unwrap_or_default();
            stream
                .write_all(answer.replace("TOKEN", token).as_bytes())
                .unwrap();
            stream.flush().unwrap();
        }
    })
}

/// All up to what ends as a head does.
fn read_head(stream: &mut AtServer, sender: &Sender<Vec<u8>>) -> Option<String> {
    let mut all = Vec::new();
    let mut chunk = [0; 4096];
    while !all.ends_with(b"\r\n\r\n") {
        let count = stream.read(&mut chunk).ok().filter(|count| *count > 0)?;
        all.extend_from_slice(&chunk[..count]);
        let _ = sender.send(chunk[..count].to_vec());
    }
    Some(String::from_utf8_lossy(&all).into_owned())
}

fn serve(config: Arc<ServerConfig>, serve: Arc<Serve>) -> (u16, Receiver<Vec<u8>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let (sender, received) = channel();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let (config, sender) = (Arc::clone(&config), sender.clone());
            let serve = Arc::clone(&serve);
            thread::spawn(move || {
                let tls = ServerConnection::new(config).unwrap();
                serve(&mut StreamOwned::new(tls, stream.unwrap()), &sender);
            });
        }
    });
    (port, received)
}

impl Case {
    /// With a server whose certificate is for these names, and is trusted or is not.
    fn new(names: &[&str], is_trusted: bool, answer: &'static str) -> Self {
        Self::serving(names, is_trusted, answering(answer))
    }

    fn serving(names: &[&str], is_trusted: bool, by: Arc<Serve>) -> Self {
        let (config, certificate) = server_config(names);
        let (port, received) = serve(Arc::new(config), by);
        let roots = if is_trusted {
            certificate
        } else {
            key_and_certificate(names).1.pem()
        };
        Self::before(port, received, &roots)
    }

    /// With this server, known by this certificate.
    fn before(port: u16, received: Receiver<Vec<u8>>, roots: &str) -> Self {
        let host = format!("a.example:{port}");
        let secret = Secret::new("TOKEN", &[&host], VALUE.as_bytes().to_vec()).unwrap();
        let mut policy = Policy::new();
        for rule in [
            host.clone(),
            format!("127.0.0.1:{port}"),
            format!("b.example:{port}"),
        ] {
            policy.allow(rule.parse().unwrap());
        }
        let interception = Arc::new(Interception::new(vec![secret], roots.as_bytes()).unwrap());
        let (sender, records) = channel();
        let gateway = Gateway::new(Options {
            policy,
            resolver: Arc::new(Here),
            sink: Some(Arc::new(move |record: &Record| {
                // A test that is over wants none.
                let _ = sender.send(record.clone());
            })),
            interception: Some(Arc::clone(&interception)),
            ..Options::default()
        });
        Self {
            gateway,
            interception,
            port,
            received,
            records,
        }
    }

    fn placeholder(&self) -> String {
        self.interception
            .placeholders()
            .next()
            .unwrap()
            .1
            .to_owned()
    }

    /// A program's connection with this SNI, which trusts the sandbox's authority alone.
    fn dial(&self, sni: &str) -> StreamOwned<ClientConnection, UnixStream> {
        let (program, ours) = UnixStream::pair().unwrap();
        self.dial_through(sni, program, ours)
    }

    /// The same through these two ends.
    fn dial_through(
        &self,
        sni: &str,
        program: UnixStream,
        ours: UnixStream,
    ) -> StreamOwned<ClientConnection, UnixStream> {
        self.take(ours);
        let name = ServerName::try_from(sni.to_owned()).unwrap();
        let config = Arc::new(self.client_config());
        StreamOwned::new(ClientConnection::new(config, name).unwrap(), program)
    }

    /// A program's stream, as the sandbox has it.
    fn take(&self, ours: UnixStream) {
        let attempt = Attempt {
            target: Target::Name(HostName::parse("a.example").unwrap()),
            port: self.port,
            process: None,
        };
        self.gateway.take(ours, move |_| Ok(attempt), &[]);
    }

    /// What a program trusts: the sandbox's authority alone.
    fn client_config(&self) -> ClientConfig {
        let mut roots = RootCertStore::empty();
        let pem = self.interception.authority_pem();
        roots
            .add(CertificateDer::from_pem_slice(pem.as_bytes()).unwrap())
            .unwrap();
        ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth()
    }

    fn request(&self, path: &str, token: &str) -> String {
        format!(
            "GET {path} HTTP/1.1\r\nHost: a.example:{}\r\nX-Token: {token}\r\n\r\n",
            self.port
        )
    }

    /// All that the server has been sent so far.
    fn received(&self) -> String {
        let all: Vec<u8> = self.received.try_iter().flatten().collect();
        String::from_utf8(all).unwrap()
    }

    /// What is on record, once the connection is over.
    fn record(&self) -> Record {
        self.records.recv_timeout(Duration::from_secs(20)).unwrap()
    }
}

const ANSWER: &str = "HTTP/1.1 200 OK\r\nX-Back: TOKEN\r\nContent-Length: 5\r\n\r\nhello";

/// As long as an answer with the token masked.
fn read_answer(stream: &mut impl Read) -> String {
    let mut answer = vec![0; ANSWER.len() - "TOKEN".len() + VALUE.len()];
    stream.read_exact(&mut answer).unwrap();
    String::from_utf8(answer).unwrap()
}

#[test]
fn the_server_gets_the_secret_and_the_program_gets_none_back() {
    let case = Case::new(&["a.example"], true, ANSWER);
    let mut stream = case.dial("a.example");
    let placeholder = case.placeholder();

    for path in ["/one", "/two"] {
        let path = format!("{path}?{placeholder}");
        stream
            .write_all(case.request(&path, &placeholder).as_bytes())
            .unwrap();
        let answer = read_answer(&mut stream);
        assert!(
            answer.contains(&format!("X-Back: {}\r\n", "*".repeat(VALUE.len()))),
            "{answer}"
        );
        assert!(answer.ends_with("hello"));
    }
    stream.conn.send_close_notify();
    stream.flush().unwrap();
    drop(stream);

    let received = case.received();
    assert_eq!(
        received.matches(&format!("X-Token: {VALUE}\r\n")).count(),
        2,
        "{received}"
    );
    assert_eq!(received.matches(&format!("/two?{placeholder} ")).count(), 1);
    let record = case.record();
    assert_eq!((record.verdict, &record.reason), (Verdict::Allowed, &None));
    assert!(record.bytes_in > 0 && record.bytes_out > 0);
    assert!(!record.json().contains(VALUE));
}

#[test]
fn a_server_whose_certificate_is_not_good_gets_nothing() {
    for (names, is_trusted) in [(["b.example"], true), (["a.example"], false)] {
        let case = Case::new(&names, is_trusted, ANSWER);
        let mut stream = case.dial("a.example");
        let request = case.request("/", &case.placeholder());
        let _ = stream.write_all(request.as_bytes());
        stream.read(&mut [0; 100]).unwrap_err();

        let record = case.record();
        assert_eq!(record.verdict, Verdict::Denied);
        let reason = record.reason.unwrap();
        assert!(
            reason.starts_with("the server's certificate is refused"),
            "{reason}"
        );
        assert_eq!(case.received(), "");
    }
}

#[test]
fn a_host_other_than_the_hello_names_ends_it_before_the_server_sees_it() {
    let case = Case::new(&["a.example"], true, ANSWER);
    let mut stream = case.dial("a.example");
    let good = case.request("/good", &case.placeholder());
    stream.write_all(good.as_bytes()).unwrap();
    read_answer(&mut stream);
    let bad = good
        .replace("Host: a.example", "Host: b.example")
        .replace("/good", "/bad");
    stream.write_all(bad.as_bytes()).unwrap();
    assert!(!matches!(stream.read(&mut [0; 100]), Ok(count) if count > 0));

    let record = case.record();
    assert_eq!(record.verdict, Verdict::Denied);
    let reason = record.reason.unwrap();
    assert!(
        reason.starts_with("another Host: the request is for 'b.example"),
        "{reason}"
    );
    assert!(!case.received().contains("/bad"));
}

#[test]
fn a_hello_for_another_host_and_what_is_no_tls_are_refused() {
    let case = Case::new(&["a.example", "b.example"], true, ANSWER);
    let _ = case.dial("b.example").write_all(b"x");
    let reason = case.record().reason.unwrap();
    assert!(reason.contains("another SNI"), "{reason}");

    let mut plain = case.dial("a.example").sock;
    let _ = plain.write_all(case.request("/", &case.placeholder()).as_bytes());
    let reason = case.record().reason.unwrap();
    assert!(reason.contains("not TLS"), "{reason}");
    assert_eq!(case.received(), "");
}

#[test]
fn a_program_that_does_not_trust_the_authority_is_named_as_the_cause() {
    let case = Case::new(&["a.example"], true, ANSWER);
    let other = Case::new(&["a.example"], true, ANSWER);
    let StreamOwned { conn, .. } = other.dial("a.example");
    let StreamOwned { sock, .. } = case.dial("a.example");
    StreamOwned::new(conn, sock).write_all(b"x").unwrap_err();

    let record = case.record();
    assert_eq!(record.verdict, Verdict::Failed);
    let reason = record.reason.unwrap();
    assert!(
        reason.contains("does not trust") || reason.contains("TLS fails"),
        "{reason}"
    );
}

#[test]
fn bytes_in_bulk_arrive_both_ways() {
    const SIZE: usize = 3_000_000;
    let text: String = ('a'..='q').cycle().take(SIZE).collect();
    let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {SIZE}\r\n\r\n{text}");
    let length = answer.len();
    let case = Case::new(
        &["a.example"],
        true,
        Box::leak(answer.clone().into_boxed_str()),
    );
    let mut stream = case.dial("a.example");
    let get = case.request("/after", "none");
    let post = get.replace("GET", "POST").replace(
        "X-Token: none",
        &format!("X-Token: {}\r\nContent-Length: {SIZE}", case.placeholder()),
    );

    // The server answers what ends as a head does.
    stream
        .write_all(format!("{post}{text}{get}").as_bytes())
        .unwrap();
    let mut back = vec![0; length];
    stream.read_exact(&mut back).unwrap();

    assert!(back == answer.as_bytes());
    let received = case.received();
    let get = get.replace("\r\n\r\n", "\r\nAccept-Encoding: identity\r\n\r\n");
    assert!(received.contains(VALUE) && received.ends_with(&format!("{text}{get}")));
}

#[test]
fn what_was_sent_over_one_connection_is_masked_on_another() {
    let last = Mutex::new(String::new());
    let case = Case::serving(
        &["a.example"],
        true,
        Arc::new(move |stream, sender| {
            while let Some(head) = read_head(stream, sender) {
                let credentials = head.lines().filter_map(|line| line.split_once(": "));
                let sent: Vec<&str> = credentials
                    .filter(|(name, _)| ["X-Token", "Authorization"].contains(name))
                    .map(|(_, value)| value)
                    .collect();
                let mut last = last.lock().unwrap();
                let answer = format!(
                    "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{last}",
                    last.len()
                );
                stream.write_all(answer.as_bytes()).unwrap();
                stream.flush().unwrap();
                *last = sent.join(",");
            }
        }),
    );
    let (mut one, mut other) = (case.dial("a.example"), case.dial("a.example"));
    let get = |stream: &mut StreamOwned<_, _>, request: &str, length: usize| {
        stream.write_all(request.as_bytes()).unwrap();
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n");
        let mut answer = vec![0; head.len() + length];
        stream.read_exact(&mut answer).unwrap();
        String::from_utf8(answer).unwrap().replace(&head, "")
    };
    let none = case.request("/", "none");
    // Both are there before anything is stored.
    get(&mut one, &none, 0);
    get(&mut other, &none, 4);

    let encoded = STANDARD.encode(format!("me:{}", case.placeholder()));
    let request = case.request("/", &case.placeholder()).replace(
        "\r\n\r\n",
        &format!("\r\nAuthorization: Basic {encoded}\r\n\r\n"),
    );
    get(&mut one, &request, 4);
    let form = STANDARD.encode(format!("me:{VALUE}")).len();
    let length = VALUE.len() + ",Basic ".len() + form;
    let expected = format!("{},Basic {}", "*".repeat(VALUE.len()), "*".repeat(form));
    assert_eq!(get(&mut other, &none, length), expected);
}

#[test]
fn two_secrets_of_one_name_are_refused_and_nothing_shows_a_value() {
    let secret = || Secret::new("TOKEN", &["a.example"], VALUE.as_bytes().to_vec()).unwrap();
    let error = Interception::new(vec![secret(), secret()], b"").unwrap_err();
    assert!(matches!(error, InterceptionError::Twice(_)));

    let interception = Interception::new(vec![secret()], b"").unwrap();
    assert!(!format!("{interception:?} {error:?} {error}").contains(VALUE));
    assert!(
        interception
            .authority_pem()
            .starts_with("-----BEGIN CERTIFICATE-----")
    );
}
