//! Requests of HTTP/2 that must not reach a server, frame by frame.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream as TokioStream;
use tokio_rustls::client::TlsStream;

use super::*;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Types of frames.
pub(super) const DATA: u8 = 0;
pub(super) const HEADERS: u8 = 1;
pub(super) const RESET: u8 = 3;
pub(super) const SETTINGS: u8 = 4;
pub(super) const PUSH_PROMISE: u8 = 5;
pub(super) const PING: u8 = 6;
const GO_AWAY: u8 = 7;
pub(super) const WINDOW_UPDATE: u8 = 8;
pub(super) const CONTINUATION: u8 = 9;

/// Flags of frames.
pub(super) const END_STREAM: u8 = 1;
pub(super) const END_HEADERS: u8 = 4;

/// One frame (RFC 9113 §4.1).
pub(super) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// Fields as HPACK has them, without tables and Huffman's code (RFC 7541 §6.2.2).
pub(super) fn block(fields: &[(&str, &str)]) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in fields {
        block.push(0);
        for text in [name, value] {
            let length = text.len();
            if length < 127 {
                block.push(u8::try_from(length).unwrap());
            } else {
                block.push(127);
                let mut rest = length - 127;
                while rest >= 128 {
                    block.push(u8::try_from(rest % 128).unwrap() | 128);
                    rest /= 128;
                }
                block.push(u8::try_from(rest).unwrap());
            }
            block.extend_from_slice(text.as_bytes());
        }
    }
    block
}

impl Case2 {
    /// A client that has said that it speaks HTTP/2, and says frames.
    pub(super) async fn raw(&self) -> TlsStream<TokioStream> {
        let mut stream = self.dial(&[HTTP2]).await.unwrap();
        stream.write_all(PREFACE).await.unwrap();
        let settings = frame(SETTINGS, 0, 0, &[]);
        stream.write_all(&settings).await.unwrap();
        stream
    }

    /// The four pseudo-fields of a good request, and a placeholder.
    pub(super) fn fields<'a>(
        &self,
        authority: &'a str,
        path: &'a str,
        placeholder: &'a str,
    ) -> Vec<(&'a str, &'a str)> {
        vec![
            (":method", "POST"),
            (":scheme", "https"),
            (":authority", authority),
            (":path", path),
            ("x-token", placeholder),
        ]
    }
}

/// All that comes until the end.
pub(super) async fn read_to_end(stream: &mut TlsStream<TokioStream>) -> Vec<u8> {
    let mut all = Vec::new();
    let _ = stream.read_to_end(&mut all).await;
    all
}

#[test]
fn requests_for_another_host_or_of_another_kind_end_the_connection_before_the_server_sees_them() {
    type Change = (&'static str, Option<&'static str>);
    // A pseudo-field that is changed or left out, or a field more; why it is refused.
    let cases: &[(&[Change], &str)] = &[
        (
            &[(":authority", Some("b.example"))],
            "another Host: the request is for 'b.example'",
        ),
        (&[(":authority", Some("a.example:1"))], "another Host"),
        (&[(":authority", Some("a.example."))], "another Host"),
        (
            &[(":authority", Some("a.example@b.example"))],
            "another Host",
        ),
        (&[(":authority", None)], "without an authority"),
        (
            &[(":authority", None), ("host", Some("a.example"))],
            "without an authority",
        ),
        (
            &[("host", Some("b.example"))],
            "another Host: the request is for 'b.example'",
        ),
        (
            &[("host", Some("a.example")), ("host", Some("a.example"))],
            "2 Host fields",
        ),
        (&[(":scheme", Some("http"))], "scheme is not https"),
        (
            &[
                (":method", Some("CONNECT")),
                (":scheme", None),
                (":path", None),
            ],
            "CONNECT",
        ),
        (&[(":method", Some("TRACE"))], "TRACE"),
        (&[(":method", Some("head"))], "HEAD but for its case"),
        (&[(":path", Some("*"))], "path is none"),
        (
            &[("http2-settings", Some("AAMAAABkAARAAAAAAAIAAAAA"))],
            "Upgrade",
        ),
        (
            &[("content-length", Some("5")), ("content-length", Some("5"))],
            "more than one Content-Length",
        ),
        (&[("x", Some(" space"))], "space at an end"),
        (&[("x", Some("tab\t"))], "space at an end"),
    ];
    for (changes, reason) in cases {
        let case = Case2::new(&[HTTP2]);
        let (authority, placeholder) = (
            format!("a.example:{}", case.case.port),
            case.case.placeholder(),
        );
        run(async {
            let mut stream = case.raw().await;
            // The first is good, and is answered.
            let good = case.fields(&authority, "/head", &placeholder);
            let first = frame(HEADERS, END_HEADERS | END_STREAM, 1, &block(&good));
            stream.write_all(&first).await.unwrap();
            let mut fields = case.fields(&authority, "/head", &placeholder);
            for (name, value) in *changes {
                let known = fields
                    .iter()
                    .position(|(known, _)| known == name && name.starts_with(':'));
                match (known, value) {
                    (Some(at), None) => drop(fields.remove(at)),
                    (Some(at), Some(value)) => fields[at].1 = value,
                    (None, value) => fields.push((name, value.unwrap())),
                }
            }
            while case.seen().is_empty() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            let bad = frame(HEADERS, END_HEADERS, 3, &block(&fields));
            stream.write_all(&bad).await.unwrap();
            let end = read_to_end(&mut stream).await;
            assert_eq!(last_kind(&end), GO_AWAY, "{changes:?}");
        });
        let record = case.case.record();
        let told = record.reason.unwrap();
        assert_eq!(record.verdict, Verdict::Denied, "{changes:?}: {told}");
        assert!(told.contains(reason), "{changes:?}: {told}");
        assert_eq!(case.seen().len(), 1, "{changes:?}");
    }
}

