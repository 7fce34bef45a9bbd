//! Secrets that a guest may use and never has: for which hosts they are, what stands for them in the guest.

use std::fmt;
use std::str::FromStr;

use zeroize::Zeroizing;

use crate::name::HostName;
use crate::policy::{Pattern, Rule, RuleError, Target};

/// Longest value, in bytes: servers take heads of 8 KiB and more.
pub const MAX_SECRET_BYTES: usize = 16 << 10;

/// Shortest value, in bytes. What comes back from a server is searched for it: a shorter one would be found by chance.
pub const MIN_SECRET_BYTES: usize = 8;

/// Most secrets of one sandbox.
pub const MAX_SECRETS: usize = 64;

/// Most hosts of one secret.
pub const MAX_SECRET_HOSTS: usize = 64;

/// Longest name of a secret's variable, in bytes.
const MAX_NAME_BYTES: usize = 128;

/// What placeholders begin with; random digits follow.
const PLACEHOLDER_PREFIX: &str = "sandvmm-secret-";

/// Random bytes of a placeholder: none is in a request by chance.
const PLACEHOLDER_RANDOM_BYTES: usize = 16;

/// The port of a secret's host that names none.
const DEFAULT_PORT: u16 = 443;

/// Why something is no secret. Never holds any of the value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SecretError {
    /// No name that a variable can have.
    #[error("'{0}' is no variable's name: letters, digits and underscores, no digit in front")]
    Name(String),
    /// No host, or too many.
    #[error("The secret {name} has {count} hosts: 1 to {MAX_SECRET_HOSTS} may have it")]
    HostCount {
        /// The secret's name.
        name: String,
        /// How many it has.
        count: usize,
    },
    /// A host that is none.
    #[error("The secret {name} has a host that is none")]
    Host {
        /// The secret's name.
        name: String,
        /// Why not.
        #[source]
        source: RuleError,
    },
    /// An address: no certificate is for it.
    #[error("The secret {name} is for the address {host}: say a host's name")]
    Address {
        /// The secret's name.
        name: String,
        /// The address.
        host: String,
    },
    /// A value that is too short or too long.
    #[error(
        "The secret {name} has {count} bytes: {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} can be kept"
    )]
    Length {
        /// The secret's name.
        name: String,
        /// How many it has.
        count: usize,
    },
    /// A value that no header can have.
    #[error(
        "The secret {0} has characters that are not printable ASCII, or a space at an end: no header can have it"
    )]
    Characters(String),
    /// The system has no random numbers.
    #[error("The system has no randomness: {0}")]
    Random(String),
}

/// A host that may have a secret: `HOST[:PORT]`, `*.DOMAIN[:PORT]`; port 443 unless named.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SecretHost(Rule);

impl FromStr for SecretHost {
    type Err = RuleError;

    fn from_str(text: &str) -> Result<Self, RuleError> {
        let rule: Rule = text.parse()?;
        // A rule without ports means 80 too; no secret goes there unless it was said.
        let has_port = text.rsplit_once(':').is_some();
        if has_port || matches!(rule.pattern(), Pattern::Range(_)) {
            return Ok(Self(rule));
        }
        format!("{text}:{DEFAULT_PORT}").parse().map(Self)
    }
}

/// One secret. Its value is overwritten when it is dropped, and nothing shows it.
#[derive(Clone)]
pub struct Secret {
    name: String,
    hosts: Vec<SecretHost>,
    value: Zeroizing<Vec<u8>>,
    placeholder: String,
}

impl fmt::Debug for Secret {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Secret")
            .field("name", &self.name)
            .field("hosts", &self.hosts)
            .finish_non_exhaustive()
    }
}

impl Secret {
    /// A secret for these hosts (see [`SecretHost`]): the guest finds a placeholder in the variable `name`.
    ///
    /// # Errors
    /// See [`SecretError`].
    pub fn new(
        name: &str,
        hosts: &[impl AsRef<str>],
        value: impl Into<Zeroizing<Vec<u8>>>,
    ) -> Result<Self, SecretError> {
        let value = value.into();
        if !is_variable(name) {
            return Err(SecretError::Name(name.to_owned()));
        }
        if !(1..=MAX_SECRET_HOSTS).contains(&hosts.len()) {
            return Err(SecretError::HostCount {
                name: name.to_owned(),
                count: hosts.len(),
            });
        }
        let mut parsed = Vec::with_capacity(hosts.len());
        for host in hosts {
            let host: SecretHost = host.as_ref().parse().map_err(|source| SecretError::Host {
                name: name.to_owned(),
                source,
            })?;
            if matches!(host.0.pattern(), Pattern::Range(_)) {
                return Err(SecretError::Address {
                    name: name.to_owned(),
                    host: host.0.to_string(),
                });
            }
            parsed.push(host);
        }
        if !(MIN_SECRET_BYTES..=MAX_SECRET_BYTES).contains(&value.len()) {
            return Err(SecretError::Length {
                name: name.to_owned(),
                count: value.len(),
            });
        }
        let is_printable = value.iter().all(|byte| (0x20..0x7f).contains(byte));
        if !is_printable || value.first() == Some(&b' ') || value.last() == Some(&b' ') {
            return Err(SecretError::Characters(name.to_owned()));
        }
        Ok(Self {
            name: name.to_owned(),
            hosts: parsed,
            value,
            placeholder: placeholder()?,
        })
    }

