//! Plain HTTP/1 from a client: each request of a connection must be for the host that the connection is for, and
//! must end where every server thinks that it ends (RFC 9112 §6, §11.2).
//!
//! What passes, passes as it is. What two servers could read differently is refused, also where it is allowed.

use crate::name::HostName;
use crate::policy::Target;

/// Longest head of a request, in bytes; servers take 8 to 64 KiB.
pub const MAX_HEAD_BYTES: usize = 48 << 10;

/// Most header fields of a request; servers take about 100.
const MAX_FIELDS: usize = 128;

/// Longest line with the size of a chunk, without its end: 64 bits.
const MAX_SIZE_DIGITS: usize = 16;

/// Why a request is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HttpError {
    /// Another protocol, or HTTP in a form that servers read differently.
    #[error("not HTTP/1: {0}")]
    Malformed(&'static str),
    /// A head that does not end.
    #[error(
        "a request whose head is longer than {MAX_HEAD_BYTES} bytes or has more than {MAX_FIELDS} fields"
    )]
    TooLong,
    /// The method that asks a proxy for a tunnel.
    #[error("CONNECT: the request asks for a tunnel")]
    Connect,
    /// The wish to go on with another protocol.
    #[error("Upgrade: the request asks for another protocol")]
    Upgrade,
    /// No host or more than one.
    #[error("{0} Host fields: a request has one")]
    HostCount(usize),
    /// Another host than that of the connection.
    #[error("another Host: the request is for '{0}'")]
    OtherHost(String),
    /// An end that servers could see in different places.
    #[error("an ambiguous length: {0}")]
    Length(&'static str),
}

/// Where in a request the stream stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Head,
    /// Bytes of a body, or of a chunk, that are left.
    Body(u64),
    ChunkSize,
    Chunk(u64),
    ChunkEnd,
    LastChunkEnd,
}

/// The requests of one connection.
#[derive(Debug)]
pub struct HttpGuard {
    target: Target,
    port: u16,
    state: State,
}

impl HttpGuard {
    /// For a connection to this host.
    #[must_use]
    pub fn new(target: Target, port: u16) -> Self {
        Self {
            target,
            port,
            state: State::Head,
        }
    }

    /// How many of these bytes, which come next, may pass. The rest is to be shown again with what follows it; it is
    /// never longer than a head.
    ///
    /// # Errors
    /// See [`HttpError`]; the connection is of no more use then.
    pub fn pass(&mut self, bytes: &[u8]) -> Result<usize, HttpError> {
        let mut rest = bytes;
        while let Some(count) = self.step(rest)? {
            rest = rest.get(count..).unwrap_or_default();
        }
        Ok(bytes.len() - rest.len())
    }

    /// Bytes of the next thing, which may pass; `None` while it is not whole.
    fn step(&mut self, bytes: &[u8]) -> Result<Option<usize>, HttpError> {
        if bytes.is_empty() {
            return Ok(None);
        }
        match self.state {
            State::Head => self.head(bytes),
            State::Body(left) => Ok(Some(self.content(bytes, left, State::Head, State::Body))),
            State::Chunk(left) => Ok(Some(self.content(
                bytes,
                left,
                State::ChunkEnd,
                State::Chunk,
            ))),
            State::ChunkSize => self.chunk_size(bytes),
            State::ChunkEnd => self.line_end(bytes, State::ChunkSize),
            State::LastChunkEnd => self.line_end(bytes, State::Head),
        }
    }

    fn content(
        &mut self,
        bytes: &[u8],
        left: u64,
        then: State,
        else_in: impl Fn(u64) -> State,
    ) -> usize {
        let available = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        self.state = if left <= available {
            then
        } else {
            else_in(left - available)
        };
        usize::try_from(left).map_or(bytes.len(), |left| left.min(bytes.len()))
    }

