//! Streams between the gate and the host, over vsock.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use protocol::frame;
use protocol::gate::{CONNECTED, Inward, MAX_GATE_CONNECTIONS, MAX_GATE_FRAME_BYTES, Open, Target};
use protocol::port;
use socket2::{Domain, SockAddr, SockRef, Socket, Type};

use super::carry::carry;
use super::{STACK_BYTES, is_loopback, process};

/// Any context identifier (`VMADDR_CID_ANY`, `linux/vm_sockets.h`).
const ANY_CID: u32 = u32::MAX;

/// Streams that the kernel holds before they are taken.
const BACKLOG: i32 = 64;

/// How long the host may take to say which port it wants.
const INWARD_LIMIT: Duration = Duration::from_secs(5);

/// How many connections there are, and which source port was last used.
#[derive(Debug, Clone, Default)]
pub(super) struct Streams {
    connections: Arc<AtomicUsize>,
    last_port: Arc<AtomicU32>,
}

/// A connection's place; dropping it gives it back.
pub(super) struct Place(Arc<AtomicUsize>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Streams {
    /// A place for one connection more, if there is one.
    pub(super) fn place(&self) -> Option<Place> {
        let place = Place(Arc::clone(&self.connections));
        let taken = self.connections.fetch_add(1, Ordering::Relaxed);
        (taken < MAX_GATE_CONNECTIONS).then_some(place)
    }

    /// Carries a program's connection on a thread of its own; where the host does not want it, it is reset. False without memory for a
    /// thread: the program sees an end in place of a reset.
    pub(super) fn take_outward(
        &self,
        place: Place,
        program: TcpStream,
        target: Target,
        port: u16,
    ) -> bool {
        let streams = self.clone();
        let work = move || {
            let _place = place;
            if !matches!(streams.outward(&program, target, port), Ok(true)) {
                reset(&program);
            }
        };
        let started = thread::Builder::new().stack_size(STACK_BYTES).spawn(work);
        started.is_ok()
    }

    fn outward(&self, program: &TcpStream, target: Target, port: u16) -> io::Result<bool> {
        if matches!(&target, Target::Address(address) if is_loopback(SocketAddr::new(*address, port)))
        {
            return Ok(false);
        }
        let open = Open {
            target,
            port,
            process: process::of_socket(program.peer_addr()?.port(), port),
        };
        let mut host = self.dial()?;
        frame::write(&mut host, &open, MAX_GATE_FRAME_BYTES).map_err(io::Error::other)?;
        program.set_nonblocking(true)?;
        program.set_nodelay(true)?;
        host.set_nonblocking(true)?;
        carry(program.as_fd(), host.as_fd(), true)
    }

    /// Dials the host from the next privileged port that is free.
    fn dial(&self) -> io::Result<Socket> {
        let sources = port::GATE_SOURCES;
        let count = sources.end() - sources.start() + 1;
        let mut failure = io::Error::from(io::ErrorKind::AddrInUse);
        for _ in 0..count {
            let number = self.last_port.fetch_add(1, Ordering::Relaxed) % count;
            match dial_from(sources.start() + number, port::GATE) {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => failure = error,
                result => return result,
            }
        }
        Err(failure)
    }

    /// Takes the host's streams to ports of this guest.
    pub(super) fn take_inward(&self, listener: &Socket) {
        loop {
            let Ok((host, peer)) = listener.accept() else {
                continue;
            };
            // A program in the guest can dial too.
            let is_host = peer
                .as_vsock_address()
                .is_some_and(|(cid, _)| cid == port::HOST_CID);
            let place = self.place().filter(|_| is_host);
            let work = move || {
                let _place = place?;
                // The end of the stream says it.
                inward(host).ok()
            };
            let _ = thread::Builder::new().stack_size(STACK_BYTES).spawn(work);
        }
    }
}

fn inward(mut host: Socket) -> io::Result<()> {
    host.set_read_timeout(Some(INWARD_LIMIT))?;
    let Inward { port } = frame::read(&mut host, MAX_GATE_FRAME_BYTES).map_err(io::Error::other)?;
    let program = TcpStream::connect((Ipv4Addr::LOCALHOST, port))
        .or_else(|_| TcpStream::connect((Ipv6Addr::LOCALHOST, port)))?;
    io::Write::write_all(&mut host, &[CONNECTED])?;
    program.set_nonblocking(true)?;
    program.set_nodelay(true)?;
    host.set_nonblocking(true)?;
    carry(program.as_fd(), host.as_fd(), false)?;
    Ok(())
}

/// Ends a program's connection with a reset, when it is dropped.
pub(super) fn reset(program: &TcpStream) {
    // It is ended in any case.
    let _ = SockRef::from(program).set_linger(Some(Duration::ZERO));
}

/// Dials the host for the control stream.
///
/// # Errors
/// The system's.
pub(super) fn dial_control() -> io::Result<Socket> {
    dial_from(port::GATE_CONTROL, port::GATE_CONTROL)
}

fn dial_from(source: u32, to: u32) -> io::Result<Socket> {
    let socket = Socket::new(Domain::VSOCK, Type::STREAM, None)?;
    socket.bind(&SockAddr::vsock(ANY_CID, source))?;
    socket.connect(&SockAddr::vsock(port::HOST_CID, to))?;
    Ok(socket)
}

/// Listens for the host's streams.
///
/// # Errors
/// The system's.
pub(super) fn listen() -> io::Result<Socket> {
    let socket = Socket::new(Domain::VSOCK, Type::STREAM, None)?;
    socket.bind(&SockAddr::vsock(ANY_CID, port::GATE))?;
    socket.listen(BACKLOG)?;
    Ok(socket)
}
