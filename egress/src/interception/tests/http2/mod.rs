//! HTTP/2 between real clients and servers of it.

mod exchanges;
mod floods;
mod shapes;

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
struct Seen {
    method: String,
    uri: String,
    fields: HeaderMap,
    body: Vec<u8>,
    trailers: Option<HeaderMap>,
}

impl Seen {
    fn field(&self, name: &str) -> Option<&str> {
        self.fields.get(name).map(|value| value.to_str().unwrap())
    }
}

/// A server of HTTP/2, a sandbox with a secret for it, and what it was asked for.
struct Case2 {
    case: Case,
    seen: Arc<Mutex<Vec<Seen>>>,
}

/// Runs a test's client.
fn run<T>(future: impl Future<Output = T>) -> T {
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
    fn new(protocols: &[&[u8]]) -> Self {
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
    async fn dial(&self, offer: &[&[u8]]) -> io::Result<TlsStream<TokioStream>> {
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
    async fn client(&self) -> SendRequest<Bytes> {
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

    fn request(&self, method: &str, path: &str) -> http::request::Builder {
        let uri = format!("https://a.example:{}{path}", self.case.port);
        Request::builder()
            .method(method)
            .uri(uri)
            .header("x-token", self.case.placeholder())
    }

    /// What the server was asked for so far.
    fn seen(&self) -> Vec<Seen> {
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
        tokio::spawn(answer_to(request, respond, Arc::clone(&seen)));
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
async fn answer_to(
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
async fn send_all(send: &mut h2::SendStream<Bytes>, mut bytes: Bytes) -> Option<()> {
    while !bytes.is_empty() {
        send.reserve_capacity(bytes.len());
        let count = std::future::poll_fn(|context| send.poll_capacity(context)).await?;
        let count = count.ok()?.min(bytes.len());
        send.send_data(bytes.split_to(count), false).ok()?;
    }
    Some(())
}

/// All of a body, and its trailers.
async fn read_all(mut body: RecvStream) -> Result<(Vec<u8>, Option<HeaderMap>), h2::Error> {
    let mut all = Vec::new();
    while let Some(piece) = body.data().await {
        let piece = piece?;
        body.flow_control().release_capacity(piece.len())?;
        all.extend_from_slice(&piece);
    }
    Ok((all, body.trailers().await?))
}
