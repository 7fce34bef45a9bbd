//! The other recipe: from a snapshot to a machine that goes on.
//!
//! Everything that can be found wrong with the files is found before there is a virtual machine. Then, in an order that is not free:
//! memory before the interrupt controller (a slot that is added later waits for milliseconds), devices, processors
//! ([`crate::snapshot::vcpu`]), the clock and the interrupt controllers, whose pending interrupts go to the processors'
//! local APICs at once. At last vsock ends all connections of the guest's, and the devices repeat what may have been on its way.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use devices::serial::SerialPort;
use devices::virtio::StateError;
use devices::vsock::Incoming;
use kvm_ioctls::{Kvm, VcpuFd, VmFd};

use crate::builder::BuildError;
use crate::control::{DiskConfig, MAX_DISKS, RestoreConfig};
use crate::cpuid::{CpuidError, CpuidTemplate};
use crate::machine::{Core, Parts, Shape, lock};
use crate::memory::{self, MemoryError};
use crate::serve::Hooks;
use crate::shell::{self, kvm_did_not};
use crate::snapshot::chips;
use crate::snapshot::format::{self, FormatError, MAX_STATE_BYTES};
use crate::snapshot::state::{DevicesState, MachineState};
use crate::snapshot::tsc::Counter;
use crate::snapshot::vcpu::{self, RestoreVcpuError};
use crate::snapshot::working_set;
use crate::wiring::{self, Orders, Wired};

