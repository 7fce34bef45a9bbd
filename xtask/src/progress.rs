//! What a developer sees during a long step: one line, with the time that it has taken so far.

use std::io::{IsTerminal, Write};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often the line is redrawn on a terminal.
const REDRAW_INTERVAL: Duration = Duration::from_secs(1);
/// How often a line is added to a log, so that nobody takes silence for a hang.
const LOG_INTERVAL: Duration = Duration::from_secs(30);
/// Columns of a detail that are shown; a longer one is cut.
const DETAIL_COLUMNS_MAX: usize = 60;

/// Tells a person, on standard error, what is going on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Progress {
    terminal: bool,
}

impl Progress {
    /// A progress display on standard error: a redrawn line on a terminal, lines in a log.
    pub(crate) fn new() -> Self {
        Self {
            terminal: std::io::stderr().is_terminal(),
        }
    }

    /// Says one thing, once.
    pub(crate) fn say(&self, what: &str) {
        write_line(format_args!("xtask: {what}"));
    }

    /// Begins a step that takes a while. It ends when the returned value is dropped.
    pub(crate) fn begin(&self, title: &str) -> Step {
        let (sender, receiver) = channel();
        let title = title.to_owned();
        let terminal = self.terminal;
        let display = std::thread::spawn(move || show(&title, terminal, &receiver));
        Step {
            details: Some(sender),
            display: Some(display),
        }
    }
}

/// A step under way; dropping it ends its line.
#[derive(Debug)]
pub(crate) struct Step {
    details: Option<Sender<String>>,
    display: Option<JoinHandle<()>>,
}

impl Step {
    /// Says what the step is at: shown behind its title, replacing the previous detail.
    pub(crate) fn detail(&self, what: &str) {
        if let Some(details) = &self.details {
            // The display thread ends only when this sender is gone.
            let _ = details.send(what.to_owned());
        }
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        drop(self.details.take());
        if let Some(display) = self.display.take() {
            let _ = display.join();
        }
    }
}

/// Draws one step's line until the step is dropped.
fn show(title: &str, terminal: bool, details: &Receiver<String>) {
    let started = Instant::now();
    let mut detail = String::new();
    let mut last_line = Instant::now();
    let interval = if terminal {
        REDRAW_INTERVAL
    } else {
        write_line(format_args!("xtask: {title} …"));
        LOG_INTERVAL
    };
    loop {
        if terminal {
            let shown = line(title, &detail, started.elapsed());
            let _ = write!(std::io::stderr(), "\r\x1b[K{shown}");
        }
        match details.recv_timeout(interval.saturating_sub(last_line.elapsed())) {
            Ok(next) => detail = next,
            Err(RecvTimeoutError::Timeout) => {
                if !terminal {
                    write_line(format_args!("{}", line(title, &detail, started.elapsed())));
                }
                last_line = Instant::now();
            }
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    let start = if terminal { "\r\x1b[K" } else { "" };
    let seconds = started.elapsed().as_secs_f32();
    write_line(format_args!("{start}xtask: {title}: {seconds:.1} s"));
}

/// A reader that is gone, or a disk that is full, does not keep the work from being done.
fn write_line(what: std::fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "{what}");
}

fn line(title: &str, detail: &str, elapsed: Duration) -> String {
    let shown: String = detail.chars().take(DETAIL_COLUMNS_MAX).collect();
    let seconds = elapsed.as_secs();
    if shown.is_empty() {
        format!("xtask: {title} … {seconds} s")
    } else {
        format!("xtask: {title} … {seconds} s ({shown})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_detail_is_cut() {
        let shown = line("Building", &"x".repeat(500), Duration::from_secs(3));

        assert!(shown.starts_with("xtask: Building … 3 s ("));
        assert!(shown.chars().count() < 100);
    }
}
