//! One recipe: from a configuration and open descriptors to a machine that is ready to run.

use std::fs::File;
use std::io;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::panic::resume_unwind;
use std::sync::{Arc, Mutex};
use std::thread;

use devices::block::Block;
use devices::block::request::DISK_ID_LEN;
use devices::bus::{Bus, BusDevice, BusError};
use devices::reset::ResetPort;
use devices::serial::{SerialPort, Sink};
use devices::virtio::mmio::QUEUE_NOTIFY_OFFSET;
use devices::virtio::{MmioTransport, VirtioDevice};
use devices::vsock::{Incoming, Vsock};
use event_manager::MutEventSubscriber;
use kvm_ioctls::{IoEventAddress, Kvm, VcpuFd, VmFd};
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::boot::{self, BootInfo};
use crate::cmdline::{self, CmdlineError, MmioDevice};
use crate::control::{MAX_DISKS, MachineConfig};
use crate::cpuid::{CpuidError, CpuidTemplate};
use crate::disk::{DiskError, FileDisk};
use crate::end::EndSignal;
use crate::kernel::{self, Initramfs, InitramfsError, Kernel, KernelError};
use crate::layout;
use crate::memory::{self, MemoryError};
use crate::mptable::MAX_VCPUS;
use crate::registers::{self, RegistersError};
use crate::serve::Hooks;
use crate::vcpu::{Buses, Vcpu, VcpuError};

/// The version of KVM's interface, the only one there has been since 2007.
const KVM_API_VERSION: i32 = 12;

/// The first context identifier that a guest may have (virtio 1.2 §5.10.4).
const MIN_GUEST_CID: u32 = 3;

/// How often creating a virtual machine is tried again when a signal interrupts it.
const MAX_CREATE_RETRIES: u32 = 100;

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

/// Everything that the event loop has to serve.
pub type Subscriber = Arc<Mutex<dyn MutEventSubscriber + Send>>;

/// A machine that is ready to run; its vCPUs wait.
///
/// Fields are dropped in this order: first the vCPUs stop, then what they use goes.
#[derive(Debug)]
pub struct Machine {
    /// The processors; the first one boots.
    pub vcpus: Vec<Vcpu>,
    /// Where the guest prints.
    pub serial: Arc<SerialPort>,
    /// How the machine ends by itself.
    pub end: Arc<EndSignal>,
    /// The virtual machine.
    pub vm: VmFd,
    /// Its memory.
    pub memory: GuestMemoryMmap,
}

/// A machine, and what the event loop needs to know of it.
pub(crate) struct Parts {
    pub(crate) machine: Machine,
    /// Its devices.
    pub(crate) subscribers: Vec<Subscriber>,
    /// The one among them that the supervisor talks through.
    pub(crate) vsock: Arc<Mutex<Vsock>>,
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
    let kvm = kvm_from(files.kvm)?;
    let memory = memory::map(config.memory_mib)?;
    // KVM waits for grace periods of the host's kernel while it creates a virtual machine: time enough to read the files.
    let (vm, (kernel, initramfs)) = thread::scope(|scope| {
        let loading = thread::Builder::new()
            .name(String::from("load"))
            .spawn_scoped(scope, || load(files.kernel, files.initramfs, &memory))
            .map_err(system("a thread"))?;
        let vm = create_vm(&kvm);
        let loaded = loading.join().unwrap_or_else(|panic| resume_unwind(panic));
        Ok::<_, BuildError>((vm?, loaded?))
    })?;
    // All memory slots before the interrupt controller; KVM's own, at these two addresses, too.
    memory::register(&vm, &memory)?;
    reserve_for_kvm(&vm)?;
    vm.create_irq_chip()
        .map_err(kvm_did_not("create the interrupt controller"))?;

    let end = Arc::new(EndSignal::new().map_err(system("an event descriptor"))?);
    let serial = Arc::new(serial_port(files.console)?);
    let ports = port_bus(&serial, &end)?;
    let mut virtio = VirtioDevices::new(&vm, &memory);
    for (index, (disk, file)) in config.disks.iter().zip(files.disks).enumerate() {
        let file = FileDisk::new(file, disk.read_only)
            .map_err(|source| BuildError::Disk { index, source })?;
        let block = Block::new(Box::new(file), disk_id(&disk.serial))
            .map_err(system("an event descriptor"))?;
        virtio.add(Arc::new(Mutex::new(block)))?;
    }
    let vsock =
        Vsock::new(config.guest_cid, guest_connections).map_err(system("an event descriptor"))?;
    let vsock = Arc::new(Mutex::new(vsock));
    virtio.add(Arc::clone(&vsock))?;

    let VirtioDevices {
        bus: mmio,
        subscribers,
        on_cmdline,
        ..
    } = virtio;

    let cmdline = cmdline::build(&on_cmdline, config.has_console, &config.cmdline)?;
    let info = BootInfo {
        kernel: &kernel,
        initramfs,
        cmdline: &cmdline,
        rng_seed: &config.rng_seed,
        vcpu_count: config.vcpu_count,
    };
    boot::write(&memory, &info).map_err(BuildError::BootInfo)?;

