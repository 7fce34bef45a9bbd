//! Sockets: of the supervisor's network, and of every other kind.

use super::call::{Call, at};
use super::{Attempt, Target};

pub(super) const ATTEMPTS: &[Attempt] = &[
    Attempt::new("connect to a TCP port of the host", tcp)
        .namespaces("network namespace")
        .landlock(4),
    Attempt::new("send to a UDP port of the host", udp).namespaces("network namespace"),
    Attempt::new("connect to an abstract socket of the host", abstract_socket)
        .namespaces("network namespace")
        .landlock(6),
    Attempt::new("connect to a socket by its path", socket_by_path).namespaces("empty root"),
    Attempt::new("see the network's packets", packets).always("no capability"),
    Attempt::new("connect to a vsock port of the host", vsock).gain(
        "what listens on the host for virtual machines, if anything: there is no namespace for it",
    ),
];

fn socket(family: i32, kind: i32, protocol: i64) -> i64 {
    let kind = kind | libc::SOCK_NONBLOCK;
    Call::new(libc::SYS_socket)
        .with(&[family.into(), kind.into(), protocol])
        .make()
}

fn connect<T>(socket: i64, address: &T, bytes: usize) -> i64 {
    if socket < 0 {
        return socket;
    }
    let bytes = i64::try_from(bytes).unwrap_or(0);
    let result = Call::new(libc::SYS_connect)
        .with(&[socket, at(address), bytes])
        .make();
    // It has begun.
    if result == -i64::from(libc::EINPROGRESS) {
        0
    } else {
        result
    }
}

/// 127.0.0.1 (`struct sockaddr_in`).
fn loopback(port: u16) -> [u8; 16] {
    let [high, low] = port.to_be_bytes();
    let family = u8::try_from(libc::AF_INET).unwrap_or(0);
    [family, 0, high, low, 127, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]
}

fn tcp(target: &Target) -> i64 {
    let address = loopback(target.tcp_port);
    connect(socket(libc::AF_INET, libc::SOCK_STREAM, 0), &address, 16)
}

fn udp(target: &Target) -> i64 {
    let address = loopback(target.udp_port);
    let socket = socket(libc::AF_INET, libc::SOCK_DGRAM, 0);
    if socket < 0 {
        return socket;
    }
    Call::new(libc::SYS_sendto)
        .with(&[socket, at(b"x"), 1, 0, at(&address), 16])
        .make()
}

/// The supervisor's name for both of its sockets (`struct sockaddr_un`); its process tells it from others.
fn named(name: &str) -> ([u8; 110], usize) {
    let mut address = [0; 110];
    let family = u8::try_from(libc::AF_UNIX).unwrap_or(0);
    for (place, byte) in address
        .iter_mut()
        .zip([family, 0].into_iter().chain(name.bytes()))
    {
        *place = byte;
    }
    (address, 2 + name.len())
}

fn abstract_socket(target: &Target) -> i64 {
    let (address, bytes) = named(&format!("\0{}", abstract_name(target.pid)));
    connect(socket(libc::AF_UNIX, libc::SOCK_STREAM, 0), &address, bytes)
}

/// The name of the supervisor's abstract socket.
pub(crate) fn abstract_name(pid: i32) -> String {
    format!("sandvmm-attack-{pid}")
}

/// The path of its other socket.
pub(crate) fn socket_path(pid: i32) -> String {
    format!("/tmp/sandvmm-attack-{pid}.socket")
}

fn socket_by_path(target: &Target) -> i64 {
    let (address, bytes) = named(&socket_path(target.pid));
    connect(socket(libc::AF_UNIX, libc::SOCK_STREAM, 0), &address, bytes)
}

fn packets(_: &Target) -> i64 {
    socket(libc::AF_PACKET, libc::SOCK_RAW, 0x0300)
}

fn vsock(_: &Target) -> i64 {
    // `struct sockaddr_vm`: port 1 of context 1, which is the host itself.
    let mut address = [0_u8; 16];
    let family = u8::try_from(libc::AF_VSOCK).unwrap_or(0);
    for (place, byte) in [(0, family), (4, 1), (8, 1)] {
        if let Some(slot) = address.get_mut(place) {
            *slot = byte;
        }
    }
    let socket = socket(libc::AF_VSOCK, libc::SOCK_STREAM, 0);
    if socket < 0 {
        return socket;
    }
    match connect(socket, &address, 16) {
        // Nobody listens; it has asked.
        result if result == -i64::from(libc::ECONNRESET) => 0,
        result => result,
    }
}
