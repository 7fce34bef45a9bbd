//! HTTP/2 between real clients and servers of it.

use std::future::Future;

use bytes::Bytes;
use h2::client::SendRequest;
use h2::server::SendResponse;
use h2::{Reason, RecvStream};
use http::{HeaderMap, Request, Response};
use tokio::net::UnixStream as TokioStream;
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::*;

/// What a server was asked for.
#[derive(Debug, Clone)]
pub(super) struct Seen {
    pub(super) method: String,
    pub(super) uri: String,
    pub(super) fields: HeaderMap,
    pub(super) body: Vec<u8>,
    pub(super) trailers: Option<HeaderMap>,
}

impl Seen {
    fn field(&self, name: &str) -> Option<&str> {
        self.fields.get(name).map(|value| value.to_str().unwrap())
    }
}

/// A server of HTTP/2, a sandbox with a secret for it, and what it was asked for.
pub(super) struct Case2 {
    pub(super) case: Case,
    seen: Arc<Mutex<Vec<Seen>>>,
}

/// Runs a test's client.
pub(super) fn run<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let limit = Duration::from_secs(60);
    runtime
        .block_on(async { tokio::time::timeout(limit, future).await })
        .expect("it takes too long")
}

impl Case2 {
    /// With a server that chooses the first of these protocols that is offered.
    pub(super) fn new(protocols: &[&[u8]]) -> Self {
        let (mut config, certificate) = server_config(&["a.example"]);
        config.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let seen: Arc<Mutex<Vec<Seen>>> = Arc::default();
        let sink = Arc::clone(&seen);
        thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            listener.set_nonblocking(true).unwrap();
            runtime.block_on(async {
                let listener = tokio::net::TcpListener::from_std(listener).unwrap();
                let acceptor = TlsAcceptor::from(Arc::new(config));
                loop {
                    let (stream, _) = listener.accept().await.unwrap();
                    tokio::spawn(connection(acceptor.clone(), stream, Arc::clone(&sink)));
                }
            });
        });
        let (_, received) = channel();
        let case = Case::before(port, received, &certificate);
        Self { case, seen }
    }

    /// A program's connection that offers these protocols.
    pub(super) async fn dial(&self, offer: &[&[u8]]) -> io::Result<TlsStream<TokioStream>> {
        let (program, ours) = UnixStream::pair().unwrap();
        self.case.take(ours);
        program.set_nonblocking(true).unwrap();
        let mut config = self.case.client_config();
        config.alpn_protocols = offer.iter().map(|name| name.to_vec()).collect();
        let name = ServerName::try_from("a.example").unwrap();
        let program = TokioStream::from_std(program).unwrap();
        TlsConnector::from(Arc::new(config))
            .connect(name, program)
            .await
    }

    /// A client of HTTP/2.
    pub(super) async fn client(&self) -> SendRequest<Bytes> {
        self.client_of(&h2::client::Builder::new()).await
    }

    /// The same with settings of its own.
    async fn client_of(&self, builder: &h2::client::Builder) -> SendRequest<Bytes> {
        let stream = self.dial(&[HTTP2]).await.unwrap();
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(HTTP2));
        let (client, connection) = builder.handshake(stream).await.unwrap();
        tokio::spawn(async {
            let _ = connection.await;
        });
        client
    }

    pub(super) fn request(&self, method: &str, path: &str) -> http::request::Builder {
        let uri = format!("https://a.example:{}{path}", self.case.port);
        Request::builder()
            .method(method)
            .uri(uri)
            .header("x-token", self.case.placeholder())
    }

    /// What the server was asked for so far.
    pub(super) fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }
}

async fn connection(
    acceptor: TlsAcceptor,
    stream: tokio::net::TcpStream,
    seen: Arc<Mutex<Vec<Seen>>>,
) {
    let Ok(stream) = acceptor.accept(stream).await else {
        return;
    };
    if stream.get_ref().1.alpn_protocol() != Some(HTTP2) {
        return old(stream, seen).await;
    }
    let mut builder = h2::server::Builder::new();
    let Ok(mut connection) = builder
        .max_concurrent_streams(1000)
        .handshake::<_, Bytes>(stream)
        .await
    else {
        return;
    };
    while let Some(Ok((request, respond))) = connection.accept().await {
        if request.uri().path() == "/go" {
            connection.graceful_shutdown();
        }
        tokio::spawn(serve(request, respond, Arc::clone(&seen)));
    }
}