    let buses = Buses {
        ports: Arc::new(ports),
        mmio: Arc::new(mmio),
    };
    let mut vcpus = Vec::with_capacity(config.vcpu_count.into());
    for (id, vcpu) in (0..).zip(create_vcpus(&kvm, &vm, config.vcpu_count, &kernel)?) {
        vcpus.push(Vcpu::spawn(
            id,
            vcpu,
            buses.clone(),
            Arc::clone(&end),
            hooks,
        )?);
    }
    Ok(Parts {
        machine: Machine {
            vcpus,
            serial,
            end,
            vm,
            memory,
        },
        subscribers,
        vsock,
    })
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

fn kvm_did_not(action: &'static str) -> impl Fn(kvm_ioctls::Error) -> BuildError {
    move |error| BuildError::Kvm {
        action,
        source: error.into(),
    }
}

fn system(what: &'static str) -> impl Fn(io::Error) -> BuildError {
    move |source| BuildError::System { what, source }
}

fn kvm_from(descriptor: OwnedFd) -> Result<Kvm, BuildError> {
    // SAFETY: the descriptor is open and ours alone; `Kvm` becomes its owner. That it is KVM's is no matter of memory
    // safety: another file answers the ioctls with an error.
    let kvm = unsafe { Kvm::from_raw_fd(descriptor.into_raw_fd()) };
    if kvm.get_api_version() == KVM_API_VERSION {
        Ok(kvm)
    } else {
        Err(BuildError::NotKvm)
    }
}

fn create_vm(kvm: &Kvm) -> Result<VmFd, BuildError> {
    let mut tries = 0;
    loop {
        match kvm.create_vm() {
            Err(error) if error.errno() == libc::EINTR && tries < MAX_CREATE_RETRIES => tries += 1,
            result => return result.map_err(kvm_did_not("create a virtual machine")),
        }
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

/// The pages that KVM needs for itself on some Intel processors.
fn reserve_for_kvm(vm: &VmFd) -> Result<(), BuildError> {
    vm.set_identity_map_address(layout::KVM_IDENTITY_MAP)
        .map_err(kvm_did_not("take the address of its identity map"))?;
    vm.set_tss_address(layout::KVM_TSS)
        .map_err(kvm_did_not("take the address of its task state segment"))
}

fn serial_port(console: Option<OwnedFd>) -> Result<SerialPort, BuildError> {
    let sink = match console {
        None => Sink::new(),
        Some(console) => {
            rustix::io::ioctl_fionbio(&console, true)
                .map_err(|error| system("a console that does not block")(error.into()))?;
            Sink::forwarding(Box::new(File::from(console)))
        }
    };
    Ok(SerialPort::new(None, sink))
}

fn port_bus(serial: &Arc<SerialPort>, end: &Arc<EndSignal>) -> Result<Bus, BuildError> {
    let reset = end
        .event()
        .try_clone()
        .map_err(system("an event descriptor"))?;
    let mut ports = Bus::new();
    ports.insert(
        layout::SERIAL_PORT,
        layout::SERIAL_PORT_BYTES,
        Arc::clone(serial) as Arc<dyn BusDevice>,
    )?;
    ports.insert(
        layout::I8042_PORT,
        layout::I8042_PORT_BYTES,
        Arc::new(ResetPort::new(reset)),
    )?;
    Ok(ports)
}

/// At most [`DISK_ID_LEN`] bytes of the serial number, padded with zeros.
fn disk_id(serial: &str) -> [u8; DISK_ID_LEN] {
    let mut id = [0; DISK_ID_LEN];
    for (slot, byte) in id.iter_mut().zip(serial.bytes()) {
        *slot = byte;
    }
    id
}

/// The virtio devices, as they are put behind their addresses one after another.
struct VirtioDevices<'a> {
    vm: &'a VmFd,
    memory: &'a GuestMemoryMmap,
    bus: Bus,
    subscribers: Vec<Subscriber>,
    on_cmdline: Vec<MmioDevice>,
}

impl<'a> VirtioDevices<'a> {
    fn new(vm: &'a VmFd, memory: &'a GuestMemoryMmap) -> Self {
        Self {
            vm,
            memory,
            bus: Bus::new(),
            subscribers: Vec::new(),
            on_cmdline: Vec::new(),
        }
    }

    /// Gives the device the next address and interrupt, and connects it to KVM: kicks come as events (ioeventfd), interrupts
    /// go as events (irqfd), neither through this process's code.
    fn add<D>(&mut self, device: Arc<Mutex<D>>) -> Result<(), BuildError>
    where
        D: VirtioDevice + MutEventSubscriber + std::fmt::Debug + 'static,
    {
        let index = self.on_cmdline.len();
        let place = MmioDevice {
            address: layout::VIRTIO_MMIO + index as u64 * layout::VIRTIO_MMIO_BYTES,
            irq: layout::FIRST_VIRTIO_IRQ + u32::try_from(index).unwrap_or(u32::MAX),
        };
        let line = EventFd::new(EFD_NONBLOCK).map_err(system("an event descriptor"))?;
        self.vm
            .register_irqfd(&line, place.irq)
            .map_err(kvm_did_not("connect an interrupt"))?;
        let transport =
            MmioTransport::new(Arc::clone(&device), self.memory.clone(), Box::new(line));
        let notify = IoEventAddress::Mmio(place.address + QUEUE_NOTIFY_OFFSET);
        for (queue, event) in (0u32..).zip(transport.queue_events().iter()) {
            self.vm
                .register_ioevent(event, &notify, queue)
                .map_err(kvm_did_not("connect a queue's notification"))?;
        }
        self.bus.insert(
            place.address,
            layout::VIRTIO_MMIO_BYTES,
            Arc::new(transport),
        )?;
        self.subscribers.push(device);
        self.on_cmdline.push(place);
        Ok(())
    }
}

fn create_vcpus(
    kvm: &Kvm,
    vm: &VmFd,
    vcpu_count: u8,
    kernel: &Kernel,
) -> Result<Vec<VcpuFd>, BuildError> {
    let cpuid = CpuidTemplate::new(kvm, vcpu_count)?;
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
