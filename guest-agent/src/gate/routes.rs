//! Makes every address this guest's own: what a program connects to arrives here, and what nobody listens on is refused
//! by the kernel at once, TCP with a reset and UDP with "port unreachable".
//!
//! A route of the type `local` for everything does it (`ip route add local default dev lo`); there is no other interface.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::Path;

use super::names::{OWN_V4, OWN_V6};
use crate::network::{LOOPBACK_INDEX, ask};

/// Messages (`linux/rtnetlink.h`).
const RTM_NEWADDR: u16 = 20;
const RTM_NEWROUTE: u16 = 24;
/// `NLM_F_REQUEST | NLM_F_ACK | NLM_F_REPLACE | NLM_F_CREATE` (`linux/netlink.h`).
const REPLACE_WITH_ACK: u16 = 1 | 4 | 0x100 | 0x400;
/// Length of `struct nlmsghdr`.
const HEADER_BYTES: usize = 16;
/// Address families.
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
/// Attributes of an address and of a route.
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const IFA_CACHEINFO: u16 = 6;
const RTA_OIF: u16 = 4;
/// `struct ifa_cacheinfo`: preferred for no time, valid for ever. Resolvers then put IPv4 first (RFC 6724 §5, rule 3): what is
/// refused is seen over IPv4 alone.
const NOT_PREFERRED: [u32; 4] = [0, u32::MAX, 0, 0];
/// `RT_TABLE_LOCAL`, `RTPROT_STATIC`, `RT_SCOPE_HOST` and `RTN_LOCAL`.
const TABLE_LOCAL: u8 = 255;
const PROTOCOL_STATIC: u8 = 4;
const SCOPE_HOST: u8 = 254;
const TYPE_LOCAL: u8 = 2;

/// Where programs' resolvers look for a server, and what is written there.
const RESOLV_CONF: &str = "/etc/resolv.conf";
const RESOLVER: &str = "nameserver 127.0.0.1\noptions timeout:2 attempts:2\n";

/// Addresses and routes of the loopback.
///
/// # Errors
/// The kernel's.
pub(super) fn set_up() -> io::Result<()> {
    for address in [IpAddr::from(OWN_V4), IpAddr::from(OWN_V6)] {
        ask(&address_message(address))?;
    }
    for family in [AF_INET, AF_INET6] {
        ask(&route_message(family))?;
    }
    Ok(())
}

/// Has programs ask here. The image's file may be a link to one that another system's resolver writes.
///
/// # Errors
/// When the file can't be replaced.
pub(super) fn set_resolver() -> io::Result<()> {
    if fs::symlink_metadata(RESOLV_CONF).is_ok_and(|found| found.is_symlink()) {
        fs::remove_file(RESOLV_CONF)?;
    }
    if let Some(folder) = Path::new(RESOLV_CONF).parent() {
        fs::create_dir_all(folder)?;
    }
    fs::write(RESOLV_CONF, RESOLVER)
}

fn message(kind: u16, parts: &[&[u8]]) -> Vec<u8> {
    let length = parts.iter().map(|part| part.len()).sum::<usize>() + HEADER_BYTES;
    let mut message = Vec::with_capacity(length);
    message.extend_from_slice(&u32::try_from(length).unwrap_or_default().to_ne_bytes());
    message.extend_from_slice(&kind.to_ne_bytes());
    message.extend_from_slice(&REPLACE_WITH_ACK.to_ne_bytes());
    message.extend_from_slice(&1_u32.to_ne_bytes()); // nlmsg_seq
    message.extend_from_slice(&0_u32.to_ne_bytes()); // nlmsg_pid
    for part in parts {
        message.extend_from_slice(part);
    }
    message
}

/// `struct rtattr`; all contents here are multiples of four bytes.
fn attribute(kind: u16, content: &[u8]) -> Vec<u8> {
    let length = u16::try_from(content.len() + 4).unwrap_or_default();
    let head = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
    [&head, content].concat()
}

/// `struct ifaddrmsg`: this one address on loopback.
fn address_message(address: IpAddr) -> Vec<u8> {
    let (family, bits, octets) = match address {
        IpAddr::V4(address) => (AF_INET, 32, address.octets().to_vec()),
        IpAddr::V6(address) => (AF_INET6, 128, address.octets().to_vec()),
    };
    let head = [family, bits, 0, 0];
    let times = match address {
        IpAddr::V4(_) => Vec::new(),
        IpAddr::V6(_) => attribute(IFA_CACHEINFO, &NOT_PREFERRED.map(u32::to_ne_bytes).concat()),
    };
    message(
        RTM_NEWADDR,
        &[
            &head,
            &LOOPBACK_INDEX.to_ne_bytes(),
            &attribute(IFA_LOCAL, &octets),
            &attribute(IFA_ADDRESS, &octets),
            &times,
        ],
    )
}

/// `struct rtmsg`: everything is local, through loopback.
fn route_message(family: u8) -> Vec<u8> {
    let scope = if family == AF_INET { SCOPE_HOST } else { 0 };
    let head = [
        family,
        0,
        0,
        0,
        TABLE_LOCAL,
        PROTOCOL_STATIC,
        scope,
        TYPE_LOCAL,
    ];
    message(
        RTM_NEWROUTE,
        &[
            &head,
            &0_u32.to_ne_bytes(), // rtm_flags
            &attribute(RTA_OIF, &LOOPBACK_INDEX.to_ne_bytes()),
        ],
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_have_the_length_that_they_name() {
        for message in [
            address_message(OWN_V4.into()),
            address_message(OWN_V6.into()),
            route_message(AF_INET),
            route_message(AF_INET6),
        ] {
            let length = u32::try_from(message.len()).unwrap();
            assert_eq!(message[..4], length.to_ne_bytes());
            assert_eq!(length % 4, 0);
        }
    }
}