/// HTTP/1.1 as far as one request has it.
async fn old(
    mut stream: tokio_rustls::server::TlsStream<tokio::net::TcpStream>,
    seen: Arc<Mutex<Vec<Seen>>>,
) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut head = vec![0; 4096];
    let count = stream.read(&mut head).await.unwrap_or(0);
    seen.lock().unwrap().push(Seen {
        method: "HTTP/1.1".to_owned(),
        uri: String::new(),
        fields: HeaderMap::new(),
        body: head[..count].to_vec(),
        trailers: None,
    });
    let _ = stream
        .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        .await;
    let _ = stream.flush().await;
    let _ = stream.read(&mut head).await;
}

/// Answers by the path.
async fn serve(
    request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
    seen: Arc<Mutex<Vec<Seen>>>,
) -> Option<()> {
    let (head, mut body) = request.into_parts();
    let token = head.headers.get("x-token").cloned();
    let text = |text: &str| {
        let token = token.as_ref().map(|token| token.to_str().unwrap());
        Bytes::from(text.replace("TOKEN", token.unwrap_or_default()))
    };
    let answer = || {
        let mut answer = Response::new(());
        if let Some(token) = &token {
            answer.headers_mut().insert("x-back", token.clone());
        }
        answer
    };
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", "0".parse().unwrap());
    trailers.insert(
        "x-back",
        token.clone().unwrap_or_else(|| "-".parse().unwrap()),
    );
    let mut entry = Seen {
        method: head.method.to_string(),
        uri: head.uri.to_string(),
        fields: head.headers.clone(),
        body: Vec::new(),
        trailers: None,
    };
    let path = head.uri.path();
    // What does not read a request's body is seen with its head.
    if path.starts_with("/head") {
        seen.lock().unwrap().push(entry);
        match path {
            "/head/never" => std::future::poll_fn(|context| respond.poll_reset(context))
                .await
                .map(drop)
                .ok()?,
            "/head/pieces" => {
                let mut send = respond.send_response(answer(), false).ok()?;
                let value = text("TOKEN");
                for piece in [&b"["[..], &value[..3], &value[3..9], &value[9..], b"]"] {
                    send.send_data(Bytes::copy_from_slice(piece), false).ok()?;
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
                send.send_trailers(trailers).ok()?;
            }
            "/head/pause" => {
                let mut send = respond.send_response(answer(), false).ok()?;
                let value = text("TOKEN");
                send.send_data(value.slice(..6), false).ok()?;
                std::future::pending::<()>().await;
            }
            "/head/early" => {
                let mut early = answer();
                *early.status_mut() = http::StatusCode::EARLY_HINTS;
                respond.send_informational(early).ok()?;
                let mut send = respond.send_response(answer(), false).ok()?;
                send.send_data(Bytes::from_static(b"late"), true).ok()?;
            }
            "/head/endless" => loop {
                let mut early = answer();
                *early.status_mut() = http::StatusCode::EARLY_HINTS;
                respond.send_informational(early).ok()?;
                tokio::time::sleep(Duration::from_millis(1)).await;
            },
            "/head/reset" => respond.send_reset(Reason::INADEQUATE_SECURITY),
            "/head/bulk" => {
                let mut send = respond.send_response(answer(), false).ok()?;
                for number in 0..200_u8 {
                    let piece = Bytes::from(vec![number; 20_000]);
                    send_all(&mut send, piece).await?;
                    seen.lock().unwrap().last_mut().unwrap().body.push(number);
                }
                send.send_data(Bytes::new(), true).ok()?;
            }
            _ => {
                respond.send_response(answer(), true).ok()?;
            }
        }
        return Some(());
    }
    // Each message comes back before the next is sent.
    if path == "/stream" {
        let mut send = respond.send_response(answer(), false).ok()?;
        while let Some(piece) = body.data().await {
            let piece = piece.ok()?;
            let _ = body.flow_control().release_capacity(piece.len());
            send_all(&mut send, piece).await?;
        }
        send.send_trailers(trailers).ok()?;
        seen.lock().unwrap().push(entry);
        return Some(());
    }
    while let Some(piece) = body.data().await {
        let piece = piece.ok()?;
        let _ = body.flow_control().release_capacity(piece.len());
        entry.body.extend_from_slice(&piece);
    }
    entry.trailers = body.trailers().await.ok()?;
    seen.lock().unwrap().push(entry.clone());
    let mut send = respond.send_response(answer(), false).ok()?;
    send_all(&mut send, text("you are TOKEN, with ")).await?;
    send_all(&mut send, Bytes::from(entry.body)).await?;
    send.send_trailers(trailers).ok()
}

/// Sends as fast as it is taken.
pub(super) async fn send_all(send: &mut h2::SendStream<Bytes>, mut bytes: Bytes) -> Option<()> {
    while !bytes.is_empty() {
        send.reserve_capacity(bytes.len());
        let count = std::future::poll_fn(|context| send.poll_capacity(context)).await?;
        let count = count.ok()?.min(bytes.len());
        send.send_data(bytes.split_to(count), false).ok()?;
    }
    Some(())
}

/// All of a body, and its trailers.
pub(super) async fn read_all(
    mut body: RecvStream,
) -> Result<(Vec<u8>, Option<HeaderMap>), h2::Error> {
    let mut all = Vec::new();
    while let Some(piece) = body.data().await {
        let piece = piece?;
        body.flow_control().release_capacity(piece.len())?;
        all.extend_from_slice(&piece);
    }
    Ok((all, body.trailers().await?))
}

fn stars(count: usize) -> String {
    "*".repeat(count)
}

#[test]
fn a_server_of_http2_gets_the_secret_in_fields_alone_and_the_program_gets_none_back() {
    let case = Case2::new(&[HTTP2, HTTP1]);
    let placeholder = case.case.placeholder();
    let credentials = STANDARD.encode(format!("me:{placeholder}"));

    let (head, body, trailers) = run(async {
        let mut client = case.client().await;
        let request = case
            .request("POST", &format!("/all/{placeholder}?k={placeholder}"))
            .header("authorization", format!("Basic {credentials}"))
            .header("accept-encoding", "gzip")
            .header("grpc-accept-encoding", "gzip")
            .header("range", "bytes=1-")
            .header("te", "trailers")
            .header("host", format!("A.example:{}", case.case.port))
            .body(())
            .unwrap();
        let (answer, mut send) = client.send_request(request, false).unwrap();
        send_all(&mut send, Bytes::from(format!("[{placeholder}]"))).await;
        let mut trailers = HeaderMap::new();
        trailers.insert("x-trailer", placeholder.parse().unwrap());
        send.send_trailers(trailers).unwrap();
        let (head, body) = answer.await.unwrap().into_parts();
        let (body, trailers) = read_all(body).await.unwrap();
        (head, String::from_utf8(body).unwrap(), trailers.unwrap())
    });

    let seen = &case.seen()[0];
    assert_eq!(seen.method, "POST");
    assert_eq!(
        seen.uri,
        format!(
            "https://a.example:{}/all/{placeholder}?k={placeholder}",
            case.case.port
        )
    );
    assert_eq!(seen.field("x-token"), Some(VALUE));
    let basic = STANDARD.encode(format!("me:{VALUE}"));
    assert_eq!(
        seen.field("authorization"),
        Some(&*format!("Basic {basic}"))
    );
    assert_eq!(seen.field("accept-encoding"), Some("identity"));
    assert_eq!(seen.field("te"), Some("trailers"));
    for name in ["host", "range", "grpc-accept-encoding"] {
        assert_eq!(seen.field(name), None, "{name}");
    }
    assert_eq!(seen.body, format!("[{placeholder}]").as_bytes());
    assert_eq!(seen.trailers.as_ref().unwrap()["x-trailer"], *placeholder);

    let masked = stars(VALUE.len());
    assert_eq!(head.headers["x-back"], *masked);
    assert_eq!(body, format!("you are {masked}, with [{placeholder}]"));
    assert_eq!(
        (&trailers["grpc-status"], &trailers["x-back"]),
        (&"0".parse().unwrap(), &masked.parse().unwrap())
    );
    let record = case.case.record();
    assert_eq!((record.verdict, &record.reason), (Verdict::Allowed, &None));
    assert!(record.bytes_in > 0 && record.bytes_out > 0);
    assert!(!record.json().contains(VALUE));
}

#[test]
fn what_the_server_chooses_of_what_the_program_offers_is_spoken_with_both() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    for (has, offer, spoken) in [
        (&[HTTP2, HTTP1][..], &[HTTP2, HTTP1][..], Some(HTTP2)),
        (&[HTTP2, HTTP1], &[HTTP1], Some(HTTP1)),
        (&[HTTP2, HTTP1], &[], None),
        (&[HTTP1], &[HTTP2, HTTP1], Some(HTTP1)),
        (&[], &[HTTP2, HTTP1], Some(HTTP1)),
    ] {
        let case = Case2::new(has);
        run(async {
            let mut stream = case.dial(offer).await.unwrap();
            let protocol = stream.get_ref().1.alpn_protocol().map(<[u8]>::to_vec);
            assert_eq!(protocol.as_deref(), spoken, "{has:?} {offer:?}");
            if spoken == Some(HTTP2) {
                return;
            }
            let request = case.case.request("/", &case.case.placeholder());
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut answer = [0; 40];
            let count = stream.read(&mut answer).await.unwrap();
            assert!(answer[..count].starts_with(b"HTTP/1.1 200 OK"));
            let seen = String::from_utf8(case.seen()[0].body.clone()).unwrap();
            assert!(seen.contains(&format!("X-Token: {VALUE}\r\n")), "{seen}");
        });
    }
}

