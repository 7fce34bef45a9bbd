//! Queues that cannot be, and queues that are changed in service.

use super::AGREED;
use crate::virtio::block::{self, DISK, QUEUE};
use crate::virtio::queue::Queue;
use crate::virtio::{VERSION_1, register, status, vsock};
use crate::{check, same};

pub(crate) fn queue_select_out_of_range() {
    DISK.negotiate(VERSION_1);
    for selected in [1, 2, 0x7fff_ffff, 0x8000_0000, 0xffff_ffff] {
        DISK.write(register::QUEUE_SEL, selected);
        same!(
            DISK.read(register::QUEUE_NUM_MAX),
            0,
            "QueueNumMax of queue {selected:#x}"
        );
        DISK.write(register::QUEUE_NUM, 16);
        for at in [
            register::QUEUE_DESC,
            register::QUEUE_DRIVER,
            register::QUEUE_DEVICE,
        ] {
            DISK.write_address(at, QUEUE.table());
        }
        DISK.write(register::QUEUE_READY, 1);
        same!(
            DISK.read(register::QUEUE_READY),
            0,
            "QueueReady of queue {selected:#x}"
        );
        DISK.kick(selected);
    }
    QUEUE.clear();
    DISK.make_ready(&QUEUE);
    DISK.write(register::QUEUE_SEL, 0xffff_ffff);
    DISK.go();
    block::reads_right(&QUEUE, 4);
}

/// A queue of these is not made ready, DRIVER_OK is refused with it, and the device starts after a reset.
fn no_queue(size: u32, table: u64, available: u64, used: u64) {
    DISK.negotiate(VERSION_1);
    DISK.write(register::QUEUE_SEL, 0);
    DISK.write(register::QUEUE_NUM, size);
    DISK.write_address(register::QUEUE_DESC, table);
    DISK.write_address(register::QUEUE_DRIVER, available);
    DISK.write_address(register::QUEUE_DEVICE, used);
    DISK.write(register::QUEUE_READY, 1);
    same!(
        DISK.read(register::QUEUE_READY),
        0,
        "QueueReady with {size} at {table:#x} {available:#x} {used:#x}"
    );
    DISK.set_status(AGREED | status::DRIVER_OK);
    check!(
        DISK.status() & status::DRIVER_OK == 0,
        "DRIVER_OK with {size} at {table:#x} {available:#x} {used:#x}"
    );
    DISK.kick(0);
}

pub(crate) fn bad_queue_sizes() {
    let (table, available, used) = (QUEUE.table(), QUEUE.available(), QUEUE.used());
    for size in [
        0,
        3,
        6,
        255,
        257,
        512,
        0x8000,
        0x1_0000,
        0x1_0001,
        0x1_0040,
        0x8000_0000,
        0xffff_ffff,
    ] {
        no_queue(size, table, available, used);
    }
    block::serves_again(&QUEUE);
}

pub(crate) fn bad_ring_addresses() {
    let (table, available, used) = (QUEUE.table(), QUEUE.available(), QUEUE.used());
    // In order: unaligned; over one another; past the end of memory, over it, in the hole and its devices; where sums wrap.
    const MEMORY_END: u64 = 0x200_0000;
    let outside = [
        MEMORY_END,
        MEMORY_END - 16,
        0xc000_0000,
        0xd000_0000,
        0xfee0_0000,
        0xffff_fff0,
        0x1_0000_0000,
        0x7fff_ffff_ffff_fff0,
        0x8000_0000_0000_0000,
        0xffff_ffff_ffff_f000,
        0xffff_ffff_ffff_fff0,
    ];
    for (table, available, used) in [
        (table + 8, available, used),
        (table, available + 1, used),
        (table, available, used + 2),
        (table, table, used),
        (table, available, table + 16 * 63),
        (table, used, used),
        (table, available, available + 4),
        (0, 0, 0),
    ] {
        no_queue(64, table, available, used);
    }
    for address in outside {
        no_queue(64, address, available, used);
        no_queue(64, table, address, used);
        no_queue(64, table, available, address);
    }
    block::serves_again(&QUEUE);
}

pub(crate) fn rings_of_two_queues_overlap() {
    let twin = Queue {
        index: 1,
        ..vsock::RECEIVE
    };
    vsock::SOCKETS.negotiate(VERSION_1);
    vsock::RECEIVE.clear();
    for queue in [&vsock::RECEIVE, &twin, &vsock::EVENT] {
        vsock::SOCKETS.make_ready(queue);
    }
    vsock::SOCKETS.set_status(AGREED | status::DRIVER_OK);
    same!(
        vsock::SOCKETS.status() & (status::DRIVER_OK | status::NEEDS_RESET),
        status::NEEDS_RESET,
        "status"
    );
    vsock::Sockets::start().echo_works(1000);
}

pub(crate) fn queue_ready_early_and_twice() {
    DISK.negotiate(VERSION_1);
    DISK.write(register::QUEUE_SEL, 0);
    // Without addresses, several times.
    for _ in 0..3 {
        DISK.write(register::QUEUE_READY, 1);
        same!(
            DISK.read(register::QUEUE_READY),
            0,
            "QueueReady without addresses"
        );
    }
    QUEUE.clear();
    DISK.make_ready(&QUEUE);
    // Twice; with other values; and changed while it is ready.
    DISK.write(register::QUEUE_READY, 1);
    same!(
        DISK.read(register::QUEUE_READY),
        1,
        "QueueReady the second time"
    );
    DISK.write(register::QUEUE_NUM, 128);
    DISK.write_address(register::QUEUE_DESC, 0x1_0000_0000);
    DISK.go();
    block::reads_right(&QUEUE, 6);
}

pub(crate) fn queue_registers_after_driver_ok() {
    block::start(&QUEUE);
    block::reads_right(&QUEUE, 7);
    for address in [
        0,
        0xd000_0000,
        0xffff_ffff_ffff_f000,
        QUEUE.table() + 0x20_0000,
    ] {
        DISK.write(register::QUEUE_SEL, 0);
        DISK.write(register::QUEUE_NUM, 256);
        DISK.write_address(register::QUEUE_DESC, address);
        DISK.write_address(register::QUEUE_DRIVER, address);
        DISK.write_address(register::QUEUE_DEVICE, address);
        DISK.write(register::QUEUE_READY, 0);
        DISK.write(register::QUEUE_READY, 1);
        same!(DISK.read(register::QUEUE_READY), 1, "QueueReady in service");
        block::reads_right(&QUEUE, 8);
    }
    // More requests than the true size, so that the ring goes round.
    for sector in 0..150 {
        block::reads_right(&QUEUE, sector);
    }
}
