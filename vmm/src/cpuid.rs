//! What the guest's processors say about themselves.
//!
//! KVM says what it can offer ([`CpuidTemplate::new`] asks once a machine); what is taken away and what is told of the
//! topology is here: one package, `vcpu_count` cores, one thread a core, APIC id = number of the vCPU. Leaf and bit
//! numbers: Intel SDM 2A, "CPUID", and AMD APM 3, appendix E.

use kvm_bindings::{
    CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2,
};
use kvm_ioctls::{Cap, Kvm};

/// Why there is no CPUID.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CpuidError {
    /// KVM's failure.
    #[error("KVM did not tell which processor features it supports")]
    Supported(#[source] kvm_ioctls::Error),
    /// More leaves than KVM takes.
    #[error("The processor has {entries} CPUID leaves, more than KVM takes")]
    TooMany {
        /// How many.
        entries: usize,
    },
}

/// Leaf 1: features that are taken away (MONITOR, VMX, SMX, PDCM) and added (TSC deadline timer, hypervisor).
const LEAF_1_ECX_HIDDEN: u32 = 1 << 3 | 1 << 5 | 1 << 6 | 1 << 15;
const LEAF_1_ECX_TSC_DEADLINE: u32 = 1 << 24;
const LEAF_1_ECX_HYPERVISOR: u32 = 1 << 31;
const LEAF_1_EDX_HTT: u32 = 1 << 28;

/// Leaf 6: the local APIC's timer goes on in every power state (ARAT), which KVM's does; without it Linux wants a PIT.
const LEAF_6_EAX_ARAT: u32 = 1 << 2;

/// Leaf 7: SGX, processor trace; SGX launch control.
const LEAF_7_EBX_HIDDEN: u32 = 1 << 2 | 1 << 25;
const LEAF_7_ECX_HIDDEN: u32 = 1 << 30;

/// Leaf 0x8000_0001: SVM, IBS, SKINIT, watchdog, lightweight profiling, three kinds of performance counters, MWAITX.
const LEAF_EXT_1_ECX_HIDDEN: u32 =
    1 << 2 | 1 << 10 | 1 << 12 | 1 << 13 | 1 << 15 | 1 << 23 | 1 << 24 | 1 << 28 | 1 << 29;
const LEAF_EXT_1_ECX_CMP_LEGACY: u32 = 1 << 1;

/// AMX, wherever a leaf speaks of it: the tiles' states among the extended ones, and the instructions. Its 8 KiB of state fit into no
/// snapshot, and before Linux 6.4 KVM tells a process that has not asked the host for it (`ARCH_REQ_XCOMP_GUEST_PERM`) of one of
/// its two states, which no processor takes alone.
const TILE_STATES: [u32; 2] = [17, 18];
const LEAF_7_EDX_AMX: u32 = 1 << 22 | 1 << 24 | 1 << 25;
const LEAF_7_1_EAX_AMX: u32 = 1 << 21;
const LEAF_7_1_EDX_AMX: u32 = 1 << 8;

/// Leaves that are left out and so read as zeros: MONITOR, performance counters, SGX, processor trace, tiles and their multiplication; SVM, IBS, performance
/// counters version 2, and AMD's own extended topology, of which leaf 0xb says the same.
const LEAVES_HIDDEN: [u32; 10] = [
    5,
    0xa,
    0x12,
    0x14,
    0x1d,
    0x1e,
    0x8000_000a,
    0x8000_001b,
    0x8000_0022,
    0x8000_0026,
];

/// Leaves that are left out, to be written anew: extended topology and its second version, which says the same.
const LEAVES_REBUILT: [u32; 2] = [0xb, 0x1f];

/// Level types of leaf 0xb.
const LEVEL_SMT: u32 = 1;
const LEVEL_CORE: u32 = 2;

/// Level of the last cache, which all cores share.
const LAST_CACHE_LEVEL: u32 = 3;

/// CPUID without what differs from vCPU to vCPU.
#[derive(Debug, Clone)]
pub struct CpuidTemplate {
    entries: Vec<kvm_cpuid_entry2>,
    vcpu_count: u32,
}

impl CpuidTemplate {
    /// Asks KVM and filters.
    ///
    /// # Errors
    /// [`CpuidError::Supported`].
    pub fn new(kvm: &Kvm, vcpu_count: u8) -> Result<Self, CpuidError> {
        let supported = kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(CpuidError::Supported)?;
        let has_tsc_deadline = kvm.check_extension(Cap::TscDeadlineTimer);
        Ok(Self::filter(
            supported.as_slice(),
            vcpu_count,
            has_tsc_deadline,
        ))
    }

