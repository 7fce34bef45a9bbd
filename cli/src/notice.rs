//! What sandvmm itself has to say: sentences on standard error.

use std::error::Error;
use std::io::Write;

use crate::escape::escape;
use crate::terminal;

/// Says a sentence, `sandvmm: ` in front. The text may be a guest's: it is escaped.
pub(crate) fn say(sentence: &str) {
    write_line("sandvmm: ", sentence);
}

/// Shows a line of the guest kernel's console.
pub(crate) fn show_console(line: &str) {
    write_line("kernel: ", line);
}

/// An error and all its sources, as one sentence.
pub(crate) fn sentence(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        // A transparent error shows its source's text already.
        if !text.ends_with(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}

/// So many of a thing, as people say it.
pub(crate) fn count(count: u64, thing: &str) -> String {
    let end = if count == 1 { "" } else { "s" };
    format!("{count} {thing}{end}")
}

/// One call of write a line: lines of several threads don't mix. A standard error that can't be written to
/// changes nothing for the run.
fn write_line(prefix: &str, text: &str) {
    let end = if terminal::is_raw() { "\r\n" } else { "\n" };
    let line = format!("{prefix}{}{end}", escape(text));
    let _ = std::io::stderr().write_all(line.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("The lid is stuck")]
    struct Outer(#[source] std::io::Error);

    #[test]
    fn an_error_is_told_with_its_sources() {
        let error = Outer(std::io::Error::other("no handle"));

        assert_eq!(sentence(&error), "The lid is stuck: no handle");
    }
}
