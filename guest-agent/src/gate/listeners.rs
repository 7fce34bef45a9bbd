//! Sockets that take programs' connections: one for each address and port that the rules allow. What no socket listens on
//! is refused by the kernel.

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::os::fd::OwnedFd;

use protocol::gate::{AddressRule, MAX_GATE_LISTENERS, Refusal, Rules, Target};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use socket2::{Domain, Socket, Type};

use super::names::{self, Names};

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
    /// Most sockets.
    room: usize,
}

impl Listeners {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            epoll: epoll::create(CreateFlags::CLOEXEC)?,
            sockets: HashMap::new(),
            numbers: HashMap::new(),
            next_number: 0,
            room: MAX_GATE_LISTENERS,
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
            // Why there is none is told when a program tries to connect.
            let _ = self.add_one(address);
        }
    }

    /// Listens on one address more, if that is not done already.
    fn add_one(&mut self, address: SocketAddr) -> Result<(), Refusal> {
        if self.numbers.contains_key(&address) {
            return Ok(());
        }
        if self.sockets.len() >= self.room {
            return Err(Refusal::NoListener);
        }
        let number = self.next_number;
        let data = EventData::new_u64(number);
        let socket = listen(address).and_then(|socket| {
            epoll::add(&self.epoll, &socket, data, EventFlags::IN)?;
            Ok(socket)
        });
        match socket {
            Ok(socket) => {
                self.next_number += 1;
                self.numbers.insert(address, number);
                self.sockets.insert(number, (address, socket));
                Ok(())
            }
            // A program that listens on the port for all addresses keeps it, and gets what goes there.
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => Err(Refusal::PortTaken),
            Err(_) => Err(Refusal::NoListener),
        }
    }

    /// Why a connection to an address was not taken. Where it can be taken by now, the next one is.
    pub(super) fn refusal(&mut self, rules: &Rules, names: &Names, to: SocketAddr) -> Refusal {
        let Some(wanted) = wanted(rules, names, to) else {
            return Refusal::NotAllowed;
        };
        match self.add_one(wanted) {
            // The rule has come since.
            Ok(()) => Refusal::NotAllowed,
            Err(refusal) => refusal,
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

/// The address to listen on for connections to this one, if these rules allow them.
fn wanted(rules: &Rules, names: &Names, to: SocketAddr) -> Option<SocketAddr> {
    if let Target::Name(name) = names.target(to.ip()) {
        return names::ports(rules, &name)
            .contains(&to.port())
            .then_some(to);
    }
    let covering = rules.addresses.iter().filter(|rule| covers(rule, to.ip()));
    covering.flat_map(literals).find(|address| {
        *address == to || address.ip().is_unspecified() && address.port() == to.port()
    })
}

fn covers(rule: &AddressRule, address: IpAddr) -> bool {
    let (first, address, bits) = match (rule.address, address) {
        (IpAddr::V4(first), IpAddr::V4(address)) => {
            (first.to_bits().into(), address.to_bits().into(), 32_u32)
        }
        (IpAddr::V6(first), IpAddr::V6(address)) => (first.to_bits(), address.to_bits(), 128),
        _ => return false,
    };
    let free = bits.saturating_sub(u32::from(rule.prefix_bits));
    let difference: u128 = first ^ address;
    difference.checked_shr(free).unwrap_or(0) == 0
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

    /// A free address of this host's loopback: the others are no host's but a guest's. And rules that allow it.
    fn loopback() -> (SocketAddr, Rules) {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = free.local_addr().unwrap();
        let rule = AddressRule {
            address: address.ip(),
            prefix_bits: 32,
            ports: vec![address.port()],
        };
        let addresses = vec![rule];
        (
            address,
            Rules {
                addresses,
                ..Rules::default()
            },
        )
    }

    #[test]
    fn what_is_not_listened_for_has_its_reason() {
        let (address, allowed) = loopback();
        let (mut listeners, names) = (Listeners::new().unwrap(), Names::default());
        let mut refusal = |rules: &Rules, room| {
            listeners.room = room;
            listeners.refusal(rules, &names, address)
        };
        assert_eq!(refusal(&Rules::default(), 9), Refusal::NotAllowed);
        assert_eq!(refusal(&allowed, 0), Refusal::NoListener);
        let program = std::net::TcpListener::bind(("0.0.0.0", address.port())).unwrap();
        assert_eq!(refusal(&allowed, 9), Refusal::PortTaken);
        drop(program);
        refusal(&allowed, 9);
        assert!(listeners.takes(address));
    }

    #[test]
    fn a_name_or_an_address_is_wanted_where_a_rule_has_it() {
        let mut names = Names::default();
        let number = names.number("a.example").unwrap();
        let mut rules = rules(&[443]);
        let range = |address: &str, prefix_bits| AddressRule {
            address: address.parse().unwrap(),
            prefix_bits,
            ports: vec![5432],
        };
        rules.addresses = vec![range("10.0.0.0", 8), range("1.2.3.4", 30), range("::", 0)];
        let of = |address: &str| wanted(&rules, &names, address.parse().unwrap());
        let at = |port| SocketAddr::new(names::v4(number).into(), port);

        assert_eq!(wanted(&rules, &names, at(443)), Some(at(443)));
        assert_eq!(wanted(&rules, &names, at(80)), None);
        let everywhere = "0.0.0.0:5432".parse().ok();
        assert_eq!(of("10.200.0.1:5432"), everywhere);
        assert_eq!(of("11.0.0.1:5432"), None);
        assert_eq!(of("10.200.0.1:443"), None);
        assert_eq!(of("1.2.3.7:5432"), "1.2.3.7:5432".parse().ok());
        assert_eq!(of("1.2.3.8:5432"), None);
        assert_eq!(of("[fd00::1]:5432"), "[::]:5432".parse().ok());
    }

    #[test]
    fn rules_that_go_close_their_sockets() {
        let (address, allowed) = loopback();
        let mut listeners = Listeners::new().unwrap();

        listeners.set(&allowed, &Names::default());
        assert!(listeners.takes(address));
        std::net::TcpStream::connect(address).unwrap();
        listeners.set(&Rules::default(), &Names::default());

        assert!(!listeners.takes(address));
        std::net::TcpStream::connect(address).unwrap_err();
    }
}
