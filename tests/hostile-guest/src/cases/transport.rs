//! Registers and states of the virtio-mmio transport.

use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::virtio::block::{self, DATA, DISK, QUEUE, READ};
use crate::virtio::queue::{Descriptor, Queue, WRITE};
use crate::virtio::{Device, EVENT_IDX, VERSION_1, register, status, vsock};
use crate::{boot, check, memory, same, second, time};

/// Every register that has a value after a start, to be compared before and after.
const STABLE: [u64; 8] = [
    register::MAGIC,
    register::VERSION,
    register::DEVICE_ID,
    register::DEVICE_FEATURES,
    register::QUEUE_NUM_MAX,
    register::QUEUE_READY,
    register::STATUS,
    register::CONFIG,
];

const AGREED: u32 = status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK;

fn all_stable(device: Device) -> [u32; STABLE.len()] {
    STABLE.map(|offset| device.read(offset))
}

pub(super) fn odd_accesses() {
    block::start(&QUEUE);
    let before = all_stable(DISK);
    for offset in 0..register::CONFIG {
        let address = DISK.address(offset);
        same!(memory::read::<u8>(address), 0, "1 byte at {offset:#x}");
        same!(memory::read::<u16>(address), 0, "2 bytes at {offset:#x}");
        if offset % 4 != 0 {
            same!(memory::read::<u32>(address), 0, "4 bytes at {offset:#x}");
            memory::write::<u32>(address, 0);
        }
        same!(memory::read::<u64>(address), 0, "8 bytes at {offset:#x}");
        memory::write::<u8>(address, 0);
        memory::write::<u16>(address, 0);
        memory::write::<u64>(address, 0);
    }
    same!(
        all_stable(DISK),
        before,
        "registers after writes of other widths"
    );
    block::reads_right(&QUEUE, 1);
}

pub(super) fn undefined_registers() {
    block::start(&QUEUE);
    let before = all_stable(DISK);
    // Read-only, and where nothing is: 0xa8 is behind QueueDevice, 0xb0 to 0xbc are the shared memory regions' that there are not.
    for offset in [
        0x00, 0x04, 0x08, 0x0c, 0x10, 0x18, 0x1c, 0x28, 0x34, 0x3c, 0x40, 0x48, 0x4c, 0x54, 0x60,
        0x68, 0x78, 0x7c, 0x88, 0x8c, 0x98, 0x9c, 0xa8, 0xac, 0xb0, 0xb4, 0xb8, 0xbc, 0xc0, 0xc4,
        0xf8, 0xfc,
    ] {
        DISK.write(offset, 0xffff_ffff);
    }
    same!(
        all_stable(DISK),
        before,
        "registers after writes to read-only ones"
    );
    // Write-only ones, and where nothing is, read as 0.
    for offset in [
        0x14, 0x20, 0x24, 0x28, 0x30, 0x38, 0x3c, 0x50, 0x64, 0x80, 0x84, 0x90, 0x94, 0xa0, 0xa4,
        0xd0, 0xf0,
    ] {
        same!(DISK.read(offset), 0, "write-only register {offset:#x}");
    }
    same!(DISK.read(0xfc), 0, "ConfigGeneration");
    // Over the edge of the register file, into the next device's: KVM makes two accesses of it, none of which is a register's.
    same!(memory::read::<u32>(DISK.address(0xffe)), 0, "over the end");
    memory::write::<u32>(DISK.address(0xffe), u32::MAX);
    block::reads_right(&QUEUE, 2);
}

