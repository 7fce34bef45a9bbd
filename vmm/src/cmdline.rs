//! The kernel's command line: what the machine itself needs, then what the supervisor adds.

use std::fmt::Write as _;

use crate::layout;

/// What every Linux guest of this machine needs to hear.
///
/// * `reboot=k`: reset through the keyboard controller's port, which ends the machine. `panic=-1`: at once after a panic.
/// * `no_timer_check`, `tsc=reliable`: there is no PIT to check timers against, and the TSC is the host's.
/// * `nomodule`, `pci=off`, `i8042.*`, `8250.nr_uarts=0`, `cryptomgr.notests`: no probing for what is not there, in kernels other
///   than ours.
/// * `rcupdate.rcu_expedited=1`: grace periods while booting don't wait for ticks.
/// * `noreplace-smp`: with one processor, lock prefixes stay: patching them away costs more than they do. `swiotlb=noforce`: no
///   bounce buffer of 64 MiB where memory reaches above 4 GiB; no device here needs one.
const MACHINE_WORDS: &str = "reboot=k panic=-1 no_timer_check tsc=reliable nomodule pci=off \
     i8042.noaux i8042.nomux i8042.nopnp i8042.dumbkbd 8250.nr_uarts=0 cryptomgr.notests \
     rcupdate.rcu_expedited=1 noreplace-smp swiotlb=noforce";

/// Only errors are printed, and a panic with all that it says: each character costs two exits. It counts for what is printed when the
/// early console starts only if it comes before it.
const QUIET: &str = " quiet";

/// The console of a kernel without a serial driver.
const CONSOLE: &str = " earlyprintk=serial,0x3f8,115200";

/// Why there is no command line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CmdlineError {
    /// It does not fit.
    #[error(
        "The kernel's command line has {bytes} bytes with what the machine itself needs, more than Linux's bound of {}: shorten it",
        layout::MAX_CMDLINE_BYTES - 1
    )]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// A byte that can't be in it.
    #[error("The kernel's command line holds a control or non-ASCII character: remove it")]
    BadCharacter,
}

/// A virtio-mmio device, as the kernel is told of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MmioDevice {
    /// First address of its registers.
    pub address: u64,
    /// Its interrupt.
    pub irq: u32,
}

/// Puts the command line together; `is_verbose` where somebody wants to see all that the kernel prints.
///
/// # Errors
/// See [`CmdlineError`].
pub fn build(
    devices: &[MmioDevice],
    is_verbose: bool,
    added: &str,
) -> Result<String, CmdlineError> {
    if added.bytes().any(|byte| !(b' '..=b'~').contains(&byte)) {
        return Err(CmdlineError::BadCharacter);
    }
    let mut cmdline = String::from(MACHINE_WORDS);
    if !is_verbose {
        cmdline.push_str(QUIET);
    }
    cmdline.push_str(CONSOLE);
    for MmioDevice { address, irq } in devices {
        // Writing to a string can't fail.
        let _ = write!(
            cmdline,
            " virtio_mmio.device={:#x}@{address:#x}:{irq}",
            layout::VIRTIO_MMIO_BYTES
        );
    }
    if !added.is_empty() {
        cmdline.push(' ');
        cmdline.push_str(added);
    }
    if cmdline.len() >= layout::MAX_CMDLINE_BYTES {
        return Err(CmdlineError::TooLong {
            bytes: cmdline.len(),
        });
    }
    Ok(cmdline)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_and_added_words_follow_the_machine_s_own() {
        let device = MmioDevice {
            address: 0xd000_1000,
            irq: 6,
        };

        let cmdline = build(&[device], true, "ro -- x").unwrap();

        assert!(cmdline.starts_with("reboot=k panic=-1 "));
        assert!(cmdline.ends_with(" virtio_mmio.device=0x1000@0xd0001000:6 ro -- x"));
    }

    #[test]
    fn a_kernel_that_is_to_be_quiet_hears_it_before_its_console_starts() {
        let quiet = build(&[], false, "").unwrap();
        let verbose = build(&[], true, "").unwrap();

        assert!(quiet.find(" quiet ").unwrap() < quiet.find(" earlyprintk=").unwrap());
        assert!(!verbose.contains("quiet"));
    }

    #[test]
    fn test_build_too_long_returns_too_long() {
        let added = "x".repeat(layout::MAX_CMDLINE_BYTES);

        assert!(matches!(
            build(&[], true, &added),
            Err(CmdlineError::TooLong { bytes }) if bytes > layout::MAX_CMDLINE_BYTES
        ));
    }

    #[test]
    fn test_build_control_character_returns_bad_character() {
        for added in ["a\0b", "a\nb", "ä"] {
            assert_eq!(build(&[], true, added), Err(CmdlineError::BadCharacter));
        }
    }
}
