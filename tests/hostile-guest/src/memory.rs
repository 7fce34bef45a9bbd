//! Guest memory and registers as numbers: each access is one instruction, done as written.

use core::arch::asm;
use core::ptr;

/// What one instruction reads or writes.
pub(crate) trait Word: Copy {
    fn read(address: u64) -> Self;
    fn write(self, address: u64);
}

macro_rules! word {
    ($word:ty, $class:ident, $modifier:literal) => {
        impl Word for $word {
            fn read(address: u64) -> Self {
                let value;
                // SAFETY: the addresses of cases are memory that nothing else of this program uses, or registers.
                unsafe { asm!(concat!("mov {value", $modifier, "}, [{address}]"), value = out($class) value, address = in(reg) address) }
                value
            }

            fn write(self, address: u64) {
                // SAFETY: as `read`.
                unsafe { asm!(concat!("mov [{address}], {value", $modifier, "}"), value = in($class) self, address = in(reg) address) }
            }
        }
    };
}

word!(u8, reg_byte, "");
word!(u16, reg, ":x");
word!(u32, reg, ":e");
word!(u64, reg, ":r");

/// Reads a `u8`, `u16`, `u32` or `u64`.
pub(crate) fn read<T: Word>(address: u64) -> T {
    T::read(address)
}

/// Writes one.
pub(crate) fn write<T: Word>(address: u64, value: T) {
    value.write(address);
}

/// Copies bytes to memory.
pub(crate) fn store(address: u64, bytes: &[u8]) {
    // SAFETY: as `read`: memory that nothing else of this program uses.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len()) }
}

/// Fills memory.
pub(crate) fn fill(address: u64, value: u8, bytes: u64) {
    // SAFETY: as `read`.
    unsafe { ptr::write_bytes(address as *mut u8, value, bytes as usize) }
}

/// Bytes of memory, to be looked at before a device writes there again.
pub(crate) fn view(address: u64, bytes: u64) -> &'static [u8] {
    // SAFETY: as `read`.
    unsafe { core::slice::from_raw_parts(address as *const u8, bytes as usize) }
}

/// Whether memory holds this value throughout.
pub(crate) fn is_filled(address: u64, value: u8, bytes: u64) -> bool {
    view(address, bytes).iter().all(|byte| *byte == value)
}

/// What `core` takes from a C library.
mod library {
    use core::arch::asm;

    /// Named by `core`'s unwind tables; nothing unwinds here.
    #[unsafe(no_mangle)]
    extern "C" fn rust_eh_personality() {}

    #[unsafe(no_mangle)]
    unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, bytes: usize) -> *mut u8 {
        // SAFETY: the caller's, of `memcpy`.
        unsafe {
            asm!("rep movsb", inout("rcx") bytes => _, inout("rdi") to => _, inout("rsi") from => _);
        }
        to
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, bytes: usize) -> *mut u8 {
        if (to as usize).wrapping_sub(from as usize) >= bytes {
            // SAFETY: what is written is not read later.
            return unsafe { memcpy(to, from, bytes) };
        }
        // SAFETY: the caller's, of `memmove`; from the end, as `to` is ahead.
        unsafe {
            asm!("std", "rep movsb", "cld", inout("rcx") bytes => _,
                inout("rdi") to.wrapping_add(bytes).wrapping_sub(1) => _,
                inout("rsi") from.wrapping_add(bytes).wrapping_sub(1) => _);
        }
        to
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn memset(to: *mut u8, value: i32, bytes: usize) -> *mut u8 {
        // SAFETY: the caller's, of `memset`.
        unsafe {
            asm!("rep stosb", inout("rcx") bytes => _, inout("rdi") to => _, in("al") value as u8);
        }
        to
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn memcmp(one: *const u8, other: *const u8, bytes: usize) -> i32 {
        for index in 0..bytes {
            // SAFETY: the caller's, of `memcmp`.
            let (a, b) = unsafe {
                (
                    one.add(index).read_volatile(),
                    other.add(index).read_volatile(),
                )
            };
            if a != b {
                return i32::from(a) - i32::from(b);
            }
        }
        0
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn bcmp(one: *const u8, other: *const u8, bytes: usize) -> i32 {
        // SAFETY: the caller's.
        unsafe { memcmp(one, other, bytes) }
    }
}