    fn filter(supported: &[kvm_cpuid_entry2], vcpu_count: u8, has_tsc_deadline: bool) -> Self {
        let vcpu_count = u32::from(vcpu_count);
        let mut entries: Vec<_> = supported
            .iter()
            .filter(|entry| {
                let is_tiles = entry.function == 0xd && TILE_STATES.contains(&entry.index);
                !is_tiles
                    && !LEAVES_HIDDEN.contains(&entry.function)
                    && !LEAVES_REBUILT.contains(&entry.function)
            })
            .copied()
            .collect();
        for entry in &mut entries {
            filter_entry(entry, vcpu_count, has_tsc_deadline);
            // Ids of the host's processor that happened to answer: each vCPU has its own.
            match entry.function {
                1 => entry.ebx &= 0x00ff_ffff,
                0x8000_001e => (entry.eax, entry.ebx) = (0, 0),
                _ => {}
            }
        }
        Self {
            entries,
            vcpu_count,
        }
    }

    /// As a snapshot has kept it: see [`Self::entries`].
    #[must_use]
    pub fn from_entries(entries: Vec<kvm_cpuid_entry2>, vcpu_count: u8) -> Self {
        Self {
            entries,
            vcpu_count: u32::from(vcpu_count),
        }
    }

    /// What a snapshot keeps.
    #[must_use]
    pub fn entries(&self) -> &[kvm_cpuid_entry2] {
        &self.entries
    }

    /// The first leaf that the other says something else in, or lacks.
    #[must_use]
    pub fn first_difference(&self, other: &Self) -> Option<u32> {
        let key = |entry: &kvm_cpuid_entry2| (entry.function, entry.index);
        self.entries
            .iter()
            .find(|entry| !other.entries.contains(entry))
            .or_else(|| {
                other
                    .entries
                    .iter()
                    .find(|entry| !self.entries.iter().any(|own| key(own) == key(entry)))
            })
            .map(|entry| entry.function)
    }

    /// The extended states that the processors have, as XCR0 takes them; `None` without XSAVE.
    #[must_use]
    pub fn extended_states(&self) -> Option<u64> {
        self.entries
            .iter()
            .find(|entry| entry.function == 0xd && entry.index == 0)
            .map(|entry| u64::from(entry.edx) << 32 | u64::from(entry.eax))
            .filter(|states| *states != 0)
    }

    /// The CPUID of the vCPU with this number.
    ///
    /// # Errors
    /// [`CpuidError::TooMany`].
    pub fn for_vcpu(&self, vcpu_id: u8) -> Result<CpuId, CpuidError> {
        let apic_id = u32::from(vcpu_id);
        let mut entries = self.entries.clone();
        for entry in &mut entries {
            match entry.function {
                1 => entry.ebx = entry.ebx & 0x00ff_ffff | apic_id << 24,
                0x8000_001e => (entry.eax, entry.ebx) = (apic_id, apic_id & 0xff),
                _ => {}
            }
        }
        let last_basic_leaf = entries
            .iter()
            .find(|entry| entry.function == 0)
            .map_or(0, |entry| entry.eax);
        for leaf in LEAVES_REBUILT {
            if leaf <= last_basic_leaf {
                entries.extend(topology(leaf, apic_id, self.vcpu_count));
            }
        }
        CpuId::from_entries(&entries).map_err(|_| CpuidError::TooMany {
            entries: entries.len(),
        })
    }
}

/// Bits that it takes to number all cores.
fn core_id_bits(vcpu_count: u32) -> u32 {
    vcpu_count.max(1).next_power_of_two().trailing_zeros()
}

