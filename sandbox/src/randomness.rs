//! The system's randomness.

use std::io;

use rustix::rand::{GetRandomFlags, getrandom};

/// 32 bytes of the system's generator, which has been seeded since early in the host's boot.
pub(crate) fn random_bytes() -> io::Result<[u8; 32]> {
    let mut bytes = [0; 32];
    let count = getrandom(&mut bytes, GetRandomFlags::empty())?;
    if count == bytes.len() {
        return Ok(bytes);
    }
    Err(io::ErrorKind::UnexpectedEof.into())
}
