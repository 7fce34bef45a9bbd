//! The one object of `run --json`. Its fields are documented in `docs/cli.md`; they are added to, never
//! renamed.

use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use sandvmm::cell::Cell;
use sandvmm::{Clocks, Limit, Usage};
use serde::Serialize;

use super::network::NetworkReport;
use super::stream::Captured;
use super::verdict::{Failure, Reason, Verdict};
use crate::cell::CellReport;
use crate::template::Path;

/// Longest UTF-8 character, in bytes, less its last: what a cut may leave of one.
const MAX_CUT_BYTES: usize = 3;

/// All that is known about a run.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    exit_code: u8,
    reason: Option<Reason>,
    signal: Option<i32>,
    message: Option<String>,
    error: Option<Failure>,
    stdout: String,
    stdout_encoding: Encoding,
    stdout_truncated: bool,
    stdout_bytes: u64,
    stderr: String,
    stderr_encoding: Encoding,
    stderr_truncated: bool,
    stderr_bytes: u64,
    clocks: Timeline,
    usage: UsageReport,
    /// The ceilings that were met.
    limits_hit: Vec<Limit>,
    cell: Option<CellReport>,
    /// What left, where anything may.
    egress: Option<NetworkReport>,
    /// Which template was forked, if one was.
    template: Option<String>,
    /// Why the machine came to be as it did.
    path_reason: Option<String>,
    /// Whether the program was forked from a warm interpreter.
    warm: bool,
}

/// How bytes are put into a JSON string.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
enum Encoding {
    /// As they are: they are UTF-8.
    #[serde(rename = "utf-8")]
    Utf8,
    /// RFC 4648 §4, with padding.
    #[serde(rename = "base64")]
    Base64,
}

/// Microseconds from the user's call to each phase; null where it was not reached.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[expect(clippy::struct_field_names, reason = "a unit belongs to each name")]
pub(crate) struct Timeline {
    /// The machine's process began.
    pub(crate) process_started_us: Option<u64>,
    /// The first vCPU ran.
    pub(crate) vcpu_running_us: Option<u64>,
    /// The guest's first program began.
    pub(crate) guest_init_us: Option<u64>,
    /// The guest was ready for commands.
    pub(crate) agent_ready_us: Option<u64>,
    /// The program ran.
    pub(crate) command_started_us: Option<u64>,
    /// Its first byte of output was read.
    pub(crate) first_output_us: Option<u64>,
    /// It ended.
    pub(crate) exited_us: Option<u64>,
    /// The machine was gone.
    pub(crate) gone_us: Option<u64>,
}

impl From<Clocks> for Timeline {
    fn from(clocks: Clocks) -> Self {
        let micros = |duration: Option<Duration>| {
            duration.map(|duration| u64::try_from(duration.as_micros()).unwrap_or(u64::MAX))
        };
        Self {
            process_started_us: micros(clocks.process_started),
            vcpu_running_us: micros(clocks.vcpu_running),
            guest_init_us: micros(clocks.guest_init),
            agent_ready_us: micros(clocks.agent_ready),
            command_started_us: micros(clocks.command_started),
            first_output_us: micros(clocks.first_output),
            exited_us: micros(clocks.exited),
            gone_us: micros(clocks.all_gone),
        }
    }
}

/// What the program and all that it started used.
#[derive(Debug, Clone, Copy, Default, Serialize)]
struct UsageReport {
    peak_memory_bytes: u64,
    cpu_time_us: u64,
    oom_kills: u32,
    peak_processes: u32,
    throttled_us: u64,
    wall_us: u64,
    bytes_in: u64,
    bytes_out: u64,
    disk_bytes: u64,
}

impl From<Usage> for UsageReport {
    fn from(usage: Usage) -> Self {
        Self {
            peak_memory_bytes: usage.peak_memory_bytes,
            cpu_time_us: u64::try_from(usage.cpu_time.as_micros()).unwrap_or(u64::MAX),
            oom_kills: usage.oom_kills,
            peak_processes: usage.peak_processes,
            throttled_us: u64::try_from(usage.throttled.as_micros()).unwrap_or(u64::MAX),
            wall_us: u64::try_from(usage.wall.as_micros()).unwrap_or(u64::MAX),
            bytes_in: usage.bytes_in,
            bytes_out: usage.bytes_out,
            disk_bytes: usage.disk_bytes,
        }
    }
}

impl Report {
    /// Puts a run's parts together.
    pub(crate) fn new(
        verdict: &Verdict,
        stdout: &Captured,
        stderr: &Captured,
        clocks: Clocks,
        usage: Usage,
    ) -> Self {
        let (stdout_text, stdout_encoding) = text(stdout);
        let (stderr_text, stderr_encoding) = text(stderr);
        Self {
            exit_code: verdict.exit_code,
            reason: verdict.reason,
            signal: verdict.signal,
            message: verdict.message.clone(),
            error: verdict.error,
            stdout: stdout_text,
            stdout_encoding,
            stdout_truncated: stdout.is_truncated(),
            stdout_bytes: stdout.total_bytes,
            stderr: stderr_text,
            stderr_encoding,
            stderr_truncated: stderr.is_truncated(),
            stderr_bytes: stderr.total_bytes,
            clocks: clocks.into(),
            usage: usage.into(),
            limits_hit: Vec::new(),
            cell: None,
            egress: None,
            template: None,
            path_reason: None,
            warm: false,
        }
    }

