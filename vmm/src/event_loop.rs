//! The event loop: the control socket, the end of the machine, and the devices, on one thread.

use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use devices::vsock::{Incoming, Refused, Vsock};
use event_manager::{EventManager, EventOps, EventSet, Events, MutEventSubscriber, SubscriberOps};

use crate::control::{ControlSocket, EndReason, FromMachine, Then, ToMachine};
use crate::end::EndSignal;
use crate::machine::{Subscriber, lock};

/// Most events that are taken from the system at once.
const MAX_EVENTS: usize = 64;

/// Why the event loop could not go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum LoopError {
    /// The event manager's failure.
    #[error("The event loop failed")]
    Manager(#[from] event_manager::Error),
}

/// Why the event loop comes back.
#[derive(Debug)]
pub(crate) enum Turn {
    /// The supervisor closed its end of the socket, died, or said something that is no message.
    SupervisorIsGone,
    /// The machine ended by itself.
    Ended(EndReason),
    /// The supervisor wants a snapshot.
    Snapshot {
        /// What is to be done then.
        then: Then,
        /// What came with the message.
        descriptors: Vec<OwnedFd>,
    },
}

/// Offers the guest's connections to the supervisor, who closes those that it does not want.
#[derive(Debug)]
pub(crate) struct Offer(pub(crate) Arc<ControlSocket>);

impl Incoming for Offer {
    fn accept(
        &mut self,
        stream: UnixStream,
        host_port: u32,
        guest_port: u32,
    ) -> Result<(), Refused> {
        let message = FromMachine::GuestConnected {
            host_port,
            guest_port,
        };
        // A supervisor that does not read its socket is not waited for: the guest could have filled it.
        self.0
            .try_send(&message, &[stream.as_fd()])
            .map_err(|_| Refused)
    }
}

/// What the supervisor and the end of the machine have to say.
struct Control {
    socket: Arc<ControlSocket>,
    end: Arc<EndSignal>,
    vsock: Arc<Mutex<Vsock>>,
    turn: Option<Turn>,
}

impl Control {
    fn hear_supervisor(&mut self, events: EventSet) {
        if events.intersects(EventSet::HANG_UP | EventSet::READ_HANG_UP | EventSet::ERROR) {
            self.turn = Some(Turn::SupervisorIsGone);
            return;
        }
        match self.socket.try_receive() {
            Ok(Some((ToMachine::Connect { port }, descriptors))) => {
                self.connect(port, descriptors);
            }
            Ok(None) => {}
            Ok(Some((ToMachine::Snapshot { then }, descriptors))) => {
                self.turn = Some(Turn::Snapshot { then, descriptors });
            }
            // A second start, or no message at all: nobody who speaks so can be followed.
            Ok(Some((ToMachine::Start(_) | ToMachine::Restore(_), _))) | Err(_) => {
                self.turn = Some(Turn::SupervisorIsGone);
            }
        }
    }

    /// Hands a stream to the guest. One that can't be is closed, which is how the supervisor learns of it.
    fn connect(&mut self, port: u32, descriptors: Vec<OwnedFd>) {
        for stream in descriptors.into_iter().take(1) {
            let connected = lock(&self.vsock).connect(port, UnixStream::from(stream));
            if let Err(error) = connected {
                tracing::debug!(port, %error, "A stream to the guest was refused");
            }
        }
    }
}

impl MutEventSubscriber for Control {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        let registered = ops
            .add(Events::new_raw(
                raw(&self.socket),
                EventSet::IN | EventSet::READ_HANG_UP,
            ))
            .and_then(|()| ops.add(Events::new(self.end.event(), EventSet::IN)));
        if let Err(error) = registered {
            self.turn = Some(Turn::Ended(EndReason::HostFailed(format!(
                "The event loop took no more descriptors: {error}"
            ))));
        }
    }

    fn process(&mut self, events: Events, _ops: &mut EventOps<'_>) {
        if events.fd() == raw(&self.socket) {
            self.hear_supervisor(events.event_set());
        } else {
            // The reset port rings without a reason: it is one.
            let reason = self.end.reason().unwrap_or(EndReason::Reset);
            self.turn.get_or_insert(Turn::Ended(reason));
        }
    }
}

/// Everything that is to be served; it waits for [`Self::run`].
pub(crate) struct EventLoop {
    manager: EventManager<Subscriber>,
    control: Arc<Mutex<Control>>,
}

impl EventLoop {
    /// Has everything watched.
    ///
    /// # Errors
    /// See [`LoopError`].
    pub(crate) fn new(
        socket: &Arc<ControlSocket>,
        end: &Arc<EndSignal>,
        vsock: &Arc<Mutex<Vsock>>,
        devices: Vec<Subscriber>,
    ) -> Result<Self, LoopError> {
        let control = Arc::new(Mutex::new(Control {
            socket: Arc::clone(socket),
            end: Arc::clone(end),
            vsock: Arc::clone(vsock),
            turn: None,
        }));
        let mut manager = EventManager::<Subscriber>::new_with_capacity(MAX_EVENTS)?;
        manager.add_subscriber(Arc::clone(&control) as Subscriber);
        for device in devices {
            manager.add_subscriber(device);
        }
        Ok(Self { manager, control })
    }

    /// Serves everything until there is something for the machine as a whole. It may be called again.
    ///
    /// # Errors
    /// See [`LoopError`].
    pub(crate) fn run(&mut self) -> Result<Turn, LoopError> {
        loop {
            self.manager.run()?;
            if let Some(turn) = lock(&self.control).turn.take() {
                return Ok(turn);
            }
        }
    }
}

fn raw(socket: &ControlSocket) -> RawFd {
    socket.as_fd().as_raw_fd()
}
