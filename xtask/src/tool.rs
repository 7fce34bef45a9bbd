//! Running other programs: their output is kept, and shown only when they fail.

use std::io;
use std::process::{Command, Output, Stdio};

/// Bytes of a failed program's output that its error shows.
const TAIL_BYTES_MAX: usize = 4096;

/// Why a program did not do its work.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ToolError {
    /// It could not be started.
    #[error("Could not start {program}")]
    Start {
        /// The program.
        program: String,
        /// Why.
        source: io::Error,
    },
    /// It ended with an error.
    #[error("{program} failed ({status}); the end of its output:\n{tail}")]
    Failed {
        /// The program.
        program: String,
        /// How it ended.
        status: std::process::ExitStatus,
        /// What it said last.
        tail: String,
    },
}

/// Runs `command` to its end and returns what it wrote to standard output.
pub(crate) fn run(command: &mut Command) -> Result<Vec<u8>, ToolError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command
        .stdin(Stdio::null())
        .output()
        .map_err(|source| ToolError::Start {
            program: program.clone(),
            source,
        })?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    Err(ToolError::Failed {
        program,
        status: output.status,
        tail: tail_of(&output),
    })
}

fn tail_of(output: &Output) -> String {
    let mut all = output.stdout.clone();
    all.extend_from_slice(&output.stderr);
    tail(&all)
}

/// The end of `bytes` as text, beginning with a whole line where it was cut.
pub(crate) fn tail(bytes: &[u8]) -> String {
    let start = bytes.len().saturating_sub(TAIL_BYTES_MAX);
    let text = String::from_utf8_lossy(bytes.get(start..).unwrap_or_default()).into_owned();
    match text.split_once('\n') {
        Some((_, rest)) if start > 0 => rest.to_owned(),
        _ => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_run_failing_program_returns_its_words() {
        let result = run(Command::new("sh").args(["-c", "echo the reason >&2; exit 3"]));

        let message = result.unwrap_err().to_string();
        assert!(message.contains("the reason"), "{message}");
        assert!(message.contains("exit status: 3"), "{message}");
    }

    #[test]
    fn a_cut_tail_begins_with_a_whole_line() {
        let text = "0123456789\n".repeat(1000);

        let shown = tail(text.as_bytes());

        assert!(shown.starts_with("0123456789\n"));
        assert!(shown.len() <= TAIL_BYTES_MAX);
    }
}
