//! Chains that do not end, and indices that lead nowhere.

use super::{LOOSE, breaks, is_broken, next, with_chain};
use crate::virtio::block::{self, DATA, HEADER_PART, OK, QUEUE, READ, STATUS_PART};
use crate::virtio::queue::{Descriptor, NEXT, WRITE};
use crate::{memory, same};

pub(crate) fn chains_that_loop() {
    breaks("a descriptor that follows itself", |queue| {
        with_chain(queue, &[(0, next(0))], 0)
    });
    breaks("two that follow one another", |queue| {
        with_chain(queue, &[(0, next(1)), (1, next(0))], 0)
    });
    breaks("a loop behind a beginning", |queue| {
        with_chain(
            queue,
            &[(0, next(1)), (1, next(2)), (2, next(3)), (3, next(1))],
            0,
        );
    });
}

pub(crate) fn chain_longer_than_queue() {
    // As long as the queue is right.
    block::start(&QUEUE);
    block::header(READ, 0);
    let sectors = u64::from(QUEUE.size) - 2;
    QUEUE.set(0, Descriptor(HEADER_PART.0, 16, NEXT, 1));
    for index in 1..QUEUE.size - 1 {
        QUEUE.set(
            index,
            Descriptor(DATA + u64::from(index) * 512, 512, WRITE | NEXT, index + 1),
        );
    }
    QUEUE.set(QUEUE.size - 1, STATUS_PART);
    let used = QUEUE.serve(0);
    same!(
        (block::status(), u64::from(used.bytes)),
        (OK, sectors * 512 + 1),
        "a chain of all descriptors"
    );
    same!(
        memory::view(DATA + sectors * 512, 512),
        &block::pattern(sectors - 1)[..],
        "its last sector"
    );
    // One more is a loop.
    breaks("one descriptor more than there are", |queue| {
        for index in 0..queue.size {
            queue.set(index, next((index + 1) % queue.size));
        }
        queue.offer(0);
    });
}

pub(crate) fn next_past_the_end() {
    for index in [0, 1, 0x7fff, 0xffff] {
        breaks("a next field past the end", |queue| {
            with_chain(queue, &[(0, next(index.max(queue.size)))], 0);
        });
    }
}

pub(crate) fn head_past_the_end() {
    for index in [0, 1, 0x7fff, 0xffff] {
        breaks("a head past the end", |queue| {
            queue.set(0, LOOSE);
            queue.offer(index.max(queue.size));
        });
    }
}

pub(crate) fn available_index_ahead() {
    for surplus in [1, 2, 0x7fff, 0xff00] {
        breaks("an available index too far ahead", |queue| {
            queue.set(0, LOOSE);
            queue.set_offered(queue.done().wrapping_add(queue.size).wrapping_add(surplus));
        });
    }
}

pub(crate) fn available_index_backwards() {
    // Each queue of the socket device has used nothing yet when it goes back: from 0 to 65535. The disk goes back from 3.
    breaks("an available index before the first", |queue| {
        queue.set_offered(queue.offered().wrapping_sub(1))
    });
    block::start(&QUEUE);
    (0..3).for_each(|sector| block::reads_right(&QUEUE, sector));
    is_broken(&QUEUE, "an available index that goes back", |queue| {
        queue.set_offered(2)
    });
    block::serves_again(&QUEUE);
}
