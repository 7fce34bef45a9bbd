//! Which addresses are public: what a name may stand for without the operator's having named the address too.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// What an address is, by the IANA's registries of special-purpose addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Class {
    /// Public unicast.
    Public,
    /// No address: `0.0.0.0/8`, `::`.
    Unspecified,
    /// This host: `127.0.0.0/8`, `::1`.
    Loopback,
    /// A private network (RFC 1918, RFC 4193, and the site-local ones of old).
    Private,
    /// This link: `169.254.0.0/16`, `fe80::/10`; metadata services are there.
    LinkLocal,
    /// Shared by a provider's customers (RFC 6598).
    Shared,
    /// A cloud's metadata service at a public address.
    Metadata,
    /// More than one receiver.
    Multicast,
    /// For documents (RFC 5737, RFC 3849, RFC 9637).
    Documentation,
    /// For measurements (RFC 2544, RFC 5180), and the range of a guest's synthetic addresses.
    Benchmark,
    /// An IPv4 address in an IPv6 one: mapped, compatible, translated, 6to4, Teredo.
    Embedded,
    /// Everything else that is not for hosts.
    Reserved,
}

impl Class {
    /// Its name in sentences and records.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Public => "public",
            Self::Unspecified => "unspecified",
            Self::Loopback => "loopback",
            Self::Private => "private",
            Self::LinkLocal => "link-local",
            Self::Shared => "shared",
            Self::Metadata => "metadata",
            Self::Multicast => "multicast",
            Self::Documentation => "documentation",
            Self::Benchmark => "benchmark",
            Self::Embedded => "embedded IPv4",
            Self::Reserved => "reserved",
        }
    }
}

/// What an address is.
#[must_use]
pub fn class(address: IpAddr) -> Class {
    match address {
        IpAddr::V4(address) => class_v4(address),
        IpAddr::V6(address) => class_v6(address),
    }
}

/// The address that the system would really speak with: a mapped one is its IPv4 address.
#[must_use]
pub fn canonical(address: IpAddr) -> IpAddr {
    address.to_canonical()
}

/// <https://www.iana.org/assignments/iana-ipv4-special-registry>
fn class_v4(address: Ipv4Addr) -> Class {
    match address.octets() {
        [0, ..] => Class::Unspecified,
        [127, ..] => Class::Loopback,
        [10, ..] | [172, 16..=31, ..] | [192, 168, ..] => Class::Private,
        [169, 254, ..] => Class::LinkLocal,
        [100, 64..=127, ..] => Class::Shared,
        // The Azure platform's own, in a public range and reachable from every machine there.
        [168, 63, 129, 16] => Class::Metadata,
        [224..=239, ..] => Class::Multicast,
        [192, 0, 2, _] | [198, 51, 100, _] | [203, 0, 113, _] => Class::Documentation,
        [198, 18..=19, ..] => Class::Benchmark,
        // Protocol assignments; the relays of 6to4; class E and broadcast.
        [192, 0, 0, _] | [192, 88, 99, _] | [240..=255, ..] => Class::Reserved,
        _ => Class::Public,
    }
}

/// <https://www.iana.org/assignments/iana-ipv6-special-registry>
fn class_v6(address: Ipv6Addr) -> Class {
    match address.segments() {
        [0, 0, 0, 0, 0, 0, 0, 0] => Class::Unspecified,
        [0, 0, 0, 0, 0, 0, 0, 1] => Class::Loopback,
        // Compatible, mapped, and translated (RFC 2765).
        [0, 0, 0, 0, 0, 0, ..] | [0, 0, 0, 0, 0, 0xffff, ..] | [0, 0, 0, 0, 0xffff, 0, ..] => {
            Class::Embedded
        }
        // The well-known prefix of NAT64 (RFC 6052): on hosts without IPv4 it is how public IPv4 is reached.
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] => match class_v4(v4(high, low)) {
            Class::Public => Class::Public,
            _ => Class::Embedded,
        },
        [0x64, 0xff9b, 1, ..] => Class::Embedded,
        [first, ..] if first & 0xff00 == 0xff00 => Class::Multicast,
        [first, ..] if first & 0xfe00 == 0xfc00 => Class::Private,
        [first, ..] if first & 0xffc0 == 0xfec0 => Class::Private,
        [first, ..] if first & 0xffc0 == 0xfe80 => Class::LinkLocal,
        [0x2001, 0xdb8, ..] => Class::Documentation,
        [0x3fff, second, ..] if second & 0xf000 == 0 => Class::Documentation,
        [0x2001, 2, 0, ..] => Class::Benchmark,
        // Teredo, 6to4.
        [0x2001, 0, ..] | [0x2002, ..] => Class::Embedded,
        // The rest of the protocol assignments 2001::/23.
        [0x2001, second, ..] if second & 0xfe00 == 0 => Class::Reserved,
        [first, ..] if first & 0xe000 == 0x2000 => Class::Public,
        _ => Class::Reserved,
    }
}

