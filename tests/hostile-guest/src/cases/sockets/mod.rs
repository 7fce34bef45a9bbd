//! Packets that break the rules of sockets.

mod connections;
mod credit;
mod packets;
mod readers;

use crate::time;
use crate::virtio::vsock::{Header, RECEIVE, RESET, Sockets};

pub(crate) use connections::*;
pub(crate) use credit::*;
pub(crate) use packets::*;
pub(crate) use readers::*;

/// A packet gets a reset in answer, and nothing else.
fn is_reset(sockets: &Sockets, header: &Header) {
    sockets.send(header, b"");
    sockets.expect(RESET, header.src_port, header.dst_port);
    sockets.expect_nothing();
}

fn drain(sockets: &Sockets) {
    while time::soon(|| RECEIVE.done() != sockets.taken()) {
        let _ = sockets.try_receive();
    }
}
