//! The lines of a call and of its answer: JSON that a program of the guest has written, and JSON that it gets.

use std::io::{self, Write};

use protocol::call::MAX_ANSWER_BYTES;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Serialize};

/// Longest message of an error that the guest is told, in characters; a longer one is cut.
const MAX_MESSAGE_CHARS: usize = 4096;

/// Why a call has no value, as the guest is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// No function has this name.
    Unknown,
    /// The line is no call, or its arguments are not the function's.
    Arguments,
    /// The function itself failed.
    Failed,
    /// It took too long.
    Deadline,
    /// Too many calls in a second.
    Rate,
    /// It could not begin in time: too many run, or the host is out of threads.
    Busy,
    /// The result is above its bound.
    TooLarge,
}

impl Kind {
    /// As the guest is told.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Arguments => "arguments",
            Self::Failed => "failed",
            Self::Deadline => "deadline",
            Self::Rate => "rate",
            Self::Busy => "busy",
            Self::TooLarge => "too_large",
        }
    }
}

impl Serialize for Kind {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// A call that failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Failure {
    kind: Kind,
    message: String,
}

impl Failure {
    pub(super) fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into().chars().take(MAX_MESSAGE_CHARS).collect(),
        }
    }

    pub(super) fn kind(&self) -> Kind {
        self.kind
    }

    /// In the function's own words.
    pub(super) fn failed(message: String) -> Self {
        Self::new(Kind::Failed, message)
    }

    /// The line that tells the guest.
    pub(super) fn line(&self) -> Vec<u8> {
        #[derive(Serialize)]
        struct Line<'a> {
            error: &'a Failure,
        }
        // A string of characters can't fail to be JSON.
        serde_json::to_vec(&Line { error: self }).unwrap_or_default()
    }
}

/// A call that was understood so far as to find its function.
#[derive(Debug)]
pub(super) struct Call<'a> {
    line: &'a [u8],
    has_args: bool,
}

/// The name of the function that a line calls, and whether it has arguments. Nothing of those is kept.
pub(super) fn named(line: &[u8]) -> Result<(String, bool), Failure> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Line {
        call: String,
        args: Option<IgnoredAny>,
    }
    let line: Line = serde_json::from_slice(line).map_err(|error| no_call(&error))?;
    Ok((line.call, line.args.is_some()))
}

impl<'a> Call<'a> {
    pub(super) fn new(line: &'a [u8], has_args: bool) -> Self {
        Self { line, has_args }
    }

    /// The arguments as the function's type. Without any, what has no fields or no value fits.
    pub(super) fn arguments<T: DeserializeOwned>(&self) -> Result<T, Failure> {
        #[derive(Deserialize)]
        struct Line<T> {
            args: T,
        }
        if self.has_args {
            let line: Line<T> =
                serde_json::from_slice(self.line).map_err(|error| no_call(&error))?;
            return Ok(line.args);
        }
        serde_json::from_str("null")
            .or_else(|_| serde_json::from_str("{}"))
            .map_err(|error| no_call(&error))
    }
}

fn no_call(error: &serde_json::Error) -> Failure {
    Failure::new(Kind::Arguments, error.to_string())
}

/// The line that gives the guest a value.
pub(super) fn value<R: Serialize>(value: &R) -> Result<Vec<u8>, Failure> {
    #[derive(Serialize)]
    struct Line<'a, R> {
        ok: &'a R,
    }
    let mut line = Bounded(Vec::new());
    match serde_json::to_writer(&mut line, &Line { ok: value }) {
        Ok(()) => Ok(line.0),
        Err(error) if error.is_io() => Err(Failure::new(
            Kind::TooLarge,
            format!("The result is above {} MiB", MAX_ANSWER_BYTES >> 20),
        )),
        Err(error) => Err(Failure::failed(format!("The result is no JSON: {error}"))),
    }
}

/// Takes as much as an answer may have.
struct Bounded(Vec<u8>);

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_ANSWER_BYTES {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, PartialEq, Deserialize)]
    struct Lookup {
        id: u32,
    }

    #[derive(Debug, PartialEq, Deserialize)]
    struct Nothing {}

    fn arguments<T: DeserializeOwned>(line: &str) -> Result<T, Kind> {
        let (_, has_args) = named(line.as_bytes()).map_err(|failure| failure.kind)?;
        Call::new(line.as_bytes(), has_args)
            .arguments()
            .map_err(|failure| failure.kind)
    }

    #[test]
    fn arguments_are_the_functions_type_or_an_error() {
        let lookup = arguments::<Lookup>(r#"{"call": "lookup", "args": {"id": 3}}"#);
        let reversed = arguments::<Lookup>(r#"{"args": {"id": 3}, "call": "lookup"}"#);
        let wrong = arguments::<Lookup>(r#"{"call": "lookup", "args": {"id": "3"}}"#);

        assert_eq!(
            (lookup, reversed),
            (Ok(Lookup { id: 3 }), Ok(Lookup { id: 3 }))
        );
        assert_eq!(wrong, Err(Kind::Arguments));
    }

    #[test]
    fn no_arguments_are_nothing_of_any_kind() {
        for line in [r#"{"call": "now"}"#, r#"{"call": "now", "args": null}"#] {
            assert_eq!(arguments::<()>(line), Ok(()));
            assert_eq!(arguments::<Option<u8>>(line), Ok(None));
            assert_eq!(arguments::<Nothing>(line), Ok(Nothing {}));
            assert_eq!(arguments::<Lookup>(line), Err(Kind::Arguments));
        }
    }

    #[test]
    fn what_is_no_call_is_told_so() {
        let deep = format!("{{\"call\":\"x\",\"args\":{}", "[".repeat(1 << 19));
        for line in [
            "",
            "x",
            "[]",
            "{}",
            r#"{"call":1}"#,
            r#"{"call":"x","y":1}"#,
            &deep,
        ] {
            let failure = named(line.as_bytes()).unwrap_err();
            assert_eq!(failure.kind, Kind::Arguments);
        }
    }

    #[test]
    fn values_are_bounded_and_errors_are_cut() {
        let too_large = value(&"x".repeat(MAX_ANSWER_BYTES)).unwrap_err();
        let fits = value(&"x".repeat(MAX_ANSWER_BYTES - 9)).unwrap();
        let long = Failure::failed("ä\n".repeat(1 << 20)).line();

        assert_eq!(too_large.kind, Kind::TooLarge);
        assert_eq!(fits.len(), MAX_ANSWER_BYTES);
        assert!(long.len() < MAX_ANSWER_BYTES && !long.contains(&b'\n'));
        assert_eq!(value(&()).unwrap(), b"{\"ok\":null}");
        assert_eq!(
            Failure::new(Kind::TooLarge, "a").line(),
            br#"{"error":{"kind":"too_large","message":"a"}}"#
        );
    }

    proptest! {
        #[test]
        fn any_line_is_a_call_or_an_error(line in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Ok((_, has_args)) = named(&line) {
                let _ = Call::new(&line, has_args).arguments::<serde_json::Value>();
            }
        }
    }
}