#[test]
fn a_program_of_http2_alone_is_told_that_the_server_has_none() {
    for (has, reason) in [
        (
            &[HTTP1][..],
            "speaks no version of HTTP that the program offers",
        ),
        (&[], "speak no version of HTTP in common"),
    ] {
        let case = Case2::new(has);
        run(async { case.dial(&[HTTP2]).await.unwrap_err() });
        let record = case.case.record();
        assert_eq!(record.verdict, Verdict::Failed);
        let told = record.reason.unwrap();
        assert!(told.contains(reason), "{told}");
    }
}

#[test]
fn messages_go_both_ways_at_once_as_grpc_has_them() {
    let case = Case2::new(&[HTTP2]);
    run(async {
        let mut client = case.client().await;
        let request = case.request("POST", "/stream").body(()).unwrap();
        let (answer, mut send) = client.send_request(request, false).unwrap();
        let mut body = answer.await.unwrap().into_body();
        for number in 0..50 {
            let message = format!("message {number}");
            send.send_data(Bytes::from(message.clone()), false).unwrap();
            let back = body.data().await.unwrap().unwrap();
            body.flow_control().release_capacity(back.len()).unwrap();
            assert_eq!(back, message);
        }
        send.send_data(Bytes::new(), true).unwrap();
        assert!(body.data().await.is_none());
        let trailers = body.trailers().await.unwrap().unwrap();
        assert_eq!(trailers["grpc-status"], "0");
    });
    assert_eq!(case.case.record().reason, None);
}

