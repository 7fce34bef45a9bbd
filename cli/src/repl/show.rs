//! What the prompt shows. Output is passed on byte for byte, as by `run`; of all else that the guest says, control characters are
//! spelled out.

use std::cell::Cell;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::PathBuf;

use rustix::stdio::{stderr, stdout};
use sandvmm::{OutputStream, Representations};

use crate::escape::escape;
use crate::{notice, output};

/// Python's prompts.
const FIRST: &str = ">>> ";
const NEXT: &str = "... ";

/// The terminal, and the folder for figures.
#[derive(Debug)]
pub(super) struct Screen {
    figures: Option<PathBuf>,
    figure_count: Cell<u32>,
}

impl Screen {
    pub(super) fn new(figures: Option<PathBuf>) -> Self {
        Self {
            figures,
            figure_count: Cell::new(0),
        }
    }

    pub(super) fn prompt(&self, is_first: bool) {
        self.text(if is_first { FIRST } else { NEXT });
    }

    /// A line of our own.
    pub(super) fn line(&self, line: &str) {
        self.text(&format!("{line}\n"));
    }

    fn text(&self, text: &str) {
        // Where nobody reads it any more, nobody types either.
        let _ = output::write_all(stdout(), text.as_bytes());
    }

    pub(super) fn output(&self, stream: OutputStream, bytes: &[u8]) {
        let _ = match stream {
            OutputStream::Stdout => output::write_all(stdout(), bytes),
            OutputStream::Stderr => output::write_all(stderr(), bytes),
        };
    }

    pub(super) fn traceback(&self, traceback: &str) {
        let _ = output::write_all(stderr(), lines(traceback).as_bytes());
    }

    /// A value: an image as a file, or its text.
    pub(super) fn representations(&self, shown: &Representations) {
        match (shown.png(), shown.text()) {
            (Some(image), text) => {
                let place = self.save(image).unwrap_or_else(|error| {
                    notice::say(&format!("The figure could not be written: {error}"));
                    None
                });
                let text = text.map_or_else(String::new, escape);
                match place {
                    Some(path) => self.line(&format!("{text} [{}]", path.display())),
                    None => self.line(&format!("{text} [--figures FOLDER keeps it]")),
                }
            }
            (None, Some(text)) => self.text(&lines(text)),
            (None, None) => {
                let kinds: Vec<&str> = shown.iter().map(|(mime, _)| mime).collect();
                self.line(&format!("[{}]", escape(&kinds.join(", "))));
            }
        }
    }

    /// Writes a figure under the next name that is free.
    fn save(&self, image: &[u8]) -> io::Result<Option<PathBuf>> {
        let Some(folder) = &self.figures else {
            return Ok(None);
        };
        fs::create_dir_all(folder)?;
        loop {
            self.figure_count.set(self.figure_count.get() + 1);
            let path = folder.join(format!("figure-{}.png", self.figure_count.get()));
            match OpenOptions::new().write(true).create_new(true).open(&path) {
                Ok(mut file) => {
                    file.write_all(image)?;
                    return Ok(Some(path));
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// Text of several lines, each made fit for a terminal, with an end.
fn lines(text: &str) -> String {
    let mut shown = String::new();
    for line in text.strip_suffix('\n').unwrap_or(text).split('\n') {
        shown.push_str(&escape(line));
        shown.push('\n');
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_stay_and_controls_are_spelled_out() {
        assert_eq!(lines("a\nb\x1b[2J\n"), "a\nb\\u{1b}[2J\n");
        assert_eq!(lines("a\n\nb"), "a\n\nb\n");
    }

    #[test]
    fn figures_get_names_that_are_free() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("figure-1.png"), "kept").unwrap();
        let screen = Screen::new(Some(folder.path().to_owned()));

        let first = screen.save(b"one").unwrap().unwrap();
        let second = screen.save(b"two").unwrap().unwrap();

        assert!(first.ends_with("figure-2.png") && second.ends_with("figure-3.png"));
        assert_eq!(
            fs::read(folder.path().join("figure-1.png")).unwrap(),
            b"kept"
        );
        assert_eq!(Screen::new(None).save(b"x").unwrap(), None);
    }
}
