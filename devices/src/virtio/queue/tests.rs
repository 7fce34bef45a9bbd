//! Rings: those of a good driver, and each way to break one.

use proptest::prelude::*;
use virtio_bindings::virtio_config::VIRTIO_CONFIG_S_NEEDS_RESET;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::virtio::chain::BufferError;
use crate::virtio::testing::{
    CountingLine, DRIVER_QUEUE_LEN, DriverQueue, INDIRECT, NEXT, Piece, WRITE, memory,
};

const MEMORY_LEN: usize = 0x10_0000;
const RING: u64 = 0x1000;
const DATA: u64 = 0x8000;
const _: () = assert!(RING + DRIVER_QUEUE_LEN <= DATA);

struct Setup {
    memory: GuestMemoryMmap,
    line: CountingLine,
    interrupt: VirtioInterrupt,
    driver: DriverQueue,
    queue: ActiveQueue,
}

fn setup(size: u16) -> Setup {
    let memory = memory(MEMORY_LEN);
    let line = CountingLine::default();
    let interrupt = line.interrupt();
    let driver = DriverQueue::new(&memory, RING, size);
    let queue = driver.activate(&interrupt);
    Setup {
        memory,
        line,
        interrupt,
        driver,
        queue,
    }
}

impl Setup {
    /// The ring is broken: one error of this kind, then silence, whatever the driver does to mend it.
    fn assert_retires(mut self, is_expected: impl Fn(&QueueError) -> bool) {
        let error = self.queue.pop().unwrap_err();
        assert!(is_expected(&error), "{error:?}");
        assert!(self.queue.is_retired());
        assert_eq!(self.interrupt.device_status(), VIRTIO_CONFIG_S_NEEDS_RESET);
        assert_eq!(self.line.count(), 1);

        self.driver = DriverQueue::new(&self.memory, RING, self.queue.size());
        self.driver.add(&[Piece::readable(DATA, 1)]);
        assert!(matches!(self.queue.pop(), Err(QueueError::Retired)));
        assert!(matches!(
            self.queue.drain(|_, _| panic!("served a broken ring")),
            Err(QueueError::Retired)
        ));
        assert!(matches!(
            self.queue.add_used(0, 0),
            Err(QueueError::Retired)
        ));
        assert_eq!(self.driver.used_index(), 0);
        assert_eq!(self.line.count(), 1, "the driver is told once");
    }
}

#[test]
fn test_chain_is_split_and_given_back() {
    let mut s = setup(8);
    let head = s.driver.add(&[
        Piece::readable(DATA, 3),
        Piece::readable(DATA + 0x100, 4),
        Piece::writable(DATA + 0x200, 5),
    ]);
    s.memory.write_slice(b"abc", GuestAddress(DATA)).unwrap();
    s.memory
        .write_slice(b"defg", GuestAddress(DATA + 0x100))
        .unwrap();

    let chain = s.queue.pop().unwrap().unwrap();
    let mut data = [0; 5];
    chain.readable().read_at(&s.memory, 1, &mut data).unwrap();
    chain.writable().write_at(&s.memory, 3, b"yz").unwrap();
    s.queue.add_used(chain.head(), 5).unwrap();

    assert_eq!(&data, b"bcdef");
    assert_eq!(chain.readable().len(), 7);
    assert_eq!(chain.writable().len(), 5);
    assert_eq!(s.driver.take_used(), Some((head, 5)));
    let mut written = [0; 6];
    s.memory
        .read_slice(&mut written, GuestAddress(DATA + 0x200))
        .unwrap();
    assert_eq!(&written, b"\0\0\0yz\0");
    assert!(s.queue.pop().unwrap().is_none());
}

#[test]
fn test_undone_pop_gives_the_chain_again() {
    let mut s = setup(8);
    let head = s.driver.add(&[Piece::writable(DATA, 1)]);

    let first = s.queue.pop().unwrap().unwrap();
    s.queue.undo_pop();

    assert_eq!(first.head(), head);
    assert_eq!(s.queue.pop().unwrap(), Some(first));
}

#[test]
fn test_self_loop_retires() {
    let mut s = setup(8);
    s.driver.set_descriptor(3, DATA, 16, NEXT, 3);
    s.driver.publish(3);
    s.assert_retires(|e| matches!(e, QueueError::ChainTooLong { head: 3 }));
}

#[test]
fn test_mutual_loop_retires() {
    let mut s = setup(8);
    s.driver.set_descriptor(0, DATA, 16, NEXT, 1);
    s.driver.set_descriptor(1, DATA, 16, NEXT | WRITE, 0);
    s.driver.publish(0);
    s.assert_retires(|e| matches!(e, QueueError::ChainTooLong { head: 0 }));
}

