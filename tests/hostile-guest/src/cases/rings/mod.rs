//! Rings that are broken, and requests that name what is not memory.

mod buffers;
mod chains;
mod in_flight;
mod indirect;

use crate::virtio::block::{self, DATA, QUEUE, READ};
use crate::virtio::queue::{Descriptor, NEXT, Queue, WRITE};
use crate::virtio::vsock::{self, RECEIVE, Sockets, TRANSMIT};
use crate::virtio::{CONFIG_INTERRUPT, register};
use crate::{check, time};

pub(crate) use buffers::*;
pub(crate) use chains::*;
pub(crate) use in_flight::*;
pub(crate) use indirect::*;

/// End of the machine's memory.
const MEMORY_END: u64 = 0x200_0000;

/// Breaks a queue of the disk, and a queue of packets in each direction, with `deed`: each device is to need a reset, not to look at the
/// ring again, and to serve after it. `deed` finds the queue in service and kicks nothing.
fn breaks(what: &str, deed: impl Fn(&Queue)) {
    block::start(&QUEUE);
    block::header(READ, 0);
    is_broken(&QUEUE, what, &deed);
    block::serves_again(&QUEUE);

    Sockets::start();
    is_broken(&TRANSMIT, what, &deed);
    Sockets::start().echo_works(1000);

    // The device looks into the receive queue when it has something to say: to a stranger, a reset.
    let sockets = Sockets::start_without_buffers();
    deed(&RECEIVE);
    sockets.send(&vsock::packet(1001, vsock::ECHO_PORT, vsock::DATA), b"");
    RECEIVE.kick();
    has_retired(&RECEIVE, what);
    Sockets::start().echo_works(1002);
}

fn is_broken(queue: &Queue, what: &str, deed: impl Fn(&Queue)) {
    deed(queue);
    queue.kick();
    has_retired(queue, what);
}

fn has_retired(queue: &Queue, what: &str) {
    let device = queue.device;
    check!(
        time::until(|| device.needs_reset()),
        "{what}: the device does not ask for a reset"
    );
    check!(
        time::until(|| device.read(register::INTERRUPT_STATUS) & CONFIG_INTERRUPT != 0),
        "{what}: the driver was not told"
    );
    // A good chain now, at an index that would be right: nobody looks.
    let done = queue.done();
    queue.set(0, Descriptor(DATA, 64, WRITE, 0));
    queue.set_offered(done);
    queue.offer(0);
    queue.kick();
    check!(
        !time::soon(|| queue.done() != done),
        "{what}: the ring was read again"
    );
}

fn with_chain(queue: &Queue, parts: &[(u16, Descriptor)], head: u16) {
    for (index, descriptor) in parts {
        queue.set(*index, *descriptor);
    }
    queue.offer(head);
}

const LOOSE: Descriptor = Descriptor(DATA, 64, WRITE, 0);

fn next(index: u16) -> Descriptor {
    Descriptor(DATA, 64, WRITE | NEXT, index)
}
