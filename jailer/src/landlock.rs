//! Which Landlock the kernel has.

/// Asks `landlock_create_ruleset` for the version of its interface (`LANDLOCK_CREATE_RULESET_VERSION`,
/// `landlock_create_ruleset(2)`).
const CREATE_RULESET_VERSION: libc::c_uint = 1;

/// The version of the kernel's Landlock interface, 1 or more; `None` when the kernel has none or it is
/// switched off.
#[must_use]
#[expect(unsafe_code, reason = "no crate asks for the version alone")]
pub fn landlock_abi() -> Option<u32> {
    // SAFETY: with this flag, a null attribute of size 0 is what the call asks for: it reads no memory and
    // makes no descriptor.
    let version = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            std::ptr::null::<libc::c_void>(),
            0_usize,
            CREATE_RULESET_VERSION,
        )
    };
    u32::try_from(version).ok().filter(|version| *version > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_one_that_exists_or_none() {
        let version = landlock_abi();

        assert!(version.is_none_or(|version| (1..1000).contains(&version)));
    }
}
