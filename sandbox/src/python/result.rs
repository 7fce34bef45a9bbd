//! What a run of Python comes to. All of it is the guest's word.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;

/// What one run came to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Evaluation {
    /// The value of the code's last expression, unless it is `None` or there is no such expression.
    pub value: Option<Representations>,
    /// What was displayed, in order: `display(…)` and figures of matplotlib.
    pub displays: Vec<Representations>,
    /// What was written to standard output.
    pub stdout: Vec<u8>,
    /// What was written to standard error.
    pub stderr: Vec<u8>,
    /// Whether `stdout`, `stderr` or `displays` lack what came above their bounds.
    pub truncated: bool,
    /// The exception that ended the code. What it had done before stays done.
    pub exception: Option<PythonException>,
    /// Whether the deadline interrupted it: the exception is `KeyboardInterrupt` then, unless the code made another of it.
    pub timed_out: bool,
    /// How long it took, as seen from the host.
    pub wall: Duration,
}

impl Evaluation {
    /// The text of the value; short for [`Representations::text`].
    #[must_use]
    pub fn text(&self) -> Option<&str> {
        self.value.as_ref().and_then(Representations::text)
    }

    /// Standard output as text, what is not UTF-8 replaced.
    #[must_use]
    pub fn stdout_text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}

/// What a value looks like, by MIME type.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Representations(pub(super) BTreeMap<String, Vec<u8>>);

impl Representations {
    /// The representation of this MIME type.
    #[must_use]
    pub fn get(&self, mime: &str) -> Option<&[u8]> {
        self.0.get(mime).map(Vec::as_slice)
    }

    /// `text/plain`: what Python's own prompt would show.
    #[must_use]
    pub fn text(&self) -> Option<&str> {
        self.get("text/plain")
            .and_then(|bytes| std::str::from_utf8(bytes).ok())
    }

    /// `text/html`, of tables of pandas for example. It is the guest's: not to be shown in a page that has rights.
    #[must_use]
    pub fn html(&self) -> Option<&str> {
        self.get("text/html")
            .and_then(|bytes| std::str::from_utf8(bytes).ok())
    }

    /// `image/png`, of figures of matplotlib for example.
    #[must_use]
    pub fn png(&self) -> Option<&[u8]> {
        self.get("image/png")
    }

    /// All of them, by MIME type.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.0
            .iter()
            .map(|(mime, bytes)| (mime.as_str(), bytes.as_slice()))
    }
}

/// An exception that ended a run.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[non_exhaustive]
pub struct PythonException {
    /// Its type's name.
    pub name: String,
    /// Its text.
    pub value: String,
    /// The traceback as Python prints it, from the code's first line on.
    pub traceback: String,
}
