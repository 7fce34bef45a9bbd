//! From the boot protocol's entry to Rust code in ring 3, and the little that only ring 0 can do.
//!
//! Cases run in ring 3 with every port and all memory open to them: a hypervisor without hardware virtualization runs ring 3 at full
//! speed and emulates ring 0, instruction by instruction, without those of the floating-point unit that a compiler likes to use.
//! What needs ring 0 is behind the undefined instruction, one number an operation ([`Privileged`]): such a hypervisor knows exceptions, but
//! neither software interrupts nor system calls.

use core::arch::{asm, global_asm};

use crate::report;

/// Bytes of a processor's stack.
const STACK_BYTES: usize = 64 << 10;

/// Where the second processor begins, in real mode: a page below 1 MiB; the start-up interrupt's vector is its number.
pub(crate) const TRAMPOLINE: u64 = 0x1_0000;

global_asm!(
    ".pushsection .boot, \"awx\"",
    ".global _start",
    "_start:",
    "lea rsp, [boot_stack_end]",
    "mov r15d, offset tss_first_selector",
    "mov r14, rsi",
    "lea r13, [first_stack_end]",
    "lea r12, [enter_first]",
    // Both processors come here in 64-bit mode: r15 task, r14 argument, r13 stack, r12 function.
    "begin:",
    "lea rax, [pml4]",
    "mov cr3, rax",
    // SSE: no emulation, monitored, FXSAVE and exceptions by the system.
    "mov rax, cr0",
    "and eax, 0xfffffff3",
    "or eax, 2",
    "mov cr0, rax",
    "mov rax, cr4",
    "or eax, 0x600",
    "mov cr4, rax",
    "lgdt [gdt_pointer]",
    "lidt [idt_pointer]",
    "ltr r15w",
    "mov edi, 0x1b",
    "mov ds, edi",
    "mov es, edi",
    // To ring 3, interrupts off.
    "push 0x1b",
    "push r13",
    "push 2",
    "push 0x23",
    "push r12",
    "mov rdi, r14",
    "xor ebp, ebp",
    "iretq",
    // Exceptions: the stack has, below what the processor pushed, the vector and an error code.
    ".set vector, 0",
    ".balign 16",
    "stubs:",
    ".rept 32",
    ".balign 16",
    ".if vector == 8 || (vector >= 10 && vector <= 14) || vector == 17 || vector == 21 || vector == 29 || vector == 30",
    ".else",
    "push 0",
    ".endif",
    "push vector",
    "jmp fault",
    ".set vector, vector + 1",
    ".endr",
    "fault:",
    // In ring 0 it can only be a model-specific register that does not exist.
    "test byte ptr [rsp + 24], 3",
    "jz fault_in_ring_0",
    "cmp dword ptr [rsp], 6",
    "jne 5f",
    "cmp r9d, {call}",
    "jne 5f",
    // A call: the operation in r8. It comes back behind the two bytes of UD2.
    "add rsp, 16",
    "add qword ptr [rsp], 2",
    "jmp privileged",
    "5: push rax",
    "mov rax, [rsp + 8]",
    "mov [fault_vector], rax",
    "mov rax, [rsp + 24]",
    "mov [fault_address], rax",
    "lea rax, [faulted]",
    "mov [rsp + 24], rax",
    "pop rax",
    "add rsp, 16",
    "iretq",
    "fault_in_ring_0:",
    "add rsp, 16",
    "mov qword ptr [rsp], offset msr_refused",
    "iretq",
    "privileged:",
    "cmp r8d, 1",
    "je 1f",
    "cmp r8d, 2",
    "je 2f",
    "cmp r8d, 3",
    "je 3f",
    "cmp r8d, 4",
    "je 4f",
    "cmp r8d, 5",
    "je 7f",
    "cmp r8d, 6",
    "je 8f",
    "0: cli",
    "hlt",
    "jmp 0b",
    "1: rdmsr",
    "xor r8d, r8d",
    "iretq",
    "2: wrmsr",
    "xor r8d, r8d",
    "iretq",
    "msr_refused:",
    "mov r8d, 1",
    "iretq",
    // A fault without a table of handlers, and a jump to where there is no memory.
    "3: lidt [no_idt]",
    "ud2",
    "4: lidt [no_idt]",
    "mov eax, 0x8000000",
    "jmp rax",
    // An instruction on a device's register that KVM does not emulate.
    "7: mov eax, 0xd0000000",
    "lock cmpxchg16b [rax]",
    "jmp 7b",
    "8: cpuid",
    "iretq",
    // The second processor, in real mode at TRAMPOLINE.
    ".code16",
    ".global trampoline, trampoline_end",
    "trampoline:",
    "cli",
    "mov ax, cs",
    "mov ds, ax",
    // `lgdt` with a 32-bit base, of what is at a 16-bit offset; the assembler takes no difference there.
    ".byte 0x66, 0x0f, 0x01, 0x16",
    ".word small_gdt_pointer - trampoline",
    "mov eax, 0x20",
    "mov cr4, eax",
    "mov eax, offset pml4",
    "mov cr3, eax",
    "mov ecx, 0xc0000080",
    "rdmsr",
    "or eax, 0x100",
    "wrmsr",
    "mov eax, 0x80000001",
    "mov cr0, eax",
    // A far jump to a 32-bit offset, for the same reason.
    ".byte 0x66, 0xea",
    ".long second_in_long_mode",
    ".word 0x10",
    ".balign 8",
    "small_gdt_pointer: .word 5 * 8 - 1",
    ".long gdt",
    "trampoline_end:",
    ".code64",
    "second_in_long_mode:",
    "xor eax, eax",
    "mov ss, eax",
    "lea rsp, [second_ring_0_stack_end]",
    "mov r15d, offset tss_second_selector",
    "xor r14d, r14d",
    "lea r13, [second_stack_end]",
    "lea r12, [enter_second]",
    "jmp begin",
    // Tables. Flat segments: 0x10 and 0x18 as the boot protocol has them, 0x18 and 0x20 with 3 for ring 3.
    ".balign 16",
    "gdt: .quad 0, 0",
    ".quad 0x00af9b000000ffff",
    ".quad 0x00cff3000000ffff",
    ".quad 0x00affb000000ffff",
    ".set tss_first_selector, . - gdt",
    ".word port_bitmap_end - tss_first - 1, tss_first - _start",
    ".byte 0x10, 0x89, 0, 0",
    ".quad 0",
    ".set tss_second_selector, . - gdt",
    ".word port_bitmap_end - tss_second - 1, tss_second - _start",
    ".byte 0x10, 0x89, 0, 0",
    ".quad 0",
    "gdt_end:",
    "gdt_pointer: .word gdt_end - gdt - 1",
    ".quad gdt",
    "no_idt: .word 0",
    ".quad 0",
    ".balign 16",
    // Ring 3 may use every port by the bitmap; IOPL would do, but not where the hypervisor has no hardware's help.
    "tss_first: .long 0",
    ".quad boot_stack_end",
    ".fill 90, 1, 0",
    ".word port_bitmap - tss_first",
    "tss_second: .long 0",
    ".quad second_ring_0_stack_end",
    ".fill 90, 1, 0",
    ".word port_bitmap - tss_second",
    // With the bits that four bytes at the last port reach.
    "port_bitmap: .fill 8193, 1, 0",
    ".byte 0xff",
    "port_bitmap_end:",
    ".balign 16",
    "idt_pointer: .word 32 * 16 - 1",
    ".quad idt",
    ".balign 16",
    "idt:",
    ".set vector, 0",
    ".rept 32",
    ".word stubs - _start + vector * 16, 0x10",
    ".byte 0, 0x8e",
    ".word 0x10, 0, 0, 0, 0",
    ".set vector, vector + 1",
    ".endr",
    "fault_vector: .quad 0",
    "fault_address: .quad 0",
    // One to one, for ring 3 too: the first GiB, and the last below 4 GiB with the devices, in pages of 2 MiB.
    ".balign 4096",
    "pml4: .quad pdpt + 7",
    ".fill 511, 8, 0",
    "pdpt: .quad low + 7",
    ".quad 0, 0",
    ".quad high + 7",
    ".fill 508, 8, 0",
    ".set page, 0",
    "low: .rept 512",
    ".quad page + 0x87",
    ".set page, page + 0x200000",
    ".endr",
    ".set page, 0xc0000000",
    "high: .rept 512",
    ".quad page + 0x87",
    ".set page, page + 0x200000",
    ".endr",
    ".popsection",
    ".pushsection .bss",
    ".balign 16",
    ".skip 4096",
    "boot_stack_end:",
    ".skip 4096",
    "second_ring_0_stack_end:",
    ".skip {stack_bytes}",
    "first_stack_end:",
    ".skip {stack_bytes}",
    "second_stack_end:",
    ".popsection",
    // A function begins with its return address on the stack, 8 bytes off a multiple of 16.
    "enter_first: call {first}",
    "enter_second: call {second}",
    "faulted: and rsp, -16",
    "mov rdi, [fault_vector]",
    "mov rsi, [fault_address]",
    "call {fault}",
    call = const CALL,
    stack_bytes = const STACK_BYTES,
    first = sym crate::begin,
    second = sym crate::second::begin,
    fault = sym fault,
);