/// The type of the last frame.
fn last_kind(mut frames: &[u8]) -> u8 {
    let mut last = u8::MAX;
    while let Some((head, rest)) = frames.split_at_checked(9) {
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        last = head[3];
        frames = rest.get(length as usize..).unwrap_or_default();
    }
    last
}

/// Reads until a stream is reset, or all has ended.
async fn reset_or_end(stream: &mut TlsStream<TokioStream>) {
    let mut answer = [0; 4096];
    loop {
        let count = stream.read(&mut answer).await.unwrap_or(0);
        if count == 0 || [RESET, GO_AWAY].contains(&last_kind(&answer[..count])) {
            return;
        }
    }
}

#[test]
fn requests_that_http2_forbids_never_reach_the_server() {
    let cases: &[&[(&str, &str)]] = &[
        &[("connection", "close")],
        &[("transfer-encoding", "chunked")],
        &[("upgrade", "websocket")],
        &[("keep-alive", "1")],
        &[("proxy-connection", "close")],
        &[("te", "gzip")],
        &[("X-Upper", "x")],
        &[("x y", "x")],
        &[("x:y", "x")],
        &[("", "x")],
        &[("x", "a\r\nhost: b.example")],
        &[("x", "a\0")],
        &[("x\r\nhost", "b.example")],
        &[(":path", "/twice")],
        &[(":protocol", "websocket")],
        &[(":status", "200")],
        &[(":unknown", "x")],
        &[("content-length", "5"), ("content-length", "6")],
        &[("content-length", "+5")],
        &[("content-length", "3")],
    ];
    for more in cases {
        let case = Case2::new(&[HTTP2]);
        let (authority, placeholder) = (
            format!("a.example:{}", case.case.port),
            case.case.placeholder(),
        );
        run(async {
            let mut stream = case.raw().await;
            let fields = [&case.fields(&authority, "/all", &placeholder)[..], more].concat();
            let bytes = [
                frame(HEADERS, END_HEADERS, 1, &block(&fields)),
                frame(DATA, END_STREAM, 1, b"12345"),
            ]
            .concat();
            stream.write_all(&bytes).await.unwrap();
            reset_or_end(&mut stream).await;
        });
        assert!(case.seen().is_empty(), "{more:?}: {:?}", case.seen());
    }
}

#[test]
fn an_extended_connect_never_reaches_the_server() {
    let case = Case2::new(&[HTTP2]);
    let (authority, placeholder) = (
        format!("a.example:{}", case.case.port),
        case.case.placeholder(),
    );
    run(async {
        let mut stream = case.raw().await;
        let mut fields = case.fields(&authority, "/all", &placeholder);
        fields[0].1 = "CONNECT";
        fields.insert(4, (":protocol", "websocket"));
        let bytes = frame(HEADERS, END_HEADERS, 1, &block(&fields));
        stream.write_all(&bytes).await.unwrap();
        reset_or_end(&mut stream).await;
    });
    assert!(case.seen().is_empty());
}

#[test]
fn trailers_that_belong_in_a_head_end_the_connection() {
    let case = Case2::new(&[HTTP2]);
    run(async {
        let mut client = case.client().await;
        let request = case.request("POST", "/all").body(()).unwrap();
        let (answer, mut send) = client.send_request(request, false).unwrap();
        let mut trailers = http::HeaderMap::new();
        trailers.insert("host", "b.example".parse().unwrap());
        send.send_trailers(trailers).unwrap();
        answer.await.unwrap_err();
    });
    let reason = case.case.record().reason.unwrap();
    assert!(
        reason.contains("a trailer that belongs in a head"),
        "{reason}"
    );
    assert!(case.seen().is_empty());
}

#[test]
fn what_is_no_http2_where_that_was_chosen_reaches_no_server() {
    let case = Case2::new(&[HTTP2]);
    run(async {
        let mut stream = case.dial(&[HTTP2]).await.unwrap();
        let request = case.case.request("/", &case.case.placeholder());
        stream.write_all(request.as_bytes()).await.unwrap();
        read_to_end(&mut stream).await;
    });
    let record = case.case.record();
    assert_eq!(record.verdict, Verdict::Denied);
    let reason = record.reason.unwrap();
    assert!(reason.contains("breaks its protocol"), "{reason}");
    assert!(case.seen().is_empty());
}

