//! The signals that end a run, the one that must not, and the one that a terminal's new size brings.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::Sender;

use sandvmm::host::name_limit;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGWINCH, SIGXFSZ};
use signal_hook::iterator::Signals;

/// From now on a write above the largest file's size (`ulimit -f`) is an error like others, `EFBIG`, which is told, and does not end this
/// process, whose machines, and what it would remove, it would leave.
///
/// The signal is handled, and not ignored: programs that are started from here find it as it is by default.
pub(crate) fn outlive_large_files() {
    // Where there can be no handler the signal does what it did.
    let _ = signal_hook::flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false)));
}

/// From now on calls `tell` with the number of each signal that asks sandvmm to end, on a thread of its own.
///
/// A hang-up that is ignored already, as under nohup(1), stays ignored.
///
/// # Errors
/// When the system refuses a handler or the thread.
pub(crate) fn forward<T: Send + 'static>(
    events: Sender<T>,
    event: impl Fn(i32) -> T + Send + 'static,
) -> io::Result<()> {
    let mut ending = vec![SIGINT, SIGTERM, SIGQUIT];
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    if !is_ignored(&status, SIGHUP) {
        ending.push(SIGHUP);
    }
    let mut signals = Signals::new(ending)?;
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            for signal in signals.forever() {
                if events.send(event(signal)).is_err() {
                    return;
                }
            }
        })
        .map_err(name_limit)?;
    Ok(())
}

/// A flag that every change of the terminal's size sets.
///
/// # Errors
/// When the system refuses the handler.
pub(crate) fn resized() -> io::Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(SIGWINCH, Arc::clone(&flag))?;
    Ok(flag)
}

/// From now on sends `event` with every change of the terminal's size.
///
/// # Errors
/// When the system refuses the handler or the thread.
pub(crate) fn forward_resizes<T: Send + 'static>(
    events: Sender<T>,
    event: impl Fn() -> T + Send + 'static,
) -> io::Result<()> {
    let mut signals = Signals::new([SIGWINCH])?;
    std::thread::Builder::new()
        .name("resizes".into())
        .spawn(move || {
            for _ in signals.forever() {
                if events.send(event()).is_err() {
                    return;
                }
            }
        })
        .map_err(name_limit)?;
    Ok(())
}

/// Whether a signal is ignored, by the text of `/proc/self/status` (proc_pid_status(5), `SigIgn`).
fn is_ignored(status: &str, signal: i32) -> bool {
    status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ignored_signal_is_seen_in_the_mask() {
        let status = "Name:\tx\nSigIgn:\t0000000000000001\nSigCgt:\t0000000000000002\n";

        assert!(is_ignored(status, SIGHUP));
        assert!(!is_ignored(status, SIGINT));
        assert!(!is_ignored("", SIGHUP));
    }
}
