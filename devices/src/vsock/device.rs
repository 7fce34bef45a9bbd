//! The device: its queues, its events, and what the machine calls.

use std::fmt::Debug;
use std::io;
use std::os::unix::net::UnixStream;

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_ids::VIRTIO_ID_VSOCK;

use super::limits::Limits;
use super::muxer::{Filled, Muxer};
use crate::virtio::{
    Activation, ActivationError, ActiveQueue, Drained, QueueError, QueueEvents, QueuePosition,
    StateError, VirtioDevice, read_config_bytes,
};

/// `VIRTIO_VSOCK_F_STREAM` (virtio 1.2 §5.10.3): bit 0. Sockets of packets (bit 1) are not offered.
const FEATURE_STREAM: u64 = 1;

/// `VIRTIO_VSOCK_EVENT_TRANSPORT_RESET` (virtio 1.2 §5.10.6.7).
const EVENT_TRANSPORT_RESET: u32 = 0;

/// The queues, in the order of virtio 1.2 §5.10.2.
const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;
const EVENT: usize = 2;

/// Their sizes. Linux fills the receive queue with buffers of 4 KiB when it starts, so its size costs the guest half a megabyte and
/// time at boot; the transmit queue takes several of Linux's packets of up to 18 descriptors; Linux gives 8 buffers for events.
const QUEUE_SIZES: [u16; 3] = [128, 128, 8];

/// Whom the device asks when the guest connects to the host.
///
/// Called on the event-loop thread with the device's lock held: it must not wait, nor call the device.
pub trait Incoming: Debug + Send {
    /// Takes the host's end of a connection from `guest_port` to `host_port`, or refuses it: then the guest's connect fails.
    ///
    /// A handler that decides later accepts now and drops the stream then: the guest reads end of file.
    ///
    /// # Errors
    ///
    /// [`Refused`].
    fn accept(
        &mut self,
        stream: UnixStream,
        host_port: u32,
        guest_port: u32,
    ) -> Result<(), Refused>;
}

/// What a snapshot keeps of the device beside its queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VsockState {
    /// The port that the next connection from the host has: going on from there, none comes from a port that the guest's
    /// kernel may not have forgotten yet.
    pub next_host_port: u32,
}

/// Nobody on the host wants the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused;

/// Why a connection to the guest was not begun. The stream is closed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The guest has not started the device, or has stopped it.
    #[error("The guest's socket device is not in service; wait until the guest has connected")]
    NotInService,
    /// The table of connections is full.
    #[error("All {limit} connections of the machine are in use; close some first")]
    TooMany {
        /// How many there may be.
        limit: usize,
    },
    /// The stream can't be used.
    #[error("The stream could not be made non-blocking")]
    Stream(#[source] io::Error),
}

/// A socket device.
#[derive(Debug)]
pub struct Vsock {
    guest_cid: u32,
    queue_events: QueueEvents,
    muxer: Muxer,
    packets_per_round: usize,
    active: Option<Queues>,
    /// Whether the guest has yet to be told that all its connections are gone.
    transport_reset_owed: bool,
}

#[derive(Debug)]
struct Queues {
    receive: ActiveQueue,
    transmit: ActiveQueue,
    event: ActiveQueue,
}

impl Vsock {
    /// A device for the guest with this context identifier (3 or more, virtio 1.2 §5.10.4).
    ///
    /// # Errors
    ///
    /// The system's, when it is out of descriptors.
    pub fn new(guest_cid: u32, incoming: Box<dyn Incoming>) -> io::Result<Self> {
        Self::with_limits(guest_cid, incoming, Limits::DEFAULT)
    }

    pub(super) fn with_limits(
        guest_cid: u32,
        incoming: Box<dyn Incoming>,
        limits: Limits,
    ) -> io::Result<Self> {
        Ok(Self {
            guest_cid,
            queue_events: QueueEvents::new(QUEUE_SIZES.len())?,
            muxer: Muxer::new(guest_cid, incoming, limits)?,
            packets_per_round: limits.packets_per_round,
            active: None,
            transport_reset_owed: false,
        })
    }

    #[cfg(test)]
    pub(super) fn muxer(&self) -> &Muxer {
        &self.muxer
    }

    /// Opens a connection to a port in the guest, over the machine's end of a socket pair. Does not wait: bytes that the peer writes before
    /// the guest has accepted stay in the socket, and if the guest refuses, the peer reads end of file.
    ///
    /// # Errors
    ///
    /// [`ConnectError`]; the stream was closed.
    pub fn connect(&mut self, guest_port: u32, stream: UnixStream) -> Result<(), ConnectError> {
        if self.active.is_none() {
            return Err(ConnectError::NotInService);
        }
        self.muxer.connect(guest_port, stream)?;
        // The request is sent from the event loop.
        self.queue_events.kick(RECEIVE);
        Ok(())
    }

    /// What a snapshot keeps beside the queues. Connections are not in it: none survives.
    #[must_use]
    pub fn save(&self) -> VsockState {
        VsockState {
            next_host_port: self.muxer.next_host_port(),
        }
    }

    /// Goes on from a snapshot: to be followed by [`Self::reset_transport`] before the guest runs.
    ///
    /// # Errors
    ///
    /// [`StateError::HostPort`] where the state is of no device like this.
    pub fn restore(&mut self, state: VsockState) -> Result<(), StateError> {
        self.muxer.set_next_host_port(state.next_host_port)
    }

