//! The recipe: from a running machine to two files.

use std::io;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvm_ioctls::Kvm;

use super::format;
use super::state::{DevicesState, MachineState, Shape, VcpuState};
use super::vcpu::{RestoreVcpuError, SaveVcpuError, check_extended_state};
use super::{chips, memory};
use crate::control::Taken;
use crate::machine::Machine;
use crate::volatile_io;

/// Why there is no snapshot. The machine is as it was.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TakeError {
    /// The message and its descriptors don't belong together.
    #[error("The supervisor sent {given} descriptors, and a snapshot needs 3")]
    Descriptors {
        /// How many came.
        given: usize,
    },
    /// It is about to end.
    #[error("The machine has ended")]
    Over,
    /// A step that KVM refused.
    #[error("KVM did not {action}")]
    Kvm {
        /// What it was asked for.
        action: &'static str,
        /// Its failure.
        source: kvm_ioctls::Error,
    },
    /// The processors have larger states than a snapshot holds.
    #[error(transparent)]
    ExtendedState(#[from] RestoreVcpuError),
    /// A processor.
    #[error("Processor {id} could not be saved")]
    Vcpu {
        /// Which.
        id: usize,
        /// Why.
        source: SaveVcpuError,
    },
    /// The state has more in it than a state file may have.
    #[error("The machine's state is larger than a state file can be")]
    TooLarge,
    /// A file.
    #[error("The snapshot's {file} file could not be written")]
    Write {
        /// Which of the two.
        file: &'static str,
        /// The system's failure.
        source: io::Error,
    },
}

/// Where a snapshot goes.
#[derive(Debug)]
pub(crate) struct Files {
    kvm: OwnedFd,
    state: OwnedFd,
    memory: OwnedFd,
}

impl Files {
    /// The descriptors of [`crate::control::ToMachine::Snapshot`].
    pub(crate) fn sort(descriptors: Vec<OwnedFd>) -> Result<Self, TakeError> {
        let given = descriptors.len();
        let [kvm, state, memory] =
            <[OwnedFd; 3]>::try_from(descriptors).map_err(|_| TakeError::Descriptors { given })?;
        Ok(Self { kvm, state, memory })
    }
}

/// Takes the snapshot; the machine's processors are paused afterwards.
///
/// # Errors
/// See [`TakeError`]; the files may have been written in part.
pub(crate) fn take(machine: &Machine, files: Files) -> Result<Taken, TakeError> {
    let begun = Instant::now();
    machine.vcpus.iter().for_each(crate::vcpu::Vcpu::pause);
    if machine.end.reason().is_some() {
        return Err(TakeError::Over);
    }
    let devices = DevicesState {
        transports: machine
            .transports
            .iter()
            .map(|device| device.save())
            .collect(),
        vsock: crate::machine::lock(&machine.vsock).save(),
        serial: machine.serial.save(),
    };
    check_extended_state(&machine.core.vm)?;
    let vcpus = save_vcpus(machine, files.kvm)?;
    let chips = chips::save(&machine.core.vm)
        .map_err(|(action, source)| TakeError::Kvm { action, source })?;
    let state = MachineState {
        shape: Shape {
            vcpu_count: u8::try_from(vcpus.len()).map_err(|_| TakeError::TooLarge)?,
            memory_mib: machine.core.shape.memory_mib,
            guest_cid: machine.core.shape.guest_cid,
            cpuid: machine.core.shape.cpuid.entries().to_vec(),
        },
        devices,
        chips,
        vcpus,
    };
    let state = format::encode(&state).ok_or(TakeError::TooLarge)?;
    let written = |file| move |source| TakeError::Write { file, source };
    let memory_bytes =
        memory::dump(&machine.core.memory, &files.memory).map_err(written("memory"))?;
    volatile_io::write_bytes_at(&files.state, 0, &state).map_err(written("state"))?;
    Ok(Taken {
        state_bytes: state.len() as u64,
        memory_bytes,
        paused_ns: nanos(begun.elapsed()),
    })
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

fn save_vcpus(machine: &Machine, kvm: OwnedFd) -> Result<Vec<VcpuState>, TakeError> {
    // SAFETY: the descriptor is open and ours alone; `Kvm` becomes its owner. That it is KVM's is no matter of memory
    // safety: another file answers the ioctl with an error.
    let kvm = unsafe { Kvm::from_raw_fd(kvm.into_raw_fd()) };
    let msrs = kvm.get_msr_index_list().map_err(|source| TakeError::Kvm {
        action: "list its model-specific registers",
        source,
    })?;
    let msrs: Arc<[u32]> = msrs.as_slice().into();
    machine
        .vcpus
        .iter()
        .enumerate()
        .map(|(id, vcpu)| {
            vcpu.save(&msrs)
                .map_err(|source| TakeError::Vcpu { id, source })
        })
        .collect()
}
