//! A guest that performs a list of accesses which the test has written.

use sandvmm_vmm::layout;

use crate::guest::Guest;
use crate::payload::payload;

/// Where the list lies.
const SCRIPT: u64 = 0x30_0000;

payload!(
    /// Performs 16-byte records of an operation, a value and an address, as [`Step`] says. Ends with a reset.
    performs_script,
    "mov qword ptr [0xa018], 0x200003", // 3 to 4 GiB
    "mov ebx, 0x300000",
    "2: mov eax, [rbx]",
    "mov ecx, [rbx + 4]",
    "mov rsi, [rbx + 8]",
    "add rbx, 16",
    "cmp eax, 1",
    "je 10f",
    "cmp eax, 2",
    "je 20f",
    "cmp eax, 3",
    "je 30f",
    "cmp eax, 4",
    "je 40f",
    "cmp eax, 5",
    "je 50f",
    "cmp eax, 6",
    "je 60f",
    "cmp eax, 7",
    "je 70f",
    "mov al, 0xfe",
    "out 0x64, al",
    "3: jmp 3b",
    // Write
    "10: mov [rsi], ecx",
    "jmp 2b",
    // Await
    "20: pause",
    "movzx eax, word ptr [rsi]",
    "cmp eax, ecx",
    "jne 20b",
    "jmp 2b",
    // Print
    "30: mov dx, 0x3f8",
    "31: test ecx, ecx",
    "jz 2b",
    "mov al, [rsi]",
    "out dx, al",
    "inc rsi",
    "dec ecx",
    "jmp 31b",
    // PrintRegister
    "40: mov eax, [rsi]",
    "mov dx, 0x3f8",
    "mov ecx, 4",
    "41: out dx, al",
    "shr eax, 8",
    "dec ecx",
    "jnz 41b",
    "jmp 2b",
    // SweepPorts: all three widths, both ways, from the address to the value, exclusive.
    "50: mov edx, esi",
    "51: cmp edx, ecx",
    "jae 2b",
    "in al, dx",
    "in ax, dx",
    "in eax, dx",
    "xor eax, eax",
    "out dx, al",
    "out dx, ax",
    "out dx, eax",
    "inc edx",
    "jmp 51b",
    // StringOut
    "60: mov dx, 0x3f8",
    "rep outsb",
    "jmp 2b",
    // RequestForEver: the device's QueueNotify in ecx, the queue at rsi.
    "70: mov r12, 1",
    "71: mov [rsi + 0x1002], r12w",
    "mov dword ptr [rcx], 0",
    "72: pause",
    "cmp [rsi + 0x2002], r12w",
    "jne 72b",
    "mov dx, 0x3f8",
    "mov rbp, [rsi + 0x10]", // The second descriptor's buffer.
    "mov edi, 8",
    "73: mov al, [rbp]",
    "out dx, al",
    "inc rbp",
    "dec edi",
    "jnz 73b",
    "inc r12",
    "jmp 71b",
);

/// One thing that the guest does.
#[derive(Clone, Copy)]
pub(crate) enum Step {
    /// Stores 32 bits.
    Write(u64, u32),
    /// Spins until the 16 bits at the address are these.
    Await(u64, u16),
    /// Prints so many bytes from the address on.
    Print(u64, u32),
    /// Prints the 32 bits at the address, the lowest byte first.
    PrintRegister(u64),
    /// Reads and writes every port of a range in 1, 2 and 4 bytes.
    SweepPorts(u16, u32),
    /// Prints so many bytes from the address on with one string instruction.
    PrintAtOnce(u64, u32),
    /// Makes the chain from descriptor 0 of queue 0 available again and again, to the block device with this number, and prints 8
    /// bytes of its second buffer each time. The queue's base is the first value.
    RequestForEver(u64, u64),
}

