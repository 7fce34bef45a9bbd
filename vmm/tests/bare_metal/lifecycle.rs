//! How a guest begins and ends.

use sandvmm_vmm::control::EndReason;

use crate::guest::{Guest, kvm_or_skip};
use crate::payload::payload;

payload!(
    /// Prints, then resets as Linux does.
    prints_and_resets,
    "lea rsi, [rip + 3f]",
    "mov dx, 0x3f8",
    "2: mov al, [rsi]",
    "test al, al",
    "jz 4f",
    "out dx, al",
    "inc rsi",
    "jmp 2b",
    "4: mov al, 0xfe",
    "out 0x64, al",
    "5: jmp 5b",
    "3: .asciz \"Hello from ring 0\\n\"",
);

#[test]
fn a_guest_prints_and_resets() {
    let kvm = kvm_or_skip!("a_guest_prints_and_resets");

    let ended = Guest::new(prints_and_resets()).start(kvm).ended();

    assert_eq!(ended.reason, EndReason::Reset);
    assert_eq!(ended.console, "Hello from ring 0\n");
}
