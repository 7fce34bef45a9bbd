//! Requests that pass and that do not, whole and in pieces.

use proptest::prelude::*;

use super::*;
use crate::name::HostName;

fn guard() -> HttpGuard {
    HttpGuard::new(Target::Name(HostName::parse("a.example").unwrap()), 80)
}

fn all_pass(bytes: &[u8]) -> Result<(), HttpError> {
    let count = guard().pass(bytes)?;
    assert_eq!(count, bytes.len(), "{}", String::from_utf8_lossy(bytes));
    Ok(())
}

fn refused(text: &str) -> HttpError {
    guard().pass(text.as_bytes()).expect_err(text)
}

#[test]
fn requests_for_the_host_pass() {
    for text in [
        "GET / HTTP/1.1\r\nHost: a.example\r\n\r\n",
        "GET / HTTP/1.1\r\nhost:\tA.Example:80 \r\nX: \u{fc}\r\n\r\n",
        "GET / HTTP/1.0\r\nHost: a.example\r\n\r\n",
        "GET http://a.example/x HTTP/1.1\r\nHost: a.example\r\n\r\n",
        "GET HTTP://A.EXAMPLE:80?q HTTP/1.1\r\nHost: a.example\r\n\r\n",
        "OPTIONS * HTTP/1.1\r\nHost: a.example\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 5\r\n\r\nhello",
        "POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 0\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: Chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n00a\r\n0123456789\r\n0\r\n\r\n\
         GET /2 HTTP/1.1\r\nHost: a.example\r\n\r\n",
    ] {
        all_pass(text.as_bytes()).unwrap();
    }
}

#[test]
fn an_address_is_its_own_host() {
    let mut guard = HttpGuard::new(Target::Address("fd00::5".parse().unwrap()), 8080);
    guard
        .pass(b"GET / HTTP/1.1\r\nHost: [fd00::5]:8080\r\n\r\n")
        .unwrap();
    guard
        .pass(b"GET / HTTP/1.1\r\nHost: [fd00::6]:8080\r\n\r\n")
        .unwrap_err();
}

#[test]
fn another_host_is_refused_on_every_request() {
    let first = "GET / HTTP/1.1\r\nHost: a.example\r\n\r\n";
    for second in [
        "GET / HTTP/1.1\r\nHost: b.example\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a.example:81\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a.example:\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a.example..\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: ａ.example\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a。example\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a.example@b.example\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a.example, b.example\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a.example/b.example\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: 169.254.169.254\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: \r\n\r\n",
        "GET http://b.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n",
        "GET http://a.example@b.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n",
        "GET http:///b.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n",
        "GET http://a.example\\@b.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n",
    ] {
        assert!(
            matches!(refused(second), HttpError::OtherHost(_)),
            "{second}"
        );
        assert!(
            matches!(
                refused(&format!("{first}{second}")),
                HttpError::OtherHost(_)
            ),
            "{second}"
        );
    }
}

#[test]
fn a_host_with_the_root_passes_but_not_beside_a_secret() {
    let request = "GET / HTTP/1.1\r\nHost: a.example.\r\n\r\n";
    all_pass(request.as_bytes()).unwrap();
    let target = Target::Name(HostName::parse("a.example").unwrap());

    let error = HttpGuard::opened(target, 443).pass(request.as_bytes());

    assert!(matches!(error, Err(HttpError::OtherHost(_))), "{error:?}");
}

#[test]
fn words_on_the_connection_name_no_fields() {
    let request = |value: &str| {
        format!(
            "GET / HTTP/1.1\r\nHost: a.example\r\nConnection: close\r\nConnection: {value}\r\n\r\n"
        )
    };
    for value in ["close", "Keep-Alive", "TE, close", "", "keep-alive ,"] {
        all_pass(request(value).as_bytes()).unwrap();
    }
    for value in ["Host", "close, authorization", "upgrade", "keep-alive;x"] {
        assert_eq!(refused(&request(value)), HttpError::Connection, "{value}");
    }
}

#[test]
fn a_head_in_single_bytes_is_looked_through_once() {
    let mut guard = guard();
    let head = format!(
        "GET / HTTP/1.1\r\nHost: a.example\r\nX: {}\r\n\r\n",
        "x".repeat(9000)
    );
    for length in 1..head.len() {
        assert_eq!(guard.pass(&head.as_bytes()[..length]), Ok(0));
        assert_eq!(guard.scanned, length);
    }
    assert_eq!(guard.pass(head.as_bytes()), Ok(head.len()));
    assert_eq!(guard.scanned, 0);
}

