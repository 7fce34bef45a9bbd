//! Targets `tls`, `http`, `dns` and `answers`: what is read of a guest's connections before any of it leaves, of its programs' questions,
//! and of what comes back from a server that has a secret.
//!
//! Checked: what passes is for the host that was allowed, whatever the bytes; pieces make no difference; nothing passes that was not
//! there; a question is answered once, by one name, in bounded bytes; no secret comes back in an answer, and what passes of one is understood again.

use egress::guard::Guard;
use egress::http::HttpGuard;
use egress::interception::answers::{AnswerError, Answers, Asked};
use egress::name::HostName;
use egress::policy::Target;
use egress::tls;
use guest_agent::gate::dns::{self, Addresses};

use crate::Seeds;
use crate::input::Input;

/// The host that the connection is for.
const HOST: &str = "a.example";

/// Longest answer to a question, in bytes: the question's name, and one record of each kind.
const ANSWER_BYTES_MAX: usize = dns::MAX_QUESTION_BYTES + 128;

fn target() -> Target {
    Target::Name(HostName::parse(HOST).expect("it is a name"))
}

/// Runs the target `tls`.
pub fn run_tls(data: &[u8]) {
    let mut input = Input::new(data);
    let size = usize::from(input.u8()) + 1;
    let bytes = input.rest();
    let whole = tls::client_hello(bytes);
    if let Ok(Some(hello)) = &whole {
        assert!(hello.length <= bytes.len());
        assert!(hello.name.as_ref().is_none_or(|name| name.is_ascii()));
        // What follows makes no other hello of it, and what is missing no hello.
        let longer = [bytes, b"what follows"].concat();
        assert_eq!(
            tls::client_hello(&longer).as_ref(),
            Ok(&Some(hello.clone()))
        );
        assert_eq!(tls::client_hello(&bytes[..hello.length - 1]), Ok(None));
    }
    let _ = (tls::wants_retry(bytes), tls::change_cipher_spec(bytes));

    let mut guard = Guard::new(&target(), 443, false);
    let (mut held, mut passed) = (Vec::new(), Vec::new());
    for piece in bytes.chunks(size) {
        held.extend_from_slice(piece);
        match guard.client(&held) {
            Ok(count) => passed.extend(held.drain(..count)),
            Err(_) => break,
        }
    }
    // The server has not answered: what has passed is one hello, for this host.
    if !passed.is_empty() {
        let hello = tls::client_hello(&passed).ok().flatten();
        let hello = hello.expect("what has passed is a hello");
        assert_eq!(hello.length, passed.len());
        assert!(!hello.is_hidden);
        let name = HostName::parse(&hello.name.expect("it names a host"));
        assert_eq!(name.expect("it is a name").as_str(), HOST);
    }
}

/// Runs the target `http`.
pub fn run_http(data: &[u8]) {
    let mut input = Input::new(data);
    let (is_opened, size) = (input.u8() % 2 == 1, usize::from(input.u8()) + 1);
    let bytes = input.rest();
    let guard = || {
        if is_opened {
            HttpGuard::opened(target(), 443)
        } else {
            HttpGuard::new(target(), 80)
        }
    };
    let whole = guard().pass(bytes);
    let (mut in_pieces, mut held, mut passed) = (guard(), Vec::new(), Vec::new());
    let mut is_refused = false;
    for piece in bytes.chunks(size) {
        held.extend_from_slice(piece);
        match in_pieces.pass(&held) {
            Ok(count) => passed.extend(held.drain(..count)),
            Err(_) => {
                is_refused = true;
                break;
            }
        }
    }
    assert_eq!(
        whole.is_err(),
        is_refused,
        "pieces of {size} make a difference"
    );
    if let Ok(count) = whole {
        assert_eq!(passed, bytes[..count]);
    }
    assert!(bytes.starts_with(&passed));
    if let Some(end) = passed.windows(4).position(|four| four == b"\r\n\r\n") {
        check_head(&passed[..end]);
    }
}

/// A head that has passed, read as simply as can be: one host, which is the one.
fn check_head(head: &[u8]) {
    let lines = || head.split(|byte| *byte == b'\n').skip(1);
    let values: Vec<String> = lines()
        .filter_map(|line| {
            let line = String::from_utf8_lossy(line).into_owned();
            let (name, value) = line.split_once(':')?;
            name.trim()
                .eq_ignore_ascii_case("host")
                .then(|| value.trim().to_owned())
        })
        .collect();
    let [value] = values.as_slice() else {
        panic!("{values:?}");
    };
    let name = value
        .rsplit_once(':')
        .map_or(value.as_str(), |(name, _)| name);
    assert_eq!(HostName::parse(name).expect("it is a name").as_str(), HOST);
}

