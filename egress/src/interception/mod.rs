//! TLS that is opened on the way, to the hosts that may have a secret and to no other: the guest speaks with a certificate of
//! the sandbox's own, the server is verified as any client does it, and between the two placeholders in requests become secrets.
//!
//! Nothing here is made for a sandbox without secrets.

pub mod answers;
mod authority;
pub mod http2;
mod mask;
mod needle;
mod placeholders;
mod requests;
mod roots;
mod session;

use std::fmt;
use std::io;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::Acceptor;
use rustls::{AlertDescription, ClientConfig, ClientConnection, ServerConnection};

use crate::name::HostName;
use crate::policy::Target;
use crate::relay::{Count, End};
use crate::secret::{MAX_SECRETS, Secret, SecretError};
use answers::Answers;
use authority::{Authority, AuthorityError};
use http2::{Masking, Places, Relay};
use mask::Masks;
use needle::{Forms, Needle};
use requests::Requests;
use session::Session;

pub use roots::{MAX_ROOTS_BYTES, RootsError};

/// The protocols that are spoken, as ALPN names them (RFC 7301, RFC 9113 §3.1).
const HTTP1: &[u8] = b"http/1.1";
const HTTP2: &[u8] = b"h2";

/// How long a server may take for its handshake, all of it.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(15);