fn filter_entry(entry: &mut kvm_cpuid_entry2, vcpu_count: u32, has_tsc_deadline: bool) {
    let core_ids = 1 << core_id_bits(vcpu_count);
    match entry.function {
        1 => {
            entry.ecx = entry.ecx & !LEAF_1_ECX_HIDDEN | LEAF_1_ECX_HYPERVISOR;
            if has_tsc_deadline {
                entry.ecx |= LEAF_1_ECX_TSC_DEADLINE;
            }
            entry.ebx = entry.ebx & 0xff00_ffff | core_ids << 16;
            entry.edx &= !LEAF_1_EDX_HTT;
            if vcpu_count > 1 {
                entry.edx |= LEAF_1_EDX_HTT;
            }
        }
        // Intel: how many APIC ids share this cache, and how many core ids there are, each minus one.
        4 if entry.eax & 0x1f != 0 => {
            entry.eax = entry.eax & 0x3fff
                | cache_sharers(entry.eax, core_ids) << 14
                | (core_ids - 1) << 26;
        }
        6 => entry.eax |= LEAF_6_EAX_ARAT,
        7 if entry.index == 0 => {
            entry.ebx &= !LEAF_7_EBX_HIDDEN;
            entry.ecx &= !LEAF_7_ECX_HIDDEN;
            entry.edx &= !LEAF_7_EDX_AMX;
        }
        7 if entry.index == 1 => {
            entry.eax &= !LEAF_7_1_EAX_AMX;
            entry.edx &= !LEAF_7_1_EDX_AMX;
        }
        0xd if entry.index == 0 => {
            entry.eax &= !TILE_STATES.iter().fold(0, |bits, state| bits | 1 << state);
        }
        0x8000_0001 => {
            entry.ecx &= !(LEAF_EXT_1_ECX_HIDDEN | LEAF_EXT_1_ECX_CMP_LEGACY);
            if vcpu_count > 1 {
                entry.ecx |= LEAF_EXT_1_ECX_CMP_LEGACY;
            }
        }
        // AMD: bits of a core id, cores minus one.
        0x8000_0008 => entry.ecx = core_id_bits(vcpu_count) << 12 | (vcpu_count - 1),
        // AMD's form of leaf 4, without the core ids.
        0x8000_001d if entry.eax & 0x1f != 0 => {
            entry.eax = entry.eax & 0x3fff | cache_sharers(entry.eax, core_ids) << 14;
        }
        // AMD: one thread a core, one node a package; the ids are filled in for each vCPU.
        0x8000_001e => entry.ecx = 0,
        _ => {}
    }
}

/// How many APIC ids, minus one, share the cache that `eax` of leaf 4 or 0x8000_001d describes.
fn cache_sharers(eax: u32, core_ids: u32) -> u32 {
    if eax >> 5 & 0b111 >= LAST_CACHE_LEVEL {
        core_ids - 1
    } else {
        0
    }
}

