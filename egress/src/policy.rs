//! What may leave: rules of the operator, as `HOST[:PORT[,PORT]]`.

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use ipnet::IpNet;

use crate::address::{self, Class};
use crate::name::{HostName, NameError};

/// The ports of a rule that names none: HTTPS and HTTP.
pub const DEFAULT_PORTS: [u16; 2] = [443, 80];

/// Most rules of one policy.
pub const MAX_RULES: usize = 4096;

/// Most ports of one rule. A guest has a listener for each of them and each name.
pub const MAX_RULE_PORTS: usize = 32;

/// Where a connection is to go, as the guest says.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Target {
    /// A host by its name.
    Name(HostName),
    /// A literal address; a mapped one is the IPv4 address that it is.
    Address(IpAddr),
}

impl fmt::Display for Target {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => name.fmt(formatter),
            Self::Address(IpAddr::V6(address)) => write!(formatter, "[{address}]"),
            Self::Address(address) => address.fmt(formatter),
        }
    }
}

/// What a rule is about.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pattern {
    /// One host.
    Name(HostName),
    /// All hosts below a domain, by one label or more; not the domain itself.
    Below(HostName),
    /// Addresses: as literals in the guest, and as what an allowed name may stand for though they are not public.
    Range(IpNet),
}

/// One thing that is allowed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    pattern: Pattern,
    ports: Vec<u16>,
}

/// Why a text is no rule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RuleError {
    /// The host is neither a name nor an address.
    #[error(
        "'{text}' names no host: say HOST, HOST:PORT, *.DOMAIN, an address or a range of addresses"
    )]
    Host {
        /// The rule.
        text: String,
        /// Why not.
        source: NameError,
    },
    /// A port that is none.
    #[error(
        "'{text}' has something else than ports from 1 to 65535 after its colon: say HOST:443 or HOST:443,8443, at most \
         {MAX_RULE_PORTS}"
    )]
    Ports {
        /// The rule.
        text: String,
    },
    /// A URL, which says more than is looked at.
    #[error("'{text}' is a URL: say its host alone, or HOST:PORT")]
    Url {
        /// The rule.
        text: String,
    },
    /// A star anywhere but in front.
    #[error("'{text}' has a star that is not its first label: say *.DOMAIN")]
    Star {
        /// The rule.
        text: String,
    },
    /// A sandbox has as many rules as it may have.
    #[error(
        "{MAX_RULES} hosts are allowed already, and no more can be: forbid one that is not needed"
    )]
    TooMany,
    /// All addresses at once.
    #[error("'{text}' allows every address: say a range")]
    Everything {
        /// The rule.
        text: String,
    },
}

impl Rule {
    /// What it is about.
    #[must_use]
    pub fn pattern(&self) -> &Pattern {
        &self.pattern
    }

    /// Its ports, in no order.
    #[must_use]
    pub fn ports(&self) -> &[u16] {
        &self.ports
    }

    /// Whether it is about this connection.
    pub(crate) fn covers(&self, target: &Target, port: u16) -> bool {
        self.ports.contains(&port)
            && match (&self.pattern, target) {
                (Pattern::Name(allowed), Target::Name(name)) => allowed == name,
                (Pattern::Below(domain), Target::Name(name)) => name.is_below(domain),
                (Pattern::Range(range), Target::Address(address)) => range.contains(address),
                _ => false,
            }
    }
}

impl FromStr for Rule {
    type Err = RuleError;

    fn from_str(text: &str) -> Result<Self, RuleError> {
        let whole = || text.to_owned();
        if text.contains("://") {
            return Err(RuleError::Url { text: whole() });
        }
        let (host, ports) = split(text);
        let ports = match ports {
            None => DEFAULT_PORTS.to_vec(),
            Some(ports) => parse_ports(ports).ok_or_else(|| RuleError::Ports { text: whole() })?,
        };
        let bare = host
            .strip_prefix('[')
            .map_or(host, |rest| rest.strip_suffix(']').unwrap_or(host));
        let address = bare.parse::<IpAddr>().map(IpNet::from).ok();
        // `[ADDRESS]/LENGTH` and `ADDRESS/LENGTH`.
        let range = address.or_else(|| host.replace(['[', ']'], "").parse::<IpNet>().ok());
        if let Some(range) = range {
            if range.prefix_len() == 0 {
                return Err(RuleError::Everything { text: whole() });
            }
            let range = IpNet::new(address::canonical(range.addr()), range.prefix_len())
                .unwrap_or(range)
                .trunc();
            let pattern = Pattern::Range(range);
            return Ok(Self { pattern, ports });
        }
        let named = |name: &str| {
            if name.contains('*') {
                return Err(RuleError::Star { text: whole() });
            }
            HostName::parse(name).map_err(|source| RuleError::Host {
                text: whole(),
                source,
            })
        };
        let pattern = match host.strip_prefix("*.") {
            Some(domain) => Pattern::Below(named(domain)?),
            None => Pattern::Name(named(host)?),
        };
        Ok(Self { pattern, ports })
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.pattern {
            Pattern::Name(name) => write!(formatter, "{name}")?,
            Pattern::Below(domain) => write!(formatter, "*.{domain}")?,
            Pattern::Range(IpNet::V4(range)) => write!(formatter, "{range}")?,
            Pattern::Range(IpNet::V6(range)) => {
                write!(formatter, "[{}]/{}", range.addr(), range.prefix_len())?;
            }
        }
        let mut before = ':';
        for port in &self.ports {
            write!(formatter, "{before}{port}")?;
            before = ',';
        }
        Ok(())
    }
}