pub(super) fn config_past_end() {
    block::start(&QUEUE);
    let capacity: u64 = memory::read(DISK.address(register::CONFIG));
    same!(capacity, block::SECTORS, "capacity");
    for offset in (register::CONFIG + 60..0x1000).step_by(4) {
        same!(DISK.read(offset), 0, "configuration at {offset:#x}");
    }
    // Across its end: what there is, then zeros.
    check!(
        memory::read::<u64>(DISK.address(register::CONFIG + 56)) >> 32 == 0,
        "configuration across its end"
    );
    for offset in (register::CONFIG..0x1000).step_by(16) {
        memory::write::<u64>(DISK.address(offset), u64::MAX);
        memory::write::<u8>(DISK.address(offset + 3), 0xff);
    }
    same!(
        memory::read::<u64>(DISK.address(register::CONFIG)),
        capacity,
        "capacity after writes"
    );
    same!(
        memory::read::<u64>(vsock::SOCKETS.address(register::CONFIG)),
        vsock::GUEST,
        "context identifier"
    );
    same!(
        memory::read::<u64>(vsock::SOCKETS.address(register::CONFIG + 8)),
        0,
        "behind it"
    );
    block::reads_right(&QUEUE, 3);
}

pub(super) fn queue_select_out_of_range() {
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

pub(super) fn bad_queue_sizes() {
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

pub(super) fn bad_ring_addresses() {
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

pub(super) fn rings_of_two_queues_overlap() {
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

pub(super) fn queue_ready_early_and_twice() {
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

pub(super) fn queue_registers_after_driver_ok() {
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

pub(super) fn features_not_offered() {
    let offered = DISK.features();
    same!(offered >> 32 & 1, 1, "VERSION_1 on offer");
    let refused = |device: Device, features: u64, beyond: u32| {
        device.set_status(0);
        device.set_status(status::ACKNOWLEDGE);
        device.set_status(status::ACKNOWLEDGE | status::DRIVER);
        device.write_features(features);
        device.write(register::DRIVER_FEATURES_SEL, 2);
        device.write(register::DRIVER_FEATURES, beyond);
        device.set_status(AGREED);
        same!(
            device.status(),
            status::ACKNOWLEDGE | status::DRIVER,
            "status after features {features:#x}"
        );
        // Nor can it be gone round.
        device.set_status(AGREED | status::DRIVER_OK);
        check!(
            device.status() & status::DRIVER_OK == 0,
            "DRIVER_OK after features {features:#x}"
        );
    };
    for bit in 0..64 {
        if offered >> bit & 1 == 0 {
            refused(DISK, VERSION_1 | 1 << bit, 0);
        }
    }
    refused(DISK, VERSION_1, 1);
    refused(DISK, u64::MAX, u32::MAX);
    // The read-only disk offers nothing that writes.
    refused(
        block::READ_ONLY_DISK,
        VERSION_1 | block::DISCARD_FEATURES,
        0,
    );
    refused(vsock::SOCKETS, VERSION_1 | 1 << 28, 0);
    block::serves_again(&QUEUE);
}

pub(super) fn no_version_1() {
    for features in [0, EVENT_IDX, block::FLUSH_FEATURE] {
        DISK.set_status(0);
        DISK.set_status(status::ACKNOWLEDGE);
        DISK.set_status(status::ACKNOWLEDGE | status::DRIVER);
        DISK.write_features(features);
        DISK.set_status(AGREED);
        check!(
            DISK.status() & status::FEATURES_OK == 0,
            "FEATURES_OK with {features:#x}"
        );
    }
    block::serves_again(&QUEUE);
}

pub(super) fn features_after_features_ok() {
    // Without FLUSH and EVENT_IDX agreed, they are asked for when it is too late: with EVENT_IDX in force a poisoned used_event would
    // hold interrupts back.
    DISK.negotiate(VERSION_1);
    DISK.write_features(u64::MAX);
    QUEUE.clear();
    DISK.make_ready(&QUEUE);
    DISK.write_features(u64::MAX);
    DISK.go();
    DISK.write_features(0);
    memory::write::<u16>(QUEUE.used_event(), 0x7000);
    DISK.write(register::INTERRUPT_ACK, 3);
    block::reads_right(&QUEUE, 9);
    let raised =
        time::until(|| DISK.read(register::INTERRUPT_STATUS) & crate::virtio::USED_INTERRUPT != 0);
    check!(raised, "no interrupt: EVENT_IDX came into force");
}

pub(super) fn status_out_of_order() {
    let legal = [
        0,
        status::ACKNOWLEDGE,
        status::ACKNOWLEDGE | status::DRIVER,
        AGREED,
    ];
    // From each step, every value: what is no next step changes nothing, FAILED apart.
    for (step, &from) in legal.iter().enumerate() {
        for value in 1..=0xffu32 {
            DISK.set_status(0);
            for &step in &legal[1..=step] {
                if step == AGREED {
                    DISK.write_features(VERSION_1);
                }
                DISK.set_status(step);
            }
            same!(DISK.status(), from, "the step");
            let next = legal
                .get(step + 1)
                .copied()
                .unwrap_or(AGREED | status::DRIVER_OK);
            DISK.set_status(value);
            let after = DISK.status();
            let driver = value & !status::NEEDS_RESET;
            let is_next = driver == next || driver == from | status::FAILED;
            // Without features FEATURES_OK is refused, without a queue DRIVER_OK is.
            check!(
                after & !status::NEEDS_RESET == from || is_next,
                "status {from:#x} became {after:#x} by {value:#x}"
            );
            check!(
                after & status::DRIVER_OK == 0,
                "DRIVER_OK by {value:#x} without a queue"
            );
        }
    }
    for value in [0x100, 0xffff_ffff, 0x8000_000f, 0x1_0000 | AGREED] {
        DISK.set_status(value);
    }
    block::serves_again(&QUEUE);
    // In service: bits that are cleared, and all set.
    for value in 1..status::FAILED {
        DISK.set_status(value);
        same!(
            DISK.status(),
            AGREED | status::DRIVER_OK,
            "status in service after {value:#x}"
        );
    }
    block::reads_right(&QUEUE, 10);
    DISK.set_status(0xffff_ffff);
    DISK.set_status(AGREED | status::DRIVER_OK | status::FAILED);
    check!(DISK.status() & status::FAILED != 0, "FAILED was not taken");
    block::serves_again(&QUEUE);
}

pub(super) fn early_and_late_kicks() {
    let is_silent = |when: &str| {
        for queue in [0, 1, 255, 0xffff, 0xffff_ffff] {
            DISK.kick(queue);
        }
        check!(
            !time::soon(|| QUEUE.done() != 0),
            "a request was served {when}"
        );
    };
    QUEUE.clear();
    block::header(READ, 0);
    QUEUE.chain(
        0,
        &[
            block::HEADER_PART,
            Descriptor(DATA, 512, WRITE, 0),
            block::STATUS_PART,
        ],
    );
    QUEUE.offer(0);
    DISK.set_status(0);
    is_silent("before anything");
    DISK.negotiate(VERSION_1);
    is_silent("before there was a queue");
    DISK.make_ready(&QUEUE);
    is_silent("before DRIVER_OK");
    same!(block::status(), block::NO_STATUS, "status byte");
    // It was on offer before: no kick is needed.
    DISK.go();
    QUEUE.await_done(1);
    same!(block::status(), block::OK, "status byte");
    DISK.set_status(0);
    QUEUE.clear();
    block::header(READ, 0);
    QUEUE.offer(0);
    is_silent("after a reset");
    block::serves_again(&QUEUE);
}

/// Rounds of requests that are reset.
const RESETS: u32 = 60;

pub(super) fn reset_with_requests_in_flight() {
    const BYTES: u64 = 512 << 10;
    for round in 0..RESETS {
        block::start(&QUEUE);
        block::header(READ, 0);
        // The same long read as often as the queue takes it.
        for index in 0..16 {
            QUEUE.chain(
                index * 3,
                &[
                    block::HEADER_PART,
                    Descriptor(DATA, BYTES as u32, WRITE, 0),
                    block::STATUS_PART,
                ],
            );
            QUEUE.offer(index * 3);
        }
        QUEUE.kick();
        for _ in 0..round * 500 {
            core::hint::spin_loop();
        }
        DISK.set_status(0);
        // Drained: from here on nothing of the device touches memory.
        memory::fill(DATA, 0x5a, BYTES);
        let done = QUEUE.done();
        let is_untouched = || QUEUE.done() == done && memory::is_filled(DATA, 0x5a, BYTES);
        check!(is_untouched(), "memory changed after reset {round}");
        if round % 10 == 0 {
            time::pass(2);
            check!(
                is_untouched(),
                "memory changed some time after reset {round}"
            );
        }
    }
    block::serves_again(&QUEUE);
}

pub(super) fn reset_with_streams_open() {
    for round in 0..20 {
        let sockets = vsock::Sockets::start();
        (2000..2008).for_each(|port| sockets.connect(port, vsock::ECHO_PORT));
        for port in 2000..2008 {
            let header = vsock::Header {
                len: 512,
                ..vsock::packet(port, vsock::ECHO_PORT, vsock::DATA)
            };
            sockets.send(&header, &[round; 512]);
        }
        // What is echoed comes while the device is reset, or not at all.
        vsock::SOCKETS.set_status(0);
        let done = vsock::RECEIVE.done();
        check!(
            !time::soon(|| vsock::RECEIVE.done() != done),
            "a packet came after reset {round}"
        );
    }
    vsock::Sockets::start().echo_works(3000);
}

/// Whether the second processor is to stop kicking, and how often it did.
static STOP: AtomicBool = AtomicBool::new(false);
static KICKS: AtomicU32 = AtomicU32::new(0);

fn kick_all_until_stopped() -> ! {
    while !STOP.load(Ordering::Relaxed) {
        kick_all();
        KICKS.fetch_add(1, Ordering::Relaxed);
    }
    boot::halt()
}

fn kick_all() {
    block::DISK.kick(0);
    block::READ_ONLY_DISK.kick(0);
    (0..3).for_each(|queue| vsock::SOCKETS.kick(queue));
}

/// Two processors kick every queue while requests are served; the suite sees that the supervisor is answered meanwhile.
pub(super) fn kicks_without_pause() {
    block::start(&QUEUE);
    let sockets = vsock::Sockets::start();
    second::start(kick_all_until_stopped);
    check!(
        time::until(|| KICKS.load(Ordering::Relaxed) > 0),
        "the second processor does not run"
    );
    for sector in 0..100 {
        (0..20).for_each(|_| kick_all());
        block::reads_right(&QUEUE, sector);
    }
    sockets.echo_works(4000);
    STOP.store(true, Ordering::Relaxed);
    block::reads_right(&QUEUE, 1);
}

/// The same, for ever.
pub(super) fn kicks_for_ever() {
    block::start(&QUEUE);
    let _sockets = vsock::Sockets::start();
    second::start(kick_all_until_stopped);
    crate::say!("FOREVER");
    loop {
        kick_all();
    }
}

fn exit_for_ever() -> ! {
    loop {
        exit_once_each();
    }
}

/// One exit to the machine's process for each kind of access that a device's own code answers.
fn exit_once_each() {
    for device in [block::DISK, vsock::SOCKETS] {
        device.write(register::QUEUE_SEL, 1);
        device.write(register::INTERRUPT_ACK, u32::MAX);
        let _ = device.read(register::STATUS);
        let _ = device.read(register::CONFIG);
    }
}

/// Two processors read and write registers, and do nothing else.
pub(super) fn exits_for_ever() {
    block::start(&QUEUE);
    let _sockets = vsock::Sockets::start();
    second::start(exit_for_ever);
    crate::say!("FOREVER");
    loop {
        exit_once_each();
    }
}
