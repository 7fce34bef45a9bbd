//! One store of QEMU's machine code, taken out: without it an emulated guest gets each of its interrupts once.
//!
//! VMRUN may inject an event into the guest (AMD64 Architecture Programmer's Manual, volume 2, section 15.20). QEMU's
//! `helper_vmrun` notes an external interrupt's vector as the pending exception, and then delivers it itself, at once:
//!
//! ```c
//! case SVM_EVTINJ_TYPE_INTR:
//!     cs->exception_index = vector;           /* the store */
//!     env->error_code = event_inj_err;
//!     env->exception_is_int = 0;
//!     env->exception_next_eip = -1;
//!     do_interrupt_x86_hardirq(env, vector, 1);
//!     break;
//! ```
//!
//! Nothing takes the note back. Where something makes the processor's thread leave its loop before the next exit from the guest
//! (a full translation buffer, work for the other processor, with counted instructions any timer), the vector is delivered once
//! more: into a guest that has its interrupts off, which then stands still or ends in a triple fault, or into the host's kernel,
//! which panics. Without the store the note stays what it is between two instructions: no exception.
//!
//! Read in QEMU 7.2, 10.0 and 11.1, and seen in the memory of guests that stood still.

use std::io;
use std::path::Path;

/// The code of that case in the program that Debian builds: hexadecimal bytes, `..` for what a rebuild may move.
pub(super) const INJECTION: &str = "41 0f b6 .. \
                         44 89 .. .. .. .. .. \
                         89 b3 .. .. ff ff \
                         c7 83 .. .. .. .. 00 00 00 00 \
                         48 c7 83 .. .. .. .. ff ff ff ff \
                         f6 05 .. .. .. .. 02";
/// Where in it the store is: `mov %esi, exception_index(%rbx)`.
const STORE_AT: usize = 11;
/// An instruction of the store's length that does nothing: `nopw 0x0(%rax,%rax,1)`.
const NOTHING: [u8; 6] = [0x66, 0x0f, 0x1f, 0x44, 0x00, 0x00];

/// Why the program stays as it is.
#[derive(Debug, thiserror::Error)]
pub(super) enum MendError {
    /// Another compiler, or another source.
    #[error(
        "The code that delivers an injected interrupt was found {0} times in the program, not once"
    )]
    Unknown(usize),
    /// The program could not be read or written.
    #[error("The program could not be changed")]
    Io(#[from] io::Error),
}

/// Takes the store out of the QEMU at `program`.
pub(super) fn mend(program: &Path) -> Result<(), MendError> {
    let mut code = std::fs::read(program)?;
    take_out(&mut code)?;
    Ok(std::fs::write(program, code)?)
}

fn take_out(code: &mut [u8]) -> Result<(), MendError> {
    let pattern: Vec<Option<u8>> = INJECTION
        .split_whitespace()
        .map(|byte| u8::from_str_radix(byte, 16).ok())
        .collect();
    let is_it = |window: &[u8]| {
        pattern
            .iter()
            .zip(window)
            .all(|(wanted, byte)| wanted.is_none_or(|wanted| wanted == *byte))
    };
    let found: Vec<usize> = code
        .windows(pattern.len())
        .enumerate()
        .filter_map(|(at, window)| is_it(window).then_some(at))
        .collect();
    let store = match found.as_slice() {
        [at] => code.get_mut(at + STORE_AT..at + STORE_AT + NOTHING.len()),
        _ => None,
    };
    store
        .ok_or(MendError::Unknown(found.len()))?
        .copy_from_slice(&NOTHING);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The code as it is in QEMU 10.0.13 of Debian 13; 11.1.3 has other displacements.
    const DEBIAN: [u8; 45] = [
        0x41, 0x0f, 0xb6, 0xf4, 0x44, 0x89, 0xab, 0xe0, 0x33, 0x00, 0x00, 0x89, 0xb3, 0x10, 0xd7,
        0xff, 0xff, 0xc7, 0x83, 0xe4, 0x33, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x48, 0xc7, 0x83,
        0xe8, 0x33, 0x00, 0x00, 0xff, 0xff, 0xff, 0xff, 0xf6, 0x05, 0xec, 0xe2, 0x3d, 0x01, 0x02,
    ];

    fn program(times: usize) -> Vec<u8> {
        let mut code = vec![0x90; 100];
        for _ in 0..times {
            code.extend(DEBIAN);
        }
        code
    }

    #[test]
    fn the_store_and_nothing_else_is_taken_out() {
        let before = program(1);
        let mut after = before.clone();

        take_out(&mut after).unwrap();

        let store = 100 + STORE_AT..100 + STORE_AT + NOTHING.len();
        assert_eq!(after[store.clone()], NOTHING);
        assert_eq!(after[..store.start], before[..store.start]);
        assert_eq!(after[store.end..], before[store.end..]);
    }

    #[test]
    fn test_take_out_other_program_returns_unknown() {
        for times in [0, 2] {
            let mut code = program(times);

            let result = take_out(&mut code);

            assert!(matches!(result, Err(MendError::Unknown(found)) if found == times));
            assert_eq!(code, program(times));
        }
    }
}