    /// `CRLF` and nothing else: a trailer section has no fields.
    fn line_end(&mut self, bytes: &[u8], then: State) -> Result<Option<usize>, HttpError> {
        match bytes {
            [b'\r', b'\n', ..] => {
                self.state = then;
                Ok(Some(2))
            }
            [b'\r'] => Ok(None),
            _ => Err(HttpError::Length(
                "a chunk is longer than its size, or trailer fields follow it",
            )),
        }
    }

    fn chunk_size(&mut self, bytes: &[u8]) -> Result<Option<usize>, HttpError> {
        const BAD: HttpError = HttpError::Length("a chunk's size is no plain hexadecimal number");
        let digits = bytes
            .iter()
            .take_while(|byte| byte.is_ascii_hexdigit())
            .count();
        if digits > MAX_SIZE_DIGITS {
            return Err(BAD);
        }
        match bytes.get(digits..).unwrap_or_default() {
            [] | [b'\r'] => Ok(None),
            [b'\r', b'\n', ..] => {
                let text = bytes.get(..digits).unwrap_or_default();
                let text = std::str::from_utf8(text).map_err(|_| BAD)?;
                self.state = match u64::from_str_radix(text, 16).map_err(|_| BAD)? {
                    0 => State::LastChunkEnd,
                    size => State::Chunk(size),
                };
                Ok(Some(digits + 2))
            }
            _ => Err(BAD),
        }
    }

    fn head(&mut self, bytes: &[u8]) -> Result<Option<usize>, HttpError> {
        let end = bytes.windows(4).position(|four| four == b"\r\n\r\n");
        let length = end.map_or(bytes.len(), |at| at + 4);
        check_lines(bytes.get(..length).unwrap_or_default())?;
        if length > MAX_HEAD_BYTES {
            return Err(HttpError::TooLong);
        }
        if end.is_none() {
            return Ok(None);
        }
        let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
        let mut request = httparse::Request::new(&mut fields);
        let parsed = request.parse(bytes.get(..length).unwrap_or_default());
        match parsed {
            Ok(httparse::Status::Complete(count)) if count == length => {}
            Ok(_) => return Err(HttpError::Malformed("the head ends elsewhere")),
            Err(httparse::Error::TooManyHeaders) => return Err(HttpError::TooLong),
            Err(_) => return Err(HttpError::Malformed("a request line or field is none")),
        }
        self.check_request(&request)?;
        self.state = body(&request)?;
        Ok(Some(length))
    }

    fn check_request(&self, request: &httparse::Request<'_, '_>) -> Result<(), HttpError> {
        let method = request.method.unwrap_or_default();
        if method.eq_ignore_ascii_case("CONNECT") {
            return Err(HttpError::Connect);
        }
        if fields(request, "upgrade").count() + fields(request, "http2-settings").count() > 0 {
            return Err(HttpError::Upgrade);
        }
        let hosts: Vec<&[u8]> = fields(request, "host").collect();
        let [host] = hosts.as_slice() else {
            return Err(HttpError::HostCount(hosts.len()));
        };
        self.check_authority(host)?;
        let path = request.path.unwrap_or_default();
        if path.starts_with('/') || (path == "*" && method == "OPTIONS") {
            return Ok(());
        }
        let scheme = "http://";
        match path.split_at_checked(scheme.len()) {
            Some((front, rest)) if front.eq_ignore_ascii_case(scheme) => {
                let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
                self.check_authority(authority.as_bytes())
            }
            _ => Err(HttpError::Malformed(
                "the request's target is neither a path nor an http:// URI",
            )),
        }
    }

