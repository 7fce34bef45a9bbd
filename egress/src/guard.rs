//! What watches the client's side of one connection: TLS, HTTP, or nothing on a raw port.

use crate::http::{HttpError, HttpGuard};
use crate::name::HostName;
use crate::policy::Target;
use crate::tls::{self, TlsError};

/// The port on which nothing but TLS passes.
const HTTPS: u16 = 443;
/// The port on which nothing but HTTP passes.
const HTTP: u16 = 80;
/// What a TLS client's first byte is: a handshake record's type.
const TLS_FIRST_BYTE: u8 = 22;

/// Why a client's words are refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GuardError {
    /// On a port for TLS, or where the first byte is TLS's.
    #[error("{0}")]
    Tls(#[from] TlsError),
    /// On a port for HTTP, or where the first byte is not TLS's.
    #[error("{0}")]
    Http(#[from] HttpError),
}

/// What watches one connection. It is shown what the client sends and says how much of it may pass.
#[derive(Debug)]
pub struct Guard {
    target: Target,
    port: u16,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    /// Nothing has come on a port that may carry either.
    Undecided,
    Tls(TlsState),
    Http(HttpGuard),
    /// Whatever it is.
    Raw,
}

#[derive(Debug)]
enum TlsState {
    Hello,
    /// A hello has passed; whether the server wants another one is not known yet. Nothing passes meanwhile: it could be
    /// that other one.
    Answer(Vec<u8>),
    SecondHello,
    /// The rest is encrypted.
    Open,
}

impl Guard {
    /// For a connection to this target; on a raw port everything passes.
    #[must_use]
    pub fn new(target: &Target, port: u16, is_raw: bool) -> Self {
        let kind = match port {
            _ if is_raw => Kind::Raw,
            HTTPS => Kind::Tls(TlsState::Hello),
            HTTP => Kind::Http(HttpGuard::new(target.clone(), port)),
            _ => Kind::Undecided,
        };
        Self {
            target: target.clone(),
            port,
            kind,
        }
    }

    /// For a connection whose TLS is opened: nothing else passes.
    #[must_use]
    pub fn tls(target: &Target, port: u16) -> Self {
        Self {
            target: target.clone(),
            port,
            kind: Kind::Tls(TlsState::Hello),
        }
    }

    /// Whether the client has to speak first, so that nothing is connected before its words were found good.
    #[must_use]
    pub fn waits_for_client(&self) -> bool {
        !matches!(self.kind, Kind::Raw)
    }

    /// How many of these bytes, which come next from the client, may pass. The rest is to be shown again, with what
    /// follows it or after the server's next words.
    ///
    /// # Errors
    /// See [`GuardError`]; the connection has to be ended then.
    pub fn client(&mut self, bytes: &[u8]) -> Result<usize, GuardError> {
        let Some(first) = bytes.first() else {
            return Ok(0);
        };
        if matches!(self.kind, Kind::Undecided) {
            self.kind = if *first == TLS_FIRST_BYTE {
                Kind::Tls(TlsState::Hello)
            } else {
                Kind::Http(HttpGuard::new(self.target.clone(), self.port))
            };
        }
        match &mut self.kind {
            Kind::Raw | Kind::Undecided => Ok(bytes.len()),
            Kind::Http(guard) => Ok(guard.pass(bytes)?),
            Kind::Tls(state) => Ok(state.client(bytes, host(&self.target))?),
        }
    }

    /// Is shown what the server sends, before the client is.
    pub fn server(&mut self, bytes: &[u8]) {
        if let Kind::Tls(state) = &mut self.kind {
            state.server(bytes);
        }
    }
}

/// The name that a hello has to carry.
fn host(target: &Target) -> Option<&HostName> {
    match target {
        Target::Name(name) => Some(name),
        Target::Address(_) => None,
    }
}

impl TlsState {
    fn client(&mut self, bytes: &[u8], expected: Option<&HostName>) -> Result<usize, TlsError> {
        let (skipped, next) = match self {
            Self::Open => return Ok(bytes.len()),
            Self::Answer(_) => return Ok(0),
            Self::Hello => (0, Self::Answer(Vec::new())),
            Self::SecondHello => match tls::change_cipher_spec(bytes) {
                None => return Ok(0),
                Some(count) => (count, Self::Open),
            },
        };
        match tls::client_hello(bytes.get(skipped..).unwrap_or_default())? {
            None => Ok(0),
            Some(hello) => {
                hello.check(expected)?;
                *self = next;
                Ok(skipped + hello.length)
            }
        }
    }

    fn server(&mut self, bytes: &[u8]) {
        let Self::Answer(seen) = self else {
            return;
        };
        let wanted = tls::SERVER_RANDOM_END.saturating_sub(seen.len());
        seen.extend(bytes.iter().take(wanted));
        match tls::wants_retry(seen) {
            None => {}
            Some(true) => *self = Self::SecondHello,
            Some(false) => *self = Self::Open,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tls::tests::{hello, sni};

    fn guard(port: u16) -> Guard {
        Guard::new(
            &Target::Name(HostName::parse("a.example").unwrap()),
            port,
            false,
        )
    }

    fn server_hello(is_retry: bool) -> Vec<u8> {
        let random = if is_retry {
            [
                0xcf, 0x21, 0xad, 0x74, 0xe5, 0x9a, 0x61, 0x11, 0xbe, 0x1d, 0x8c, 0x02, 0x1e, 0x65,
                0xb8, 0x91, 0xc2, 0xa2, 0x11, 0x16, 0x7a, 0xbb, 0x8c, 0x5e, 0x07, 0x9e, 0x09, 0xe2,
                0xc8, 0xa8, 0x33, 0x9c,
            ]
        } else {
            [9; 32]
        };
        [&[22, 3, 3, 0, 60, 2, 0, 0, 56, 3, 3][..], &random, &[0; 22]].concat()
    }

    #[test]
    fn each_port_has_its_protocol() {
        let tls = hello(&[sni("a.example")]);
        let http = b"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n";
        for (port, passes_tls, passes_http) in
            [(443, true, false), (80, false, true), (8443, true, true)]
        {
            assert_eq!(guard(port).client(&tls).is_ok(), passes_tls, "{port}");
            assert_eq!(guard(port).client(http).is_ok(), passes_http, "{port}");
            guard(port)
                .client(b"\0\0\0\x08\x04\xd2\x16\x2f")
                .unwrap_err();
        }
        let mut raw = Guard::new(&Target::Address([10, 0, 0, 5].into()), 5432, true);
        assert!(!raw.waits_for_client());
        assert_eq!(raw.client(b"\0\0\0\x08\x04\xd2\x16\x2f"), Ok(8));
    }

    #[test]
    fn nothing_passes_behind_a_hello_before_the_server_has_answered() {
        let mut guard = guard(443);
        let first = hello(&[sni("a.example")]);
        let stream = [&first[..], b"early data"].concat();

        assert_eq!(guard.client(&stream), Ok(first.len()));
        assert_eq!(guard.client(b"early data"), Ok(0));
        let answer = server_hello(false);
        guard.server(&answer[..20]);
        assert_eq!(guard.client(b"early data"), Ok(0));
        guard.server(&answer[20..]);
        assert_eq!(guard.client(b"early data"), Ok(10));
    }

    #[test]
    fn a_second_hello_is_checked_as_the_first_was() {
        for (second, is_good) in [("a.example", true), ("evil.net", false)] {
            let mut guard = guard(443);
            let first = hello(&[sni("a.example")]);
            assert_eq!(guard.client(&first), Ok(first.len()));
            guard.server(&server_hello(true));

            let stream = [&[20, 3, 3, 0, 1, 1][..], &hello(&[sni(second)])].concat();
            assert_eq!(guard.client(&stream[..3]), Ok(0));
            assert_eq!(guard.client(&stream).is_ok(), is_good);
        }
    }
}