#[test]
fn test_chain_as_long_as_the_queue_is_served_and_one_longer_retires() {
    let mut s = setup(8);
    for index in 0..8 {
        let flags = if index < 7 { NEXT } else { 0 };
        s.driver.set_descriptor(index, DATA, 1, flags, index + 1);
    }
    s.driver.publish(0);
    let chain = s.queue.pop().unwrap().unwrap();
    assert_eq!(chain.readable().len(), 8);

    s.driver.set_descriptor(7, DATA, 1, NEXT, 0);
    s.driver.publish(0);
    s.assert_retires(|e| matches!(e, QueueError::ChainTooLong { head: 0 }));
}

#[test]
fn test_next_at_or_past_the_size_retires() {
    for next in [8, 9, 0x7fff, u16::MAX] {
        let mut s = setup(8);
        s.driver.set_descriptor(0, DATA, 1, NEXT, next);
        s.driver.publish(0);
        s.assert_retires(
            |e| matches!(e, QueueError::BadDescriptorIndex { index } if *index == next),
        );
    }
}

#[test]
fn test_next_without_its_flag_is_not_followed() {
    let mut s = setup(8);
    s.driver.set_descriptor(0, DATA, 1, 0, u16::MAX);
    s.driver.publish(0);
    assert_eq!(s.queue.pop().unwrap().unwrap().readable().len(), 1);
}

#[test]
fn test_head_at_or_past_the_size_retires() {
    for head in [8, 9, u16::MAX] {
        let mut s = setup(8);
        s.driver.publish(head);
        s.assert_retires(
            |e| matches!(e, QueueError::BadDescriptorIndex { index } if *index == head),
        );
    }
}

#[test]
fn test_available_index_too_far_ahead_retires() {
    for index in [9, 10, 0x8000, u16::MAX] {
        let mut s = setup(8);
        s.driver.set_available_index(index);
        s.assert_retires(|e| matches!(e, QueueError::AvailableIndex));
    }
}

#[test]
fn test_available_index_backwards_retires() {
    let mut s = setup(8);
    s.driver.add(&[Piece::readable(DATA, 1)]);
    s.driver.add(&[Piece::readable(DATA, 1)]);
    while s.queue.pop().unwrap().is_some() {}
    s.driver.set_available_index(1);
    s.assert_retires(|e| matches!(e, QueueError::AvailableIndex));
}

#[test]
fn test_indirect_descriptor_retires() {
    // In each of its forms: proper, with NEXT, empty, not a multiple of 16, outside memory, writable.
    for (address, len, flags) in [
        (DATA, 32, INDIRECT),
        (DATA, 32, INDIRECT | NEXT),
        (DATA, 0, INDIRECT),
        (DATA, 17, INDIRECT),
        (u64::MAX - 15, 32, INDIRECT),
        (DATA, 32, INDIRECT | WRITE),
    ] {
        let mut s = setup(8);
        s.driver.set_descriptor(0, address, len, flags, 0);
        s.driver.publish(0);
        s.assert_retires(|e| matches!(e, QueueError::Indirect { index: 0 }));
    }
}

#[test]
fn test_indirect_descriptor_deep_in_a_chain_retires() {
    let mut s = setup(8);
    s.driver.set_descriptor(0, DATA, 1, NEXT, 1);
    s.driver.set_descriptor(1, DATA, 32, INDIRECT, 0);
    s.driver.publish(0);
    s.assert_retires(|e| matches!(e, QueueError::Indirect { index: 1 }));
}

#[test]
fn test_buffer_outside_memory_fails_alone_and_the_queue_goes_on() {
    let end = u64::try_from(MEMORY_LEN).unwrap();
    for (address, len) in [
        (end, 1),
        (end - 1, 2),
        (u64::MAX, 1),
        (u64::MAX - 4, 16),
        (DATA, u32::MAX),
        (0xfee0_0000, 4096),
    ] {
        let mut s = setup(8);
        let head = s
            .driver
            .add(&[Piece::readable(address, len), Piece::writable(address, len)]);
        let chain = s.queue.pop().unwrap().unwrap();
        let count = u64::from(len);

        let read = chain.readable().slices(&s.memory, 0, count).unwrap_err();
        let write = chain.writable().slices(&s.memory, 0, count).unwrap_err();
        s.queue.add_used(chain.head(), 0).unwrap();

        assert!(matches!(read, BufferError::NotMemory { .. }), "{read:?}");
        assert!(matches!(write, BufferError::NotMemory { .. }), "{write:?}");
        assert_eq!(s.driver.take_used(), Some((head, 0)));
        assert!(!s.interrupt.needs_reset());
        s.driver.add(&[Piece::readable(DATA, 1)]);
        assert!(s.queue.pop().unwrap().is_some());
    }
}

