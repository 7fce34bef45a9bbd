//! A device's line to the interrupt controller in KVM.

use std::io;
use std::sync::{Arc, Mutex};

use devices::interrupt::Interrupt;
use kvm_ioctls::VmFd;

use crate::machine::lock;

/// A pin of the interrupt controller, as the device behind it sees it.
///
/// An irqfd would do the same through a thread of the host's kernel, since the pin is no message (`kvm_arch_set_irq_inatomic`,
/// arch/x86/kvm/irq_comm.c), and each waits for a grace period when the virtual machine goes.
#[derive(Debug)]
pub(crate) struct Line {
    vm: Arc<VmFd>,
    irq: u32,
    /// One edge at a time: a second rise before the first fall is none, and its reason would come after the guest has looked.
    edge: Mutex<()>,
}

impl Line {
    pub(crate) fn new(vm: &Arc<VmFd>, irq: u32) -> Self {
        Self {
            vm: Arc::clone(vm),
            irq,
            edge: Mutex::new(()),
        }
    }
}

impl Interrupt for Line {
    fn trigger(&self) -> io::Result<()> {
        let _edge = lock(&self.edge);
        let set = |active| self.vm.set_irq_line(self.irq, active);
        set(true).and_then(|()| set(false)).map_err(io::Error::from)
    }
}
