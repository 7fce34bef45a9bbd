//! From a target to a connection: resolve, check every answer, connect to an address that was checked.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use socket2::SockRef;

use crate::address::Class;
use crate::name::HostName;
use crate::policy::{Policy, Target};

/// Longest wait for one address.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);

/// Longest wait for all addresses of a name.
const ALL_CONNECTS_LIMIT: Duration = Duration::from_secs(30);

/// Most addresses that are tried.
const MAX_TRIES: usize = 8;

/// Finds a name's addresses on the host. It is asked once for each connection, and never about a name that the policy
/// has not allowed.
pub trait Resolver: Send + Sync {
    /// All addresses of the name.
    ///
    /// # Errors
    /// When there are none, or nobody can say.
    fn resolve(&self, name: &HostName) -> io::Result<Vec<IpAddr>>;
}

/// The host's own resolver, with its files and its search list.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemResolver;

impl Resolver for SystemResolver {
    fn resolve(&self, name: &HostName) -> io::Result<Vec<IpAddr>> {
        let found = (name.as_str(), 0).to_socket_addrs()?;
        Ok(found.map(|address| address.ip()).collect())
    }
}

/// Why an allowed connection was not made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The name has no addresses, or nobody can say.
    #[error("the host's resolver finds no address: {0}")]
    Resolve(#[source] io::Error),
    /// One of its addresses is not public, and the operator has not named it.
    #[error("it stands for {address}, which is {}; add --allow-host {}", class.name(), hint(*address, *port))]
    NotPublic {
        /// The address.
        address: IpAddr,
        /// What it is.
        class: Class,
        /// The connection's port.
        port: u16,
    },
    /// No address answers.
    #[error("{address} does not answer: {source}")]
    Unreachable {
        /// The one that was tried last.
        address: IpAddr,
        /// What the system says of it.
        source: io::Error,
    },
}

impl ConnectError {
    /// Whether it is a refusal of ours, and not the network's.
    #[must_use]
    pub fn is_denial(&self) -> bool {
        matches!(self, Self::NotPublic { .. })
    }
}

fn hint(address: IpAddr, port: u16) -> String {
    crate::audit::as_rule(&Target::Address(address), port)
}

/// Connects to a target that the policy has allowed.
///
/// # Errors
/// See [`ConnectError`].
pub fn open(
    target: &Target,
    port: u16,
    policy: &Policy,
    resolver: &dyn Resolver,
) -> Result<TcpStream, ConnectError> {
    let addresses = match target {
        Target::Address(address) => vec![*address],
        Target::Name(name) => resolver.resolve(name).map_err(ConnectError::Resolve)?,
    };
    // All of them before any is used: a name that has one address outside and one inside is refused.
    for address in &addresses {
        policy
            .admits(*address, port)
            .map_err(|class| ConnectError::NotPublic {
                address: *address,
                class,
                port,
            })?;
    }
    let deadline = Instant::now() + ALL_CONNECTS_LIMIT;
    let mut failure = ConnectError::Resolve(io::ErrorKind::NotFound.into());
    for address in addresses.into_iter().take(MAX_TRIES) {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        // By number: nothing is asked again between the check and the use.
        match TcpStream::connect_timeout(&SocketAddr::new(address, port), left.min(CONNECT_LIMIT)) {
            Ok(stream) => {
                // A peer that is gone without a word is noticed, and small pieces go out as they come. Neither is needed to
                // be right.
                let _ = SockRef::from(&stream).set_keepalive(true);
                let _ = stream.set_nodelay(true);
                return Ok(stream);
            }
            Err(source) => failure = ConnectError::Unreachable { address, source },
        }
    }
    Err(failure)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::sync::Mutex;

    use super::*;

    /// Answers with the next of its lists, as a resolver does that rebinds.
    struct Lists(Mutex<Vec<Vec<IpAddr>>>);

    impl Lists {
        fn new(lists: &[&[&str]]) -> Self {
            let parsed = lists
                .iter()
                .rev()
                .map(|list| list.iter().map(|text| text.parse().unwrap()).collect());
            Self(Mutex::new(parsed.collect()))
        }
    }

    impl Resolver for Lists {
        fn resolve(&self, _: &HostName) -> io::Result<Vec<IpAddr>> {
            let next = self.0.lock().unwrap().pop();
            next.ok_or_else(|| io::ErrorKind::NotFound.into())
        }
    }

    fn policy(rules: &[&str]) -> Policy {
        let mut policy = Policy::new();
        for rule in rules {
            policy.allow(rule.parse().unwrap());
        }
        policy
    }

    fn name() -> Target {
        Target::Name(HostName::parse("a.example").unwrap())
    }

    fn refused_class(answers: &[&str]) -> Class {
        match open(
            &name(),
            443,
            &policy(&["a.example"]),
            &Lists::new(&[answers]),
        ) {
            Err(ConnectError::NotPublic { class, .. }) => class,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn one_answer_that_is_not_public_refuses_the_name() {
        for (answers, class) in [
            (&["127.0.0.1"][..], Class::Loopback),
            (&["93.184.216.34", "10.0.0.1"], Class::Private),
            (&["169.254.169.254", "93.184.216.34"], Class::LinkLocal),
            (&["::ffff:169.254.169.254"], Class::Embedded),
            (&["2606:2800::1", "fd00:ec2::254"], Class::Private),
            (&["0.0.0.0"], Class::Unspecified),
            (&["100.100.100.200"], Class::Shared),
            (&["168.63.129.16"], Class::Metadata),
        ] {
            assert_eq!(refused_class(answers), class);
        }
    }

    #[test]
    fn an_address_that_was_named_is_connected_to() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let rules = [format!("a.example:{port}"), format!("127.0.0.1:{port}")];
        let rules: Vec<&str> = rules.iter().map(String::as_str).collect();

        let stream = open(
            &name(),
            port,
            &policy(&rules),
            &Lists::new(&[&["127.0.0.1"]]),
        )
        .unwrap();

        assert_eq!(stream.peer_addr().unwrap(), listener.local_addr().unwrap());
    }

    #[test]
    fn a_resolver_that_rebinds_is_checked_each_time() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let rules = [format!("a.example:{port}"), format!("127.0.0.1:{port}")];
        let policy = policy(&rules.each_ref().map(String::as_str));
        let resolver = Lists::new(&[&["127.0.0.1"], &["127.0.0.2"]]);

        open(&name(), port, &policy, &resolver).unwrap();
        let second = open(&name(), port, &policy, &resolver).unwrap_err();

        assert!(second.is_denial(), "{second}");
    }

    #[test]
    fn a_name_without_an_address_is_no_denial() {
        let error = open(&name(), 443, &policy(&["a.example"]), &Lists::new(&[])).unwrap_err();
        assert!(!error.is_denial());
        let error = open(&name(), 443, &policy(&["a.example"]), &Lists::new(&[&[]])).unwrap_err();
        assert!(matches!(error, ConnectError::Resolve(_)));
    }

    #[test]
    fn the_refusal_says_what_to_add() {
        let error = open(&name(), 8443, &policy(&[]), &Lists::new(&[&["10.0.0.1"]])).unwrap_err();
        assert_eq!(
            error.to_string(),
            "it stands for 10.0.0.1, which is private; add --allow-host 10.0.0.1:8443"
        );
    }
}
