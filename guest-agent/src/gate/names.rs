//! Names and the addresses that stand for them in this guest, and nowhere else.

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use protocol::gate::{Rules, Target};

/// Names that can have an address; further ones are answered with a failure.
pub const MAX_NAMES: usize = 65_536;

/// Longest name, in bytes (RFC 1035 §2.3.4).
const MAX_NAME_BYTES: usize = 253;

/// The first of 198.18.0.0/15, which is for measurements and on no network (RFC 2544); the block before it is for this
/// host's own address.
const FIRST_V4: u32 = 0xc612_0100;

/// The loopback's own addresses besides 127.0.0.1 and ::1: without one of each family that is not loopback's, resolvers leave
/// that family out (`AI_ADDRCONFIG`).
pub const OWN_V4: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
/// Likewise.
pub const OWN_V6: Ipv6Addr = Ipv6Addr::new(PREFIX[0], PREFIX[1], PREFIX[2], 0, 0, 0, 0, 1);

/// A unique local prefix (RFC 4193) for names.
const PREFIX: [u16; 3] = [0xfd73, 0x616e, 0x6476];

/// All names that were asked for.
#[derive(Debug, Default)]
pub struct Names {
    numbers: HashMap<String, usize>,
    names: Vec<String>,
}

impl Names {
    /// A name's number, a new one if it has none; `None` if there is no room, or it is no name.
    pub fn number(&mut self, name: &str) -> Option<usize> {
        if let Some(number) = self.numbers.get(name) {
            return Some(*number);
        }
        if self.names.len() >= MAX_NAMES || !is_name(name) {
            return None;
        }
        let number = self.names.len();
        self.names.push(name.to_owned());
        self.numbers.insert(name.to_owned(), number);
        Some(number)
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = (usize, &str)> {
        self.names.iter().map(String::as_str).enumerate()
    }

    /// What an address that a program connects to stands for.
    #[must_use]
    pub fn target(&self, address: IpAddr) -> Target {
        match number_of(address).and_then(|number| self.names.get(number)) {
            Some(name) => Target::Name(name.clone()),
            None => Target::Address(address.to_canonical()),
        }
    }
}

/// Letters, digits, hyphens and underscores in labels of 1 to 63; the host looks closer.
fn is_name(name: &str) -> bool {
    let is_label = |label: &str| {
        (1..=63).contains(&label.len())
            && label
                .bytes()
                .all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_'))
    };
    name.len() <= MAX_NAME_BYTES && name.split('.').all(is_label)
}

/// The IPv4 address of a number.
#[must_use]
pub fn v4(number: usize) -> Ipv4Addr {
    let number = u32::try_from(number).unwrap_or_default();
    Ipv4Addr::from_bits(FIRST_V4.saturating_add(number))
}

/// The IPv6 address of a number.
#[must_use]
pub fn v6(number: usize) -> Ipv6Addr {
    let [a, b, c, d] = v4(number).octets();
    let [p, q, r] = PREFIX;
    let (high, low) = (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]));
    Ipv6Addr::new(p, q, r, 0, 0, 0, high, low)
}

fn number_of(address: IpAddr) -> Option<usize> {
    let bits = match address.to_canonical() {
        IpAddr::V4(address) => address.to_bits(),
        IpAddr::V6(address) => match address.segments() {
            [a, b, c, 0, 0, 0, high, low] if [a, b, c] == PREFIX => {
                u32::from(high) << 16 | u32::from(low)
            }
            _ => return None,
        },
    };
    usize::try_from(bits.checked_sub(FIRST_V4)?).ok()
}

/// The ports on which a name is allowed.
#[must_use]
pub fn ports(rules: &Rules, name: &str) -> BTreeSet<u16> {
    let covers = |rule: &str, below: bool| match below {
        false => rule == name,
        true => name
            .strip_suffix(rule)
            .is_some_and(|front| front.len() > 1 && front.ends_with('.')),
    };
    let named = rules
        .names
        .iter()
        .filter(|rule| covers(&rule.name, rule.below))
        .flat_map(|rule| rule.ports.iter());
    named.chain(&rules.every).copied().collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use protocol::gate::NameRule;

    use super::*;

    #[test]
    fn a_name_keeps_its_number_and_both_addresses_lead_back() {
        let mut names = Names::default();
        let first = names.number("a.example").unwrap();
        let second = names.number("b.example").unwrap();

        assert_eq!(names.number("a.example"), Some(first));
        assert_eq!(v4(first), Ipv4Addr::new(198, 18, 1, 0));
        for (number, name) in [(first, "a.example"), (second, "b.example")] {
            for address in [
                v4(number).into(),
                v6(number).into(),
                v4(number).to_ipv6_mapped().into(),
            ] {
                assert_eq!(names.target(address), Target::Name(name.to_owned()));
            }
        }
        let literal: IpAddr = "169.254.169.254".parse().unwrap();
        assert_eq!(names.target(literal), Target::Address(literal));
        assert_eq!(names.target(v4(2).into()), Target::Address(v4(2).into()));
        assert_eq!(names.target(OWN_V4.into()), Target::Address(OWN_V4.into()));
    }

    #[test]
    fn names_are_bounded_and_stay_in_their_range() {
        let mut names = Names::default();
        for number in 0..MAX_NAMES {
            assert_eq!(names.number(&format!("a{number}.example")), Some(number));
        }
        assert_eq!(names.number("one-more.example"), None);
        assert_eq!(names.number("a7.example"), Some(7));
        let last = v4(MAX_NAMES - 1).octets();
        assert!(last[0] == 198 && (18..=19).contains(&last[1]));
    }

    #[test]
    fn what_is_no_name_has_no_number() {
        let long = "a".repeat(64);
        for name in ["", ".", "a..b", "a b", "A", "a\0", &long, &"a.".repeat(150)] {
            assert_eq!(Names::default().number(name), None, "{name:?}");
        }
    }

    #[test]
    fn ports_are_those_of_all_rules_for_the_name() {
        let rule = |name: &str, below, ports: &[u16]| NameRule {
            name: name.to_owned(),
            below,
            ports: ports.to_vec(),
        };
        let rules = Rules {
            names: vec![
                rule("a.example", false, &[443, 80]),
                rule("example", true, &[5432]),
            ],
            addresses: Vec::new(),
            every: Vec::new(),
            trust: None,
        };
        let of = |name| ports(&rules, name).into_iter().collect::<Vec<_>>();
        assert_eq!(of("a.example"), [80, 443, 5432]);
        assert_eq!(of("b.a.example"), [5432]);
        assert_eq!(of("example"), [0; 0]);
        assert_eq!(of("badexample"), [0; 0]);
    }

    proptest! {
        #[test]
        fn no_address_outside_the_ranges_stands_for_a_name(bits in any::<u32>()) {
            let mut names = Names::default();
            for number in 0..100 {
                names.number(&format!("a{number}"));
            }
            let address = Ipv4Addr::from_bits(bits);
            if address.octets()[..2] != [198, 18] {
                prop_assert_eq!(names.target(address.into()), Target::Address(address.into()));
            }
        }
    }
}
