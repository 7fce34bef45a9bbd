//! `-v`: what the guest's kernel says, line by line on standard error.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::sync::mpsc::{Receiver, channel};

use rustix::pipe::PipeFlags;

use crate::notice;

/// Longest line that is shown whole, in bytes; a longer one is shown in pieces.
const MAX_LINE_BYTES: u64 = 1024;

/// The writing end for the machine, and a receiver whose other side goes when everything is shown: after
/// every writing end was closed.
///
/// # Errors
/// When the system refuses a pipe or a thread.
pub(super) fn open() -> io::Result<(File, Receiver<()>)> {
    let (reader, writer) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    let (over, receiver) = channel();
    std::thread::Builder::new()
        .name("console".into())
        .spawn(move || {
            each_line(File::from(reader), notice::show_console);
            drop(over);
        })
        .map_err(sandvmm::host::name_limit)?;
    Ok((File::from(writer), receiver))
}

fn each_line(stream: impl Read, mut show: impl FnMut(&str)) {
    let mut stream = BufReader::new(stream);
    let mut line = Vec::new();
    loop {
        line.clear();
        match (&mut stream)
            .take(MAX_LINE_BYTES)
            .read_until(b'\n', &mut line)
        {
            Ok(0) | Err(_) => return,
            Ok(_) => show(String::from_utf8_lossy(&line).trim_end_matches(['\r', '\n'])),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_shown_whole_and_long_ones_in_pieces() {
        let mut shown = Vec::new();
        let long = "x".repeat(1500);
        let text = format!("one\r\n\ntwo\u{ff}\n{long}\nend");

        each_line(text.as_bytes(), |line| shown.push(line.to_owned()));

        assert_eq!(shown[..3], ["one", "", "two\u{ff}"]);
        assert_eq!((shown[3].len(), shown[4].len()), (1024, 476));
        assert_eq!(shown[5], "end");
    }
}
