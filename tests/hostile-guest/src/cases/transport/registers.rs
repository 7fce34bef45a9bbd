//! Accesses that no driver makes.

use crate::virtio::block::{self, DISK, QUEUE};
use crate::virtio::{Device, register, vsock};
use crate::{check, memory, same};

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

fn all_stable(device: Device) -> [u32; STABLE.len()] {
    STABLE.map(|offset| device.read(offset))
}

pub(crate) fn odd_accesses() {
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

pub(crate) fn undefined_registers() {
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

pub(crate) fn config_past_end() {
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
