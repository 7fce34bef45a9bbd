//! System calls as an attacker makes them.

use std::io;

/// A system call with its arguments; what is not given is 0.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call {
    number: i64,
    arguments: [u64; 6],
}

impl Call {
    pub(crate) fn new(number: i64) -> Self {
        Self {
            number,
            arguments: [0; 6],
        }
    }

    /// Its arguments, from the first on.
    pub(crate) fn with(mut self, arguments: &[i64]) -> Self {
        for (place, argument) in self.arguments.iter_mut().zip(arguments) {
            *place = argument.cast_unsigned();
        }
        self
    }

    /// Makes it; the result, or the error number, negative.
    #[expect(unsafe_code, reason = "an attacker does not ask")]
    pub(crate) fn make(self) -> i64 {
        let [a, b, c, d, e, f] = self.arguments;
        // SAFETY: pointers among the arguments are to values that their makers hold for as long as the call takes, and of the sizes
        // that the calls read and write; no call takes memory away that Rust uses.
        let result = unsafe { libc::syscall(self.number, a, b, c, d, e, f) };
        if result < 0 { last_error() } else { result }
    }
}

/// The address of a value, as an argument.
pub(super) fn at<T: ?Sized>(value: &T) -> i64 {
    let address = std::ptr::from_ref(value).cast::<u8>().addr();
    (address as u64).cast_signed()
}

/// The address of a value that the call writes.
pub(super) fn into<T: ?Sized>(value: &mut T) -> i64 {
    at(value)
}

fn last_error() -> i64 {
    -i64::from(
        io::Error::last_os_error()
            .raw_os_error()
            .unwrap_or(libc::EIO),
    )
}

/// Does something in a forked process: its result, negative where it failed.
#[expect(unsafe_code, reason = "a process is forked")]
pub(super) fn in_child(make: impl FnOnce() -> i64) -> i64 {
    // SAFETY: the new process makes system calls and ends; the other threads' locks are nothing to it, since it does not allocate.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let status = i32::try_from(make().min(0).unsigned_abs()).unwrap_or(libc::EIO);
        jailer::exit(status)
    }
    if child < 0 {
        return last_error();
    }
    let mut status = 0;
    // SAFETY: the pointer is to an integer that lives here.
    if unsafe { libc::waitpid(child, &raw mut status, 0) } < 0 {
        return last_error();
    }
    if libc::WIFEXITED(status) {
        -i64::from(libc::WEXITSTATUS(status))
    } else {
        -i64::from(libc::EINTR)
    }
}

/// Forks processes that end at once and are not reaped, so many at most: 0 where all could be.
#[expect(unsafe_code, reason = "processes are forked")]
pub(super) fn fork_bomb(most: u32) -> i64 {
    let mut result = 0;
    for _ in 0..most {
        // SAFETY: the new process ends at once.
        match unsafe { libc::fork() } {
            0 => jailer::exit(0),
            ..0 => {
                result = last_error();
                break;
            }
            1.. => {}
        }
    }
    let mut status = 0;
    // SAFETY: the pointer is to an integer that lives here.
    while unsafe { libc::waitpid(-1, &raw mut status, 0) } > 0 {}
    result
}

/// An error number's name.
pub(crate) fn error_name(number: i64) -> String {
    let names = [
        (libc::EPERM, "EPERM"),
        (libc::ENOENT, "ENOENT"),
        (libc::ESRCH, "ESRCH"),
        (libc::EBADF, "EBADF"),
        (libc::EAGAIN, "EAGAIN"),
        (libc::ENOMEM, "ENOMEM"),
        (libc::EACCES, "EACCES"),
        (libc::EINVAL, "EINVAL"),
        (libc::EMFILE, "EMFILE"),
        (libc::ENOTTY, "ENOTTY"),
        (libc::EFBIG, "EFBIG"),
        (libc::ENOSPC, "ENOSPC"),
        (libc::EROFS, "EROFS"),
        (libc::ENOSYS, "ENOSYS"),
        (libc::ENODEV, "ENODEV"),
        (libc::ENOKEY, "ENOKEY"),
        (libc::EAFNOSUPPORT, "EAFNOSUPPORT"),
        (libc::ENETUNREACH, "ENETUNREACH"),
        (libc::ECONNREFUSED, "ECONNREFUSED"),
        (libc::EOPNOTSUPP, "EOPNOTSUPP"),
        (libc::EUSERS, "EUSERS"),
        (libc::EIO, "EIO"),
    ];
    names
        .into_iter()
        .find(|(errno, _)| i64::from(*errno) == number)
        .map_or_else(|| format!("error {number}"), |(_, name)| name.to_owned())
}
