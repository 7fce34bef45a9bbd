//! Sockets that take programs' connections: one for each address and port that the rules allow. What no socket listens on
//! is refused by the kernel.

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::os::fd::OwnedFd;

use protocol::gate::{AddressRule, Rules};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use socket2::{Domain, Socket, Type};

use super::names::{self, Names};

/// Most sockets that listen. Names beyond that are refused as if they were not allowed.
pub(super) const MAX_LISTENERS: usize = 2048;

/// Connections that the kernel holds for one socket before they are taken.
const BACKLOG: i32 = 128;

/// Most literal addresses of one rule that get sockets of their own. For a larger range one socket takes what no other
/// does on its port, and what is not in the range is reset.
const MAX_LITERALS: u32 = 64;

/// All of them, in one epoll instance.
#[derive(Debug)]
pub(super) struct Listeners {
    epoll: OwnedFd,
    sockets: HashMap<u64, (SocketAddr, Socket)>,
    numbers: HashMap<SocketAddr, u64>,
    next_number: u64,
}

impl Listeners {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            epoll: epoll::create(CreateFlags::CLOEXEC)?,
            sockets: HashMap::new(),
            numbers: HashMap::new(),
            next_number: 0,
        })
    }

    /// What becomes readable when a connection can be taken.
    pub(super) fn epoll(&self) -> io::Result<OwnedFd> {
        self.epoll.try_clone()
    }

    /// Whether connections to it are taken.
    pub(super) fn takes(&self, address: SocketAddr) -> bool {
        let everywhere = match address.ip() {
            IpAddr::V4(_) => IpAddr::from(Ipv4Addr::UNSPECIFIED),
            IpAddr::V6(_) => IpAddr::from(Ipv6Addr::UNSPECIFIED),
        };
        self.numbers.contains_key(&address)
            || self
                .numbers
                .contains_key(&SocketAddr::new(everywhere, address.port()))
    }

    /// Listens on what these rules allow, and on nothing else.
    pub(super) fn set(&mut self, rules: &Rules, names: &Names) {
        let mut wanted: HashSet<SocketAddr> = rules.addresses.iter().flat_map(literals).collect();
        for (number, name) in names.iter() {
            wanted.extend(of_name(rules, number, name));
        }
        let unwanted: Vec<SocketAddr> = self
            .numbers
            .keys()
            .filter(|address| !wanted.contains(address))
            .copied()
            .collect();
        for address in unwanted {
            if let Some(number) = self.numbers.remove(&address) {
                // Closing it takes it out of the epoll instance too.
                self.sockets.remove(&number);
            }
        }
        self.add(wanted);
    }

    /// Listens for one name more; says whether it is allowed on any port.
    pub(super) fn add_name(&mut self, rules: &Rules, number: usize, name: &str) -> bool {
        let wanted: Vec<SocketAddr> = of_name(rules, number, name).collect();
        let is_allowed = !wanted.is_empty();
        self.add(wanted);
        is_allowed
    }

    fn add(&mut self, wanted: impl IntoIterator<Item = SocketAddr>) {
        for address in wanted {
            if self.numbers.contains_key(&address) || self.sockets.len() >= MAX_LISTENERS {
                continue;
            }
            // A program that listens on the port for all addresses keeps it, and gets what goes there.
            let Ok(socket) = listen(address) else {
                continue;
            };
            let number = self.next_number;
            let data = EventData::new_u64(number);
            if epoll::add(&self.epoll, &socket, data, EventFlags::IN).is_ok() {
                self.next_number += 1;
                self.numbers.insert(address, number);
                self.sockets.insert(number, (address, socket));
            }
        }
    }

    /// Takes a connection, if there is one.
    pub(super) fn accept(&self, number: u64) -> Option<TcpStream> {
        let (_, socket) = self.sockets.get(&number)?;
        let (stream, _) = socket.accept().ok()?;
        Some(stream.into())
    }
}

