//! Plain HTTP/1 from a client: each request of a connection must be for the host that the connection is for, and
//! must end where every server thinks that it ends (RFC 9112 §6, §11.2).
//!
//! What passes, passes as it is. What two servers could read differently is refused, also where it is allowed.

mod head;

use memchr::memmem;

use crate::policy::Target;
use head::{body, check_lines, fields};

/// Longest head of a request, in bytes; servers take 8 to 64 KiB.
pub const MAX_HEAD_BYTES: usize = 48 << 10;

/// Most header fields of a request; servers take about 100.
pub(crate) const MAX_FIELDS: usize = 128;

/// What may be said of a connection, but for names of fields that are for the next hop alone: a server may drop what it is told so
/// (RFC 9110 §7.6.1), a secret or a Host too.
const CONNECTION_OPTIONS: [&[u8]; 3] = [b"close", b"keep-alive", b"te"];

const HEAD_END: &[u8] = b"\r\n\r\n";

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
    /// HTTP/2 in a form that it has not.
    #[error("malformed HTTP/2: {0}")]
    Http2(&'static str),
    /// HTTP/2 whose frames are not as they may be.
    #[error("HTTP/2 that breaks its protocol: {0}")]
    Protocol(String),
    /// More than one connection with HTTP/2 may ask for.
    #[error("a flood: {0}")]
    Flood(&'static str),
    /// The method that asks a proxy for a tunnel.
    #[error("CONNECT: the request asks for a tunnel")]
    Connect,
    /// The method that asks a server to send back what it was sent, where a secret was put in.
    #[error("TRACE: the request asks for itself")]
    Trace,
    /// More different credentials than are looked for in what comes back.
    #[error("more different credentials with secrets than are kept for one sandbox")]
    TooManySecrets,
    /// Longer credentials than are looked into.
    #[error("credentials of more than {0} bytes with a secret in them")]
    CredentialsTooLong(usize),
    /// The wish to go on with another protocol.
    #[error("Upgrade: the request asks for another protocol")]
    Upgrade,
    /// A word on the connection that has a server leave fields out.
    #[error("Connection has other options than close, keep-alive and te")]
    Connection,
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

/// What comes next in a stream of requests, and how many bytes it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Piece {
    /// A whole head, with the empty line at its end.
    Head(usize),
    /// What belongs to a body: its bytes, or what is between its chunks.
    Body(usize),
}

/// The requests of one connection.
#[derive(Debug)]
pub struct HttpGuard {
    target: Target,
    port: u16,
    state: State,
    /// Bytes of a head that has no end yet, which were looked through.
    scanned: usize,
    /// Whether they came within TLS that was opened.
    is_opened: bool,
}

impl HttpGuard {
    /// For a connection to this host.
    #[must_use]
    pub fn new(target: Target, port: u16) -> Self {
        Self {
            target,
            port,
            state: State::Head,
            scanned: 0,
            is_opened: false,
        }
    }

    /// For requests out of TLS that ends here: URIs are `https`, and no request asks for what was put into it.
    #[must_use]
    pub fn opened(target: Target, port: u16) -> Self {
        Self {
            is_opened: true,
            ..Self::new(target, port)
        }
    }

    /// How many of these bytes, which come next, may pass. The rest is to be shown again with what follows it; it is
    /// never longer than a head.
    ///
    /// # Errors
    /// See [`HttpError`]; the connection is of no more use then.
    pub fn pass(&mut self, bytes: &[u8]) -> Result<usize, HttpError> {
        let mut rest = bytes;
        while let Some(Piece::Head(count) | Piece::Body(count)) = self.next(rest)? {
            rest = rest.get(count..).unwrap_or_default();
        }
        Ok(bytes.len() - rest.len())
    }

    /// The next thing of these bytes, which may pass; `None` while it is not whole.
    ///
    /// # Errors
    /// See [`HttpError`]; the connection is of no more use then.
    pub fn next(&mut self, bytes: &[u8]) -> Result<Option<Piece>, HttpError> {
        if bytes.is_empty() {
            return Ok(None);
        }
        if self.state == State::Head {
            return Ok(self.head(bytes)?.map(Piece::Head));
        }
        Ok(self.body(bytes)?.map(Piece::Body))
    }

    fn body(&mut self, bytes: &[u8]) -> Result<Option<usize>, HttpError> {
        match self.state {
            State::Head => Ok(None),
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
        // What was looked through has no end, but may have the beginning of one.
        let from = self.scanned.min(bytes.len());
        let near = from.saturating_sub(HEAD_END.len() - 1);
        let end = memmem::find(bytes.get(near..).unwrap_or_default(), HEAD_END);
        let length = end.map_or(bytes.len(), |at| near + at + HEAD_END.len());
        check_lines(bytes.get(..length).unwrap_or_default(), from)?;
        if length > MAX_HEAD_BYTES {
            return Err(HttpError::TooLong);
        }
        if end.is_none() {
            self.scanned = length;
            return Ok(None);
        }
        self.scanned = 0;
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
        self.check_method(method)?;
        if fields(request, "upgrade").count() + fields(request, "http2-settings").count() > 0 {
            return Err(HttpError::Upgrade);
        }
        let mut options = fields(request, "connection")
            .flat_map(|value| value.split(|byte| *byte == b','))
            .map(<[u8]>::trim_ascii)
            .filter(|option| !option.is_empty());
        let is_known = |option: &[u8]| {
            let mut known = CONNECTION_OPTIONS.iter();
            known.any(|known| option.eq_ignore_ascii_case(known))
        };
        if !options.all(is_known) {
            return Err(HttpError::Connection);
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
        let scheme = if self.is_opened {
            "https://"
        } else {
            "http://"
        };
        match path.split_at_checked(scheme.len()) {
            Some((front, rest)) if front.eq_ignore_ascii_case(scheme) => {
                let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
                self.check_authority(authority.as_bytes())
            }
            _ => Err(HttpError::Malformed(
                "the request's target is neither a path nor a URI of this scheme",
            )),
        }
    }

    /// A method that asks for an answer of the host alone, and for none that a secret would be seen in.
    pub(crate) fn check_method(&self, method: &str) -> Result<(), HttpError> {
        if method.eq_ignore_ascii_case("CONNECT") {
            return Err(HttpError::Connect);
        }
        if self.is_opened && method.eq_ignore_ascii_case("TRACE") {
            return Err(HttpError::Trace);
        }
        // Methods differ by case (RFC 9110 §9.1), and not every server knows it: whether the answer has a content could not be told.
        if self.is_opened && method != "HEAD" && method.eq_ignore_ascii_case("HEAD") {
            return Err(HttpError::Malformed(
                "a method that is HEAD but for its case",
            ));
        }
        Ok(())
    }

    /// A host with the connection's port or without. It goes on as it was spelled: but for its case, in the one spelling that all
    /// servers read alike.
    pub(crate) fn check_authority(&self, authority: &[u8]) -> Result<(), HttpError> {
        let other = || HttpError::OtherHost(String::from_utf8_lossy(authority).into_owned());
        let text = std::str::from_utf8(authority).map_err(|_| other())?;
        let (host, port) = match text.rsplit_once(':') {
            Some((host, port)) if !text.ends_with(']') => (host, Some(port)),
            _ => (text, None),
        };
        let is_same_port = port.is_none_or(|port| port == self.port.to_string());
        let is_same_host = match &self.target {
            // A program that names the root as well is right; who gets a secret is named in one way.
            Target::Name(name) => {
                let dotless = host.strip_suffix('.').filter(|_| !self.is_opened);
                name.as_str().eq_ignore_ascii_case(dotless.unwrap_or(host))
            }
            address @ Target::Address(_) => address.to_string() == host,
        };
        if is_same_host && is_same_port {
            Ok(())
        } else {
            Err(other())
        }
    }
}

#[cfg(test)]
mod tests;