    /// Ends all connections and tells the guest so, as after a restore from a snapshot (virtio 1.2 §5.10.6.7): the guest's
    /// sockets fail, its listeners stay, and it reads its context identifier anew.
    ///
    /// The transmit queue is served once more: a packet may have been in it for which no kick will come.
    pub fn reset_transport(&mut self) {
        self.muxer.forget_guest();
        self.transport_reset_owed = self.active.is_some();
        (0..self.queue_events.len()).for_each(|queue| self.queue_events.kick(queue));
    }

    fn serve(&mut self, queue: usize) {
        let result = match queue {
            TRANSMIT => self.serve_transmit().and_then(|()| self.serve_receive()),
            EVENT => self.serve_event(),
            _ => self.serve_receive(),
        };
        // The queue has retired and told the driver; a log line would be the guest's to repeat.
        let _ = result;
    }

    fn serve_transmit(&mut self) -> Result<(), QueueError> {
        let (Some(queues), muxer) = (&mut self.active, &mut self.muxer) else {
            return Ok(());
        };
        let drained = queues.transmit.drain(|memory, chain| {
            muxer.receive(memory, chain.readable());
            0
        })?;
        if drained == Drained::BudgetSpent {
            self.queue_events.kick(TRANSMIT);
        }
        Ok(())
    }

    fn serve_receive(&mut self) -> Result<(), QueueError> {
        let Some(queues) = &mut self.active else {
            return Ok(());
        };
        let queue = &mut queues.receive;
        let result = fill_queue(queue, &mut self.muxer, self.packets_per_round);
        queue.signal_used()?;
        if result? == Drained::BudgetSpent {
            self.queue_events.kick(RECEIVE);
        }
        Ok(())
    }

    fn serve_event(&mut self) -> Result<(), QueueError> {
        let Some(queues) = &mut self.active else {
            return Ok(());
        };
        let queue = &mut queues.event;
        while self.transport_reset_owed {
            let Some(chain) = queue.pop()? else {
                if queue.enable_notification()? {
                    continue;
                }
                return Ok(());
            };
            let event = EVENT_TRANSPORT_RESET.to_le_bytes();
            let written = chain.writable().write_at(queue.memory(), 0, &event);
            self.transport_reset_owed = written.is_err();
            // A buffer that is too short comes back empty, and the event goes into the next.
            let len = if written.is_ok() {
                size_of_val(&event)
            } else {
                0
            };
            queue.add_used(chain.head(), u32::try_from(len).unwrap_or(0))?;
            queue.signal_used()?;
        }
        Ok(())
    }
}

/// One round of packets for the guest, as long as there are packets and buffers.
fn fill_queue(
    queue: &mut ActiveQueue,
    muxer: &mut Muxer,
    packets: usize,
) -> Result<Drained, QueueError> {
    queue.disable_notification()?;
    for _ in 0..packets {
        // Without a packet no kick is needed: whoever has one comes here.
        if !muxer.wants_buffer() {
            return Ok(Drained::Empty);
        }
        let Some(chain) = queue.pop()? else {
            // Packets wait for buffers. From here on a buffer that is added comes with a kick; one may have
            // been added before.
            if queue.enable_notification()? {
                continue;
            }
            return Ok(Drained::Empty);
        };
        match muxer.fill(queue.memory(), chain.writable()) {
            Filled::Packet(len) => queue.add_used(chain.head(), len)?,
            Filled::Unusable => queue.add_used(chain.head(), 0)?,
            Filled::Nothing => {
                queue.undo_pop();
                return Ok(Drained::Empty);
            }
        }
    }
    Ok(Drained::BudgetSpent)
}

impl VirtioDevice for Vsock {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_VSOCK
    }

    fn queue_max_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn features(&self) -> u64 {
        FEATURE_STREAM
    }

    fn queue_events(&self) -> &QueueEvents {
        &self.queue_events
    }

    /// The configuration space is the guest's context identifier (virtio 1.2 §5.10.4).
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config_bytes(&u64::from(self.guest_cid).to_le_bytes(), offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivationError> {
        let [receive, transmit, event] = activation.into_queues()?;
        self.active = Some(Queues {
            receive,
            transmit,
            event,
        });
        Ok(())
    }

    fn reset(&mut self) {
        self.active = None;
        self.transport_reset_owed = false;
        self.muxer.forget_guest();
    }

    fn positions(&self) -> Vec<QueuePosition> {
        self.active
            .iter()
            .flat_map(|queues| [&queues.receive, &queues.transmit, &queues.event])
            .map(ActiveQueue::position)
            .collect()
    }
}

impl MutEventSubscriber for Vsock {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        self.queue_events.register(ops);
        // For the life of the device, as the queues' events: connections are in an epoll set of their own behind it.
        if let Err(error) = ops.add(Events::new_raw(self.muxer.poller_fd(), EventSet::IN)) {
            tracing::error!(%error, "The sockets' epoll set could not be added to the event loop");
        }
    }

    fn process(&mut self, events: Events, _ops: &mut EventOps<'_>) {
        if let Some(queue) = self.queue_events.take(events.fd()) {
            self.serve(queue);
        } else if events.fd() == self.muxer.poller_fd() {
            self.muxer.poll_sockets();
            self.serve(RECEIVE);
        }
    }
}
