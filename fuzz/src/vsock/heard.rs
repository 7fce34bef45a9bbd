//! What the guest hears: each packet is one of the specification's, within its credit.

use std::ops::Range;

use super::header::{CREDIT_REQUEST, DATA, HEADER_BYTES, Header, REQUEST, RESET, RESPONSE};
use super::{EVENT, GUEST_CID, HOST_CID, RECEIVE, World};
use crate::memory::overlap;

/// The device's bounds: payload of a packet, and the room that it promises.
const PAYLOAD_BYTES_MAX: u32 = 64 << 10;
const BUF_ALLOC_MIN: u32 = 16 << 10;
const BUF_ALLOC_MAX: u32 = 256 << 10;

/// What the guest knows of a pair of ports.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Pair {
    /// Sum of the bytes that it has ever said it takes: the most of `fwd_cnt` + `buf_alloc`.
    pub(super) allowed: u64,
    /// Bytes that came since the device's last request or response.
    pub(super) received: u64,
}

impl World {
    /// Checks the packets that came, as long as none lies over another.
    pub(super) fn hear(&mut self) {
        let ring = self.rings[RECEIVE];
        let used = ring.used_index(&self.memory);
        let came = used.wrapping_sub(self.seen);
        assert!(came <= ring.size, "more buffers than there are");
        let mut packets = Vec::new();
        let mut all_parts: Vec<Range<u64>> = Vec::new();
        for index in 0..came {
            let (head, written) = ring.used_element(&self.memory, self.seen.wrapping_add(index));
            let head = u16::try_from(head).expect("a head");
            let parts = ring
                .writable_parts(&self.memory, head)
                .expect("a chain that came back is one");
            let room: u64 = parts.iter().map(|part| part.end - part.start).sum();
            assert!(u64::from(written) <= room, "{written} bytes in {room}");
            if written > 0 {
                assert!(written >= HEADER_BYTES, "half a header");
                all_parts.extend(parts.iter().cloned());
                packets.push((parts, written));
            }
        }
        self.seen = used;
        let is_disjoint = all_parts
            .iter()
            .enumerate()
            .all(|(at, part)| all_parts[..at].iter().all(|other| !overlap(part, other)));
        // An event that was written over a packet hides it too.
        let events = self.rings[EVENT].writable_buffers(&self.memory);
        let is_whole = all_parts
            .iter()
            .all(|part| events.iter().all(|event| !overlap(part, event)));
        let is_readable = is_disjoint && is_whole;
        self.has_missed_packets |= !is_readable;
        if !is_readable {
            return;
        }
        for (parts, written) in packets {
            let mut bytes = Vec::new();
            for part in parts {
                let left = u64::from(HEADER_BYTES) - bytes.len() as u64;
                let len = usize::try_from(left.min(part.end - part.start)).expect("small");
                bytes.extend(self.memory.read_bytes(part.start, len));
            }
            self.check_packet(&Header::from_bytes(&bytes), written);
        }
    }

    fn check_packet(&mut self, header: &Header, written: u32) {
        assert_eq!(header.len, written - HEADER_BYTES, "{header:?}");
        assert_eq!(header.dst_cid, GUEST_CID, "{header:?}");
        assert!(
            (REQUEST..=CREDIT_REQUEST).contains(&header.op),
            "{header:?}"
        );
        assert!(header.len <= PAYLOAD_BYTES_MAX, "{header:?}");
        assert_eq!(header.len > 0, header.op == DATA, "{header:?}");
        if header.op == RESET {
            return;
        }
        // Only a reset answers a packet that made no sense, with that packet's addresses.
        assert_eq!((header.src_cid, header.kind), (HOST_CID, 1), "{header:?}");
        assert!(
            (BUF_ALLOC_MIN..=BUF_ALLOC_MAX).contains(&header.buf_alloc),
            "{header:?}"
        );
        if !self.host_ports.contains(&header.src_port) {
            self.host_ports.push(header.src_port);
        }
        let pair = self
            .pairs
            .entry((header.dst_port, header.src_port))
            .or_default();
        if matches!(header.op, REQUEST | RESPONSE) {
            pair.received = 0;
        }
        if header.op == DATA {
            pair.received += u64::from(header.len);
            assert!(
                self.has_missed_packets || pair.received <= pair.allowed,
                "{header:?} is beyond the guest's credit: {pair:?}"
            );
        }
    }
}
