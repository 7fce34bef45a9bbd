//! The second processor.

use core::sync::atomic::{AtomicPtr, Ordering};

use crate::{boot, memory};

/// What the second processor is to do.
static TASK: AtomicPtr<()> = AtomicPtr::new(core::ptr::null_mut());

/// The local APIC's registers (Intel SDM 3A §11.4.1): spurious-interrupt vector, interrupt command in two halves.
const APIC_SPURIOUS: u64 = 0xfee0_00f0;
const APIC_COMMAND: u64 = 0xfee0_0300;
const APIC_COMMAND_HIGH: u64 = 0xfee0_0310;

unsafe extern "C" {
    #[link_name = "trampoline"]
    static TRAMPOLINE_CODE: u8;
    #[link_name = "trampoline_end"]
    static TRAMPOLINE_CODE_END: u8;
}

/// Starts the second processor, with INIT and a start-up interrupt, on `task`, which does not return.
pub(crate) fn start(task: fn() -> !) {
    TASK.store(task as *mut (), Ordering::SeqCst);
    let (code, end) = (&raw const TRAMPOLINE_CODE, &raw const TRAMPOLINE_CODE_END);
    // SAFETY: both are labels in `boot.rs`, the second behind the first.
    let code = unsafe { core::slice::from_raw_parts(code, end as usize - code as usize) };
    memory::store(boot::TRAMPOLINE, code);
    memory::write::<u32>(APIC_SPURIOUS, 0x1ff);
    memory::write::<u32>(APIC_COMMAND_HIGH, 1 << 24);
    memory::write::<u32>(APIC_COMMAND, 0x4500);
    memory::write::<u32>(APIC_COMMAND_HIGH, 1 << 24);
    memory::write::<u32>(APIC_COMMAND, 0x4600 | (boot::TRAMPOLINE >> 12) as u32);
}

/// Where the second processor arrives in ring 3.
pub(crate) extern "C" fn begin() -> ! {
    let task = TASK.load(Ordering::SeqCst);
    // SAFETY: `start` has put a function of this type there.
    let task: fn() -> ! = unsafe { core::mem::transmute(task) };
    task()
}
