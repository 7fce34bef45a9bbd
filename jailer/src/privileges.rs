//! No privileges, and no way to gain any.

use rustix::io::Errno;
use rustix::process::{Gid, Uid, getgroups};
use rustix::thread::{
    CapabilitiesSecureBits, CapabilitySet, CapabilitySets, capabilities_secure_bits,
    capability_is_in_bounding_set, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities, set_capabilities_secure_bits,
};

use crate::cell::Namespace;
use crate::ids::{Got, NOBODY, Whose};

/// Number of the last capability that there can be: the sets have 64 bits.
const LAST_CAPABILITY: u32 = 63;

/// Lets this process, which is in a user namespace of its own, make no other below it: in one, it would have all capabilities over
/// what is made there, and much of the kernel can be reached with those. Where `/proc/sys` is read-only, as in many containers, the filter
/// of system calls alone stands against that.
pub(crate) fn forbid_user_namespaces() {
    let _ = std::fs::write(Namespace::User.limit_file(), "0");
}

/// Joins a session keyring of its own, which is empty: that of the supervisor's session is handed down to all that it starts, with the
/// right to read the keys in it (`session-keyring(7)`). Where the kernel has no keys, or answers none of this process's calls for them,
/// there is nothing to leave. Returns 0, or the error number where there is no room for one more keyring of this user's: the filter of
/// system calls alone stands against that then.
#[expect(unsafe_code, reason = "no crate of ours has keyrings")]
pub(crate) fn leave_keyring() -> u8 {
    // SAFETY: with a null name the call makes a keyring, and reads no memory.
    let joined = unsafe {
        libc::syscall(
            libc::SYS_keyctl,
            libc::KEYCTL_JOIN_SESSION_KEYRING,
            std::ptr::null::<libc::c_char>(),
        )
    };
    let errno = std::io::Error::last_os_error().raw_os_error();
    match errno {
        Some(no_room @ (libc::EDQUOT | libc::ENOMEM)) if joined < 0 => {
            u8::try_from(no_room).unwrap_or(u8::MAX)
        }
        _ => 0,
    }
}

/// How far a process came.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Dropped {
    /// Whose ids it got, where it was to take any.
    pub(crate) got: Option<Got>,
    /// Whether there are capabilities in its bounding set.
    pub(crate) keeps_bounding_set: bool,
    /// Whether its secure bits could not be set.
    pub(crate) lacks_secure_bits: bool,
}

/// Takes `own` ids where the process has to take any itself, and drops every capability from every set for good.
///
/// A process that never had the capability to change its bounding set keeps that set, and no other: it says what an executed
/// program could gain, and `no_new_privs` says that none gains anything.
///
/// # Errors
/// The system's.
pub(crate) fn drop_all(own: Option<u32>) -> Result<Dropped, Errno> {
    clear_ambient_capability_set()?;
    let may_drop = rustix::thread::capabilities(None)?
        .effective
        .contains(CapabilitySet::SETPCAP);
    let mut lacks_secure_bits = false;
    if may_drop {
        for capability in capabilities() {
            match remove_capability_from_bounding_set(capability) {
                Ok(()) => {}
                // One more than the kernel knows.
                Err(Errno::INVAL) => break,
                Err(error) => return Err(error),
            }
        }
        lacks_secure_bits = !set_secure_bits()?;
    }
    let got = own.map(take);
    set_capabilities(
        None,
        CapabilitySets {
            effective: CapabilitySet::empty(),
            permitted: CapabilitySet::empty(),
            inheritable: CapabilitySet::empty(),
        },
    )?;
    Ok(Dropped {
        got,
        keeps_bounding_set: !may_drop
            && capabilities().any(|one| capability_is_in_bounding_set(one) == Ok(true)),
        lacks_secure_bits,
    })
}

/// Makes user 0 nobody special any more, and that for good; whether the supervisor's own locked bits let it
/// (`capabilities(7)`, "The securebits flags").
fn set_secure_bits() -> Result<bool, Errno> {
    let wanted = CapabilitiesSecureBits::NO_ROOT
        | CapabilitiesSecureBits::NO_ROOT_LOCKED
        | CapabilitiesSecureBits::KEEP_CAPS_LOCKED
        | CapabilitiesSecureBits::NO_SETUID_FIXUP_LOCKED
        | CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE
        | CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE_LOCKED;
    // One that is locked as set may not be cleared, and does no harm: every capability is dropped by name.
    for bits in [wanted, wanted | capabilities_secure_bits()?] {
        match set_capabilities_secure_bits(bits) {
            Ok(()) => return Ok(true),
            Err(Errno::PERM) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(false)
}

/// All that there can be, one by one.
fn capabilities() -> impl Iterator<Item = CapabilitySet> {
    (0..=LAST_CAPABILITY).map(|number| CapabilitySet::from_bits_retain(1 << number))
}

/// Changes the user and group of this thread, which is the process's only one, and leaves all other groups: each as far as the host lets
/// it.
fn take(own: u32) -> Got {
    let mut refusal = None;
    let mut refused = |error: Errno| {
        refusal.get_or_insert(error);
    };
    if let Err(error) = rustix::thread::set_thread_groups(&[]) {
        refused(error);
    }
    let mut best = |change: fn(u32) -> Result<(), Errno>| {
        for (whose, id) in [(Whose::Own, own), (Whose::Nobodys, NOBODY)] {
            match change(id) {
                Ok(()) => return whose,
                Err(error) => refused(error),
            }
        }
        Whose::Supervisors
    };
    // The user last: who is no root any more may change no group.
    let group = best(|id| {
        let group = Gid::from_raw(id);
        rustix::thread::set_thread_res_gid(group, group, group)
    });
    let user = best(|id| {
        let user = Uid::from_raw(id);
        rustix::thread::set_thread_res_uid(user, user, user)
    });
    Got {
        user,
        group,
        errno: refusal.map_or(0, Errno::raw_os_error),
    }
}

/// Whether this process is in other groups than its own. What can't be told is taken to be so.
pub(crate) fn has_groups() -> bool {
    getgroups().map_or(true, |groups| !groups.is_empty())
}
