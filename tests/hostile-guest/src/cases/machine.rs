//! Processors, ports, the console, and addresses where nothing is.

use crate::virtio::block::{self, QUEUE};
use crate::virtio::vsock::{DATA, RESUME_PORT, Sockets};
use crate::{boot, check, memory, port, report, same, say, time};

pub(super) fn triple_fault() {
    report::now();
    boot::triple_fault();
}

pub(super) fn jump_to_nowhere() {
    report::now();
    boot::jump_nowhere();
}

pub(super) fn halts_for_ever() {
    say!("FOREVER");
    boot::halt();
}

pub(super) fn spins_for_ever() {
    say!("FOREVER");
    loop {
        core::hint::black_box(());
    }
}

pub(super) fn pauses_for_ever() {
    say!("FOREVER");
    loop {
        core::hint::spin_loop();
    }
}

pub(super) fn every_port() {
    for number in 0..=0xffff {
        port::read8(number);
        port::read16(number);
        port::read32(number);
        // Zeros: no command of the keyboard controller, no loop-back of the serial port.
        port::write8(number, 0);
        port::write16(number, 0);
        port::write32(number, 0);
    }
    block::serves_again(&QUEUE);
}

pub(super) fn string_io() {
    let words = &mut [0; 512];
    let bytes = memory::view(block::DATA, 0x2000);
    for number in [0x20, 0x60, 0x61, 0x70, 0x80, 0xcf8, 0xcfc, 0xffff] {
        port::write_string(number, bytes);
        port::write_string(number, b"");
        port::read_string32(number, words);
    }
    // The serial port in words: nobody answers, nothing is printed.
    port::read_string32(port::SERIAL, words);
    check!(
        words.iter().all(|word| *word == u32::MAX),
        "words read from the serial port"
    );
    block::serves_again(&QUEUE);
}

pub(super) fn reset_port() {
    // Everything but the command, wider writes of it, and its neighbours.
    for value in (0..=0xff).filter(|value| *value != port::RESET_COMMAND) {
        port::write8(port::RESET, value);
    }
    for number in 0x60..=0x6f {
        port::write16(number, 0xfefe);
        port::write32(number, 0xfefe_fefe);
    }
    (0x60..0x64).for_each(|number| port::write8(number, port::RESET_COMMAND));
    say!("note still here");
    report::now();
    port::write8(port::RESET, port::RESET_COMMAND);
    boot::halt();
}

pub(super) fn gaps_in_mmio() {
    block::start(&QUEUE);
    // Behind memory, in the hole, behind the last device, and where firmware would be.
    for address in [
        0x200_0000,
        0x300_0008,
        0xc000_0000,
        0xcfff_fff8,
        0xd000_3000,
        0xd000_ffff,
        0xe000_0000,
        0xfed0_0000,
        0xffff_fff0,
    ] {
        same!(memory::read::<u8>(address), 0xff, "a byte at {address:#x}");
        same!(
            memory::read::<u64>(address),
            u64::MAX,
            "8 bytes at {address:#x}"
        );
        memory::write::<u32>(address, 0);
        memory::write::<u64>(address, 0x1234);
        same!(
            memory::read::<u32>(address),
            u32::MAX,
            "what was written at {address:#x}"
        );
    }
    // Over the edges of memory and of the devices.
    let _: u64 = memory::read(0x200_0000 - 4);
    let _: u64 = memory::read(0xd000_0000 - 4);
    let _: u64 = memory::read(0xd000_3000 - 4);
    block::reads_right(&QUEUE, 1);
}

pub(super) fn unemulated_instruction() {
    report::now();
    boot::unemulated();
}

/// Ranges of model-specific registers: architectural ones with the x2APIC's and virtualization's, those of Hyper-V and KVM, and AMD's.
const MSRS: [core::ops::Range<u32>; 5] = [
    0..0x1000,
    0x4000_0000..0x4000_0200,
    0x4b56_4d00..0x4b56_4d20,
    0xc000_0000..0xc000_0400,
    0xc001_0000..0xc001_0400,
];

