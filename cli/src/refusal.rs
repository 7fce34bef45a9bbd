//! What is said of a command line that is none: clap's words, made fit for a terminal, or one object where a run's is asked for.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::process::ExitCode;

use clap::error::ErrorKind;

use crate::args::Cli;
use crate::escape::escape;
use crate::run::verdict::USAGE;
use crate::{notice, output, run};

/// Answers a command line that is none, or that asks for help.
pub(crate) fn refuse(line: &[OsString], error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        return ExitCode::from(output::written(error.print(), 0));
    }
    let is_run = line.get(1).is_some_and(|word| word == "run");
    let mut options = line.iter().take_while(|word| *word != "--");
    let shown = shown(line, error.kind());
    if is_run && options.any(|word| word == "--json") {
        let text = shown.map_or_else(|| escape(&error.to_string()), |shown| shown.to_string());
        return ExitCode::from(run::refuse(&sentence(&text)));
    }
    match shown {
        Some(shown) => drop(shown.print()),
        None => notice::say(&sentence(&error.to_string())),
    }
    ExitCode::from(USAGE)
}

/// The same error as clap words it of the line with its control characters spelled out: what it quotes of that goes to a terminal. Only clap
/// knows which part of its text is quoted.
fn shown(line: &[OsString], kind: ErrorKind) -> Option<clap::Error> {
    let line: Vec<OsString> = line.iter().map(|word| escape_word(word)).collect();
    Cli::read(&line).err().filter(|error| error.kind() == kind)
}

/// Spells control characters out; bytes that are no text stay, and clap shows none of them.
fn escape_word(word: &OsStr) -> OsString {
    let mut bytes = Vec::with_capacity(word.len());
    for chunk in word.as_bytes().utf8_chunks() {
        bytes.extend_from_slice(escape(chunk.valid()).as_bytes());
        bytes.extend_from_slice(chunk.invalid());
    }
    OsString::from_vec(bytes)
}

/// Clap's text as one sentence: what is wrong with what is listed below it, and its tips, without the usage.
fn sentence(text: &str) -> String {
    let text = text.strip_prefix("error: ").unwrap_or(text);
    let mut sentence = String::new();
    for line in text.lines().map(str::trim) {
        if line.starts_with("Usage:") || line.starts_with("For more information") {
            break;
        }
        if line.is_empty() {
            continue;
        }
        if let Some(tip) = line.strip_prefix("tip: ") {
            sentence.push_str("; ");
            sentence.push_str(tip);
        } else {
            if !sentence.is_empty() {
                sentence.push(' ');
            }
            sentence.push_str(line);
        }
    }
    let mut rest = sentence.chars();
    match rest.next() {
        Some(first) => first.to_uppercase().chain(rest).collect(),
        None => sentence,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(line: &[&OsStr]) -> (Vec<OsString>, clap::Error) {
        let line: Vec<OsString> = line.iter().map(OsString::from).collect();
        let error = Cli::read(&line).unwrap_err();
        (line, error)
    }

    #[test]
    fn what_clap_quotes_has_no_control_characters() {
        for words in [
            &["run", "--bo\x1b[31m\x07\n\u{202e}gus", "-c", "1"][..],
            &["run", "--cpus", "\x1b[31m\n", "-c", "1"],
            &["run", "--allow-host", "a\x1b[31m\nb", "-c", "1"],
            &["run", "--publish", "\x1b]0;x\x07\r", "-c", "1"],
            &["\x1b[31m\nnonsense"],
            &["exec", "a", "\x1b[31m\n"],
        ] {
            let words: Vec<&OsStr> = ["sandvmm"].iter().chain(words).map(OsStr::new).collect();
            let (line, error) = error(&words);

            let text = shown(&line, error.kind()).unwrap().to_string();

            let own = |character: char| character.is_control() && character != '\n';
            assert!(
                !text.contains(own) && !text.contains('\u{202e}'),
                "{text:?}"
            );
            assert!(text.contains("\\u{1b}"), "{text:?}");
            // A line that is quoted begins none.
            assert!(!text.contains("\nb") && !text.contains("\nnon"), "{text:?}");
        }
    }

    #[test]
    fn bytes_that_are_no_text_are_refused_as_such() {
        let word = OsStr::from_bytes(b"--bogus\xff\x1b[31m");

        let (line, error) = error(&[OsStr::new("sandvmm"), OsStr::new("run"), word]);

        let text = shown(&line, error.kind()).unwrap().to_string();
        assert!(!text.contains('\x1b'), "{text:?}");
    }

    #[test]
    fn an_error_is_told_in_one_sentence_with_all_that_it_names() {
        let said = |words: &[&str]| {
            let words: Vec<&OsStr> = ["sandvmm"].iter().chain(words).map(OsStr::new).collect();
            sentence(&error(&words).1.to_string())
        };

        assert_eq!(
            said(&["run", "--cpu", "1", "x.py"]),
            "Unexpected argument '--cpu' found; a similar argument exists: '--cpus'; to pass '--cpu' as a value, use '-- --cpu'"
        );
        assert_eq!(
            said(&["kill"]),
            "The following required arguments were not provided: <NAME> <ID>"
        );
        assert_eq!(
            said(&["run", "--json"]),
            "Nothing is named that could be run: say SCRIPT, - for one on standard input, -c CODE, or -- COMMAND"
        );
    }
}
