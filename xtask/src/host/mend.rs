//! Two stores of QEMU's machine code, taken out: without them an emulated guest lives as on a real processor.
//!
//! **An interrupt that is delivered twice.** VMRUN may inject an event into the guest (AMD64 Architecture Programmer's Manual,
//! volume 2, section 15.20). QEMU's `helper_vmrun` notes an external interrupt's vector as the pending exception, and then delivers it
//! itself, at once:
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
//! **Another processor's flags.** Each FXRSTOR and XRSTOR, so each switch between programs, on any processor, takes a flag of the
//! first one back that only a write to port F0h sets (the numeric error of an 80387):
//!
//! ```c
//! void cpu_clear_ignne(void)
//! {
//!     CPUX86State *env = &X86_CPU(first_cpu)->env;
//!     env->hflags2 &= ~HF2_IGNNE_MASK;        /* the store, and the load before it */
//! }
//! ```
//!
//! It is not atomic, and in the same word the first processor's own thread has what VMRUN and the exit from a guest set and take
//! back: whether there is nested paging, whether interrupts are on. What it writes between this load and this store is lost: a guest
//! that runs without nested paging ends in a triple fault at its first instruction, one without its interrupts stands still, and the
//! host's kernel panics when it is interrupted before it has its own GS base again. Nobody here writes to port F0h.
//!
//! Read in QEMU 7.2, 10.0, 10.2 and 11.1, and seen in the memory of guests that stood still or had ended.

use std::io;
use std::path::Path;

use crate::cache::CacheError;

/// A store in the program that Debian builds.
#[derive(Debug)]
struct Store {
    /// The code around it, as hexadecimal bytes; `..` for what a rebuild may move.
    code: &'static str,
    /// Where in that code the instruction is that stores.
    at: usize,
    /// An instruction of the same length that does nothing.
    nothing: &'static [u8],
}

/// What is taken out.
const STORES: [Store; 2] = [
    // mov %esi, exception_index(%rbx), in helper_vmrun; nopw 0x0(%rax,%rax,1)
    Store {
        code: "41 0f b6 .. \
               44 89 .. .. .. .. .. \
               89 b3 .. .. ff ff \
               c7 83 .. .. .. .. 00 00 00 00 \
               48 c7 83 .. .. .. .. ff ff ff ff \
               f6 05 .. .. .. .. 02",
        at: 11,
        nothing: &[0x66, 0x0f, 0x1f, 0x44, 0x00, 0x00],
    },
    // andl $~HF2_IGNNE_MASK, hflags2(%rax), in cpu_clear_ignne; cs nopw 0x0(%rax,%rax,1)
    Store {
        code: "e8 .. .. .. .. \
               81 a0 .. .. 00 00 7f ff ff ff \
               48 83 c4 08",
        at: 5,
        nothing: &[0x66, 0x2e, 0x0f, 0x1f, 0x84, 0x00, 0x00, 0x00, 0x00, 0x00],
    },
];

/// Why the program stays as it is.
#[derive(Debug, thiserror::Error)]
pub(super) enum MendError {
    /// Another compiler, or another source.
    #[error("The code that is to be mended was found {0} times in the program, not once")]
    Unknown(usize),
    /// The program could not be read or written.
    #[error("The program could not be read or changed: {0}")]
    Io(#[from] io::Error),
    /// There is nothing to mend.
    #[error("There is no program")]
    Absent,
    /// A cache from which no program may be executed, say.
    #[error("The mended copy does not start")]
    Unfit,
    /// There is no place for a copy.
    #[error(transparent)]
    Cache(#[from] CacheError),
}

/// What is looked for: a program that was mended by other patterns is another one.
pub(super) fn patterns() -> [&'static str; 2] {
    STORES.each_ref().map(|store| store.code)
}

/// Takes the [`STORES`] out of the QEMU at `program`.
pub(super) fn mend(program: &Path) -> Result<(), MendError> {
    let mut code = std::fs::read(program)?;
    for store in &STORES {
        store.take_out(&mut code)?;
    }
    Ok(std::fs::write(program, code)?)
}

impl Store {
    fn take_out(&self, program: &mut [u8]) -> Result<(), MendError> {
        let pattern: Vec<Option<u8>> = self
            .code
            .split_whitespace()
            .map(|byte| u8::from_str_radix(byte, 16).ok())
            .collect();
        let is_it = |window: &[u8]| {
            pattern
                .iter()
                .zip(window)
                .all(|(wanted, byte)| wanted.is_none_or(|wanted| wanted == *byte))
        };
        let found: Vec<usize> = program
            .windows(pattern.len())
            .enumerate()
            .filter_map(|(at, window)| is_it(window).then_some(at))
            .collect();
        let instruction = match found.as_slice() {
            [at] => program.get_mut(at + self.at..at + self.at + self.nothing.len()),
            _ => None,
        };
        instruction
            .ok_or(MendError::Unknown(found.len()))?
            .copy_from_slice(self.nothing);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Their code as it is in QEMU 10.0.13 of Debian 13; 11.1.3 has other displacements.
    const DEBIAN: [&[u8]; 2] = [
        &[
            0x41, 0x0f, 0xb6, 0xf4, 0x44, 0x89, 0xab, 0xe0, 0x33, 0x00, 0x00, 0x89, 0xb3, 0x10,
            0xd7, 0xff, 0xff, 0xc7, 0x83, 0xe4, 0x33, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x48,
            0xc7, 0x83, 0xe8, 0x33, 0x00, 0x00, 0xff, 0xff, 0xff, 0xff, 0xf6, 0x05, 0xec, 0xe2,
            0x3d, 0x01, 0x02,
        ],
        &[
            0xe8, 0x42, 0x64, 0x14, 0x00, 0x81, 0xa0, 0x74, 0x2c, 0x00, 0x00, 0x7f, 0xff, 0xff,
            0xff, 0x48, 0x83, 0xc4, 0x08,
        ],
    ];
    /// Where the code is in [`program`], the first time.
    const AT: usize = 100;

    fn program(code: &[u8], times: usize) -> Vec<u8> {
        let mut program = vec![0x90; AT];
        for _ in 0..times {
            program.extend(code);
        }
        program
    }

    #[test]
    fn one_instruction_is_taken_out_and_nothing_else() {
        for (store, code) in STORES.iter().zip(DEBIAN) {
            let before = program(code, 1);
            let mut after = before.clone();

            store.take_out(&mut after).unwrap();

            let at = AT + store.at..AT + store.at + store.nothing.len();
            assert_eq!(after[at.clone()], *store.nothing);
            assert_eq!(after[..at.start], before[..at.start]);
            assert_eq!(after[at.end..], before[at.end..]);
        }
    }

    #[test]
    fn test_take_out_other_program_returns_unknown() {
        for (store, code) in STORES.iter().zip(DEBIAN) {
            for times in [0, 2] {
                let before = program(code, times);
                let mut after = before.clone();

                let result = store.take_out(&mut after);

                assert!(matches!(result, Err(MendError::Unknown(found)) if found == times));
                assert_eq!(after, before);
            }
        }
    }
}