    /// The variable in which the guest finds the placeholder.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Takes another placeholder: no two sandboxes have one.
    pub(crate) fn renew(&mut self) -> Result<(), SecretError> {
        self.placeholder = placeholder()?;
        Ok(())
    }

    /// What the guest finds there: random, another in each sandbox, and of no use anywhere else.
    #[must_use]
    pub(crate) fn placeholder(&self) -> &str {
        &self.placeholder
    }

    /// The rules for the hosts that may have it: they are allowed by being named here.
    pub fn rules(&self) -> impl Iterator<Item = &Rule> {
        self.hosts.iter().map(|host| &host.0)
    }

    /// Whether this host may have it.
    #[must_use]
    pub fn is_for(&self, target: &Target, port: u16) -> bool {
        self.rules().any(|rule| rule.covers(target, port))
    }

    /// The domains of its hosts: each of them, or what it is below.
    pub(crate) fn domains(&self) -> impl Iterator<Item = &HostName> {
        self.rules().filter_map(|rule| match rule.pattern() {
            Pattern::Name(name) | Pattern::Below(name) => Some(name),
            Pattern::Range(_) => None,
        })
    }

    pub(crate) fn value(&self) -> &[u8] {
        &self.value
    }
}

fn is_variable(name: &str) -> bool {
    let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    (1..=MAX_NAME_BYTES).contains(&name.len())
        && name.bytes().all(is_letter)
        && !name.starts_with(|first: char| first.is_ascii_digit())
}

fn placeholder() -> Result<String, SecretError> {
    let mut random = [0_u8; PLACEHOLDER_RANDOM_BYTES];
    let filled = rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
        .map_err(|errno| SecretError::Random(errno.to_string()))?;
    if filled != random.len() {
        return Err(SecretError::Random("too little came".to_owned()));
    }
    let digits: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(format!("{PLACEHOLDER_PREFIX}{digits}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(hosts: &[&str]) -> Result<Secret, SecretError> {
        Secret::new("TOKEN", hosts, b"s3cr3t-value".to_vec())
    }

    fn is_for(secret: &Secret, host: &str, port: u16) -> bool {
        secret.is_for(&Target::Name(HostName::parse(host).unwrap()), port)
    }

    #[test]
    fn a_secret_is_for_its_hosts_on_443_unless_a_port_is_named() {
        let secret = secret(&["API.example.", "*.b.example", "c.example:8443"]).unwrap();
        for (host, port, is_its) in [
            ("api.example", 443, true),
            ("api.example", 80, false),
            ("x.api.example", 443, false),
            ("x.b.example", 443, true),
            ("b.example", 443, false),
            ("c.example", 8443, true),
            ("c.example", 443, false),
            ("d.example", 443, false),
        ] {
            assert_eq!(is_for(&secret, host, port), is_its, "{host}:{port}");
        }
    }

    #[test]
    fn what_can_be_no_secret_is_refused_without_showing_it() {
        for hosts in [&[][..], &["10.0.0.1"], &["::1"], &["a b"], &["*"]] {
            secret(hosts).unwrap_err();
        }
        for name in ["", "1A", "A-B", "A=B", "Ä"] {
            let error = Secret::new(name, &["a.example"], b"s3cr3t-value".to_vec()).unwrap_err();
            assert_eq!(error, SecretError::Name(name.to_owned()));
        }
        for value in [
            "short",
            "a line\nfeed",
            "an end\r\n",
            "nul\0nul\0",
            " space ahead",
            "ümlaut-value",
        ] {
            let error =
                Secret::new("TOKEN", &["a.example"], value.as_bytes().to_vec()).unwrap_err();
            assert!(!format!("{error} {error:?}").contains(value), "{error}");
        }
        Secret::new("TOKEN", &["a.example"], vec![b'x'; MAX_SECRET_BYTES + 1]).unwrap_err();
    }

    #[test]
    fn nothing_shows_the_value_and_placeholders_differ() {
        let (one, other) = (
            secret(&["a.example"]).unwrap(),
            secret(&["a.example"]).unwrap(),
        );
        assert!(!format!("{one:?}").contains("s3cr3t"));
        assert!(!format!("{one:?}").contains(one.placeholder()));
        assert_ne!(one.placeholder(), other.placeholder());
    }
}
