//! The system calls that a machine's threads may make (`seccomp(2)`).
//!
//! There is a filter for each kind of thread, in `filters/`, with a reason beside each call. They are compiled with this
//! crate: nothing is parsed when a machine starts. A call that is not in its thread's filter is not made; the process says
//! which it was and ends (`SECCOMP_RET_TRAP`, and a handler of this crate's; without the handler the signal kills).

use seccompiler::sock_filter;

use crate::enter::Inside;

include!(concat!(env!("OUT_DIR"), "/filters.rs"));

/// A kind of thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Thread {
    /// The event loop: control socket, disks, streams.
    Main,
    /// A virtual processor.
    Vcpu,
}

/// Why a thread's system calls could not be filtered.
#[derive(Debug, thiserror::Error)]
#[error("The system calls of a machine's thread could not be filtered")]
pub struct FilterError(#[source] seccompiler::Error);

impl Inside {
    /// Closes what is left of the cell around the calling thread, for good: to be called by each thread of the machine
    /// before the guest's first instruction.
    ///
    /// # Errors
    /// See [`FilterError`]; the process must end then.
    pub fn close(self, thread: Thread) -> Result<(), FilterError> {
        if !self.is_filtered {
            return Ok(());
        }
        let filter: &[sock_filter] = match thread {
            Thread::Main => &MAIN,
            Thread::Vcpu => &VCPU,
        };
        seccompiler::apply_filter(filter).map_err(FilterError)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Most steps to the action for a number that is in no filter: the head, a halving for each doubling of the calls, the comparison.
    const MAX_STEPS: usize = 20;

    /// What stands in a filter's machine for x86-64 (`AUDIT_ARCH_X86_64`) and for 32-bit x86.
    const X86_64: u32 = 0xc000_003e;
    const I386: u32 = 0x4000_0003;

    /// Runs a filter on a call whose arguments are all zero: the action, and after how many steps.
    fn run(filter: &[sock_filter], architecture: u32, number: u32) -> (u32, usize) {
        let (mut at, mut loaded, mut steps) = (0, 0, 0);
        loop {
            let step = &filter[at];
            steps += 1;
            at += 1;
            let jump = |holds: bool| usize::from(if holds { step.jt } else { step.jf });
            match step.code {
                0x20 => {
                    loaded = match step.k {
                        0 => number,
                        4 => architecture,
                        _ => 0,
                    }
                }
                0x05 => at += step.k as usize,
                0x15 => at += jump(loaded == step.k),
                0x25 => at += jump(loaded > step.k),
                0x35 => at += jump(loaded >= step.k),
                0x54 => loaded &= step.k,
                0x06 => return (step.k, steps),
                code => panic!("a step of code {code:#x}"),
            }
        }
    }

    /// The numbers of the calls that a filter's file names.
    fn named(text: &str) -> Vec<u32> {
        let file: serde_json::Value = serde_json::from_str(text).unwrap();
        let filter = file.as_object().unwrap().values().next().unwrap();
        let calls = filter["filter"].as_array().unwrap().iter();
        calls
            .map(|rule| {
                let name = rule["syscall"].as_str().unwrap();
                let number = (0..500).find(|number| crate::calls::call_name(*number) == Some(name));
                number.unwrap_or_else(|| panic!("{name} has no number"))
            })
            .collect()
    }

    #[test]
    fn a_call_that_is_in_no_filter_is_trapped_after_few_steps() {
        let files = [
            (MAIN.as_slice(), include_str!("../filters/main.json")),
            (VCPU.as_slice(), include_str!("../filters/vcpu.json")),
        ];
        for (filter, file) in files {
            let named = named(file);
            for number in (0..600).filter(|number| !named.contains(number)) {
                let (action, steps) = run(filter, X86_64, number);
                assert_eq!(action, libc::SECCOMP_RET_TRAP, "{number}");
                assert!(steps <= MAX_STEPS, "{number}: {steps}");
            }
            assert_eq!(run(filter, X86_64, u32::MAX).0, libc::SECCOMP_RET_TRAP);
            assert_eq!(run(filter, I386, 1).0, libc::SECCOMP_RET_KILL_PROCESS);
        }
    }

    #[test]
    fn a_call_without_conditions_is_allowed() {
        let write = libc::SYS_write.try_into().unwrap();
        for filter in [MAIN.as_slice(), VCPU.as_slice()] {
            assert_eq!(run(filter, X86_64, write).0, libc::SECCOMP_RET_ALLOW);
        }
    }
}
