//! The devices of a machine: made, put behind their addresses, and connected to KVM.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use devices::block::Block;
use devices::block::request::DISK_ID_LEN;
use devices::bus::{Bus, BusDevice};
use devices::reset::ResetPort;
use devices::serial::{SerialPort, Sink};
use devices::virtio::mmio::QUEUE_NOTIFY_OFFSET;
use devices::virtio::{MmioTransport, Preserve, VirtioDevice};
use devices::vsock::{Incoming, Vsock};
use event_manager::MutEventSubscriber;
use kvm_ioctls::{IoEventAddress, VmFd};
use vm_memory::GuestMemoryMmap;

use crate::builder::BuildError;
use crate::cmdline::MmioDevice;
use crate::control::DiskConfig;
use crate::disk::FileDisk;
use crate::end::EndSignal;
use crate::layout;
use crate::line::Line;
use crate::machine::Subscriber;
use crate::shell::{kvm_did_not, system};
use crate::vcpu::Buses;

/// Where the guest's console output goes.
///
/// # Errors
/// [`BuildError::System`].
pub(crate) fn console_sink(console: Option<OwnedFd>) -> Result<Sink, BuildError> {
    let Some(console) = console else {
        return Ok(Sink::new());
    };
    rustix::io::ioctl_fionbio(&console, true)
        .map_err(|error| system("a console that does not block")(error.into()))?;
    Ok(Sink::forwarding(Box::new(File::from(console))))
}

/// What the devices are made from.
pub(crate) struct Orders {
    /// The console.
    pub(crate) serial: SerialPort,
    /// The disks, each with its file, in order.
    pub(crate) disks: Vec<(DiskConfig, OwnedFd)>,
    /// The guest's vsock context identifier.
    pub(crate) guest_cid: u32,
    /// Who hears of the guest's connections.
    pub(crate) guest_connections: Box<dyn Incoming>,
}

/// The devices, behind their addresses and connected to KVM.
pub(crate) struct Wired {
    pub(crate) buses: Buses,
    pub(crate) serial: Arc<SerialPort>,
    pub(crate) end: Arc<EndSignal>,
    pub(crate) subscribers: Vec<Subscriber>,
    pub(crate) transports: Vec<Arc<dyn Preserve>>,
    pub(crate) vsock: Arc<Mutex<Vsock>>,
    /// The virtio devices as the kernel's command line names them.
    pub(crate) on_cmdline: Vec<MmioDevice>,
}

/// Makes all devices.
///
/// # Errors
/// See [`BuildError`].
pub(crate) fn wire(
    vm: &Arc<VmFd>,
    memory: &GuestMemoryMmap,
    orders: Orders,
) -> Result<Wired, BuildError> {
    let end = Arc::new(EndSignal::new().map_err(system("an event descriptor"))?);
    let serial = Arc::new(orders.serial);
    let ports = port_bus(&serial, &end)?;
    let mut virtio = VirtioDevices::new(vm, memory);
    for (index, (disk, file)) in orders.disks.into_iter().enumerate() {
        let file = FileDisk::new(file, disk.read_only)
            .map_err(|source| BuildError::Disk { index, source })?;
        let block = Block::new(Box::new(file), disk_id(&disk.serial))
            .map_err(system("an event descriptor"))?;
        virtio.add(Arc::new(Mutex::new(block)))?;
    }
    let vsock = Vsock::new(orders.guest_cid, orders.guest_connections)
        .map_err(system("an event descriptor"))?;
    let vsock = Arc::new(Mutex::new(vsock));
    virtio.add(Arc::clone(&vsock))?;
    Ok(Wired {
        buses: Buses {
            ports: Arc::new(ports),
            mmio: Arc::new(virtio.bus),
        },
        serial,
        end,
        subscribers: virtio.subscribers,
        transports: virtio.transports,
        vsock,
        on_cmdline: virtio.on_cmdline,
    })
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
    vm: &'a Arc<VmFd>,
    memory: &'a GuestMemoryMmap,
    bus: Bus,
    subscribers: Vec<Subscriber>,
    transports: Vec<Arc<dyn Preserve>>,
    on_cmdline: Vec<MmioDevice>,
}

impl<'a> VirtioDevices<'a> {
    fn new(vm: &'a Arc<VmFd>, memory: &'a GuestMemoryMmap) -> Self {
        Self {
            vm,
            memory,
            bus: Bus::new(),
            subscribers: Vec::new(),
            transports: Vec::new(),
            on_cmdline: Vec::new(),
        }
    }

    /// Gives the device the next address and interrupt, and connects it to KVM: kicks come as events (ioeventfd), past the processor's
    /// thread.
    fn add<D>(&mut self, device: Arc<Mutex<D>>) -> Result<(), BuildError>
    where
        D: VirtioDevice + MutEventSubscriber + std::fmt::Debug + 'static,
    {
        let index = self.on_cmdline.len();
        let place = MmioDevice {
            address: layout::VIRTIO_MMIO + index as u64 * layout::VIRTIO_MMIO_BYTES,
            irq: layout::FIRST_VIRTIO_IRQ + u32::try_from(index).unwrap_or(u32::MAX),
        };
        let line = Line::new(self.vm, place.irq);
        let transport =
            MmioTransport::new(Arc::clone(&device), self.memory.clone(), Box::new(line));
        let notify = IoEventAddress::Mmio(place.address + QUEUE_NOTIFY_OFFSET);
        for (queue, event) in (0u32..).zip(transport.queue_events().iter()) {
            self.vm
                .register_ioevent(event, &notify, queue)
                .map_err(kvm_did_not("connect a queue's notification"))?;
        }
        let transport = Arc::new(transport);
        self.transports
            .push(Arc::clone(&transport) as Arc<dyn Preserve>);
        self.bus
            .insert(place.address, layout::VIRTIO_MMIO_BYTES, transport)?;
        self.subscribers.push(device);
        self.on_cmdline.push(place);
        Ok(())
    }
}