/// Host and ports. A bare IPv6 address has colons of its own and no ports.
fn split(text: &str) -> (&str, Option<&str>) {
    match text.rsplit_once(':') {
        Some((host, ports)) if !host.contains(':') || host.contains(']') => (host, Some(ports)),
        _ => (text, None),
    }
}

fn parse_ports(text: &str) -> Option<Vec<u16>> {
    let mut ports = Vec::new();
    for word in text.split(',') {
        // `+80` is a number for Rust.
        let digits = word.bytes().all(|byte| byte.is_ascii_digit());
        let port = word.parse().ok().filter(|port| digits && *port != 0)?;
        if !ports.contains(&port) {
            ports.push(port);
        }
    }
    (ports.len() <= MAX_RULE_PORTS).then_some(ports)
}

/// What may leave a sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Policy {
    rules: Vec<Rule>,
    raw_ports: BTreeSet<u16>,
}

impl Policy {
    /// One that allows nothing.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Allows one thing more. What is above [`MAX_RULES`] is not taken: false.
    pub fn allow(&mut self, rule: Rule) -> bool {
        if self.rules.contains(&rule) {
            return true;
        }
        let has_room = self.rules.len() < MAX_RULES;
        if has_room {
            self.rules.push(rule);
        }
        has_room
    }

    /// Allows one thing less: false if it was not allowed in these words.
    pub fn forbid(&mut self, rule: &Rule) -> bool {
        let before = self.rules.len();
        self.rules.retain(|known| known != rule);
        self.rules.len() < before
    }

    /// What passes on this port is not looked into: it is neither TLS nor HTTP. It still takes a rule with the port.
    pub fn raw_port(&mut self, port: u16) {
        self.raw_ports.insert(port);
    }

    /// All rules, as they were given.
    #[must_use]
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// Whether a port's content is looked into.
    #[must_use]
    pub fn is_raw(&self, port: u16) -> bool {
        self.raw_ports.contains(&port)
    }

    /// The ports whose content is not looked into.
    #[must_use]
    pub fn raw_ports(&self) -> &BTreeSet<u16> {
        &self.raw_ports
    }

    /// The rule that allows a connection, if there is one.
    #[must_use]
    pub fn rule_for(&self, target: &Target, port: u16) -> Option<&Rule> {
        self.rules.iter().find(|rule| rule.covers(target, port))
    }