impl Step {
    fn record(self) -> Vec<u8> {
        let (operation, value, address) = match self {
            Self::Write(address, value) => (1u32, value, address),
            Self::Await(address, value) => (2, value.into(), address),
            Self::Print(address, bytes) => (3, bytes, address),
            Self::PrintRegister(address) => (4, 0, address),
            Self::SweepPorts(first, end) => (5, end, first.into()),
            Self::PrintAtOnce(address, bytes) => (6, bytes, address),
            Self::RequestForEver(base, device) => {
                let notify = u32::try_from(register(device, 0x50)).unwrap();
                (7, notify, base)
            }
        };
        let mut record = Vec::from(operation.to_le_bytes());
        record.extend_from_slice(&value.to_le_bytes());
        record.extend_from_slice(&address.to_le_bytes());
        record
    }
}

/// A guest that performs these steps, with `data` in its memory, and resets.
pub(crate) fn guest(steps: &[Step], data: &[(u64, Vec<u8>)]) -> Guest {
    let mut script: Vec<u8> = steps.iter().flat_map(|step| step.record()).collect();
    script.extend_from_slice(&[0; 16]);
    let mut data = data.to_vec();
    data.push((SCRIPT, script));
    Guest::with_data(performs_script(), &data)
}

/// A register of the virtio device with this number.
pub(crate) fn register(device: u64, offset: u64) -> u64 {
    layout::VIRTIO_MMIO + device * layout::VIRTIO_MMIO_BYTES + offset
}

/// A virtqueue of 8 entries that the test has laid out in guest memory.
pub(crate) struct Queue {
    pub(crate) index: u32,
    pub(crate) base: u64,
}

/// A descriptor: address, bytes, whether the device writes, whether the chain goes on with the next descriptor.
pub(crate) struct Descriptor(
    pub(crate) u64,
    pub(crate) u32,
    pub(crate) bool,
    pub(crate) bool,
);

impl Queue {
    /// Entries of each queue.
    const SIZE: u32 = 8;

    /// The index of the used ring.
    pub(crate) fn used_index(&self) -> u64 {
        self.base + 0x2002
    }

    /// Descriptor table and available ring, with these chain heads on offer.
    pub(crate) fn data(&self, descriptors: &[Descriptor], heads: &[u16]) -> (u64, Vec<u8>) {
        let mut bytes = Vec::new();
        for (next, Descriptor(address, len, writable, chained)) in (1u16..).zip(descriptors) {
            let flags = u16::from(*chained) | u16::from(*writable) << 1;
            bytes.extend_from_slice(&address.to_le_bytes());
            bytes.extend_from_slice(&len.to_le_bytes());
            bytes.extend_from_slice(&flags.to_le_bytes());
            bytes.extend_from_slice(&(if *chained { next } else { 0 }).to_le_bytes());
        }
        bytes.resize(0x1000, 0);
        bytes.extend_from_slice(&[0, 0]);
        bytes.extend_from_slice(&u16::try_from(heads.len()).unwrap().to_le_bytes());
        for head in heads {
            bytes.extend_from_slice(&head.to_le_bytes());
        }
        bytes.resize(0x3000, 0);
        (self.base, bytes)
    }
}

/// What a driver does to take a device into service (virtio 1.2 §3.1.1, §4.2.3).
pub(crate) fn start_device(device: u64, queues: &[Queue]) -> Vec<Step> {
    let write = |offset, value| Step::Write(register(device, offset), value);
    let low = |address: u64| u32::try_from(address).unwrap();
    let mut steps = vec![
        write(0x70, 0),
        write(0x70, 1),
        write(0x70, 3),
        write(0x24, 1), // VIRTIO_F_VERSION_1 is bit 0 of the second word.
        write(0x20, 1),
        write(0x70, 11),
    ];
    for queue in queues {
        steps.extend([
            write(0x30, queue.index),
            write(0x38, Queue::SIZE),
            write(0x80, low(queue.base)),
            write(0x90, low(queue.base + 0x1000)),
            write(0xa0, low(queue.base + 0x2000)),
            write(0x44, 1),
        ]);
    }
    steps.push(write(0x70, 15));
    steps
}

/// A kick.
pub(crate) fn notify(device: u64, queue: u32) -> Step {
    Step::Write(register(device, 0x50), queue)
}