/// Runs the target `dns`.
pub fn run_dns(data: &[u8]) {
    let mut asked = Vec::new();
    let answer = dns::answer(data, |name| {
        asked.push(name.to_owned());
        Some(Addresses {
            v4: [198, 18, 0, 1].into(),
            v6: Some("fd73::1".parse().expect("it is an address")),
        })
    });
    for name in &asked {
        assert!(!name.is_empty() && !name.bytes().any(|byte| byte.is_ascii_uppercase()));
    }
    if let Some(answer) = answer {
        assert!(answer.len() <= ANSWER_BYTES_MAX, "{}", answer.len());
        // The same number, and the mark of an answer (RFC 1035 §4.1.1).
        assert_eq!(answer[..2], data[..2]);
        assert_eq!(answer[2] & 0x80, 0x80);
    }
}

fn vector(bytes: usize, content: &[u8]) -> Vec<u8> {
    let length = u32::try_from(content.len())
        .expect("it is short")
        .to_be_bytes();
    [&length[4 - bytes..], content].concat()
}

fn extension(kind: u16, content: &[u8]) -> Vec<u8> {
    [&kind.to_be_bytes()[..], &vector(2, content)].concat()
}

fn sni(name: &str) -> Vec<u8> {
    let entry = [&[0][..], &vector(2, name.as_bytes())].concat();
    extension(0, &vector(2, &entry))
}

/// A size of pieces, and a hello with these extensions in records of so many bytes.
fn hello(size: u8, extensions: &[Vec<u8>], record: usize) -> Vec<u8> {
    let body = [
        &[3, 3][..],
        &[7; 32],
        &vector(1, &[1; 32]),
        &vector(2, &[0x13, 1]),
        &vector(1, &[0]),
        &vector(2, &extensions.concat()),
    ]
    .concat();
    let message = [&[1][..], &vector(3, &body)].concat();
    let records = message
        .chunks(record)
        .flat_map(|piece| [&[22, 3, 1][..], &vector(2, piece)].concat());
    std::iter::once(size).chain(records).collect()
}

/// The corpus of `tls`.
#[must_use]
pub fn tls_seeds() -> Seeds {
    let versions = extension(43, &[2, 3, 4]);
    vec![
        ("plain", hello(255, &[versions.clone(), sni(HOST)], 9999)),
        ("in_records", hello(9, &[versions.clone(), sni(HOST)], 20)),
        ("another_name", hello(255, &[sni("b.example")], 9999)),
        ("no_name", hello(255, &[versions], 9999)),
        (
            "two_names",
            hello(255, &[sni(HOST), sni("b.example")], 9999),
        ),
        (
            "hidden",
            hello(255, &[sni(HOST), extension(0xfe0d, &[0])], 9999),
        ),
    ]
}

