//! One recipe: from a configuration and open descriptors to a machine that is ready to run.

use std::io;
use std::os::fd::OwnedFd;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::thread;

use devices::bus::BusError;
use devices::serial::SerialPort;
use devices::vsock::Incoming;
use kvm_ioctls::{VcpuFd, VmFd};
use vm_memory::GuestMemoryMmap;

use crate::boot::{self, BootInfo};
use crate::cmdline::{self, CmdlineError};
use crate::control::{MAX_DISKS, MachineConfig};
use crate::cpuid::{CpuidError, CpuidTemplate};
use crate::disk::DiskError;
use crate::kernel::{self, Initramfs, InitramfsError, Kernel, KernelError};
use crate::machine::{Core, Parts, Shape};
use crate::memory::{self, MemoryError};
use crate::mptable::MAX_VCPUS;
use crate::registers::{self, RegistersError};
use crate::serve::Hooks;
use crate::shell::{self, kvm_did_not};
use crate::vcpu::{THREAD_STACK_BYTES, VcpuError};
use crate::wiring::{self, Orders};

/// The first context identifier that a guest may have (virtio 1.2 §5.10.4).
const MIN_GUEST_CID: u32 = 3;

/// Why a machine could not be built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The message and its descriptors don't belong together.
    #[error("The supervisor sent {given} descriptors, and the machine needs {needed}")]
    Descriptors {
        /// How many came.
        given: usize,
        /// How many the configuration names.
        needed: usize,
    },
    /// A reserved one.
    #[error("A guest can't have context identifier {guest_cid}: 0, 1, 2 and 4294967295 are taken")]
    GuestCid {
        /// What was asked for.
        guest_cid: u32,
    },
    /// None, or above [`MAX_VCPUS`].
    #[error("A machine can't have {vcpu_count} processors: give it 1 to {MAX_VCPUS}")]
    VcpuCount {
        /// What was asked for.
        vcpu_count: u8,
    },
    /// Above [`MAX_DISKS`].
    #[error("A machine can't have {count} disks: {MAX_DISKS} at most")]
    DiskCount {
        /// What was asked for.
        count: usize,
    },
    /// The descriptor is not `/dev/kvm`, or a KVM of another world.
    #[error("The descriptor for KVM does not answer as KVM does")]
    NotKvm,
    /// A step that KVM refused.
    #[error("KVM did not {action}")]
    Kvm {
        /// What it was asked for.
        action: &'static str,
        /// Its failure.
        source: io::Error,
    },
    /// Guest memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The kernel file.
    #[error("The kernel file can't be used")]
    Kernel(#[source] KernelError),
    /// The initramfs file.
    #[error("The initramfs file can't be used")]
    Initramfs(#[source] InitramfsError),
    /// A disk.
    #[error("Disk {index} can't be used")]
    Disk {
        /// Which: 0 is `/dev/vda`.
        index: usize,
        /// Why.
        source: DiskError,
    },
    /// The command line.
    #[error(transparent)]
    Cmdline(#[from] CmdlineError),
    /// What the kernel finds in memory.
    #[error("The boot parameters could not be written to guest memory")]
    BootInfo(#[source] vm_memory::GuestMemoryError),
    /// CPUID.
    #[error(transparent)]
    Cpuid(#[from] CpuidError),
    /// Registers.
    #[error(transparent)]
    Registers(#[from] RegistersError),
    /// Two devices at one address.
    #[error(transparent)]
    Bus(#[from] BusError),
    /// A vCPU's thread.
    #[error(transparent)]
    Vcpu(#[from] VcpuError),
    /// Descriptors and other resources of the system.
    #[error("The system did not provide {what}")]
    System {
        /// What was asked for.
        what: &'static str,
        /// Its failure.
        source: io::Error,
    },
}

/// Builds the machine. `descriptors` are those of [`crate::control::ToMachine::Start`].
///
/// # Errors
/// See [`BuildError`]; nothing of the machine is left then.
pub(crate) fn build(
    config: &MachineConfig,
    descriptors: Vec<OwnedFd>,
    guest_connections: Box<dyn Incoming>,
    hooks: &Arc<dyn Hooks>,
) -> Result<Parts, BuildError> {
    let files = Files::sort(config, descriptors)?;
    if config.vcpu_count == 0 || config.vcpu_count > MAX_VCPUS {
        return Err(BuildError::VcpuCount {
            vcpu_count: config.vcpu_count,
        });
    }
    if config.guest_cid < MIN_GUEST_CID || config.guest_cid == u32::MAX {
        return Err(BuildError::GuestCid {
            guest_cid: config.guest_cid,
        });
    }
    let kvm = shell::kvm_from(files.kvm)?;
    let memory = memory::map(config.memory_mib)?;
    // KVM waits for grace periods of the host's kernel while it creates a virtual machine: time enough to read the files.
    let (vm, (kernel, initramfs)) = thread::scope(|scope| {
        let loading = thread::Builder::new()
            .name(String::from("load"))
            .stack_size(THREAD_STACK_BYTES)
            .spawn_scoped(scope, || load(files.kernel, files.initramfs, &memory))
            .map_err(shell::system(
                "a thread to load files with, as where a control group has no room for it (`pids.max`)",
            ))?;
        let vm = shell::with_memory(&kvm, &memory);
        let loaded = loading.join().unwrap_or_else(|panic| resume_unwind(panic));
        Ok::<_, BuildError>((vm?, loaded?))
    })?;

    let orders = Orders {
        serial: SerialPort::new(None, wiring::console_sink(files.console)?),
        disks: config.disks.iter().cloned().zip(files.disks).collect(),
        guest_cid: config.guest_cid,
        guest_connections,
    };
    let wired = wiring::wire(&vm, &memory, orders)?;

    let cmdline = cmdline::build(&wired.on_cmdline, config.has_console, &config.cmdline)?;
    let info = BootInfo {
        kernel: &kernel,
        initramfs,
        cmdline: &cmdline,
        rng_seed: &config.rng_seed,
        vcpu_count: config.vcpu_count,
    };
    boot::write(&memory, &info).map_err(BuildError::BootInfo)?;

    let cpuid = CpuidTemplate::new(&kvm, config.vcpu_count)?;
    let vcpus = create_vcpus(&vm, &cpuid, config.vcpu_count, &kernel)?;
    let shape = Shape {
        memory_mib: config.memory_mib,
        guest_cid: config.guest_cid,
        cpuid,
    };
    let core = Core { shape, vm, memory };
    Ok(Parts::assemble(core, wired, vcpus, hooks)?)
}

/// The descriptors of a start message, by what they are for.
struct Files {
    kvm: OwnedFd,
    kernel: OwnedFd,
    initramfs: Option<OwnedFd>,
    console: Option<OwnedFd>,
    disks: Vec<OwnedFd>,
}

impl Files {
    fn sort(config: &MachineConfig, descriptors: Vec<OwnedFd>) -> Result<Self, BuildError> {
        let count = config.disks.len();
        if count > MAX_DISKS {
            return Err(BuildError::DiskCount { count });
        }
        let needed =
            2 + usize::from(config.has_initramfs) + usize::from(config.has_console) + count;
        let given = descriptors.len();
        let wrong = BuildError::Descriptors { given, needed };
        if given != needed {
            return Err(wrong);
        }
        let mut descriptors = descriptors.into_iter();
        let (Some(kvm), Some(kernel)) = (descriptors.next(), descriptors.next()) else {
            return Err(wrong);
        };
        let initramfs = config.has_initramfs.then(|| descriptors.next()).flatten();
        let console = config.has_console.then(|| descriptors.next()).flatten();
        Ok(Self {
            kvm,
            kernel,
            initramfs,
            console,
            disks: descriptors.collect(),
        })
    }
}

fn load(
    kernel: OwnedFd,
    initramfs: Option<OwnedFd>,
    memory: &GuestMemoryMmap,
) -> Result<(Kernel, Option<Initramfs>), BuildError> {
    let kernel = kernel::load(kernel, memory).map_err(BuildError::Kernel)?;
    let initramfs = initramfs
        .map(|file| kernel::load_initramfs(file, memory, &kernel))
        .transpose()
        .map_err(BuildError::Initramfs)?;
    Ok((kernel, initramfs))
}

fn create_vcpus(
    vm: &VmFd,
    cpuid: &CpuidTemplate,
    vcpu_count: u8,
    kernel: &Kernel,
) -> Result<Vec<VcpuFd>, BuildError> {
    (0..vcpu_count)
        .map(|id| {
            let vcpu = vm
                .create_vcpu(id.into())
                .map_err(kvm_did_not("create a vCPU"))?;
            vcpu.set_cpuid2(&cpuid.for_vcpu(id)?)
                .map_err(kvm_did_not("take a vCPU's features"))?;
            if let Some(xcr0) = cpuid.extended_states() {
                registers::set_extended_states(&vcpu, xcr0)?;
            }
            registers::set_local_interrupts(&vcpu)?;
            if id == 0 {
                registers::set_boot_processor(&vcpu, kernel.entry)?;
            }
            Ok(vcpu)
        })
        .collect()
}
