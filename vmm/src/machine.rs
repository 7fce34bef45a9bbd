//! A machine that is ready to run, however it came to be.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use devices::serial::SerialPort;
use devices::virtio::Preserve;
use devices::vsock::Vsock;
use event_manager::MutEventSubscriber;
use kvm_ioctls::{VcpuFd, VmFd};
use vm_memory::GuestMemoryMmap;

use crate::cpuid::CpuidTemplate;
use crate::end::EndSignal;
use crate::serve::Hooks;
use crate::vcpu::{StartLine, Vcpu, VcpuError};
use crate::wiring::Wired;

/// Everything that the event loop has to serve.
pub(crate) type Subscriber = Arc<Mutex<dyn MutEventSubscriber + Send>>;

/// A machine that is ready to run; its vCPUs wait.
///
/// Fields are dropped in this order: first the vCPUs stop, then what they use goes.
#[derive(Debug)]
pub(crate) struct Machine {
    /// The processors; the first one boots.
    pub(crate) vcpus: Vec<Vcpu>,
    /// Where the guest prints.
    pub(crate) serial: Arc<SerialPort>,
    /// How the machine ends by itself.
    pub(crate) end: Arc<EndSignal>,
    /// The virtio devices with their registers, in the order of their addresses.
    pub(crate) transports: Vec<Arc<dyn Preserve>>,
    /// The one among them that the supervisor talks through.
    pub(crate) vsock: Arc<Mutex<Vsock>>,
    /// What is left.
    pub(crate) core: Core,
}

/// A machine without its devices and threads.
#[derive(Debug)]
pub(crate) struct Core {
    /// What it is made of.
    pub(crate) shape: Shape,
    /// The virtual machine.
    pub(crate) vm: Arc<VmFd>,
    /// Its memory.
    pub(crate) memory: GuestMemoryMmap,
}

/// What a machine is made of, beside its devices.
#[derive(Debug)]
pub(crate) struct Shape {
    /// Memory in MiB.
    pub(crate) memory_mib: u32,
    /// The guest's vsock context identifier.
    pub(crate) guest_cid: u32,
    /// What the processors say of themselves.
    pub(crate) cpuid: CpuidTemplate,
}

/// A machine, and what the event loop has to serve of it.
pub(crate) struct Parts {
    pub(crate) machine: Machine,
    /// Its devices.
    pub(crate) subscribers: Vec<Subscriber>,
}

impl Parts {
    /// Starts the processors' threads, paused.
    ///
    /// # Errors
    /// [`VcpuError`].
    pub(crate) fn assemble(
        core: Core,
        wired: Wired,
        vcpus: Vec<VcpuFd>,
        hooks: &Arc<dyn Hooks>,
    ) -> Result<Self, VcpuError> {
        let start_line = Arc::new(StartLine::new(vcpus.len()));
        let vcpus = (0..)
            .zip(vcpus)
            .map(|(id, vcpu)| {
                let (buses, end) = (wired.buses.clone(), Arc::clone(&wired.end));
                Vcpu::spawn(id, vcpu, buses, end, hooks, &start_line)
            })
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Self {
            machine: Machine {
                vcpus,
                serial: wired.serial,
                end: wired.end,
                transports: wired.transports,
                vsock: wired.vsock,
                core,
            },
            subscribers: wired.subscribers,
        })
    }
}

/// Locks, also after another thread panicked while it held the lock.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
