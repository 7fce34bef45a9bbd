//! `sandvmm-call NAME [ARGS]`: one call from a shell.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;

use protocol::call::{MAX_ANSWER_BYTES, MAX_CALL_BYTES, SOCKET, is_name};

/// Name that the binary is started under to be this.
pub const NAME: &str = "sandvmm-call";

/// How an answer that is no error begins, and how it ends: as the host writes it.
const VALUE: (&[u8], &[u8]) = (b"{\"ok\":", b"}");

/// How one that is an error begins.
const ERROR: (&[u8], &[u8]) = (b"{\"error\":", b"}");

const USAGE: &str = "usage: sandvmm-call NAME [JSON | -]
Calls a function of the host. Its arguments are JSON, or JSON on standard input (-). What it returns is printed as JSON.
Exit codes: 0; 1 it failed, and the error is on standard error as JSON; 2 usage.";

/// Exit code of a wrong command line.
const WRONG_USAGE: u8 = 2;

/// Why there is no value.
#[derive(Debug)]
enum Failure {
    Usage,
    /// The host's own object.
    Error(Vec<u8>),
    Sentence(String),
}

/// The whole life of the command.
#[must_use]
pub fn main() -> ExitCode {
    let mut stderr = io::stderr();
    let told = match call(std::env::args_os().skip(1)) {
        Ok(value) => {
            let written = io::stdout().write_all(&[&value, &b"\n"[..]].concat());
            return match written {
                Ok(()) => ExitCode::SUCCESS,
                Err(_) => ExitCode::FAILURE,
            };
        }
        Err(Failure::Usage) => {
            let _ = stderr.write_all(USAGE.as_bytes());
            let _ = stderr.write_all(b"\n");
            return ExitCode::from(WRONG_USAGE);
        }
        Err(Failure::Error(object)) => object,
        Err(Failure::Sentence(sentence)) => format!("{NAME}: {sentence}").into_bytes(),
    };
    // Where nobody reads it, the exit code says it.
    let _ = stderr.write_all(&[&told, &b"\n"[..]].concat());
    ExitCode::FAILURE
}

fn call(arguments: impl Iterator<Item = OsString>) -> Result<Vec<u8>, Failure> {
    let line = line(arguments, &mut io::stdin())?;
    let sentence =
        |what: &'static str| move |error: io::Error| Failure::Sentence(format!("{what}: {error}"));
    let mut stream = UnixStream::connect(SOCKET)
        .map_err(sentence("No function of the host can be called here"))?;
    stream
        .write_all(&line)
        .map_err(sentence("The call could not be sent"))?;
    let mut answer = Vec::new();
    stream
        .shutdown(std::net::Shutdown::Write)
        .and_then(|()| {
            (&stream)
                .take(MAX_ANSWER_BYTES as u64 + 1)
                .read_to_end(&mut answer)
        })
        .map_err(sentence("The answer could not be read"))?;
    value(&answer)
}

/// The call, on its line.
fn line(
    mut arguments: impl Iterator<Item = OsString>,
    input: &mut impl Read,
) -> Result<Vec<u8>, Failure> {
    let (name, args) = (arguments.next(), arguments.next());
    let name = name.and_then(|name| name.into_string().ok());
    let (Some(name), None) = (name.filter(|name| is_name(name)), arguments.next()) else {
        return Err(Failure::Usage);
    };
    let mut line = format!("{{\"call\":\"{name}\"").into_bytes();
    if let Some(args) = args {
        let mut args = args.into_vec();
        if args == b"-" {
            args.clear();
            input
                .take(MAX_CALL_BYTES as u64 + 1)
                .read_to_end(&mut args)
                .map_err(|error| {
                    Failure::Sentence(format!("Standard input can't be read: {error}"))
                })?;
        }
        line.extend_from_slice(b",\"args\":");
        // Between the tokens of JSON a line's end is a blank, and inside them there is none.
        line.extend(args.iter().map(|byte| match byte {
            b'\n' | b'\r' => b' ',
            byte => *byte,
        }));
    }
    line.extend_from_slice(b"}\n");
    Ok(line)
}

/// What is in an answer.
fn value(answer: &[u8]) -> Result<Vec<u8>, Failure> {
    let answer = answer.strip_suffix(b"\n").unwrap_or(answer);
    let inside = |(begin, end): (&[u8], &[u8])| {
        answer
            .strip_prefix(begin)
            .and_then(|rest| rest.strip_suffix(end))
    };
    match (inside(VALUE), inside(ERROR)) {
        (Some(value), _) => Ok(value.to_vec()),
        (None, Some(error)) => Err(Failure::Error(error.to_vec())),
        (None, None) => Err(Failure::Sentence("The host gave no answer".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(arguments: &[&str], input: &str) -> Result<String, Failure> {
        let arguments = arguments.iter().map(OsString::from);
        line(arguments, &mut input.as_bytes()).map(|line| String::from_utf8(line).unwrap())
    }

    #[test]
    fn a_call_is_one_line_whatever_its_arguments() {
        assert_eq!(made(&["a"], "").unwrap(), "{\"call\":\"a\"}\n");
        assert_eq!(
            made(&["a", "{\n \"id\": 3\r\n}"], "").unwrap(),
            "{\"call\":\"a\",\"args\":{  \"id\": 3  }}\n"
        );
        assert_eq!(
            made(&["a", "-"], "[1,\n2]\n").unwrap(),
            "{\"call\":\"a\",\"args\":[1, 2] }\n"
        );
    }

    #[test]
    fn what_is_no_call_is_a_usage_error() {
        for arguments in [&[][..], &["a-b"], &["a\"", "1"], &["a", "1", "2"]] {
            assert!(matches!(made(arguments, ""), Err(Failure::Usage)));
        }
    }

    #[test]
    fn an_answer_is_a_value_or_an_error() {
        assert_eq!(value(b"{\"ok\":{\"a\":1}}\n").unwrap(), b"{\"a\":1}");
        match value(b"{\"error\":{\"kind\":\"failed\"}}\n") {
            Err(Failure::Error(error)) => assert_eq!(error, b"{\"kind\":\"failed\"}"),
            other => panic!("{other:?}"),
        }
        assert!(matches!(value(b""), Err(Failure::Sentence(_))));
        assert!(matches!(value(b"{\"ok\":1"), Err(Failure::Sentence(_))));
    }
}