/// Why secrets can't be kept.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InterceptionError {
    /// Two for one variable.
    #[error("There are two secrets for the variable {0}")]
    Twice(String),
    /// More than can be.
    #[error("There are more than {MAX_SECRETS} secrets")]
    TooMany,
    /// No placeholder.
    #[error("{0}")]
    Secret(#[from] SecretError),
    /// No certificate.
    #[error("{0}")]
    Authority(#[from] AuthorityError),
    /// Certificates to trust that are none.
    #[error("{0}")]
    Roots(#[from] RootsError),
}

/// Why a server is not spoken with.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// It does not show that it is the host.
    #[error("the server's certificate is refused: {0}")]
    Certificate(String),
    /// Its handshake fails.
    #[error("the server's TLS fails: {0}")]
    Tls(String),
    /// Nobody is trusted here.
    #[error("{0}")]
    Roots(#[from] RootsError),
}

impl ServerError {
    /// Whether it is a refusal of ours, and not the network's failure.
    #[must_use]
    pub fn is_denial(&self) -> bool {
        matches!(self, Self::Certificate(_))
    }
}

/// The secrets of one sandbox, and what it takes to put them in.
pub struct Interception {
    secrets: Vec<Kept>,
    /// Looked for on every connection, as a server may show on one what it was sent on another.
    forms: Arc<Forms>,
    /// The streams of all connections with HTTP/2.
    places: Places,
    authority: Authority,
    provider: Arc<CryptoProvider>,
    extra_roots: Vec<CertificateDer<'static>>,
    /// Made when the first connection needs it.
    client: OnceLock<Result<Arc<ClientConfig>, RootsError>>,
    /// Read when the first gate asks.
    host_roots: OnceLock<String>,
}

/// A secret, and how it is found in what comes back.
struct Kept {
    secret: Arc<Secret>,
    needle: Arc<Needle>,
}

impl fmt::Debug for Interception {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let secrets: Vec<&Secret> = self.secrets.iter().map(|kept| &*kept.secret).collect();
        formatter
            .debug_struct("Interception")
            .field("secrets", &secrets)
            .finish_non_exhaustive()
    }
}

impl Interception {
    /// For these secrets, at least one. `extra_roots_pem` is trusted beside the host's own certificates, to know servers by.
    ///
    /// # Errors
    /// See [`InterceptionError`].
    pub fn new(
        mut secrets: Vec<Secret>,
        extra_roots_pem: &[u8],
    ) -> Result<Self, InterceptionError> {
        if secrets.len() > MAX_SECRETS {
            return Err(InterceptionError::TooMany);
        }
        for (index, secret) in secrets.iter().enumerate() {
            let others = secrets.get(index + 1..).unwrap_or_default();
            if others.iter().any(|other| other.name() == secret.name()) {
                return Err(InterceptionError::Twice(secret.name().to_owned()));
            }
        }
        for secret in &mut secrets {
            secret.renew()?;
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let domains = secrets.iter().flat_map(Secret::domains);
        let keep = |secret: Secret| Kept {
            needle: Arc::new(Needle::new(secret.value())),
            secret: Arc::new(secret),
        };
        Ok(Self {
            authority: Authority::new(domains, &provider)?,
            extra_roots: roots::parse(extra_roots_pem)?,
            secrets: secrets.into_iter().map(keep).collect(),
            forms: Arc::default(),
            places: Places::default(),
            provider,
            client: OnceLock::new(),
            host_roots: OnceLock::new(),
        })
    }

    /// The certificate, in PEM, that the guest has to trust.
    #[must_use]
    pub fn authority_pem(&self) -> String {
        self.authority.pem()
    }

    /// The certificates, in PEM, that this host trusts, for a guest whose image has none; none where they take more than
    /// [`MAX_ROOTS_BYTES`]. Read once.
    #[must_use]
    pub fn host_roots_pem(&self) -> &str {
        self.host_roots.get_or_init(|| {
            let pem = roots::to_pem(&roots::of_host());
            if pem.len() > MAX_ROOTS_BYTES {
                return String::new();
            }
            pem
        })
    }

    /// The secrets: variable and placeholder.
    pub fn placeholders(&self) -> impl Iterator<Item = (&str, &str)> {
        self.secrets
            .iter()
            .map(|kept| (kept.secret.name(), kept.secret.placeholder()))
    }

    /// Whether TLS to this host is opened.
    #[must_use]
    pub fn covers(&self, target: &Target, port: u16) -> bool {
        self.secrets
            .iter()
            .any(|kept| kept.secret.is_for(target, port))
    }

    /// TLS with the server, up to the end of its handshake: it has shown that it is the host, and has chosen a protocol of those that the
    /// program offers in its hello, with which `first` begins.
    ///
    /// # Errors
    /// See [`ServerError`].
    pub fn connect(
        &self,
        host: &HostName,
        server: &TcpStream,
        first: &[u8],
    ) -> Result<Upstream, ServerError> {
        let config = self.client.get_or_init(|| self.client_config()).clone()?;
        let name = ServerName::try_from(host.to_string())
            .map_err(|error| ServerError::Certificate(error.to_string()))?;
        let mut tls = ClientConnection::new_with_alpn(config, name, offered(first))
            .map_err(|error| ServerError::Tls(error.to_string()))?;
        let done = handshake(&mut tls, server);
        server
            .set_read_timeout(None)
            .and_then(|()| server.set_write_timeout(None))
            .map_err(|error| ServerError::Tls(error.to_string()))?;
        done.map(|()| Upstream(tls))
    }

    /// Carries a connection whose hello was read: `first` is what the client has said so far. Both streams must be
    /// non-blocking.
    ///
    /// # Errors
    /// When the system can't wait.
    pub fn carry(
        &self,
        (host, port): (&HostName, u16),
        (guest, server): (&UnixStream, &TcpStream),
        upstream: Upstream,
        first: &[u8],
        count: &mut Count<'_>,
    ) -> io::Result<End> {
        let target = Target::Name(host.clone());
        let of_host = || {
            let kept = self.secrets.iter();
            kept.filter(|kept| kept.secret.is_for(&target, port))
        };
        let secrets = of_host().map(|kept| Arc::clone(&kept.secret)).collect();
        // Of all of them, whatever is asked for here: one may have been sent over another connection.
        let needles = of_host().map(|kept| Arc::clone(&kept.needle));
        // What the server has chosen is what is spoken with both, so that nothing is translated.
        let is_http2 = upstream.0.alpn_protocol() == Some(HTTP2);
        let protocol = if is_http2 { HTTP2 } else { HTTP1 };
        let config = self.authority.server(host, protocol);
        let downstream =
            ServerConnection::new(config.map_err(io::Error::other)?).map_err(io::Error::other)?;
        let (guest, server) = ((guest, downstream), (server, upstream.0));
        if is_http2 {
            let requests = http2::Requests::new(&target, port, secrets, &self.forms);
            let masking = Masking::new(needles.collect(), &self.forms);
            return Relay::new(guest, server, requests, masking, &self.places)?.run(first, count);
        }
        let requests = Requests::new(&target, port, secrets, &self.forms);
        let answers = Answers::new(Masks::new(needles, &self.forms));
        Session::new(guest, server, requests, answers).run(first, count)
    }

    fn client_config(&self) -> Result<Arc<ClientConfig>, RootsError> {
        let roots = roots::store(&self.extra_roots)?;
        let config = ClientConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_safe_default_protocol_versions()
            .map_err(|error| RootsError::Tls(error.to_string()))?;
        let config = config.with_root_certificates(roots).with_no_client_auth();
        Ok(Arc::new(config))
    }
}

/// A server that has shown that it is the host.
#[derive(Debug)]
pub struct Upstream(ClientConnection);

/// The protocols that a program offers and that are spoken, in its order; HTTP/1.1 where there is none.
fn offered(mut first: &[u8]) -> Vec<Vec<u8>> {
    let mut acceptor = Acceptor::default();
    let mut known = Vec::new();
    while !first.is_empty() && acceptor.read_tls(&mut first).is_ok() {
        match acceptor.accept() {
            Ok(None) => continue,
            Ok(Some(accepted)) => {
                let hello = accepted.client_hello();
                let spoken = |name: &[u8]| [HTTP1, HTTP2].into_iter().find(|known| *known == name);
                known.extend(hello.alpn().into_iter().flatten().filter_map(spoken));
            }
            Err(_) => {}
        }
        break;
    }
    known.dedup();
    if known.is_empty() {
        known.push(HTTP1);
    }
    known.into_iter().map(<[u8]>::to_vec).collect()
}

fn handshake(tls: &mut ClientConnection, mut server: &TcpStream) -> Result<(), ServerError> {
    let failed = |error: io::Error| ServerError::Tls(error.to_string());
    let deadline = Instant::now() + HANDSHAKE_LIMIT;
    // With what is said last, or an alert.
    while tls.is_handshaking() || tls.wants_write() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ServerError::Tls("it takes too long".to_owned()));
        }
        server
            .set_read_timeout(Some(left))
            .and_then(|()| server.set_write_timeout(Some(left)))
            .map_err(failed)?;
        if tls.wants_write() {
            tls.write_tls(&mut server).map_err(failed)?;
            continue;
        }
        match tls.read_tls(&mut server) {
            Ok(0) => return Err(ServerError::Tls("it closed the connection".to_owned())),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            Err(error) => return Err(failed(error)),
        }
        if let Err(error) = tls.process_new_packets() {
            // It is told why, as far as it still listens.
            let _ = tls.write_tls(&mut server);
            return Err(match error {
                rustls::Error::InvalidCertificate(_)
                | rustls::Error::NoCertificatesPresented
                | rustls::Error::UnsupportedNameType => ServerError::Certificate(error.to_string()),
                rustls::Error::AlertReceived(AlertDescription::NoApplicationProtocol) => {
                    ServerError::Tls("it speaks no version of HTTP that the program offers".into())
                }
                other => ServerError::Tls(other.to_string()),
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