#[test]
fn test_buffer_over_two_regions_works_and_over_a_hole_fails() {
    let memory = GuestMemoryMmap::from_ranges(&[
        (GuestAddress(0), 0x10_000),
        (GuestAddress(0x10_000), 0x1000),
        (GuestAddress(0x20_000), 0x1000),
    ])
    .unwrap();
    let mut driver = DriverQueue::new(&memory, RING, 8);
    let mut queue = driver.activate(&CountingLine::default().interrupt());
    driver.add(&[Piece::writable(0xfffe, 4)]);
    driver.add(&[Piece::writable(0x10_ffe, 4)]);
    let over_regions = queue.pop().unwrap().unwrap();
    let over_hole = queue.pop().unwrap().unwrap();

    over_regions
        .writable()
        .write_at(&memory, 0, b"abcd")
        .unwrap();
    let error = over_hole
        .writable()
        .write_at(&memory, 0, b"abcd")
        .unwrap_err();

    let text: [u8; 4] = memory.read_obj(GuestAddress(0xfffe)).unwrap();
    assert_eq!(&text, b"abcd");
    assert!(matches!(error, BufferError::NotMemory { .. }));
    let untouched: u16 = memory.read_obj(GuestAddress(0x10_ffe)).unwrap();
    assert_eq!(untouched, 0, "nothing is written where not all can be");
}

#[test]
fn test_lengths_of_zero_and_beyond_4_gib_are_counted_and_not_allocated() {
    let mut s = setup(8);
    s.driver.add(&[
        Piece::readable(DATA, 0),
        Piece::readable(DATA, u32::MAX),
        Piece::readable(DATA, u32::MAX),
        Piece::writable(u64::MAX, 0),
    ]);

    let chain = s.queue.pop().unwrap().unwrap();

    assert_eq!(chain.readable().len(), 2 * u64::from(u32::MAX));
    assert!(chain.writable().is_empty());
    assert_eq!(chain.writable().segments().len(), 1);
    assert_eq!(
        chain.readable().slices(&s.memory, 0, 16).unwrap().len(),
        1,
        "an empty segment gives no slice"
    );
    assert_eq!(
        chain.readable().slices(&s.memory, u64::MAX, 2).unwrap_err(),
        BufferError::TooShort { end: u64::MAX }
    );
}

#[test]
fn test_readable_behind_writable_has_no_readable_part() {
    let mut s = setup(8);
    s.driver
        .add(&[Piece::writable(DATA, 4), Piece::readable(DATA, 16)]);

    let chain = s.queue.pop().unwrap().unwrap();

    assert!(chain.readable().is_empty());
    assert_eq!(chain.writable().len(), 4);
}

#[test]
fn test_same_head_twice_in_flight_is_given_back_twice() {
    let mut s = setup(8);
    s.driver.set_descriptor(2, DATA, 4, WRITE, 0);
    s.driver.publish(2);
    s.driver.publish(2);

    let first = s.queue.pop().unwrap().unwrap();
    let second = s.queue.pop().unwrap().unwrap();
    s.queue.add_used(second.head(), 1).unwrap();
    s.queue.add_used(first.head(), 2).unwrap();

    assert_eq!(s.driver.take_used(), Some((2, 1)));
    assert_eq!(s.driver.take_used(), Some((2, 2)));
    assert!(!s.interrupt.needs_reset());
}

#[test]
fn test_descriptor_changed_after_pop_does_not_change_the_chain() {
    let mut s = setup(8);
    s.driver.add(&[Piece::readable(DATA, 4)]);
    let chain = s.queue.pop().unwrap().unwrap();

    s.driver
        .set_descriptor(0, u64::MAX, u32::MAX, NEXT | WRITE, 0);

    assert_eq!(chain.readable().len(), 4);
    chain.readable().read_at(&s.memory, 0, &mut [0; 4]).unwrap();
}

#[test]
fn test_drain_serves_what_was_added_while_it_served() {
    let mut s = setup(8);
    s.driver.add(&[Piece::writable(DATA, 1)]);
    let mut served = 0;

    let drained = {
        let driver = &mut s.driver;
        s.queue
            .drain(|_, _| {
                served += 1;
                if served < 3 {
                    driver.add(&[Piece::writable(DATA, 1)]);
                }
                0
            })
            .unwrap()
    };

    assert_eq!(drained, Drained::Empty);
    assert_eq!(served, 3);
    assert_eq!(s.driver.used_index(), 3);
    assert_eq!(
        s.driver.avail_event(),
        3,
        "the next chain is to be kicked for"
    );
}

#[test]
fn test_drain_ends_at_its_budget_with_a_driver_that_never_stops() {
    let mut s = setup(8);
    s.driver.add(&[Piece::writable(DATA, 1)]);
    let mut served = 0;

    let drained = {
        let driver = &mut s.driver;
        s.queue
            .drain(|_, _| {
                served += 1;
                driver.add(&[Piece::writable(DATA, 1)]);
                0
            })
            .unwrap()
    };

    assert_eq!(drained, Drained::BudgetSpent);
    assert_eq!(served, 8);
}