#[test]
fn no_host_or_two_are_refused() {
    assert_eq!(refused("GET / HTTP/1.1\r\n\r\n"), HttpError::HostCount(0));
    assert_eq!(refused("GET / HTTP/1.0\r\n\r\n"), HttpError::HostCount(0));
    assert_eq!(
        refused("GET / HTTP/1.1\r\nHost: a.example\r\nhOST: a.example\r\n\r\n"),
        HttpError::HostCount(2)
    );
}

#[test]
fn tunnels_and_other_protocols_are_refused() {
    assert_eq!(
        refused("CONNECT a.example:22 HTTP/1.1\r\nHost: a.example\r\n\r\n"),
        HttpError::Connect
    );
    for field in [
        "Upgrade: h2c",
        "upgrade: websocket",
        "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA",
    ] {
        assert_eq!(
            refused(&format!(
                "GET / HTTP/1.1\r\nHost: a.example\r\n{field}\r\n\r\n"
            )),
            HttpError::Upgrade
        );
    }
    for other in [
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "SSH-2.0-OpenSSH\r\n\r\n",
        "\x16\x03\x01",
        "\r\nGET / HTTP/1.1\r\n",
        "GET /\r\n\r\n",
        "GET / HTTP/1.2\r\nHost: a.example\r\n\r\n",
        "GET a.example HTTP/1.1\r\nHost: a.example\r\n\r\n",
        "GET ftp://a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n",
    ] {
        assert!(
            matches!(refused(other), HttpError::Malformed(_)),
            "{other:?}"
        );
    }
}

#[test]
fn smuggling_shapes_are_refused() {
    let post = |fields: &str, rest: &str| {
        format!("POST / HTTP/1.1\r\nHost: a.example\r\n{fields}\r\n\r\n{rest}")
    };
    for (fields, rest) in [
        ("Content-Length: 5\r\nTransfer-Encoding: chunked", ""),
        ("Transfer-Encoding: chunked\r\nContent-Length: 5", ""),
        ("Content-Length: 5\r\nContent-Length: 6", ""),
        ("Content-Length: 5\r\nContent-Length: 5", ""),
        ("Content-Length: +5", ""),
        ("Content-Length: -5", ""),
        ("Content-Length: 5, 5", ""),
        ("Content-Length: 0x5", ""),
        ("Content-Length:", ""),
        ("Content-Length: 99999999999999999999", ""),
        (
            "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
            "",
        ),
        ("Transfer-Encoding: gzip, chunked", ""),
        ("Transfer-Encoding: xchunked", ""),
        ("Transfer-Encoding: \"chunked\"", ""),
        (
            "Transfer-Encoding: chunked",
            "5;ext=1\r\nhello\r\n0\r\n\r\n",
        ),
        ("Transfer-Encoding: chunked", "0x5\r\nhello\r\n0\r\n\r\n"),
        ("Transfer-Encoding: chunked", " 5\r\nhello\r\n0\r\n\r\n"),
        ("Transfer-Encoding: chunked", "5\nhello\r\n0\r\n\r\n"),
        ("Transfer-Encoding: chunked", "\r\n"),
        ("Transfer-Encoding: chunked", "5\r\nhelloX\r\n0\r\n\r\n"),
        ("Transfer-Encoding: chunked", "11111111111111111\r\n"),
        ("Transfer-Encoding: chunked", "0\r\nHost: b.example\r\n\r\n"),
    ] {
        let error = refused(&post(fields, rest));
        assert!(
            matches!(error, HttpError::Length(_)),
            "{fields:?} {rest:?}: {error}"
        );
    }
    for head in [
        "GET / HTTP/1.1\nHost: a.example\n\n",
        "GET / HTTP/1.1\r\nHost: a.example\nX: b\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a.example\rX: b\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a.example\r\nX: a\r\n b\r\n\r\n",
        "GET / HTTP/1.1\r\nHost : a.example\r\n\r\n",
        "GET / HTTP/1.1\r\n Host: a.example\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a.example\0\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a.example\r\nX\r\n\r\n",
        "GET / HTTP/1.1\r\n: a.example\r\nHost: a.example\r\n\r\n",
        "GET  / HTTP/1.1\r\nHost: a.example\r\n\r\n",
        "GET /\tx HTTP/1.1\r\nHost: a.example\r\n\r\n",
        "GET / x HTTP/1.1\r\nHost: a.example\r\n\r\n",
    ] {
        assert!(matches!(refused(head), HttpError::Malformed(_)), "{head:?}");
    }
    let old = "POST / HTTP/1.0\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n";
    assert!(matches!(refused(old), HttpError::Length(_)));
}