/// An exception in ring 3 that no case expects.
extern "C" fn fault(vector: u64, address: u64) -> ! {
    report::fail(format_args!("exception {vector} at {address:#x}"))
}

/// In R9, it tells a call from an undefined instruction that no case expects.
const CALL: u32 = 0x0ca1_1ed0;

/// What a call does.
#[derive(Clone, Copy)]
#[repr(u32)]
enum Privileged {
    Halt = 0,
    ReadMsr = 1,
    WriteMsr = 2,
    TripleFault = 3,
    JumpNowhere = 4,
    Unemulated = 5,
    Cpuid = 6,
}

/// `cli; hlt`, for ever.
pub(crate) fn halt() -> ! {
    forever(Privileged::Halt)
}

/// A fault for which there is no handler.
pub(crate) fn triple_fault() -> ! {
    forever(Privileged::TripleFault)
}

/// A jump to mapped addresses behind which there is no memory.
pub(crate) fn jump_nowhere() -> ! {
    forever(Privileged::JumpNowhere)
}

/// An instruction on a device's register that KVM does not emulate: in ring 3 it would only be an exception.
pub(crate) fn unemulated() -> ! {
    forever(Privileged::Unemulated)
}

fn forever(operation: Privileged) -> ! {
    // SAFETY: the operation does not come back.
    unsafe {
        asm!("ud2", in("r8") operation as u64, in("r9") CALL, options(noreturn));
    }
}

