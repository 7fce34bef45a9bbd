//! What the process may use of the system (`getrlimit(2)`).

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::cell::Bounds;

/// Most descriptors: those of 1,023 vsock connections, and of 32 processors, 8 disks and their events.
const MAX_DESCRIPTORS: u64 = 1280;

/// Address space beside the guest's memory, in MiB: program, libraries, heap, and what the streams hold.
const BASE_ADDRESS_SPACE_MIB: u64 = 768;

/// Address space of each processor's thread, in MiB: its stack, and the 64 MiB aligned at 64 MiB that the C library
/// reserves for a thread's heap.
const VCPU_ADDRESS_SPACE_MIB: u64 = 144;

/// Signals that may be queued: a kick or two for each of the most processors.
const MAX_QUEUED_SIGNALS: u64 = 128;

/// Threads that KVM starts in a machine's name and counts as its own: the one that splits huge pages again
/// (`kvm_mmu_start_lpage_recovery`), with room for others to come.
pub(crate) const KERNEL_THREADS: u64 = 4;

/// Tasks that a machine does not start without: its main loop, a thread for each processor, and at first one that loads files.
pub(crate) fn min_tasks(bounds: Bounds) -> u64 {
    2 + u64::from(bounds.vcpus)
}

/// Most tasks of a machine: its main loop, a thread for each processor, KVM's.
pub(crate) fn max_tasks(bounds: Bounds) -> u64 {
    1 + u64::from(bounds.vcpus) + KERNEL_THREADS
}

/// Sets all limits, for good. `counts_alone` says that no process outside of the machine counts under its ids.
///
/// # Errors
/// The system's.
pub(crate) fn set(bounds: Bounds, counts_alone: bool) -> Result<(), Errno> {
    let address_space_mib = u64::from(bounds.memory_mib)
        + BASE_ADDRESS_SPACE_MIB
        + VCPU_ADDRESS_SPACE_MIB * u64::from(bounds.vcpus);
    let mut limits = vec![
        (Resource::Core, 0),
        (Resource::Fsize, bounds.max_file_bytes),
        (Resource::Nofile, MAX_DESCRIPTORS),
        (Resource::As, address_space_mib << 20),
        (Resource::Memlock, 0),
        (Resource::Msgqueue, 0),
        (Resource::Nice, 0),
        (Resource::Rtprio, 0),
        (Resource::Sigpending, MAX_QUEUED_SIGNALS),
    ];
    if counts_alone {
        limits.push((Resource::Nproc, max_tasks(bounds)));
    }
    for (resource, most) in limits {
        // No hard limit is ever raised.
        let most = getrlimit(resource)
            .maximum
            .map_or(most, |hard| hard.min(most));
        let limit = Rlimit {
            current: Some(most),
            maximum: Some(most),
        };
        setrlimit(resource, limit)?;
    }
    Ok(())
}
