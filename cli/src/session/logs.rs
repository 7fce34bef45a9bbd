//! `sandvmm logs`: what detached commands have printed, and print.

use std::io::{IsTerminal, Read};

use sandvmm::session::Session;

use super::args::LogsArgs;
use super::failed;
use crate::escape::escape;
use crate::run::verdict::FAILED;
use crate::{notice, output};

/// Bytes read of a log at once.
const BUFFER_BYTES: usize = 64 << 10;

/// Shows what detached commands have printed; for a terminal, escaped.
pub(crate) fn logs(args: &LogsArgs) -> u8 {
    if args.follow {
        return follow(&args.name);
    }
    match Session::open(&args.name).and_then(|session| session.log()) {
        Ok(bytes) => output::print_bytes(&shown(&bytes, std::io::stdout().is_terminal()), 0),
        Err(error) => failed(&error),
    }
}

/// Shows it as it grows, a whole line at a time, until the session is over; where nobody reads any more, until the next line.
fn follow(name: &str) -> u8 {
    let mut log = match Session::open(name).and_then(Session::follow_log) {
        Ok(log) => log,
        Err(error) => return failed(&error),
    };
    let is_terminal = std::io::stdout().is_terminal();
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut rest = Vec::new();
    loop {
        let count = match log.read(&mut buffer) {
            Ok(count) => count,
            Err(error) => {
                notice::say(&format!("The log of {name} can't be read: {error}"));
                return FAILED;
            }
        };
        rest.extend_from_slice(buffer.get(..count).unwrap_or_default());
        let whole = whole_lines(&rest, count == 0);
        let code = output::print_bytes(
            &shown(rest.get(..whole).unwrap_or_default(), is_terminal),
            0,
        );
        if code != 0 || count == 0 {
            return code;
        }
        rest.drain(..whole);
    }
}

/// How many bytes make whole lines; at the end, all do. A line of the log is bounded, and so is what is kept of one.
fn whole_lines(bytes: &[u8], is_end: bool) -> usize {
    if is_end {
        return bytes.len();
    }
    let last = bytes.iter().rposition(|byte| *byte == b'\n');
    last.map_or(0, |at| at + 1)
}

/// Lines as they are, or fit for a terminal.
fn shown(bytes: &[u8], is_terminal: bool) -> Vec<u8> {
    if !is_terminal {
        return bytes.to_vec();
    }
    let text = String::from_utf8_lossy(bytes);
    let lines = text.lines().map(|line| escape(line) + "\n");
    lines.collect::<String>().into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_shown_when_it_is_whole() {
        assert_eq!(whole_lines(b"[1] a\n[1] b", false), 6);
        assert_eq!(whole_lines(b"[1] b", false), 0);
        assert_eq!(whole_lines(b"[1] b", true), 5);
    }

    #[test]
    fn a_terminal_gets_no_control_characters_and_a_file_gets_the_bytes() {
        let line = b"[1] \x1b[2J\xff\n";

        assert_eq!(shown(line, true), "[1] \\u{1b}[2J\u{fffd}\n".as_bytes());
        assert_eq!(shown(line, false), line);
    }
}
