//! What a program that is started from here must not have.

/// The first descriptor that is not standard input, output or error.
const FIRST_OTHER: libc::c_uint = 3;

/// Keeps all descriptors but standard input, output and error from programs that this process starts, also those that it has
/// itself inherited from somebody who was careless. Does nothing before Linux 5.11.
#[expect(unsafe_code, reason = "no crate of ours has close_range")]
pub fn keep_descriptors() {
    // SAFETY: with this flag the call closes nothing and touches no memory: it sets the flag with which a descriptor is closed in
    // another program.
    unsafe {
        libc::syscall(
            libc::SYS_close_range,
            FIRST_OTHER,
            libc::c_uint::MAX,
            libc::CLOSE_RANGE_CLOEXEC,
        );
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};

    use super::*;

    #[test]
    fn a_descriptor_that_is_inheritable_is_so_no_more() {
        let file = std::fs::File::open("/dev/null").unwrap();
        fcntl_setfd(&file, FdFlags::empty()).unwrap();

        keep_descriptors();

        assert_eq!(fcntl_getfd(&file).unwrap(), FdFlags::CLOEXEC);
    }
}
