//! Sees the connections and datagrams that the kernel refuses, since nothing listens: a raw socket gets a copy of each first
//! segment, and another of each datagram (raw(7)), through filters that take nothing else.

use std::io::{self, Read};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use socket2::{Domain, Protocol, SockFilter, Socket, Type};

/// Bytes of a segment that are read: both headers at their longest.
const SEGMENT_BYTES: usize = 120;

/// A first segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Knock {
    pub(super) to: SocketAddr,
    pub(super) from_port: u16,
}

/// The socket that sees them.
#[derive(Debug)]
pub(super) struct Knocks(Socket);

impl Knocks {
    /// Of TCP.
    pub(super) fn new() -> io::Result<Self> {
        Self::of(Protocol::TCP, &first_segments())
    }

    /// Of UDP.
    pub(super) fn datagrams() -> io::Result<Self> {
        Self::of(Protocol::UDP, &outward_datagrams())
    }

    fn of(protocol: Protocol, filter: &[SockFilter]) -> io::Result<Self> {
        let socket = Socket::new(Domain::IPV4, Type::RAW, Some(protocol))?;
        socket.attach_filter(filter)?;
        // What came between the socket and its filter is no concern: nothing runs yet.
        Ok(Self(socket))
    }

    /// Waits for the next one. `None` for what is none.
    pub(super) fn next(&self) -> io::Result<Option<Knock>> {
        let mut segment = [0; SEGMENT_BYTES];
        let count = match (&self.0).read(&mut segment) {
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(None),
            Err(error) => return Err(error),
        };
        Ok(parse(segment.get(..count).unwrap_or_default()))
    }
}

/// Classic BPF (`linux/filter.h`).
const LOAD_BYTE: u16 = 0x30;
const JUMP_IF_EQUAL: u16 = 0x15;
const RETURN: u16 = 0x06;

/// Over an IPv4 packet: not to 127.0.0.0/8, and of the flags SYN alone.
fn first_segments() -> [SockFilter; 8] {
    const LOAD_BYTE_BEHIND_X: u16 = 0x50;
    const X_IS_HEADER_LENGTH: u16 = 0xb1;
    const AND: u16 = 0x54;
    const SYN_AND_ACK: u32 = 0x12;
    const SYN: u32 = 0x02;
    [
        SockFilter::new(LOAD_BYTE, 0, 0, 16),
        SockFilter::new(JUMP_IF_EQUAL, 4, 0, 127),
        SockFilter::new(X_IS_HEADER_LENGTH, 0, 0, 0),
        SockFilter::new(LOAD_BYTE_BEHIND_X, 0, 0, 13),
        SockFilter::new(AND, 0, 0, SYN_AND_ACK),
        SockFilter::new(JUMP_IF_EQUAL, 1, 0, SYN),
        SockFilter::new(RETURN, 0, 0, 0),
        SockFilter::new(RETURN, 0, 0, 0xffff),
    ]
}

/// Over an IPv4 packet: not to 127.0.0.0/8.
fn outward_datagrams() -> [SockFilter; 4] {
    [
        SockFilter::new(LOAD_BYTE, 0, 0, 16),
        SockFilter::new(JUMP_IF_EQUAL, 0, 1, 127),
        SockFilter::new(RETURN, 0, 0, 0),
        SockFilter::new(RETURN, 0, 0, 0xffff),
    ]
}

/// Addresses and ports of an IPv4 packet with a TCP segment or a UDP datagram (RFC 791 §3.1, RFC 9293 §3.1, RFC 768).
fn parse(packet: &[u8]) -> Option<Knock> {
    let header = usize::from(packet.first()? & 0xf) * 4;
    let address: [u8; 4] = packet.get(16..20)?.try_into().ok()?;
    let ports = packet.get(header..header + 4)?;
    let [a, b, c, d] = ports else {
        return None;
    };
    let to = IpAddr::from(Ipv4Addr::from(address));
    Some(Knock {
        to: SocketAddr::new(to, u16::from_be_bytes([*c, *d])),
        from_port: u16::from_be_bytes([*a, *b]),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segments_addresses_and_ports_are_read_behind_any_header() {
        for words in [5_u8, 6, 15] {
            let mut packet = vec![0; usize::from(words) * 4];
            packet[0] = 0x40 | words;
            packet[16..20].copy_from_slice(&[198, 18, 1, 0]);
            packet.extend_from_slice(&[0xc0, 0, 1, 0xbb]);
            let knock = parse(&packet).unwrap();
            assert_eq!(knock.to, "198.18.1.0:443".parse().unwrap());
            assert_eq!(knock.from_port, 0xc000);
            assert_eq!(parse(&packet[..packet.len() - 1]), None);
        }
        assert_eq!(parse(&[]), None);
    }
}