    /// Whether an allowed connection may go to this address: a public one, or one that the operator has named.
    ///
    /// # Errors
    /// What the address is, if not.
    pub fn admits(&self, address: IpAddr, port: u16) -> Result<(), Class> {
        let class = address::class(address);
        if class == Class::Public {
            return Ok(());
        }
        // A mapped answer is no address of the range that it maps to: only that range's own spelling is.
        match self.rule_for(&Target::Address(address), port) {
            Some(_) => Ok(()),
            None => Err(class),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn policy(rules: &[&str]) -> Policy {
        let mut policy = Policy::new();
        for rule in rules {
            assert!(policy.allow(rule.parse().unwrap()));
        }
        policy
    }

    fn target(text: &str) -> Target {
        match text.parse() {
            Ok(address) => Target::Address(address),
            Err(_) => Target::Name(HostName::parse(text).unwrap()),
        }
    }

    fn allows(policy: &Policy, host: &str, port: u16) -> bool {
        policy.rule_for(&target(host), port).is_some()
    }

    #[test]
    fn a_rule_is_a_host_and_its_ports() {
        for (text, shown) in [
            ("PyPI.org", "pypi.org:443,80"),
            ("pypi.org.:8443,443", "pypi.org:8443,443"),
            ("*.example.com:443", "*.example.com:443"),
            ("bücher.example", "xn--bcher-kva.example:443,80"),
            ("10.0.0.5:5432", "10.0.0.5/32:5432"),
            ("10.1.2.3/8", "10.0.0.0/8:443,80"),
            ("fd00::5", "[fd00::5]/128:443,80"),
            ("[fd00::5]:22", "[fd00::5]/128:22"),
            ("[fd00::]/8:22", "[fd00::]/8:22"),
        ] {
            let rule: Rule = text.parse().unwrap();
            assert_eq!(rule.to_string(), shown);
            assert_eq!(shown.parse::<Rule>().unwrap(), rule);
        }
    }

    #[test]
    fn what_is_no_rule_is_refused() {
        for text in [
            "",
            ":443",
            "a:",
            "a:0",
            "a:x",
            "a:65536",
            "a:+80",
            "a:80,",
            "*",
            "*.",
            "a.*",
            "*.*.a",
            "**.a",
            "a b",
            "127.1",
            "0x7f000001",
            "http://a",
            "a/b",
            "0.0.0.0/0",
            "::/0",
            "10.0.0.0/33",
            "[::1",
            "a:80:90",
        ] {
            assert!(text.parse::<Rule>().is_err(), "{text:?}");
        }
        let url = "http://a".parse::<Rule>().unwrap_err();
        assert!(url.to_string().contains("is a URL"), "{url}");
        let port = "a.b:0".parse::<Rule>().unwrap_err();
        assert!(port.to_string().contains("ports from 1 to 65535"), "{port}");
        let many: Vec<String> = (1..=33).map(|port| port.to_string()).collect();
        format!("a:{}", many.join(",")).parse::<Rule>().unwrap_err();
    }

    #[test]
    fn nothing_is_allowed_that_was_not_named() {
        let policy = policy(&["pypi.org", "*.example.com:443", "db.example.net:5432"]);

        assert!(allows(&policy, "pypi.org", 443));
        assert!(allows(&policy, "pypi.org", 80));
        assert!(allows(&policy, "PYPI.org.", 443));
        assert!(allows(&policy, "a.b.example.com", 443));
        assert!(allows(&policy, "db.example.net", 5432));
        for (host, port) in [
            ("pypi.org", 22),
            ("files.pypi.org", 443),
            ("pypi.org.evil.net", 443),
            ("evilpypi.org", 443),
            ("example.com", 443),
            ("a.example.com", 80),
            ("db.example.net", 443),
            ("93.184.216.34", 443),
            ("::1", 443),
        ] {
            assert!(!allows(&policy, host, port), "{host}:{port}");
        }
        assert!(!allows(&Policy::new(), "pypi.org", 443));
    }

    #[test]
    fn an_address_that_is_not_public_has_to_be_named() {
        let policy = policy(&["db.internal:5432", "10.0.0.0/8:5432", "127.0.0.1:8080"]);
        let admits = |address: &str, port| policy.admits(address.parse().unwrap(), port);

        assert_eq!(admits("93.184.216.34", 443), Ok(()));
        assert_eq!(admits("10.1.2.3", 5432), Ok(()));
        assert_eq!(admits("10.1.2.3", 443), Err(Class::Private));
        assert_eq!(admits("::ffff:10.1.2.3", 5432), Err(Class::Embedded));
        assert_eq!(admits("127.0.0.1", 8080), Ok(()));
        assert_eq!(admits("127.0.0.2", 8080), Err(Class::Loopback));
        assert_eq!(admits("169.254.169.254", 80), Err(Class::LinkLocal));
    }

    #[test]
    fn rules_come_and_go() {
        let mut policy = policy(&["a.example"]);
        let rule: Rule = "A.example.".parse().unwrap();

        assert!(policy.forbid(&rule));
        assert!(!policy.forbid(&rule));
        assert!(!allows(&policy, "a.example", 443));
    }

    #[test]
    fn rules_are_bounded() {
        let mut policy = Policy::new();
        for number in 0..MAX_RULES {
            assert!(policy.allow(format!("a{number}.example").parse().unwrap()));
        }
        assert!(!policy.allow("one.more.example".parse().unwrap()));
        assert!(policy.allow("a1.example".parse().unwrap()));
    }

    proptest! {
        #[test]
        fn any_text_is_a_rule_that_reads_back_or_none(text in ".{0,60}") {
            if let Ok(rule) = text.parse::<Rule>() {
                prop_assert_eq!(rule.to_string().parse::<Rule>(), Ok(rule));
            }
        }

        #[test]
        fn a_star_allows_what_ends_in_its_domain_alone(front in "[a-z]{1,5}(\\.[a-z]{1,5}){0,2}", host in "[a-z.]{1,24}") {
            let policy = policy(&["*.example.com"]);
            let below = format!("{front}.example.com");
            prop_assert!(allows(&policy, &below, 443));
            if let Ok(name) = HostName::parse(&host) {
                prop_assert_eq!(
                    policy.rule_for(&Target::Name(name.clone()), 443).is_some(),
                    name.as_str().ends_with(".example.com")
                );
            }
        }
    }
}