    /// Adds the ceilings that were met.
    pub(crate) fn with_limits(mut self, limits_hit: &[Limit]) -> Self {
        self.limits_hit = limits_hit.to_vec();
        self
    }

    /// Adds how the machine and the program in it came to be.
    pub(crate) fn with_path(mut self, path: Option<&Path>, warm: bool) -> Self {
        self.template = path.and_then(|path| path.template.clone());
        self.path_reason = path.map(|path| path.why.clone());
        self.warm = warm;
        self
    }

    /// Adds what left.
    pub(crate) fn with_network(mut self, network: Option<NetworkReport>) -> Self {
        self.egress = network;
        self
    }

    /// Adds what is on of the cell around the machine's process.
    pub(crate) fn with_cell(mut self, cell: Option<&Cell>) -> Self {
        self.cell = cell.map(CellReport::from);
        self
    }

    /// The report of a run that never came to a machine.
    pub(crate) fn of_failure(verdict: &Verdict) -> Self {
        let nothing = Captured::default();
        Self::new(
            verdict,
            &nothing,
            &nothing,
            Clocks::default(),
            Usage::default(),
        )
    }

    /// One line of JSON, with the newline.
    pub(crate) fn line(&self) -> String {
        // Strings and numbers alone can't fail to be JSON.
        let mut line = serde_json::to_string(self).unwrap_or_default();
        line.push('\n');
        line
    }
}

/// Text where the bytes are UTF-8; a character that the cap has cut is left out of it.
fn text(captured: &Captured) -> (String, Encoding) {
    let kept = captured.kept.as_slice();
    let whole = match std::str::from_utf8(kept) {
        Ok(text) => Some(text),
        Err(error) if captured.is_truncated() && error.error_len().is_none() => kept
            .get(..error.valid_up_to())
            .filter(|valid| kept.len() - valid.len() <= MAX_CUT_BYTES)
            .and_then(|valid| std::str::from_utf8(valid).ok()),
        Err(_) => None,
    };
    match whole {
        Some(text) => (text.to_owned(), Encoding::Utf8),
        None => (STANDARD.encode(kept), Encoding::Base64),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn captured(kept: &[u8], total_bytes: u64) -> Captured {
        Captured {
            kept: kept.to_vec(),
            total_bytes,
        }
    }

    #[test]
    fn the_shape_is_the_documented_one() {
        let verdict = Verdict::failed(127, Failure::NotFound, "No x".into());

        let line = Report::of_failure(&verdict).line();

        let found: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(
            found,
            json!({
                "exit_code": 127, "reason": null, "signal": null, "message": "No x", "error": "not_found",
                "stdout": "", "stdout_encoding": "utf-8", "stdout_truncated": false, "stdout_bytes": 0,
                "stderr": "", "stderr_encoding": "utf-8", "stderr_truncated": false, "stderr_bytes": 0,
                "clocks": {
                    "process_started_us": null, "vcpu_running_us": null, "guest_init_us": null,
                    "agent_ready_us": null, "command_started_us": null, "first_output_us": null,
                    "exited_us": null, "gone_us": null
                },
                "usage": {
                    "peak_memory_bytes": 0, "cpu_time_us": 0, "oom_kills": 0, "peak_processes": 0, "throttled_us": 0,
                    "wall_us": 0, "bytes_in": 0, "bytes_out": 0, "disk_bytes": 0
                },
                "limits_hit": [],
                "cell": null, "egress": null, "template": null, "path_reason": null, "warm": false
            })
        );
        assert_eq!(line.lines().count(), 1);
    }

    #[test]
    fn reasons_have_the_documented_names() {
        let names = [
            (Reason::Exited, "exited"),
            (Reason::Signal, "signal"),
            (Reason::Timeout, "timeout"),
            (Reason::Oom, "oom"),
            (Reason::VmCrash, "vm_crash"),
            (Reason::Policy, "policy"),
        ];
        for (reason, name) in names {
            assert_eq!(serde_json::to_value(reason).unwrap(), name);
        }
    }

    #[test]
    fn text_is_text_and_other_bytes_are_base64() {
        assert_eq!(
            text(&captured("Grüße\0\n".as_bytes(), 8)),
            ("Grüße\0\n".into(), Encoding::Utf8)
        );
        assert_eq!(
            text(&captured(b"\xff\xfe", 2)),
            ("//4=".into(), Encoding::Base64)
        );
    }

    #[test]
    fn a_character_cut_by_the_cap_is_left_out_but_one_cut_by_the_program_is_not() {
        let cut = &"ab€".as_bytes()[..4];

        assert_eq!(text(&captured(cut, 5)), ("ab".into(), Encoding::Utf8));
        assert_eq!(text(&captured(cut, 4)).1, Encoding::Base64);
    }
}