#[test]
fn test_drain_gives_served_chains_back_before_a_broken_one() {
    let mut s = setup(8);
    let head = s.driver.add(&[Piece::writable(DATA, 1)]);
    s.driver.publish(77);

    let error = s.queue.drain(|_, _| 1).unwrap_err();

    assert!(matches!(
        error,
        QueueError::BadDescriptorIndex { index: 77 }
    ));
    assert_eq!(s.driver.take_used(), Some((head, 1)));
    assert_eq!(
        s.interrupt.interrupt_status(),
        3,
        "used buffer and changed status"
    );
}

#[test]
fn test_event_idx_suppresses_interrupts_and_wakes_at_the_index() {
    let mut s = setup(8);
    s.driver.set_used_event(2);

    for expected_interrupts in [0, 0, 1, 1] {
        s.driver.add(&[Piece::writable(DATA, 1)]);
        let _ = s.queue.drain(|_, _| 0).unwrap();
        assert_eq!(s.line.count(), expected_interrupts);
    }
}

#[test]
fn test_65536_wraps_lose_no_completion_whatever_the_used_event() {
    let mut s = setup(8);
    for round in 0..70_000_u32 {
        // A driver that asks for the very next completion gets an interrupt for each.
        s.driver.set_used_event(s.driver.used_index());
        let head = s.driver.add(&[Piece::writable(DATA, 1)]);
        assert_eq!(s.queue.drain(|_, _| round).unwrap(), Drained::Empty);
        assert_eq!(s.driver.take_used(), Some((head, round)));
    }
    assert_eq!(s.line.count(), 70_000);
}

proptest! {
    /// Poisoned event indices cost interrupts at most: every chain is given back.
    #[test]
    fn prop_poisoned_event_indices_lose_no_completion(
        used_events in proptest::collection::vec(any::<u16>(), 1..64),
    ) {
        let mut s = setup(8);
        for used_event in used_events {
            s.driver.set_used_event(used_event);
            let avail_event_at = s.driver.device_area() + 4 + 8 * 8;
            s.memory.write_obj(used_event, GuestAddress(avail_event_at)).unwrap();
            let head = s.driver.add(&[Piece::writable(DATA, 1)]);
            prop_assert_eq!(s.queue.drain(|_, _| 0).unwrap(), Drained::Empty);
            prop_assert_eq!(s.driver.take_used(), Some((head, 0)));
        }
    }

    /// A ring of random bytes never panics, never serves more than its budget, and gives back what it served;
    /// and once it retired it stays so.
    #[test]
    fn prop_random_ring_is_bounded(
        ring in proptest::collection::vec(any::<u8>(), 8 * 16),
        small_indices in any::<bool>(),
        heads in proptest::collection::vec(0_u16..10, 8),
        available in prop_oneof![0_u16..10, any::<u16>()],
    ) {
        let mut s = setup(8);
        s.memory.write_slice(&ring, GuestAddress(RING)).unwrap();
        if small_indices {
            // Mostly legal tables: else nearly all end at the first index.
            for index in 0..8_u64 {
                let at = GuestAddress(RING + index * 16 + 12);
                let flags: u16 = s.memory.read_obj(at).unwrap();
                s.memory.write_obj(flags & 3, at).unwrap();
                let at = GuestAddress(RING + index * 16 + 14);
                let next: u16 = s.memory.read_obj(at).unwrap();
                s.memory.write_obj(next % 9, at).unwrap();
            }
        }
        for head in heads {
            s.driver.publish(head);
        }
        s.driver.set_available_index(available);
        let mut served = 0;

        let result = s.queue.drain(|memory, chain| {
            served += 1;
            assert!(chain.head() < 8);
            let segments = chain.readable().segments().len() + chain.writable().segments().len();
            assert!(segments <= 8);
            let len = chain.writable().len().min(1 << 20);
            // Fails or not: never panics, and never allocates what the driver says.
            let _ = chain.readable().read_at(memory, 0, &mut [0; 64]);
            chain.writable().slices(memory, 0, len).map_or(0, |slices| {
                assert_eq!(slices.iter().map(|slice| slice.len() as u64).sum::<u64>(), len);
                0
            })
        });

        prop_assert!(served <= 8);
        prop_assert_eq!(s.driver.used_index(), served);
        prop_assert_eq!(result.is_err(), s.queue.is_retired());
        prop_assert_eq!(result.is_err(), s.interrupt.needs_reset());
        if result.is_err() {
            s.driver = DriverQueue::new(&s.memory, RING, 8);
            prop_assert!(matches!(s.queue.pop(), Err(QueueError::Retired)));
        }
    }
}