#[test]
fn a_value_in_pieces_is_masked_and_its_beginning_is_held_no_longer_than_a_pause() {
    let case = Case2::new(&[HTTP2]);
    run(async {
        let mut client = case.client().await;
        let request = case.request("GET", "/head/pieces").body(()).unwrap();
        let (answer, _) = client.send_request(request, true).unwrap();
        let (body, _) = read_all(answer.await.unwrap().into_body()).await.unwrap();
        let masked = format!("[{}]", stars(VALUE.len()));
        assert_eq!(String::from_utf8(body).unwrap(), masked);

        let request = case.request("GET", "/head/pause").body(()).unwrap();
        let (answer, _) = client.send_request(request, true).unwrap();
        let mut body = answer.await.unwrap().into_body();
        let began = Instant::now();
        assert_eq!(body.data().await.unwrap().unwrap(), VALUE[..6]);
        assert!(began.elapsed() < Duration::from_secs(5));
    });
}

#[test]
fn early_answers_come_with_secrets_masked_and_resets_with_their_reason() {
    let case = Case2::new(&[HTTP2]);
    run(async {
        let mut client = case.client().await;
        let request = case.request("GET", "/head/early").body(()).unwrap();
        let (mut answer, _) = client.send_request(request, true).unwrap();
        let early = std::future::poll_fn(|context| answer.poll_informational(context)).await;
        let early = early.unwrap().unwrap();
        assert_eq!(early.status(), 103);
        assert_eq!(early.headers()["x-back"], *stars(VALUE.len()));
        let (body, _) = read_all(answer.await.unwrap().into_body()).await.unwrap();
        assert_eq!(body, b"late");

        let request = case.request("GET", "/head/reset").body(()).unwrap();
        let (answer, _) = client.send_request(request, true).unwrap();
        let error = answer.await.unwrap_err();
        assert_eq!(error.reason(), Some(Reason::INADEQUATE_SECURITY));

        // The connection goes on.
        let request = case.request("HEAD", "/head").body(()).unwrap();
        let (answer, _) = client.send_request(request, true).unwrap();
        assert_eq!(answer.await.unwrap().status(), 200);
    });
}

