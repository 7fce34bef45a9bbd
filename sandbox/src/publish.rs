//! Ports of the host that lead to ports of the guest.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use egress::guard::Guard;
use egress::policy::Target;
use egress::relay::{Count, relay};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};

use crate::shared::Shared;

/// Most connections to one published port at a time; one more is closed. The gate in the guest has a bound of its own.
const MAX_CONNECTIONS: usize = 256;

/// How often it is looked whether the machine is gone.
const LOOK_PERIOD: Duration = Duration::from_millis(200);

/// Stack of a connection's thread.
const STACK_BYTES: usize = 256 << 10;

/// A port of this host that leads to one of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PublishedPort {
    /// Where this host listens; the port that the system chose where 0 was asked for.
    pub address: SocketAddr,
    /// The guest's port.
    pub guest_port: u16,
}

/// A published port.
#[derive(Debug)]
struct Published {
    shared: Arc<Shared>,
    port: u16,
    connections: AtomicUsize,
}

/// Carries what comes to `listener` to a port of the guest, until the machine is gone.
pub(crate) fn publish(shared: &Arc<Shared>, listener: TcpListener, port: u16) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    let published = Arc::new(Published {
        shared: Arc::clone(shared),
        port,
        connections: AtomicUsize::new(0),
    });
    thread::Builder::new()
        .name("publish".to_owned())
        .spawn(move || published.serve(&listener))?;
    shared.is_published(PublishedPort {
        address,
        guest_port: port,
    });
    Ok(())
}

impl Published {
    fn serve(self: &Arc<Self>, listener: &TcpListener) {
        let period = Timespec::try_from(LOOK_PERIOD).ok();
        while self.shared.lock().over().is_none() {
            let mut row = [PollFd::new(listener, PollFlags::IN)];
            // An interruption is a look.
            let _ = poll(&mut row, period.as_ref());
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(_) => {
                    // One that was given up, or no more descriptors: then it waits on, and there would be no pause.
                    thread::sleep(LOOK_PERIOD);
                    continue;
                }
            };
            let taken = self.connections.fetch_add(1, Ordering::Relaxed);
            let published = Arc::clone(self);
            let work = move || {
                if taken < MAX_CONNECTIONS {
                    // A port where nobody listens closes the connection.
                    let _ = published.carry(&stream);
                }
                drop(stream);
                published.connections.fetch_sub(1, Ordering::Relaxed);
            };
            let started = thread::Builder::new().stack_size(STACK_BYTES).spawn(work);
            if started.is_err() {
                self.connections.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    fn carry(&self, outside: &TcpStream) -> io::Result<()> {
        let guest = self.shared.connect_inward(self.port)?;
        guest.set_nonblocking(true)?;
        outside.set_nonblocking(true)?;
        outside.set_nodelay(true)?;
        let address = outside.peer_addr()?.ip();
        let mut guard = Guard::new(&Target::Address(address), self.port, true);
        let unbounded = AtomicU64::new(u64::MAX);
        let mut count = Count::new(&unbounded);
        let nothing = (Vec::new(), 0);
        // Who dials is the client: the host's side of the published port.
        relay(
            outside.as_fd(),
            guest.as_fd(),
            &mut guard,
            nothing,
            &mut count,
        )?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Events;

    #[test]
    fn a_port_that_the_system_chose_is_known() {
        let shared = Arc::new(Shared::new(0, Events::default()).unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();

        publish(&shared, listener, 80).unwrap();

        let guest_port = 80;
        let expected = PublishedPort {
            address,
            guest_port,
        };
        assert_ne!(address.port(), 0);
        assert_eq!(shared.published(), [expected]);
    }
}
