//! A heap in one place: the one at the end of the program, that grows and shrinks with `brk` alone.
//!
//! The C library's allocator would else map large blocks by themselves, and a region for each thread: `mmap`, `mprotect`, `mremap`,
//! `munmap` and `madvise` for every thread of the machine. So none of them is in the filters, and no memory of the process can be made
//! executable once they are closed. What is given up is that large blocks go back to the system at once, and that processors'
//! threads allocate beside each other: a machine's heap is small, and serving a guest allocates little.

use std::io;

/// Has the whole process allocate with `brk`. To be called before there is a second thread.
///
/// # Errors
/// When the C library does not know how.
#[cfg(target_env = "gnu")]
#[expect(unsafe_code, reason = "no crate sets the allocator's parameters")]
pub(crate) fn keep_in_one_place() -> io::Result<()> {
    for (parameter, value) in [
        // No block has a mapping of its own.
        (libc::M_MMAP_MAX, 0),
        // No thread has a heap of its own.
        (libc::M_ARENA_MAX, 1),
    ] {
        // SAFETY: the call changes two numbers of the allocator, under its lock (`mallopt(3)`).
        if unsafe { libc::mallopt(parameter, value) } != 1 {
            return Err(io::ErrorKind::Unsupported.into());
        }
    }
    Ok(())
}

/// Other allocators are not known to keep to `brk`: the filters would end the process at its first large block.
///
/// # Errors
/// Always.
#[cfg(not(target_env = "gnu"))]
pub(crate) fn keep_in_one_place() -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}
