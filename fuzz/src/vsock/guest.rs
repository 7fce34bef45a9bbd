//! What the guest does: packets of all kinds, and buffers for those that come.

use super::header::{
    CREDIT_REQUEST, CREDIT_UPDATE, DATA, HEADER_BYTES, Header, REQUEST, RESET, RESPONSE, SHUTDOWN,
};
use super::{EVENT, GUEST_CID, HOST_CID, RECEIVE, RECEIVED, SENT, TRANSMIT, World};
use crate::input::Input;
use crate::machine::low;
use crate::memory::{address, length};

impl World {
    /// The guest makes a packet available, most often one that makes sense.
    pub(super) fn guest_sends(&mut self, input: &mut Input<'_>) {
        let op = input.pick(&[
            REQUEST,
            DATA,
            RESPONSE,
            DATA,
            SHUTDOWN,
            CREDIT_UPDATE,
            CREDIT_REQUEST,
            RESET,
            0,
            8,
            0xffff,
        ]);
        let guest_port = input.pick(&[1024, 1025, 1026, 0, u32::MAX]);
        let host_port = self.host_ports[usize::from(input.u8()) % self.host_ports.len()];
        let pair = self
            .pairs
            .get(&(guest_port, host_port))
            .copied()
            .unwrap_or_default();
        let odd = input.u8();
        let pick = |input: &mut Input<'_>, bit: u8, plain: u64| match odd & bit {
            0 => plain,
            _ => input.u64(),
        };
        let payload_len = if op == DATA {
            input.pick(&[1, 0, 100, 4096, 8192, 0x2000])
        } else {
            0
        };
        let taken = if input.below(2) == 0 {
            pair.received
        } else {
            0
        };
        let buf_alloc = input.pick(&[1 << 16, 0, 1, 100, 4096, 1 << 20, u32::MAX]);
        let header = Header {
            src_cid: pick(input, 1, GUEST_CID),
            dst_cid: pick(input, 2, HOST_CID),
            src_port: guest_port,
            dst_port: host_port,
            len: low(pick(input, 4, payload_len.into())),
            kind: u16::from_le_bytes(first_two(pick(input, 8, 1))),
            op,
            flags: match op {
                SHUTDOWN => u32::from(input.below(4)),
                _ => low(pick(input, 16, 0)),
            },
            buf_alloc,
            fwd_cnt: low(pick(input, 32, taken)),
        };
        let slot = SENT + u64::from(self.next_descriptor[TRANSMIT] % 4) * 0x800;
        self.memory.write(slot, &header.to_bytes());
        let body = slot + u64::from(HEADER_BYTES);
        let pieces = match input.below(4) {
            0 if payload_len > 1 => vec![
                (slot, HEADER_BYTES, false),
                (body, 1, false),
                (body + 1, payload_len - 1, false),
            ],
            1 => vec![(slot, 20, false), (slot + 20, payload_len + 24, false)],
            2 => vec![(slot, length(input), input.below(8) == 0)],
            _ => vec![(slot, HEADER_BYTES + payload_len, false)],
        };
        self.publish(TRANSMIT, &pieces);
        let pair = self.pairs.entry((guest_port, host_port)).or_default();
        let allowed = u64::from(header.fwd_cnt) + u64::from(header.buf_alloc);
        pair.allowed = pair.allowed.max(allowed);
    }

    pub(super) fn guest_gives_buffers(&mut self, input: &mut Input<'_>) {
        let queue = if input.below(8) == 0 { EVENT } else { RECEIVE };
        let len = input.pick(&[4140, 45, 44, 43, 1, 0, 100, 1 << 14]);
        for _ in 0..input.below(8) {
            let at = RECEIVED + u64::from(self.next_descriptor[queue] % 2) * 0x1100;
            let pieces = match input.below(3) {
                0 if len > 2 => vec![(at, 2, true), (at + 2, len - 2, true)],
                1 => vec![(address(input), len, true)],
                _ => vec![(at, len, true)],
            };
            self.publish(queue, &pieces);
        }
    }

    pub(super) fn publish(&mut self, queue: usize, pieces: &[(u64, u32, bool)]) {
        let head = self.next_descriptor[queue];
        self.next_descriptor[queue] = self.rings[queue].set_chain(&self.memory, head, pieces);
        self.rings[queue].publish(&self.memory, head);
    }

    pub(super) fn send(&mut self, header: Header, payload: &[u8]) {
        self.memory.write(SENT, &header.to_bytes());
        self.memory.write(SENT + u64::from(HEADER_BYTES), payload);
        let pair = self
            .pairs
            .entry((header.src_port, header.dst_port))
            .or_default();
        pair.allowed = pair.allowed.max(u64::from(header.buf_alloc));
        self.publish(TRANSMIT, &[(SENT, HEADER_BYTES + header.len, false)]);
    }
}

fn first_two(value: u64) -> [u8; 2] {
    let [a, b, ..] = value.to_le_bytes();
    [a, b]
}
