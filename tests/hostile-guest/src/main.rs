//! A guest that does to its devices and its processor what no guest should.
//!
//! It boots by the protocol that Linux boots by. `case=NAME` on the kernel's command line says what to do ([`cases`]); without, it prints
//! the names of all.

#![no_std]
#![no_main]

mod boot;
mod cases;
mod memory;
mod port;
mod report;
mod second;
mod time;
mod virtio;

use core::panic::PanicInfo;

/// Offsets in the boot protocol's `struct boot_params`: the command line's address and size.
const CMDLINE_ADDRESS: u64 = 0x228;

/// Longest command line: `COMMAND_LINE_SIZE` of x86 Linux.
const CMDLINE_MAX_BYTES: u64 = 2048;

/// Where the first processor arrives in ring 3.
extern "C" fn begin(boot_params: u64) -> ! {
    let address = u64::from(memory::read::<u32>(boot_params + CMDLINE_ADDRESS));
    let cmdline = memory::view(address, CMDLINE_MAX_BYTES);
    let cmdline = cmdline.split(|byte| *byte == 0).next().unwrap_or_default();
    let name = core::str::from_utf8(cmdline)
        .unwrap_or_default()
        .split(' ')
        .find_map(|word| word.strip_prefix("case="));
    match name {
        Some(name) => match cases::ALL.iter().find(|case| case.0 == name) {
            Some(case) => case.1(),
            None => report::fail(format_args!("there is no case {name}")),
        },
        None => cases::ALL.iter().for_each(|case| say!("case {}", case.0)),
    }
    report::done()
}

#[panic_handler]
fn panicked(info: &PanicInfo<'_>) -> ! {
    report::fail(format_args!("{info}"))
}