/// A model-specific register; `None` where reading it is an exception.
pub(crate) fn read_msr(index: u32) -> Option<u64> {
    let (low, high, refused): (u32, u32, u64);
    // SAFETY: reading a register has no effect on memory.
    unsafe {
        asm!("ud2", inout("r8") Privileged::ReadMsr as u64 => refused, in("r9") CALL, in("ecx") index, out("eax") low, out("edx") high);
    }
    (refused == 0).then_some(u64::from(high) << 32 | u64::from(low))
}

/// Writes a model-specific register; false where that is an exception.
///
/// # Safety
/// The caller answers for what the register does.
pub(crate) unsafe fn write_msr(index: u32, value: u64) -> bool {
    let refused: u64;
    let [low, high] = [value as u32, (value >> 32) as u32];
    // SAFETY: the caller's.
    unsafe {
        asm!("ud2", inout("r8") Privileged::WriteMsr as u64 => refused, in("r9") CALL, in("ecx") index, in("eax") low, in("edx") high);
    }
    refused == 0
}

/// What CPUID says in ring 0: EAX, EBX, ECX, EDX. Without hardware's help, ring 3 would be told by the processor itself.
pub(crate) fn cpuid(leaf: u32, subleaf: u32) -> [u32; 4] {
    let (mut a, mut c) = (leaf, subleaf);
    let (b, d): (u64, u32);
    // SAFETY: CPUID has no effect on memory; RBX, which the compiler keeps for itself, is as before.
    unsafe {
        asm!("mov {b}, rbx", "ud2", "xchg {b}, rbx", b = out(reg) b, in("r8") Privileged::Cpuid as u64, in("r9") CALL,
            inout("eax") a, inout("ecx") c, out("edx") d);
    }
    [a, b as u32, c, d]
}
