//! Kicks and accesses without pause, from two processors.

use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::virtio::block::{self, QUEUE};
use crate::virtio::{register, vsock};
use crate::{boot, check, second, time};

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
pub(crate) fn kicks_without_pause() {
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
pub(crate) fn kicks_for_ever() {
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
pub(crate) fn exits_for_ever() {
    block::start(&QUEUE);
    let _sockets = vsock::Sockets::start();
    second::start(exit_for_ever);
    crate::say!("FOREVER");
    loop {
        exit_once_each();
    }
}
