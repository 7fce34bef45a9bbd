//! Landlock (`landlock(7)`): a domain without a rule.

use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetError, Scope,
};

/// The version whose rights are asked for. Those that an older kernel does not know are left out by the crate.
const NEWEST: ABI = ABI::V6;

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

/// Takes every right that Landlock knows from this thread and those that it will start: no file is opened, made,
/// renamed or executed, no TCP port bound or connected to, no abstract socket connected to and no signal
/// sent outside. What is open stays usable.
///
/// # Errors
/// When a kernel that has Landlock refuses it.
pub(crate) fn enclose() -> Result<(), RulesetError> {
    Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(NEWEST))?
        .handle_access(AccessNet::from_all(NEWEST))?
        .scope(Scope::from_all(NEWEST))?
        .create()?
        .no_new_privs(true)
        .restrict_self()?;
    Ok(())
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