    /// A host with the connection's port or without.
    fn check_authority(&self, authority: &[u8]) -> Result<(), HttpError> {
        let other = || HttpError::OtherHost(String::from_utf8_lossy(authority).into_owned());
        let text = std::str::from_utf8(authority).map_err(|_| other())?;
        let (host, port) = match text.rsplit_once(':') {
            Some((host, port)) if !text.ends_with(']') => (host, Some(port)),
            _ => (text, None),
        };
        let is_same_port = port.is_none_or(|port| port == self.port.to_string());
        let is_same_host = match &self.target {
            Target::Name(name) => HostName::parse(host).as_ref() == Ok(name),
            address @ Target::Address(_) => address.to_string() == host,
        };
        if is_same_host && is_same_port {
            Ok(())
        } else {
            Err(other())
        }
    }
}

/// All values of a field.
fn fields<'a>(
    request: &'a httparse::Request<'_, '_>,
    name: &'a str,
) -> impl Iterator<Item = &'a [u8]> {
    request
        .headers
        .iter()
        .filter(move |field| field.name.eq_ignore_ascii_case(name))
        .map(|field| field.value)
}

/// Lines end in `CRLF`, and there are no other control characters but tabs.
fn check_lines(head: &[u8]) -> Result<(), HttpError> {
    if matches!(head.first(), Some(b'\r' | b'\n' | b' ' | b'\t')) {
        return Err(HttpError::Malformed("a request begins with its method"));
    }
    let mut previous = 0;
    for byte in head {
        let is_in_place = match (previous, *byte) {
            (b'\r', byte) => byte == b'\n',
            (_, b'\n') => false,
            (_, b'\r' | b'\t') => true,
            (_, byte) => byte >= 0x20 && byte != 0x7f,
        };
        if !is_in_place {
            return Err(HttpError::Malformed(
                "a control character, or a line that does not end in CRLF",
            ));
        }
        previous = *byte;
    }
    // Fields that go on in the next line (RFC 9112 §5.2).
    if head
        .windows(3)
        .any(|three| matches!(three, [b'\r', b'\n', b' ' | b'\t']))
    {
        return Err(HttpError::Malformed("a field goes on in the next line"));
    }
    Ok(())
}

/// What follows a head.
fn body(request: &httparse::Request<'_, '_>) -> Result<State, HttpError> {
    let codings: Vec<&[u8]> = fields(request, "transfer-encoding").collect();
    let lengths: Vec<&[u8]> = fields(request, "content-length").collect();
    match (codings.as_slice(), lengths.as_slice()) {
        ([], []) => Ok(State::Head),
        ([], [length]) => {
            let digits = !length.is_empty() && length.iter().all(u8::is_ascii_digit);
            let number = std::str::from_utf8(length)
                .ok()
                .filter(|_| digits)
                .and_then(|text| text.parse().ok());
            match number {
                Some(0) => Ok(State::Head),
                Some(length) => Ok(State::Body(length)),
                None => Err(HttpError::Length("Content-Length is no number")),
            }
        }
        ([coding], []) if request.version == Some(1) && coding.eq_ignore_ascii_case(b"chunked") => {
            Ok(State::ChunkSize)
        }
        ([], _) => Err(HttpError::Length("more than one Content-Length")),
        (_, []) => Err(HttpError::Length(
            "a Transfer-Encoding that is not chunked alone, or in HTTP/1.0",
        )),
        _ => Err(HttpError::Length("Content-Length beside Transfer-Encoding")),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

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
            "GET / HTTP/1.1\r\nhost:\tA.Example.:80 \r\nX: \u{fc}\r\n\r\n",
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
            proptest::collection::vec(proptest::collection::vec(any::<u8>(), 1..40), 0..4)
                .prop_map(move |chunks| {
                    let mut bytes =
                        format!("{head}Transfer-Encoding: chunked\r\n\r\n").into_bytes();
                    for chunk in chunks {
                        bytes.extend_from_slice(format!("{:x}\r\n", chunk.len()).as_bytes());
                        bytes.extend_from_slice(&chunk);
                        bytes.extend_from_slice(b"\r\n");
                    }
                    bytes.extend_from_slice(b"0\r\n\r\n");
                    bytes
                }),
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
}
