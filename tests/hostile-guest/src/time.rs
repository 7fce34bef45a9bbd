//! Time, by the processor's counter.

use core::arch::x86_64::_rdtsc;

/// Ticks of a millisecond on a processor of 5 GHz: the least that a wait lasts on a slower one is longer.
const MAX_TICKS_PER_MS: u64 = 5_000_000;

/// How long anything that must happen may take. The suite itself waits for no longer; a busy machine with an emulated processor is slow.
const PATIENCE_MS: u64 = 20_000;

/// How long nothing may happen, where nothing must.
const QUIET_MS: u64 = 10;

/// The counter.
pub(crate) fn now() -> u64 {
    // SAFETY: every x86-64 processor has the counter.
    unsafe { _rdtsc() }
}

/// Whether so many milliseconds have passed since, at least.
pub(crate) fn is_over(since: u64, ms: u64) -> bool {
    now().wrapping_sub(since) >= ms * MAX_TICKS_PER_MS
}

/// Lets time pass: at least so many milliseconds.
pub(crate) fn pass(ms: u64) {
    let start = now();
    while !is_over(start, ms) {
        core::hint::spin_loop();
    }
}

/// Waits for a condition; false when patience is at its end.
pub(crate) fn until(condition: impl FnMut() -> bool) -> bool {
    within(PATIENCE_MS, condition)
}

/// Waits a short while in which a condition must not come true; whether it did.
pub(crate) fn soon(condition: impl FnMut() -> bool) -> bool {
    within(QUIET_MS, condition)
}

fn within(ms: u64, mut condition: impl FnMut() -> bool) -> bool {
    let start = now();
    loop {
        if condition() {
            return true;
        }
        if is_over(start, ms) {
            return false;
        }
        core::hint::spin_loop();
    }
}
