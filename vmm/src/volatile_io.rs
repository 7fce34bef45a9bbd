//! Reading and writing files at a position, straight from and to guest memory.
//!
//! A file's own position is never used: a descriptor that came from the supervisor may share it with other machines.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use vm_memory::VolatileSlice;
use vm_memory::bitmap::BitmapSlice;

/// Most slices of one system call (`IOV_MAX` of Linux: `UIO_MAXIOV` in include/uapi/linux/uio.h).
const MAX_SLICES: usize = 1024;

/// Fills `slices`, in order, from `file` at `offset`.
///
/// # Errors
/// The system's, or [`io::ErrorKind::UnexpectedEof`] where the file ends early; some slices may have been filled.
pub(crate) fn read_at<B: BitmapSlice>(
    file: impl AsFd,
    offset: u64,
    slices: &[VolatileSlice<'_, B>],
) -> io::Result<()> {
    transfer(
        offset,
        slices,
        io::ErrorKind::UnexpectedEof,
        |vector, position| read_some(file.as_fd(), vector, position),
    )
}

/// Writes `slices`, in order, to `file` at `offset`.
///
/// # Errors
/// The system's; some slices may have been written.
pub(crate) fn write_at<B: BitmapSlice>(
    file: impl AsFd,
    offset: u64,
    slices: &[VolatileSlice<'_, B>],
) -> io::Result<()> {
    transfer(
        offset,
        slices,
        io::ErrorKind::WriteZero,
        |vector, position| write_some(file.as_fd(), vector, position),
    )
}

/// Writes `bytes` to `file` at `offset`.
///
/// # Errors
/// The system's; some may have been written.
pub(crate) fn write_bytes_at(file: impl AsFd, offset: u64, bytes: &[u8]) -> io::Result<()> {
    let mut rest = bytes;
    while !rest.is_empty() {
        let position = offset + (bytes.len() - rest.len()) as u64;
        match rustix::io::pwrite(file.as_fd(), rest, position) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => rest = rest.get(count..).unwrap_or_default(),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// One piece of guest memory, as the kernel takes it. Lives no longer than the slice that it was made from.
struct Vector<'a> {
    raw: Vec<libc::iovec>,
    memory: std::marker::PhantomData<&'a ()>,
}

impl<'a> Vector<'a> {
    /// The first [`MAX_SLICES`] slices, without their first `skip` bytes.
    fn new<B: BitmapSlice>(slices: &'a [VolatileSlice<'_, B>], mut skip: usize) -> Self {
        let mut raw = Vec::with_capacity(slices.len().min(MAX_SLICES));
        for slice in slices {
            let skipped = skip.min(slice.len());
            skip -= skipped;
            if let Ok(rest) = slice.offset(skipped)
                && !rest.is_empty()
            {
                raw.push(libc::iovec {
                    iov_base: rest.ptr_guard_mut().as_ptr().cast(),
                    iov_len: rest.len(),
                });
            }
            if raw.len() == MAX_SLICES {
                break;
            }
        }
        Self {
            raw,
            memory: std::marker::PhantomData,
        }
    }

    fn count(&self) -> libc::c_int {
        libc::c_int::try_from(self.raw.len()).unwrap_or(libc::c_int::MAX)
    }
}

fn transfer<B: BitmapSlice>(
    offset: u64,
    slices: &[VolatileSlice<'_, B>],
    ended: io::ErrorKind,
    mut some: impl FnMut(&Vector<'_>, libc::off_t) -> libc::ssize_t,
) -> io::Result<()> {
    let total: usize = slices.iter().map(VolatileSlice::len).sum();
    let mut done = 0;
    while done < total {
        let position = offset
            .checked_add(done as u64)
            .and_then(|position| libc::off_t::try_from(position).ok())
            .ok_or(io::ErrorKind::InvalidInput)?;
        match usize::try_from(some(&Vector::new(slices, done), position)) {
            Ok(0) => return Err(ended.into()),
            Ok(moved) => done += moved,
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
    Ok(())
}

fn read_some(file: BorrowedFd<'_>, vector: &Vector<'_>, position: libc::off_t) -> libc::ssize_t {
    // SAFETY: every element describes memory of a `VolatileSlice`, whose maker has promised that it is valid for
    // writes of its length while the slice lives; the vector borrows the slices. Guest memory is only accessed
    // volatilely elsewhere, so what the kernel writes into it invalidates no reference.
    unsafe {
        libc::preadv(
            file.as_raw_fd(),
            vector.raw.as_ptr(),
            vector.count(),
            position,
        )
    }
}

fn write_some(file: BorrowedFd<'_>, vector: &Vector<'_>, position: libc::off_t) -> libc::ssize_t {
    // SAFETY: as in `read_some`, and the kernel only reads the memory.
    unsafe {
        libc::pwritev(
            file.as_raw_fd(),
            vector.raw.as_ptr(),
            vector.count(),
            position,
        )
    }
}