/// Why a machine can't go on from a snapshot.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// The message and its descriptors don't belong together.
    #[error("The supervisor sent {given} descriptors, and the machine needs {needed}")]
    Descriptors {
        /// How many came.
        given: usize,
        /// How many the configuration names.
        needed: usize,
    },
    /// The state file, or the working set, could not be read.
    #[error("A file of the snapshot could not be read")]
    Read(#[source] io::Error),
    /// The state file is none, or not one for this program.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The memory file.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The machine had another number of disks.
    #[error("The machine had {saved} disks when the snapshot was taken, and is given {given}")]
    Disks {
        /// In the snapshot.
        saved: usize,
        /// In the configuration.
        given: usize,
    },
    /// The guest has looked at the processor's features and relies on them.
    #[error(
        "The snapshot was taken on a processor with other features (CPUID leaf {leaf:#x} differs): make it anew on this host"
    )]
    Features {
        /// The first that differs.
        leaf: u32,
    },
    /// What the processor can do is not known.
    #[error(transparent)]
    Cpuid(#[from] CpuidError),
    /// A device.
    #[error("Device {index} can't go on")]
    Device {
        /// Which: the disks in order, then vsock, then the console.
        index: usize,
        /// Why.
        source: StateError,
    },
    /// A processor.
    #[error("Processor {id} can't go on")]
    Vcpu {
        /// Which.
        id: usize,
        /// Why.
        source: RestoreVcpuError,
    },
    /// As in building a machine.
    #[error(transparent)]
    Build(#[from] BuildError),
}

/// Builds the machine. `descriptors` are those of [`crate::control::ToMachine::Restore`].
///
/// # Errors
/// See [`RestoreError`]; nothing of the machine is left then.
pub(crate) fn restore(
    config: RestoreConfig,
    descriptors: Vec<OwnedFd>,
    guest_connections: Box<dyn Incoming>,
    hooks: &Arc<dyn Hooks>,
) -> Result<Parts, RestoreError> {
    let check_host = config.check_host;
    let files = Files::sort(config, descriptors)?;
    let state = read_state(&files.state)?;
    let MachineState {
        shape,
        devices,
        chips,
        vcpus,
    } = &state;
    let saved = devices.transports.len().saturating_sub(1);
    if saved != files.disks.len() {
        return Err(RestoreError::Disks {
            saved,
            given: files.disks.len(),
        });
    }
    let memory = memory::map_snapshot(shape.memory_mib, &files.memory)?;
    if let Some(working_set) = &files.working_set {
        let runs = working_set::read(working_set).map_err(RestoreError::Read)?;
        memory::populate(&memory, &runs);
    }
    let kvm = shell::kvm_from(files.kvm)?;
    let cpuid = CpuidTemplate::from_entries(shape.cpuid.clone(), shape.vcpu_count);
    if check_host {
        compare_host(&kvm, &cpuid, shape.vcpu_count)?;
    }

    let vm = shell::with_memory(&kvm, &memory)?;
    let orders = Orders {
        serial: SerialPort::restore(None, wiring::console_sink(files.console)?, &devices.serial)
            .map_err(|source| RestoreError::Device {
                index: devices.transports.len(),
                source,
            })?,
        disks: files.disks,
        guest_cid: shape.guest_cid,
        guest_connections,
    };
    let wired = wiring::wire(&vm, &memory, orders)?;
    restore_devices(&wired, devices)?;
    let vcpus = restore_vcpus(&vm, &cpuid, vcpus)?;
    chips::restore(&vm, chips).map_err(|(action, source)| BuildError::Kvm {
        action,
        source: source.into(),
    })?;
    lock(&wired.vsock).reset_transport();
    wired
        .transports
        .iter()
        .for_each(|device| device.repeat_signals());
    let core = Core {
        shape: Shape {
            memory_mib: shape.memory_mib,
            guest_cid: shape.guest_cid,
            cpuid,
        },
        vm,
        memory,
    };
    Ok(Parts::assemble(core, wired, vcpus, hooks).map_err(BuildError::from)?)
}

/// Whether a machine could go on from a state file's content on this host, as far as that is known without its memory and disks.
///
/// # Errors
/// See [`RestoreError`].
pub fn check(kvm: OwnedFd, state: &[u8]) -> Result<(), RestoreError> {
    let MachineState { shape, .. } = format::parse(state)?;
    let kvm = shell::kvm_from(kvm)?;
    let cpuid = CpuidTemplate::from_entries(shape.cpuid, shape.vcpu_count);
    compare_host(&kvm, &cpuid, shape.vcpu_count)
}

/// The descriptors of a restore message, by what they are for.
struct Files {
    kvm: OwnedFd,
    state: File,
    memory: Arc<File>,
    working_set: Option<File>,
    console: Option<OwnedFd>,
    disks: Vec<(DiskConfig, OwnedFd)>,
}

impl Files {
    fn sort(config: RestoreConfig, descriptors: Vec<OwnedFd>) -> Result<Self, RestoreError> {
        let count = config.disks.len();
        if count > MAX_DISKS {
            return Err(BuildError::DiskCount { count }.into());
        }
        let optional = usize::from(config.has_working_set) + usize::from(config.has_console);
        let needed = 3 + optional + count;
        let given = descriptors.len();
        let wrong = RestoreError::Descriptors { given, needed };
        if given != needed {
            return Err(wrong);
        }
        let mut descriptors = descriptors.into_iter();
        let (Some(kvm), Some(state), Some(memory)) =
            (descriptors.next(), descriptors.next(), descriptors.next())
        else {
            return Err(wrong);
        };
        let working_set = config
            .has_working_set
            .then(|| descriptors.next())
            .flatten()
            .map(File::from);
        let console = config.has_console.then(|| descriptors.next()).flatten();
        Ok(Self {
            kvm,
            state: state.into(),
            memory: Arc::new(memory.into()),
            working_set,
            console,
            disks: config.disks.into_iter().zip(descriptors).collect(),
        })
    }
}

/// Reads and checks the state file. Its position, which the supervisor may share with other machines, is not used.
fn read_state(file: &File) -> Result<MachineState, RestoreError> {
    let bytes = file.metadata().map_err(RestoreError::Read)?.len();
    if bytes > MAX_STATE_BYTES {
        return Err(FormatError::TooLong.into());
    }
    let mut content = vec![0; usize::try_from(bytes).unwrap_or(0)];
    file.read_exact_at(&mut content, 0)
        .map_err(RestoreError::Read)?;
    Ok(format::parse(&content)?)
}

/// Whether this host's processor shows guests what the snapshot's did.
fn compare_host(kvm: &Kvm, saved: &CpuidTemplate, vcpu_count: u8) -> Result<(), RestoreError> {
    let here = CpuidTemplate::new(kvm, vcpu_count)?;
    match saved.first_difference(&here) {
        None => Ok(()),
        Some(leaf) => Err(RestoreError::Features { leaf }),
    }
}

fn restore_devices(wired: &Wired, state: &DevicesState) -> Result<(), RestoreError> {
    for (index, (device, state)) in wired.transports.iter().zip(&state.transports).enumerate() {
        device
            .restore(state)
            .map_err(|source| RestoreError::Device { index, source })?;
    }
    lock(&wired.vsock)
        .restore(state.vsock)
        .map_err(|source| RestoreError::Device {
            index: state.transports.len().saturating_sub(1),
            source,
        })
}

fn restore_vcpus(
    vm: &VmFd,
    cpuid: &CpuidTemplate,
    states: &[crate::snapshot::state::VcpuState],
) -> Result<Vec<VcpuFd>, RestoreError> {
    vcpu::check_extended_state(vm).map_err(|source| RestoreError::Vcpu { id: 0, source })?;
    let counter = states.first().map_or_else(
        || Counter::new(0, 0),
        |first| Counter::new(first.tsc, first.tsc_khz),
    );
    states
        .iter()
        .enumerate()
        .map(|(id, state)| {
            let vcpu = vm
                .create_vcpu(id as u64)
                .map_err(kvm_did_not("create a vCPU"))?;
            let cpuid = cpuid.for_vcpu(u8::try_from(id).unwrap_or(u8::MAX))?;
            vcpu::restore(&vcpu, &cpuid, state, counter)
                .map_err(|source| RestoreError::Vcpu { id, source })?;
            Ok(vcpu)
        })
        .collect()
}