fn v4(high: u16, low: u16) -> Ipv4Addr {
    Ipv4Addr::from_bits(u32::from(high) << 16 | u32::from(low))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(text: &str) -> Class {
        class(text.parse().unwrap())
    }

    #[test]
    fn addresses_are_what_the_registries_say() {
        for (text, class) in [
            ("93.184.216.34", Class::Public),
            ("1.1.1.1", Class::Public),
            ("2606:4700:4700::1111", Class::Public),
            ("64:ff9b::5db8:d822", Class::Public),
            ("0.0.0.0", Class::Unspecified),
            ("0.1.2.3", Class::Unspecified),
            ("::", Class::Unspecified),
            ("127.0.0.1", Class::Loopback),
            ("127.255.255.254", Class::Loopback),
            ("::1", Class::Loopback),
            ("10.0.0.1", Class::Private),
            ("172.16.0.1", Class::Private),
            ("172.31.255.255", Class::Private),
            ("172.32.0.1", Class::Public),
            ("192.168.1.1", Class::Private),
            ("fd00:ec2::254", Class::Private),
            ("fc00::1", Class::Private),
            ("fec0::1", Class::Private),
            ("169.254.169.254", Class::LinkLocal),
            ("fe80::1", Class::LinkLocal),
            ("febf::1", Class::LinkLocal),
            ("100.64.0.1", Class::Shared),
            ("100.100.100.200", Class::Shared),
            ("100.128.0.1", Class::Public),
            ("168.63.129.16", Class::Metadata),
            ("224.0.0.1", Class::Multicast),
            ("239.255.255.255", Class::Multicast),
            ("ff02::1", Class::Multicast),
            ("192.0.2.1", Class::Documentation),
            ("198.51.100.1", Class::Documentation),
            ("203.0.113.1", Class::Documentation),
            ("2001:db8::1", Class::Documentation),
            ("3fff::1", Class::Documentation),
            ("198.18.0.1", Class::Benchmark),
            ("198.19.255.255", Class::Benchmark),
            ("2001:2::1", Class::Benchmark),
            ("192.0.0.192", Class::Reserved),
            ("192.88.99.1", Class::Reserved),
            ("240.0.0.1", Class::Reserved),
            ("255.255.255.255", Class::Reserved),
            ("2001:20::1", Class::Reserved),
            ("100::1", Class::Reserved),
            ("4000::1", Class::Reserved),
            ("5f00::1", Class::Reserved),
        ] {
            assert_eq!(of(text), class, "{text}");
        }
    }

    #[test]
    fn the_metadata_address_is_not_public_in_any_form() {
        for text in [
            "169.254.169.254",
            "::ffff:169.254.169.254",
            "::169.254.169.254",
            "::ffff:0:169.254.169.254",
            "64:ff9b::169.254.169.254",
            "64:ff9b:1::169.254.169.254",
            "2002:a9fe:a9fe::1",
            "2001:0:a9fe:a9fe::1",
            "2001::5601:5601",
            "fd00:ec2::254",
        ] {
            assert_ne!(of(text), Class::Public, "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_embedding_makes_an_address_public(bits in any::<u32>()) {
            let plain = Ipv4Addr::from_bits(bits);
            let [a, b, c, d] = plain.octets();
            let (high, low) = (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]));
            for address in [
                Ipv6Addr::new(0, 0, 0, 0, 0, 0, high, low),
                plain.to_ipv6_mapped(),
                Ipv6Addr::new(0, 0, 0, 0, 0xffff, 0, high, low),
                Ipv6Addr::new(0x2002, high, low, 0, 0, 0, 0, 1),
                Ipv6Addr::new(0x2001, 0, high, low, 0, 0, !high, !low),
                Ipv6Addr::new(0x64, 0xff9b, 1, 0, 0, 0, high, low),
            ] {
                prop_assert_ne!(class(address.into()), Class::Public, "{}", address);
            }
            let translated = Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, high, low);
            prop_assert_eq!(class(translated.into()) == Class::Public, class(plain.into()) == Class::Public);
        }

        #[test]
        fn std_agrees_where_it_has_a_word(bits in any::<u32>()) {
            let address = Ipv4Addr::from_bits(bits);
            if address.is_private() || address.is_loopback() || address.is_link_local() || address.is_multicast()
                || address.is_broadcast() || address.is_documentation() || address.is_unspecified()
            {
                prop_assert_ne!(class(address.into()), Class::Public);
            }
        }
    }
}
