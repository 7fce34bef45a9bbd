//! No privileges, and no way to gain any.

use rustix::io::Errno;
use rustix::process::{Gid, Uid, getgroups};
use rustix::thread::{
    CapabilitiesSecureBits, CapabilitySet, CapabilitySets, capability_is_in_bounding_set,
    clear_ambient_capability_set, remove_capability_from_bounding_set, set_capabilities,
    set_capabilities_secure_bits,
};

use crate::ids::{Got, NOBODY, Whose};

/// Number of the last capability that there can be: the sets have 64 bits.
const LAST_CAPABILITY: u32 = 63;

/// The limit of user namespaces below one's own (`namespaces(7)`): each user namespace has its own file by this name.
const USER_NAMESPACES_LIMIT: &str = "/proc/sys/user/max_user_namespaces";

/// Lets this process, which is in a user namespace of its own, make no other below it: in one, it would have all capabilities over
/// what is made there, and much of the kernel can be reached with those. Where `/proc/sys` is read-only, as in many containers, the filter
/// of system calls alone stands against that.
pub(crate) fn forbid_user_namespaces() {
    let _ = std::fs::write(USER_NAMESPACES_LIMIT, "0");
}

/// Joins a session keyring of its own, which is empty: that of the supervisor's session is handed down to all that it starts, with the
/// right to read the keys in it (`session-keyring(7)`). Where the kernel has no keys, or no room for one more of this user's, nothing is
/// changed, and the filter of system calls alone stands against that.
#[expect(unsafe_code, reason = "no crate of ours has keyrings")]
pub(crate) fn leave_keyring() {
    // SAFETY: with a null name the call makes a keyring, and reads no memory.
    unsafe {
        libc::syscall(
            libc::SYS_keyctl,
            libc::KEYCTL_JOIN_SESSION_KEYRING,
            std::ptr::null::<libc::c_char>(),
        );
    }
}

/// How far a process came.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Dropped {
    /// Whose ids it got, where it was to take any.
    pub(crate) got: Option<Got>,
    /// Whether there are capabilities in its bounding set.
    pub(crate) keeps_bounding_set: bool,
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
    if may_drop {
        for capability in capabilities() {
            match remove_capability_from_bounding_set(capability) {
                Ok(()) => {}
                // One more than the kernel knows.
                Err(Errno::INVAL) => break,
                Err(error) => return Err(error),
            }
        }
        // User 0 is nobody special any more, and no capability outlives a change of ids.
        set_capabilities_secure_bits(
            CapabilitiesSecureBits::NO_ROOT
                | CapabilitiesSecureBits::NO_ROOT_LOCKED
                | CapabilitiesSecureBits::KEEP_CAPS_LOCKED
                | CapabilitiesSecureBits::NO_SETUID_FIXUP_LOCKED
                | CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE
                | CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE_LOCKED,
        )?;
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
    })
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
