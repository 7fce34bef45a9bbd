//! Port I/O.

use core::arch::asm;

/// The serial port's data.
pub(crate) const SERIAL: u16 = 0x3f8;

/// The keyboard controller's commands.
pub(crate) const RESET: u16 = 0x64;

/// The command that resets the machine.
pub(crate) const RESET_COMMAND: u8 = 0xfe;

/// Writes a byte.
pub(crate) fn write8(port: u16, value: u8) {
    // SAFETY: port I/O does not touch this program's memory.
    unsafe { asm!("out dx, al", in("dx") port, in("al") value) }
}

/// Writes two.
pub(crate) fn write16(port: u16, value: u16) {
    // SAFETY: as `write8`.
    unsafe { asm!("out dx, ax", in("dx") port, in("ax") value) }
}

/// Writes four.
pub(crate) fn write32(port: u16, value: u32) {
    // SAFETY: as `write8`.
    unsafe { asm!("out dx, eax", in("dx") port, in("eax") value) }
}

/// Reads a byte.
pub(crate) fn read8(port: u16) -> u8 {
    let value;
    // SAFETY: as `write8`.
    unsafe { asm!("in al, dx", in("dx") port, out("al") value) }
    value
}

/// Reads two.
pub(crate) fn read16(port: u16) -> u16 {
    let value;
    // SAFETY: as `write8`.
    unsafe { asm!("in ax, dx", in("dx") port, out("ax") value) }
    value
}

/// Reads four.
pub(crate) fn read32(port: u16) -> u32 {
    let value;
    // SAFETY: as `write8`.
    unsafe { asm!("in eax, dx", in("dx") port, out("eax") value) }
    value
}

/// Writes bytes with one string instruction.
pub(crate) fn write_string(port: u16, bytes: &[u8]) {
    // SAFETY: reads `bytes`, as the counter says.
    unsafe {
        asm!("rep outsb", in("dx") port, inout("rcx") bytes.len() => _, inout("rsi") bytes.as_ptr() => _, options(readonly));
    }
}

/// Reads units of four bytes with one string instruction.
pub(crate) fn read_string32(port: u16, to: &mut [u32]) {
    // SAFETY: writes `to`, as the counter says.
    unsafe {
        asm!("rep insd", in("dx") port, inout("rcx") to.len() => _, inout("rdi") to.as_mut_ptr() => _);
    }
}