fn of_name<'a>(
    rules: &'a Rules,
    number: usize,
    name: &'a str,
) -> impl Iterator<Item = SocketAddr> + 'a {
    names::ports(rules, name).into_iter().flat_map(move |port| {
        [
            SocketAddr::new(names::v4(number).into(), port),
            SocketAddr::new(names::v6(number).into(), port),
        ]
    })
}

fn literals(rule: &AddressRule) -> Vec<SocketAddr> {
    let bits = match rule.address {
        IpAddr::V4(_) => 32_u32,
        IpAddr::V6(_) => 128,
    };
    let free = bits.saturating_sub(u32::from(rule.prefix_bits));
    let count = 1_u32.checked_shl(free).unwrap_or(0);
    let addresses: Vec<IpAddr> = match rule.address {
        IpAddr::V4(first) if (1..=MAX_LITERALS).contains(&count) => (0..count)
            .map(|offset| Ipv4Addr::from_bits(first.to_bits().saturating_add(offset)).into())
            .collect(),
        IpAddr::V6(first) if (1..=MAX_LITERALS).contains(&count) => (0..count)
            .map(|offset| Ipv6Addr::from_bits(first.to_bits().saturating_add(offset.into())).into())
            .collect(),
        IpAddr::V4(_) => vec![Ipv4Addr::UNSPECIFIED.into()],
        IpAddr::V6(_) => vec![Ipv6Addr::UNSPECIFIED.into()],
    };
    let ports = &rule.ports;
    addresses
        .into_iter()
        .flat_map(|address| {
            ports
                .iter()
                .map(move |port| SocketAddr::new(address, *port))
        })
        .collect()
}

fn listen(address: SocketAddr) -> io::Result<Socket> {
    let domain = Domain::for_address(address);
    let socket = Socket::new(domain, Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    if domain == Domain::IPV6 {
        socket.set_only_v6(true)?;
        // The address is this host's by a route and is on no interface.
        socket.set_freebind_v6(true)?;
    }
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use protocol::gate::NameRule;

    use super::*;

    fn rules(ports: &[u16]) -> Rules {
        Rules {
            names: vec![NameRule {
                name: "a.example".to_owned(),
                below: false,
                ports: ports.to_vec(),
            }],
            addresses: Vec::new(),
            every: Vec::new(),
            trust: None,
        }
    }

    #[test]
    fn a_range_is_all_its_addresses_or_one_socket_for_all() {
        let of = |address: &str, prefix_bits| {
            literals(&AddressRule {
                address: address.parse().unwrap(),
                prefix_bits,
                ports: vec![443],
            })
        };
        assert_eq!(of("10.0.0.4", 30).len(), 4);
        assert_eq!(of("10.0.0.5", 32), ["10.0.0.5:443".parse().unwrap()]);
        assert_eq!(of("fd00::5", 128), ["[fd00::5]:443".parse().unwrap()]);
        assert_eq!(of("10.0.0.0", 8), ["0.0.0.0:443".parse().unwrap()]);
        assert_eq!(of("fd00::", 8), ["[::]:443".parse().unwrap()]);
    }

    #[test]
    fn a_name_is_listened_for_on_its_ports_in_both_families() {
        let allowed = rules(&[443, 80]);
        assert_eq!(of_name(&allowed, 3, "a.example").count(), 4);
        assert_eq!(of_name(&allowed, 3, "b.example").count(), 0);
    }

    #[test]
    fn rules_that_go_close_their_sockets() {
        // Loopback's own addresses: the others are no host's but a guest's.
        let literal = |port| AddressRule {
            address: "127.0.0.1".parse().unwrap(),
            prefix_bits: 32,
            ports: vec![port],
        };
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = free.local_addr().unwrap();
        drop(free);
        let mut listeners = Listeners::new().unwrap();
        let allowed = Rules {
            addresses: vec![literal(address.port())],
            ..Rules::default()
        };

        listeners.set(&allowed, &Names::default());
        assert!(listeners.takes(address));
        std::net::TcpStream::connect(address).unwrap();
        listeners.set(&Rules::default(), &Names::default());

        assert!(!listeners.takes(address));
        std::net::TcpStream::connect(address).unwrap_err();
    }
}