/// Leaf 0xb or 0x1f: a level for threads, one for cores, and the end.
fn topology(leaf: u32, apic_id: u32, vcpu_count: u32) -> [kvm_cpuid_entry2; 3] {
    let levels = [
        (0, 1, LEVEL_SMT << 8),
        (core_id_bits(vcpu_count), vcpu_count, LEVEL_CORE << 8 | 1),
        (0, 0, 2),
    ];
    let mut index = 0;
    levels.map(|(eax, ebx, ecx)| {
        let entry = kvm_cpuid_entry2 {
            function: leaf,
            index,
            flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
            eax,
            ebx,
            ecx,
            edx: apic_id,
            ..kvm_cpuid_entry2::default()
        };
        index += 1;
        entry
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaf(function: u32, registers: [u32; 4]) -> kvm_cpuid_entry2 {
        let [eax, ebx, ecx, edx] = registers;
        kvm_cpuid_entry2 {
            function,
            eax,
            ebx,
            ecx,
            edx,
            ..kvm_cpuid_entry2::default()
        }
    }

    /// What the guest reads, as KVM looks it up.
    fn read(cpuid: &CpuId, function: u32, index: u32) -> [u32; 4] {
        cpuid
            .as_slice()
            .iter()
            .find(|entry| {
                entry.function == function
                    && (entry.flags & KVM_CPUID_FLAG_SIGNIFCANT_INDEX == 0 || entry.index == index)
            })
            .map_or([0; 4], |entry| [entry.eax, entry.ebx, entry.ecx, entry.edx])
    }

    fn cpuid_for(vcpu_count: u8, vcpu_id: u8) -> CpuId {
        let all = u32::MAX;
        let supported = [
            leaf(0, [0x1f, 0, 0, 0]),
            leaf(1, [0x80_0f12, 0xaabb_0800, all, all]),
            leaf(4, [0xfc00_4163, 0, 0, 0]),
            leaf(6, [0, 0, 0, 0]),
            leaf(0xa, [0x0730_0404, 0, 0, 0x603]),
            leaf(0x8000_0001, [0, 0, all, all]),
            leaf(0x8000_0008, [0x3030, 0, 0x603f, 0]),
            leaf(0x8000_000a, [1, 0x8000, 0, 0]),
            leaf(0x8000_001d, [0xfff_c121, 0, 0, 0]),
            leaf(0x8000_001e, [7, 0x107, 0x300, 0]),
        ];
        CpuidTemplate::filter(&supported, vcpu_count, true)
            .for_vcpu(vcpu_id)
            .unwrap()
    }

    #[test]
    fn there_is_no_nested_virtualization_and_no_performance_counter() {
        let cpuid = cpuid_for(1, 0);

        assert_eq!(read(&cpuid, 1, 0)[2] & (1 << 5 | 1 << 15), 0);
        assert_eq!(read(&cpuid, 0x8000_0001, 0)[2] & (1 << 2 | 1 << 23), 0);
        assert_eq!(read(&cpuid, 0xa, 0), [0; 4]);
        assert_eq!(read(&cpuid, 0x8000_000a, 0), [0; 4]);
    }

    #[test]
    fn there_are_no_tiles_also_where_the_host_tells_of_half_of_them() {
        let sub_leaf = |function, index, registers| kvm_cpuid_entry2 {
            index,
            flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
            ..leaf(function, registers)
        };
        let supported = [
            leaf(0, [0x1f, 0, 0, 0]),
            sub_leaf(7, 0, [1, 0, 0, u32::MAX]),
            sub_leaf(7, 1, [u32::MAX, 0, 0, u32::MAX]),
            // As Linux 6.1 has it on Sapphire Rapids: tile configuration, and no tile data.
            sub_leaf(0xd, 0, [0x2_02e7, 0x988, 0xac0, 0]),
            sub_leaf(0xd, 2, [0x100, 0x240, 0, 0]),
            sub_leaf(0xd, 17, [64, 0xac0, 2, 0]),
            sub_leaf(0x1d, 1, [0x400_2000, 0x8_0040, 0x10, 0]),
            sub_leaf(0x1e, 0, [0, 0x4010, 0, 0]),
        ];
        let template = CpuidTemplate::filter(&supported, 1, true);
        let cpuid = template.for_vcpu(0).unwrap();

        assert_eq!(template.extended_states(), Some(0x2e7));
        assert_eq!(read(&cpuid, 7, 0)[3], !LEAF_7_EDX_AMX);
        assert_eq!(read(&cpuid, 7, 1)[0], !LEAF_7_1_EAX_AMX);
        assert_eq!(read(&cpuid, 0xd, 2)[0], 0x100);
        assert_eq!(read(&cpuid, 0xd, 17), [0; 4]);
        assert_eq!([0x1d, 0x1e].map(|leaf| read(&cpuid, leaf, 0)), [[0; 4]; 2]);
    }

    #[test]
    fn a_linux_guest_needs_no_pit() {
        let cpuid = cpuid_for(1, 0);

        assert_ne!(read(&cpuid, 1, 0)[2] & LEAF_1_ECX_TSC_DEADLINE, 0);
        assert_ne!(read(&cpuid, 6, 0)[0] & LEAF_6_EAX_ARAT, 0);
    }

    #[test]
    fn three_processors_are_three_cores_of_one_package() {
        let cpuid = cpuid_for(3, 2);

        assert_eq!(read(&cpuid, 1, 0)[1], 0x0204_0800);
        assert_eq!(read(&cpuid, 4, 0)[0] >> 26, 3);
        assert_eq!(read(&cpuid, 4, 0)[0] >> 14 & 0xfff, 3);
        for leaf in [0xb, 0x1f] {
            assert_eq!(read(&cpuid, leaf, 0), [0, 1, 0x100, 2]);
            assert_eq!(read(&cpuid, leaf, 1), [2, 3, 0x201, 2]);
            assert_eq!(read(&cpuid, leaf, 2), [0, 0, 2, 2]);
        }
        assert_eq!(read(&cpuid, 0x8000_0008, 0)[2], 0x2002);
        assert_eq!(read(&cpuid, 0x8000_001d, 0)[0] >> 14 & 0xfff, 0);
        assert_eq!(read(&cpuid, 0x8000_001e, 0), [2, 2, 0, 0]);
    }

    #[test]
    fn one_processor_is_not_multithreaded() {
        let cpuid = cpuid_for(1, 0);

        assert_eq!(read(&cpuid, 1, 0)[1], 0x0001_0800);
        assert_eq!(read(&cpuid, 1, 0)[3] & LEAF_1_EDX_HTT, 0);
        assert_eq!(read(&cpuid, 0xb, 1), [0, 1, 0x201, 0]);
        assert_eq!(
            read(&cpuid, 0x8000_0001, 0)[2] & LEAF_EXT_1_ECX_CMP_LEGACY,
            0
        );
    }
}