/// The corpus of `http`.
#[must_use]
pub fn http_seeds() -> Seeds {
    let text = |is_opened: u8, size: u8, text: &str| [&[is_opened, size], text.as_bytes()].concat();
    vec![
        (
            "plain",
            text(0, 255, "GET / HTTP/1.1\r\nHost: a.example\r\n\r\n"),
        ),
        (
            "uri",
            text(
                0,
                9,
                "GET http://a.example:80/x HTTP/1.1\r\nHost: A.example.\r\n\r\n",
            ),
        ),
        (
            "opened",
            text(
                1,
                30,
                "GET https://a.example/x HTTP/1.1\r\nHost: a.example:443\r\n\r\n",
            ),
        ),
        (
            "length_then_another",
            text(
                0,
                11,
                "POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 5\r\n\r\nhelloGET / HTTP/1.1\r\nHost: b.example\r\n\r\n",
            ),
        ),
        (
            "chunks",
            text(
                1,
                7,
                "POST / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n\
                 GET / HTTP/1.0\r\nHost: a.example\r\n\r\n",
            ),
        ),
        (
            "both_lengths",
            text(
                0,
                255,
                "POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            ),
        ),
    ]
}

/// A question for a name with labels as they come.
fn question(labels: &[&[u8]], kind: u8) -> Vec<u8> {
    let mut bytes = vec![0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in labels {
        bytes.extend(vector(1, label));
    }
    bytes.extend([0, 0, kind, 0, 1]);
    bytes
}

/// The secret that a server sends back.
const SECRET: &[u8] = b"s3cr3t-value-of-a-header-field";

/// Requests that are asked: so many more than an input can answer.
const ASKED: usize = 200;

/// What passes of an answer in pieces of this size, and whether it was understood to its end.
fn answered(bytes: &[u8], size: usize, method: &str) -> (Vec<u8>, Result<(), AnswerError>) {
    let (mut answers, mut asked, mut out) =
        (Answers::without(SECRET), Asked::default(), Vec::new());
    for _ in 0..ASKED {
        asked.add(method);
    }
    let mut pieces = bytes.chunks(size);
    let end = pieces.try_for_each(|piece| answers.take(piece, &mut asked, &mut out));
    if end.is_ok() {
        answers.end(&mut out);
    }
    (out, end)
}

/// Runs the target `answers`.
pub fn run_answers(data: &[u8]) {
    let mut input = Input::new(data);
    let method = if input.u8() % 2 == 1 { "HEAD" } else { "GET" };
    let size = usize::from(input.u8()) + 1;
    let bytes = input.rest();
    let whole = answered(bytes, usize::MAX, method);
    let pieces = answered(bytes, size, method);
    assert_eq!(whole.1, pieces.1, "pieces of {size} make a difference");
    let again = [&whole.0, &pieces.0].map(|passed| {
        assert!(!passed.windows(SECRET.len()).any(|some| some == SECRET));
        // Each piece may be a chunk of its own, and what ends one.
        assert!(passed.len() <= bytes.len() * 10 + SECRET.len());
        answered(passed, usize::MAX, method)
    });
    if whole.1.is_ok() {
        assert_eq!(again[0].1, Ok(()), "what has passed is not understood");
        // Chunks may be others; what they are of is the same.
        assert_eq!(again[0], again[1]);
    }
}

/// The corpus of `answers`.
#[must_use]
pub fn answers_seeds() -> Seeds {
    let of = |is_head: u8, size: u8, text: &str| {
        let secret = String::from_utf8_lossy(SECRET);
        let text = text.replace("SECRET", &secret);
        [&[is_head, size], text.as_bytes()].concat()
    };
    vec![
        (
            "length",
            of(
                0,
                6,
                "HTTP/1.1 200 OK\r\nX: SECRET\r\nContent-Length: 33\r\n\r\n> SECRET\nHTTP/1.1 204 No\r\n\r\n",
            ),
        ),
        (
            "chunks",
            of(
                0,
                3,
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\ns3\r\n1c\r\ncr3t-value-of-a-header-field\r\n0\r\nT: SECRET\r\n\r\n",
            ),
        ),
        (
            "chunks_without_end",
            of(
                0,
                20,
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n40;x=y\r\nSECRETs3cr3t-value",
            ),
        ),
        (
            "until_closed",
            of(0, 0, "HTTP/1.0 200 OK\r\n\r\nSECRETSECRETs3cr3t"),
        ),
        (
            "head",
            of(
                1,
                9,
                "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nHTTP/1.1 304 Not\r\n\r\n",
            ),
        ),
        (
            "interim",
            of(
                0,
                7,
                "HTTP/1.1 103 Early\r\nLink: <SECRET>\r\n\r\nHTTP/1.1 200\r\nContent-Length: 0\r\n\r\n",
            ),
        ),
        (
            "two_lengths",
            of(
                0,
                50,
                "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
            ),
        ),
    ]
}

/// The corpus of `dns`.
#[must_use]
pub fn dns_seeds() -> Seeds {
    let mut response = question(&[b"a", b"example"], 1);
    response[2] |= 0x80;
    let mut pointer = question(&[], 1);
    pointer.splice(12..13, [0xc0, 12]);
    let mut edns = question(&[b"a", b"example"], 28);
    edns[11] = 1;
    edns.extend([0, 0, 41, 4, 0xd0, 0, 0, 0, 0, 0, 0]);
    vec![
        ("a", question(&[b"A", b"example"], 1)),
        ("aaaa", question(&[b"a", b"example"], 28)),
        ("any", question(&[b"a", b"example"], 255)),
        ("txt", question(&[b"a", b"example"], 16)),
        ("dot_in_a_label", question(&[b"a.example"], 1)),
        ("root", question(&[], 2)),
        (
            "reverse",
            question(&[b"1", b"0", b"0", b"127", b"in-addr", b"arpa"], 12),
        ),
        ("response", response),
        ("pointer_to_itself", pointer),
        ("with_options", edns),
    ]
}