/// Registers that would tell of the host: its power and heat, true frequency, performance counters' global state.
const TELLTALES: [u32; 12] = [
    0x19c,
    0x1a2,
    0x1b1,
    0xe7,
    0xe8,
    0x606,
    0x611,
    0x619,
    0x639,
    0x641,
    0xc001_0299,
    0xc001_029a,
];

pub(super) fn every_msr() {
    for index in TELLTALES {
        same!(boot::read_msr(index).unwrap_or(0), 0, "register {index:#x}");
    }
    let (mut readable, mut writable) = (0, 0);
    for index in MSRS.into_iter().flatten() {
        let before = boot::read_msr(index);
        readable += u32::from(before.is_some());
        for value in [u64::MAX, 0, 0x1234_5678_9abc_def0] {
            // SAFETY: nothing of this program depends on a register: no interrupts, no system calls, no FS and GS, and paging
            // can't be switched off this way.
            writable += u32::from(unsafe { boot::write_msr(index, value) });
        }
        if let Some(before) = before {
            // SAFETY: the value that it had.
            unsafe { boot::write_msr(index, before) };
        }
    }
    say!("note {readable} registers read, {writable} writes taken");
    check!(
        boot::read_msr(0xdead_0000).is_none(),
        "a register that there is not was read"
    );
    block::serves_again(&QUEUE);
}

pub(super) fn every_cpuid_leaf() {
    for first in [0, 0x4000_0000, 0x8000_0000, 0xc000_0000] {
        for leaf in first..first + 0x40 {
            for subleaf in 0..8 {
                // What is of the host's processor of the moment would change.
                let said = boot::cpuid(leaf, subleaf);
                same!(
                    boot::cpuid(leaf, subleaf),
                    said,
                    "leaf {leaf:#x} the second time"
                );
            }
        }
    }
    let [_, b, c, _] = boot::cpuid(1, 0);
    same!(
        (b >> 24, b >> 16 & 0xff),
        (0, 2),
        "APIC id of the first processor, and processors"
    );
    same!(
        c & (1 << 5 | 1 << 15),
        0,
        "VMX and performance capabilities"
    );
    check!(c >> 31 == 1, "the bit that says that this is no bare metal");
    for leaf in [3, 5, 0xa, 0xf, 0x10, 0x12, 0x14] {
        same!(boot::cpuid(leaf, 0), [0; 4], "leaf {leaf:#x}");
    }
    let last = boot::cpuid(0, 0)[0];
    if last >= 0xb {
        same!(
            boot::cpuid(0xb, 0)[3],
            0,
            "x2APIC id of the first processor"
        );
    }
    same!(boot::cpuid(0x8000_0001, 0)[2] & (1 << 2), 0, "SVM");
}

/// Bytes of a flood, all without a newline: as many as there is time for, where each is an exit of its own.
const FLOOD_BYTES: u64 = 64 << 20;
const FLOOD_MS: u64 = 2000;

/// The least of them where the suite does not read: more than a socket holds.
const UNREAD_BYTES: u64 = 320 << 10;

fn flood(least: u64) {
    const PIECE: u64 = 0x4000;
    let since = time::now();
    let mut written = 0;
    while written < least || written < FLOOD_BYTES && !time::is_over(since, FLOOD_MS) {
        let value = if (written / PIECE).is_multiple_of(2) {
            0
        } else {
            b'x'
        };
        memory::fill(block::DATA, value, PIECE);
        port::write_string(port::SERIAL, memory::view(block::DATA, PIECE));
        written += PIECE;
    }
    say!("");
    say!("note {written} bytes");
}

pub(super) fn serial_flood() {
    flood(0);
    block::serves_again(&QUEUE);
}

pub(super) fn serial_reader_that_stopped() {
    let sockets = Sockets::start();
    say!("@stop-reading");
    flood(UNREAD_BYTES);
    block::serves_again(&QUEUE);
    // The suite reads again when this comes, and says so when it has read all.
    sockets.connect(1000, RESUME_PORT);
    sockets.expect(DATA, 1000, RESUME_PORT);
    say!("");
}
