//! Where everything is in a guest's physical address space.
//!
//! ```text
//!  0x0000_0500  boot GDT                 ┐
//!  0x0000_7000  boot_params (zero page)  │
//!  0x0000_8ff0  boot stack, downwards    │ conventional memory: RAM that the kernel may
//!  0x0000_9000  PML4, PDPT, PD           │ take once it has read what is in it
//!  0x0000_c000  setup_data: random seed  │
//!  0x0002_0000  command line             ┘
//!  0x0009_fc00  MP table                 ─ last KiB of conventional memory: not RAM in the memory map
//!  0x0010_0000  kernel, … initramfs behind it
//!  0xc000_0000  the hole: no RAM up to 4 GiB
//!  0xd000_0000  virtio-mmio devices, 4 KiB each
//!  0xfec0_0000  IO-APIC
//!  0xfee0_0000  local APICs
//!  0xfffb_c000  KVM's identity map and task state segment (Intel only)
//!  0x1_0000_0000  the RAM that did not fit below the hole
//! ```
//!
//! The addresses in conventional memory are free choices: Linux's 64-bit boot protocol only wants `boot_params`, the command line,
//! and what they point to in mapped RAM that the kernel's own segments don't cover (Linux,
//! Documentation/arch/x86/boot.rst).

/// The global descriptor table that a boot processor starts with.
pub const BOOT_GDT: u64 = 0x500;

/// `struct boot_params`, one page.
pub const ZERO_PAGE: u64 = 0x7000;

/// First value of the stack pointer: below the page tables.
pub const BOOT_STACK: u64 = 0x8ff0;

/// Top-level page table.
pub const PML4: u64 = 0x9000;

/// Page directory pointer table.
pub const PDPT: u64 = 0xa000;

/// Page directory: 512 pages of 2 MiB.
pub const PAGE_DIRECTORY: u64 = 0xb000;

/// What the boot page tables map one to one: all of it is writable and executable.
pub const IDENTITY_MAPPED_BYTES: u64 = 1 << 30;

/// `struct setup_data` with the random seed.
pub const SETUP_DATA: u64 = 0xc000;

/// The kernel's command line, zero-terminated.
pub const CMDLINE: u64 = 0x2_0000;

/// Room for the command line with its zero: `COMMAND_LINE_SIZE` of x86 Linux (arch/x86/include/asm/setup.h).
pub const MAX_CMDLINE_BYTES: usize = 2048;

/// End of conventional memory, and the MP table: Linux looks for it in the last KiB of 640 KiB
/// (MultiProcessor Specification 1.4 §4, `mpparse_find_mptable`).
pub const MP_TABLE: u64 = 0x9_fc00;

/// Room for the MP table.
pub const MAX_MP_TABLE_BYTES: usize = 0x400;

/// First byte above the PC's first MiB: kernels are loaded from here on.
pub const HIGH_MEMORY: u64 = 0x10_0000;

/// First address without RAM: 1 GiB below 4 GiB, for the devices.
pub const HOLE_START: u64 = 0xc000_0000;

/// First address above the hole.
pub const HOLE_END: u64 = 0x1_0000_0000;

/// First virtio-mmio device.
pub const VIRTIO_MMIO: u64 = 0xd000_0000;

/// Bytes of each virtio-mmio device; a page, so that a device can be mapped alone.
pub const VIRTIO_MMIO_BYTES: u64 = 0x1000;

/// The IO-APIC that KVM emulates (`IOAPIC_DEFAULT_BASE_ADDRESS`, arch/x86/kvm/ioapic.h).
pub const IO_APIC: u32 = 0xfec0_0000;

/// The local APICs (`APIC_DEFAULT_PHYS_BASE`, arch/x86/include/asm/apicdef.h).
pub const LOCAL_APIC: u32 = 0xfee0_0000;

/// One page that KVM uses on Intel processors without unrestricted guests (KVM API 4.35).
pub const KVM_IDENTITY_MAP: u64 = 0xfffb_c000;

/// Three pages that KVM uses on Intel processors (KVM API 4.13).
pub const KVM_TSS: usize = 0xfffb_d000;

/// First interrupt of the virtio devices: 0 to 4 belong to the timer, keyboard, cascade and serial ports of a PC.
pub const FIRST_VIRTIO_IRQ: u32 = 5;

/// The serial port COM1.
pub const SERIAL_PORT: u64 = 0x3f8;

/// Registers of a 16550.
pub const SERIAL_PORT_BYTES: u64 = 8;

/// The keyboard controller's data port; its command port, which resets a PC, is 4 above.
pub const I8042_PORT: u64 = 0x60;

/// From the data port to the command port.
pub const I8042_PORT_BYTES: u64 = 5;