/// A server of frames, which a sandbox trusts: it says `words` when it has read so many bytes, and tells what it reads.
fn raw_server(words: Vec<u8>) -> Case {
    let (mut config, certificate) = server_config(&["a.example"]);
    config.alpn_protocols = vec![HTTP2.to_vec()];
    let serve_one: Arc<Serve> = Arc::new(move |stream, sender| {
        let mut chunk = [0; 4096];
        let hello = frame(SETTINGS, 0, 0, &[]);
        stream.write_all(&hello).unwrap();
        stream.flush().unwrap();
        let mut all = Vec::new();
        // The preface, and a request.
        while !all
            .windows(2)
            .any(|pair| pair == [0x1f, 8] || pair == [0x0f, 8])
        {
            let Ok(count @ 1..) = stream.read(&mut chunk) else {
                return;
            };
            all.extend_from_slice(&chunk[..count]);
            let _ = sender.send(chunk[..count].to_vec());
        }
        let _ = stream.write_all(&words);
        let _ = stream.flush();
        while let Ok(count @ 1..) = stream.read(&mut chunk) {
            let _ = sender.send(chunk[..count].to_vec());
        }
    });
    let (port, received) = super::super::serve(Arc::new(config), serve_one);
    Case::before(port, received, &certificate)
}

/// Asks for `/` with the secret as a bearer's token; what comes of it.
async fn ask(case: &Case, authority: &str) -> Result<(http::response::Parts, Vec<u8>), h2::Error> {
    let (program, ours) = UnixStream::pair().unwrap();
    case.take(ours);
    program.set_nonblocking(true).unwrap();
    let mut config = case.client_config();
    config.alpn_protocols = vec![HTTP2.to_vec()];
    let stream = tokio_rustls::TlsConnector::from(Arc::new(config))
        .connect(
            ServerName::try_from("a.example").unwrap(),
            TokioStream::from_std(program).unwrap(),
        )
        .await
        .unwrap();
    let (mut client, connection) = h2::client::handshake(stream).await?;
    tokio::spawn(async {
        let _ = connection.await;
    });
    let request = http::Request::builder()
        .uri(format!("https://{authority}/"))
        .header("authorization", format!("Bearer {}", case.placeholder()))
        .body(())
        .unwrap();
    let (answer, _) = client.send_request(request, true)?;
    let (head, body) = answer.await?.into_parts();
    Ok((head, read_all(body).await?.0))
}

#[test]
fn a_secret_is_in_no_table_of_hpack() {
    let answer = frame(HEADERS, END_HEADERS | END_STREAM, 1, &[0x88]);
    let case = raw_server(answer);
    let authority = format!("a.example:{}", case.port);
    run(ask(&case, &authority)).unwrap();
    let sent: Vec<u8> = case.received.try_iter().flatten().collect();
    // `authorization` is the 23rd of the static table: a literal that is never indexed (RFC 7541 §6.2.3).
    assert!(sent.windows(2).any(|pair| pair == [0x1f, 8]));
    assert!(!sent.windows(2).any(|pair| pair == [0x0f, 8]));
}

#[test]
fn a_server_that_pushes_or_says_a_secret_in_its_last_words_is_not_passed_on() {
    let promise = [
        &[0, 0, 0, 2][..],
        &block(&[
            (":method", "GET"),
            (":scheme", "https"),
            (":authority", "a.example"),
            (":path", "/p"),
        ]),
    ]
    .concat();
    let last_words = [&[0, 0, 0, 0, 0, 0, 0, 1][..], VALUE.as_bytes()].concat();
    for words in [
        frame(PUSH_PROMISE, END_HEADERS, 1, &promise),
        frame(GO_AWAY, 0, 0, &last_words),
    ] {
        let case = raw_server(words);
        let authority = format!("a.example:{}", case.port);
        let error = run(ask(&case, &authority)).unwrap_err();
        assert!(!error.to_string().contains(VALUE), "{error}");
        let record = case.record();
        assert_eq!(record.verdict, Verdict::Failed);
        let json = record.json();
        assert!(
            json.contains("HTTP/2 with the server fails") && !json.contains(VALUE),
            "{json}"
        );
    }
}

#[test]
fn names_and_values_of_fields_are_masked_whatever_code_they_come_in() {
    // In the static table's name, in a name of its own, in the dynamic table and out of it.
    let mut first = vec![0x88];
    first.push(0x40);
    first.extend_from_slice(&block(&[("x-back", VALUE)])[1..]);
    first.extend_from_slice(&block(&[(VALUE, VALUE)]));
    first.push(0xbe);
    let case = raw_server(frame(HEADERS, END_HEADERS | END_STREAM, 1, &first));
    let authority = format!("a.example:{}", case.port);
    let (head, _) = run(ask(&case, &authority)).unwrap();
    let stars = "*".repeat(VALUE.len());
    let all: Vec<&str> = head
        .headers
        .get_all("x-back")
        .iter()
        .map(|value| value.to_str().unwrap())
        .collect();
    assert_eq!(all, [&stars, &stars]);
    assert_eq!(head.headers[&stars], *stars);
}
