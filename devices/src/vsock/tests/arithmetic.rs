//! Layout, credit and buffer, each by itself.

use proptest::prelude::*;
use std::io::{self, ErrorKind, Write};
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use virtio_vsock::packet::VsockPacket;
use vm_memory::{Bytes, GuestAddress, GuestMemory, Permissions};

use super::super::backlog::Backlog;
use super::super::credit::{Allowance, Promise};
use super::super::packet::{HEADER_BYTES, Header};
use crate::virtio::testing::{DriverQueue, Piece, memory};

fn any_header() -> impl Strategy<Value = Header> {
    let ids = (any::<u64>(), any::<u64>(), any::<u32>(), any::<u32>());
    let rest = (
        any::<u16>(),
        any::<u16>(),
        any::<u32>(),
        any::<u32>(),
        any::<u32>(),
    );
    (ids, rest).prop_map(|((src_cid, dst_cid, src_port, dst_port), rest)| {
        let (socket_type, op, flags, buf_alloc, fwd_cnt) = rest;
        Header {
            src_cid,
            dst_cid,
            src_port,
            dst_port,
            len: 0,
            socket_type,
            op,
            flags,
            buf_alloc,
            fwd_cnt,
        }
    })
}

/// Takes what it has room for, at most `step` at a time.
struct Sink {
    taken: Vec<u8>,
    room: usize,
    step: usize,
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = bytes.len().min(self.step).min(self.room);
        if count == 0 {
            return Err(ErrorKind::WouldBlock.into());
        }
        self.room -= count;
        self.taken.extend_from_slice(&bytes[..count]);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

proptest! {
    #[test]
    fn a_header_is_laid_out_as_another_implementation_reads_it(header in any_header()) {
        let memory = memory(1 << 20);
        memory.write_slice(&header.to_bytes(), GuestAddress(0x8000)).unwrap();
        let mut driver = DriverQueue::new(&memory, 0x1000, 16);
        driver.add(&[Piece::readable(0x8000, HEADER_BYTES)]);
        let mut queue = Queue::new(16).unwrap();
        queue.try_set_desc_table_address(GuestAddress(driver.descriptor_table())).unwrap();
        queue.try_set_avail_ring_address(GuestAddress(driver.driver_area())).unwrap();
        queue.try_set_used_ring_address(GuestAddress(driver.device_area())).unwrap();
        queue.set_ready(true);
        let mut chain = queue.iter(&memory).unwrap().next().unwrap();

        let other = VsockPacket::from_tx_virtq_chain(&memory, &mut chain, 1 << 16).unwrap();

        prop_assert_eq!(header, Header {
            src_cid: other.src_cid(),
            dst_cid: other.dst_cid(),
            src_port: other.src_port(),
            dst_port: other.dst_port(),
            len: other.len(),
            socket_type: other.type_(),
            op: other.op(),
            flags: other.flags(),
            buf_alloc: other.buf_alloc(),
            fwd_cnt: other.fwd_cnt(),
        });
        prop_assert_eq!(Header::from_bytes(header.to_bytes()), header);
    }

    #[test]
    fn a_guest_that_keeps_to_its_credit_is_never_refused_and_never_stuck(
        buf_alloc in 1..300_u32,
        steps in proptest::collection::vec((any::<u32>(), any::<u32>()), 1..200),
    ) {
        // The counts are near their wrap from the start.
        let mut promise = Promise::new(buf_alloc);
        let (mut sent, mut held, mut told) = (0_u64, 0_u32, 0_u64);
        for (send, forward) in steps {
            let room = u64::from(buf_alloc) - (sent - told);
            let len = u32::try_from(u64::from(send) % (room + 1)).unwrap();
            prop_assert!(promise.receive(len).is_ok());
            prop_assert!(promise.receive(buf_alloc + 1 - len.min(buf_alloc)).is_err() || room > u64::from(buf_alloc - len));
            sent += u64::from(len);
            held += len;
            let forwarded = forward % (held + 1);
            promise.forward(forwarded);
            held -= forwarded;
            if promise.is_news() {
                told += u64::from(promise.tell().wrapping_sub(u32::try_from(told).unwrap()));
            }
            // When all has left, there is room that the guest knows of.
            prop_assert!(held > 0 || sent - told < u64::from(buf_alloc));
        }
    }

    #[test]
    fn whatever_the_guest_says_of_its_room_is_taken_or_refused(
        steps in proptest::collection::vec((any::<u32>(), any::<u32>(), any::<u32>()), 1..100),
    ) {
        let mut allowance = Allowance::default();
        for (buf_alloc, fwd_cnt, send) in steps {
            let _ = allowance.update(buf_alloc, fwd_cnt);
            let room = allowance.available();
            prop_assert!(room <= u32::MAX / 2 || room == u32::MAX || room <= buf_alloc.max(room));
            allowance.send(if room == 0 { 0 } else { send % room });
        }
    }

    #[test]
    fn a_backlog_gives_the_bytes_in_order_and_its_memory_back(
        steps in proptest::collection::vec((0..700_usize, 0..900_usize, 1..300_usize), 1..60),
    ) {
        let memory = memory(1 << 20);
        let source: Vec<u8> = (0..1 << 16).map(|at: u32| (at % 253).to_le_bytes()[0]).collect();
        memory.write_slice(&source, GuestAddress(0)).unwrap();
        let (mut backlog, mut pushed) = (Backlog::default(), 0);
        let mut sink = Sink { taken: Vec::new(), room: 0, step: 1 };
        for (push, room, step) in steps {
            if push > 0 {
                for slice in GuestMemory::get_slices(&memory, GuestAddress(pushed as u64), push, Permissions::Read).unwrap() {
                    backlog.push(&slice.unwrap());
                }
            }
            pushed += push;
            (sink.room, sink.step) = (room, step);
            let before = sink.taken.len();
            let left = backlog.flush(&mut sink).unwrap();
            prop_assert_eq!(left, sink.taken.len() - before);
            prop_assert_eq!(backlog.len(), pushed - sink.taken.len());
        }
        sink.room = usize::MAX;
        backlog.flush(&mut sink).unwrap();
        prop_assert!(backlog.is_empty() && sink.taken[..] == source[..pushed]);
    }
}

#[test]
fn counts_that_wrap_go_on() {
    let mut allowance = Allowance::default();
    let mut count = 0_u32;
    for _ in 0..10 {
        allowance.update(u32::MAX / 3, count).unwrap();
        allowance.send(u32::MAX / 3);
        assert_eq!(allowance.available(), 0);
        count = count.wrapping_add(u32::MAX / 3);
    }
}

#[test]
fn a_count_that_runs_ahead_is_a_violation_and_one_behind_is_stale() {
    let mut allowance = Allowance::default();
    allowance.update(1000, 0).unwrap();
    allowance.send(500);
    allowance.update(1000, 300).unwrap();

    assert!(allowance.update(1000, 501).is_err());
    allowance.update(9, 200).unwrap();
    assert_eq!(allowance.available(), 800);
}

#[test]
fn a_promise_that_shrinks_below_what_is_in_flight_is_no_room() {
    let mut allowance = Allowance::default();
    allowance.update(1000, 0).unwrap();
    allowance.send(900);

    allowance.update(10, 0).unwrap();
    assert_eq!(allowance.available(), 0);
    allowance.update(u32::MAX, 0).unwrap();
    assert_eq!(allowance.available(), u32::MAX - 900);
}