#[test]
fn what_looks_like_a_request_in_a_body_is_a_body() {
    let inner = "GET / HTTP/1.1\r\nHost: b.example\r\n\r\n";
    let text = format!(
        "POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: {}\r\n\r\n{inner}",
        inner.len()
    );
    all_pass(text.as_bytes()).unwrap();
    let short =
        format!("POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 4\r\n\r\nbodyX{inner}");
    // The X belongs to the next request's method, whose host is another.
    assert!(matches!(refused(&short), HttpError::OtherHost(_)));
}

#[test]
fn heads_are_bounded() {
    let long = format!(
        "GET / HTTP/1.1\r\nHost: a.example\r\nX: {}",
        "x".repeat(MAX_HEAD_BYTES)
    );
    assert_eq!(refused(&long), HttpError::TooLong);
    let many = format!(
        "GET / HTTP/1.1\r\nHost: a.example\r\n{}\r\n",
        "X: y\r\n".repeat(MAX_FIELDS)
    );
    assert_eq!(refused(&many), HttpError::TooLong);
}

fn request() -> impl Strategy<Value = Vec<u8>> {
    let head = "GET / HTTP/1.1\r\nHost: a.example\r\n";
    prop_oneof![
        Just(format!("{head}\r\n").into_bytes()),
        proptest::collection::vec(any::<u8>(), 1..80).prop_map(move |body| {
            [
                format!("{head}Content-Length: {}\r\n\r\n", body.len()).as_bytes(),
                &body,
            ]
            .concat()
        }),
        proptest::collection::vec(proptest::collection::vec(any::<u8>(), 1..40), 0..4).prop_map(
            move |chunks| {
                let mut bytes = format!("{head}Transfer-Encoding: chunked\r\n\r\n").into_bytes();
                for chunk in chunks {
                    bytes.extend_from_slice(format!("{:x}\r\n", chunk.len()).as_bytes());
                    bytes.extend_from_slice(&chunk);
                    bytes.extend_from_slice(b"\r\n");
                }
                bytes.extend_from_slice(b"0\r\n\r\n");
                bytes
            }
        ),
    ]
}

/// Shows a guard the bytes in pieces, as a relay does; what passed, and why the rest did not.
fn in_pieces(bytes: &[u8], size: usize) -> (Vec<u8>, Option<HttpError>) {
    let mut guard = guard();
    let (mut held, mut passed) = (Vec::new(), Vec::new());
    for piece in bytes.chunks(size) {
        held.extend_from_slice(piece);
        match guard.pass(&held) {
            Ok(count) => passed.extend(held.drain(..count)),
            Err(error) => return (passed, Some(error)),
        }
    }
    (passed, None)
}

proptest! {
    #[test]
    fn good_requests_pass_in_any_pieces(requests in proptest::collection::vec(request(), 1..5), size in 1_usize..60) {
        let bytes = requests.concat();
        prop_assert_eq!(in_pieces(&bytes, size), (bytes, None));
    }

    #[test]
    fn a_bad_request_stops_the_connection_in_any_pieces(requests in proptest::collection::vec(request(), 0..4), size in 1_usize..60) {
        let good = requests.concat();
        let bytes = [&good[..], b"GET / HTTP/1.1\r\nHost: b.example\r\n\r\n"].concat();
        let (passed, error) = in_pieces(&bytes, size);
        prop_assert_eq!(passed.len(), good.len().min(passed.len()));
        prop_assert_eq!(error, Some(HttpError::OtherHost("b.example".to_owned())));
    }

    #[test]
    fn any_bytes_are_read_without_harm(bytes in proptest::collection::vec(any::<u8>(), 0..300), size in 1_usize..60) {
        let (passed, _) = in_pieces(&bytes, size);
        prop_assert!(passed.len() <= bytes.len());
    }
}
