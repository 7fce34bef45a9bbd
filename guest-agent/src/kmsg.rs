//! Lines in the kernel's log, the only place for words when the host can't be reached.

use std::io::Write;

/// Writes one line of level "error" (`<3>`, `Documentation/ABI/testing/dev-kmsg`). Failing is ignored: there
/// is nobody left to tell.
pub fn error(message: &str) {
    if let Ok(mut log) = std::fs::OpenOptions::new().write(true).open("/dev/kmsg") {
        let mut line = Vec::with_capacity(message.len() + 24);
        line.extend_from_slice(b"<3>sandvmm-agent: ");
        line.extend_from_slice(message.as_bytes());
        line.push(b'\n');
        // One write is one record.
        let _ = log.write_all(&line);
    }
}