#[test]
fn bytes_in_bulk_arrive_both_ways_on_many_streams() {
    const SIZE: usize = 1_500_000;
    let case = Case2::new(&[HTTP2]);
    run(async {
        let client = case.client().await;
        let exchange = |letter: u8| {
            let (case, mut client) = (&case, client.clone());
            async move {
                let request = case.request("POST", "/all").body(()).unwrap();
                let (answer, mut send) = client.send_request(request, false).unwrap();
                send_all(&mut send, Bytes::from(vec![letter; SIZE]))
                    .await
                    .unwrap();
                send.send_data(Bytes::new(), true).unwrap();
                let (body, _) = read_all(answer.await.unwrap().into_body()).await.unwrap();
                let front = format!("you are {}, with ", stars(VALUE.len()));
                assert_eq!(&body[..front.len()], front.as_bytes());
                assert!(body[front.len()..] == vec![letter; SIZE]);
            }
        };
        tokio::join!(exchange(b'a'), exchange(b'b'), exchange(b'c'));
    });
    let record = case.case.record();
    let size = 3 * SIZE as u64;
    assert!(
        record.bytes_out > size && record.bytes_out < size * 11 / 10,
        "{record:?}"
    );
    assert!(
        record.bytes_in > size && record.bytes_in < size * 11 / 10,
        "{record:?}"
    );
}

#[test]
fn a_server_waits_for_a_program_that_does_not_read_and_other_streams_do_not() {
    let case = Case2::new(&[HTTP2]);
    run(async {
        let mut builder = h2::client::Builder::new();
        let mut client = case.client_of(builder.initial_window_size(1000)).await;
        let request = case.request("GET", "/head/bulk").body(()).unwrap();
        let (answer, _) = client.send_request(request, true).unwrap();
        let stuck = answer.await.unwrap().into_body();

        let mut sent = 0;
        loop {
            tokio::time::sleep(Duration::from_millis(200)).await;
            let now = case.seen()[0].body.len() * 20_000;
            if now == sent {
                break;
            }
            sent = now;
        }
        // What the windows have, and what the server itself has in hand.
        assert!((200_000..500_000).contains(&sent), "{sent}");
        let request = case.request("GET", "/head").body(()).unwrap();
        let (answer, _) = client.send_request(request, true).unwrap();
        assert_eq!(answer.await.unwrap().status(), 200);

        let (all, _) = read_all(stuck).await.unwrap();
        let expected: Vec<u8> = (0..200).flat_map(|number| vec![number; 20_000]).collect();
        assert!(all == expected);
    });
}

#[test]
fn what_was_asked_for_is_answered_when_the_server_ends_and_the_rest_may_be_tried_again() {
    let case = Case2::new(&[HTTP2]);
    run(async {
        let mut client = case.client().await;
        let request = case.request("POST", "/go").body(()).unwrap();
        let (answer, mut send) = client.send_request(request, false).unwrap();
        while client.clone().ready().await.is_ok() {
            let request = case.request("GET", "/head").body(()).unwrap();
            let Ok((answer, _)) = client.send_request(request, true) else {
                break;
            };
            if let Err(error) = answer.await {
                assert_eq!(error.reason(), Some(Reason::REFUSED_STREAM), "{error}");
                break;
            }
        }
        send_all(&mut send, Bytes::from_static(b"whole"))
            .await
            .unwrap();
        send.send_data(Bytes::new(), true).unwrap();
        let (body, trailers) = read_all(answer.await.unwrap().into_body()).await.unwrap();
        assert!(body.ends_with(b", with whole"));
        assert!(trailers.is_some());
    });
    assert_eq!(case.case.record().verdict, Verdict::Allowed);
}

#[test]
fn a_secret_that_was_sent_over_http1_is_masked_over_http2() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let case = Case2::new(&[HTTP2, HTTP1]);
    let user = STANDARD.encode(format!("me:{}", case.case.placeholder()));
    run(async {
        let mut old = case.dial(&[HTTP1]).await.unwrap();
        let request = case.case.request("/", "none").replace(
            "\r\n\r\n",
            &format!("\r\nAuthorization: Basic {user}\r\n\r\n"),
        );
        old.write_all(request.as_bytes()).await.unwrap();
        old.read(&mut [0; 100]).await.unwrap();

        let form = STANDARD.encode(format!("me:{VALUE}"));
        let mut client = case.client().await;
        let request = case.request("POST", "/all").body(()).unwrap();
        let (answer, mut send) = client.send_request(request, false).unwrap();
        send_all(&mut send, Bytes::from(form.clone()))
            .await
            .unwrap();
        send.send_data(Bytes::new(), true).unwrap();
        let (body, _) = read_all(answer.await.unwrap().into_body()).await.unwrap();
        let body = String::from_utf8(body).unwrap();
        assert!(
            !body.contains(form.trim_end_matches('=')) && body.contains("with ***"),
            "{body}"
        );
    });
}
