//! The variables of the program: `-e KEY=VALUE`, `-e KEY` and `--env-file FILE`, by Docker's rules.

use std::ffi::{OsStr, OsString};
use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

/// Largest file of variables that is read, in bytes. Linux bounds a program's arguments and variables
/// to about 2 MiB altogether, so that more could not be used.
const MAX_ENV_FILE_BYTES: u64 = 2 << 20;

/// Why the variables could not be put together.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EnvironmentError {
    /// `-e` with something that names no variable.
    #[error("The variable '{}' has no name: say -e KEY=VALUE", .0.display())]
    Nameless(OsString),
    /// A line of a file that is no variable.
    #[error("Line {line} of '{}' {problem}", .path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Number of the line, from 1.
        line: usize,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A file that can't be read.
    #[error("The file of variables '{}' can't be read", .path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// A folder, a pipe, a device.
    #[error("The file of variables '{}' is not a regular file", .0.display())]
    NotAFile(PathBuf),
    /// A file above [`MAX_ENV_FILE_BYTES`].
    #[error("The file of variables '{}' is larger than {} MiB", .0.display(), MAX_ENV_FILE_BYTES >> 20)]
    TooLarge(PathBuf),
}

/// A variable's name and value.
pub(crate) type Variable = (OsString, OsString);

/// Puts together the variables of `files` and then of `words`; of two with one name the later holds.
/// A name without a value gets that of the caller's own environment, which `lookup` reads, and is left
/// out where that has none.
///
/// # Errors
/// See [`EnvironmentError`].
pub(crate) fn collect(
    files: &[PathBuf],
    words: &[OsString],
    lookup: &dyn Fn(&OsStr) -> Option<OsString>,
) -> Result<Vec<Variable>, EnvironmentError> {
    let mut variables = Vec::new();
    for path in files {
        variables.extend(parse_file(path, &read_file(path)?, lookup)?);
    }
    for word in words {
        let (name, value) = split(word.as_bytes());
        if name.is_empty() {
            return Err(EnvironmentError::Nameless(word.clone()));
        }
        variables.extend(complete(name, value, lookup));
    }
    Ok(variables)
}

/// Why a secret's variable can't be set otherwise.
pub(crate) fn given_away(name: &str) -> String {
    format!(
        "The variable {name} is a --secret and is set by -e or --env-file too, which would give it to the program: leave that out"
    )
}

/// Reads a file of variables, without waiting on one that is none.
fn read_file(path: &Path) -> Result<Vec<u8>, EnvironmentError> {
    let unreadable = |source| EnvironmentError::Unreadable {
        path: path.to_owned(),
        source,
    };
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
        .open(path)
        .map_err(unreadable)?;
    if !file.metadata().map_err(unreadable)?.is_file() {
        return Err(EnvironmentError::NotAFile(path.to_owned()));
    }
    let mut content = Vec::new();
    file.take(MAX_ENV_FILE_BYTES + 1)
        .read_to_end(&mut content)
        .map_err(unreadable)?;
    if content.len() as u64 > MAX_ENV_FILE_BYTES {
        return Err(EnvironmentError::TooLarge(path.to_owned()));
    }
    Ok(content)
}

/// Docker's rules: one variable a line; blank lines and those that begin with `#` are skipped, blanks
/// in front of a name too; a value is taken as it stands, quotes and blanks at its end included.
fn parse_file(
    path: &Path,
    content: &[u8],
    lookup: &dyn Fn(&OsStr) -> Option<OsString>,
) -> Result<Vec<Variable>, EnvironmentError> {
    let content = content.strip_prefix(b"\xef\xbb\xbf").unwrap_or(content);
    let mut variables = Vec::new();
    for (index, line) in content.split(|&byte| byte == b'\n').enumerate() {
        let refused = |problem| EnvironmentError::Line {
            path: path.to_owned(),
            line: index + 1,
            problem,
        };
        let line = line.strip_suffix(b"\r").unwrap_or(line).trim_ascii_start();
        if line.is_empty() || line.starts_with(b"#") {
            continue;
        }
        if line.contains(&0) {
            return Err(refused("holds a zero byte"));
        }
        let (name, value) = split(line);
        if name.is_empty() {
            return Err(refused("has no name in front of the '='"));
        }
        if name.iter().any(u8::is_ascii_whitespace) {
            return Err(refused("has a name with blanks in it"));
        }
        variables.extend(complete(name, value, lookup));
    }
    Ok(variables)
}

/// The name, and the value if there is a `=`.
fn split(text: &[u8]) -> (&[u8], Option<&[u8]>) {
    match text.iter().position(|&byte| byte == b'=') {
        Some(at) => (text.get(..at).unwrap_or_default(), text.get(at + 1..)),
        None => (text, None),
    }
}

fn complete(
    name: &[u8],
    value: Option<&[u8]>,
    lookup: &dyn Fn(&OsStr) -> Option<OsString>,
) -> Option<Variable> {
    let value = match value {
        Some(value) => OsString::from_vec(value.to_vec()),
        None => lookup(OsStr::from_bytes(name))?,
    };
    Some((OsString::from_vec(name.to_vec()), value))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(name: &OsStr) -> Option<OsString> {
        (name == "FROM_HOST").then(|| OsString::from("host's"))
    }

    fn from_words(words: &[&str]) -> Result<Vec<Variable>, EnvironmentError> {
        let words: Vec<OsString> = words.iter().map(OsString::from).collect();
        collect(&[], &words, &host)
    }

    fn from_file(content: &[u8]) -> Result<Vec<Variable>, EnvironmentError> {
        parse_file(Path::new("vars"), content, &host)
    }

    fn pairs(expected: &[(&str, &str)]) -> Vec<Variable> {
        expected
            .iter()
            .map(|(name, value)| (name.into(), value.into()))
            .collect()
    }

    #[test]
    fn words_are_variables() {
        let variables = from_words(&["A=1", "B=", "C=x=y z", "FROM_HOST", "NOT_SET"]).unwrap();

        assert_eq!(
            variables,
            pairs(&[
                ("A", "1"),
                ("B", ""),
                ("C", "x=y z"),
                ("FROM_HOST", "host's")
            ])
        );
    }

    #[test]
    fn a_word_without_a_name_is_refused() {
        assert!(matches!(
            from_words(&["=1"]),
            Err(EnvironmentError::Nameless(_))
        ));
        assert!(matches!(
            from_words(&[""]),
            Err(EnvironmentError::Nameless(_))
        ));
    }

    #[test]
    fn bytes_that_are_no_text_pass_through() {
        let word = OsString::from_vec(b"K=\xff\xfe".to_vec());

        let variables = collect(&[], &[word], &host).unwrap();

        assert_eq!(variables[0].1.as_bytes(), b"\xff\xfe");
        assert_eq!(from_file(b"K=\xff").unwrap()[0].1.as_bytes(), b"\xff");
    }

    #[test]
    fn a_file_follows_dockers_rules() {
        let content = b"\xef\xbb\xbf# comment\r\n\n  \nA=1\r\n  B= 2 # kept \nC=\"quoted\"\nFROM_HOST\nNOT_SET\n  #D=1\nE=";

        let variables = from_file(content).unwrap();

        assert_eq!(
            variables,
            pairs(&[
                ("A", "1"),
                ("B", " 2 # kept "),
                ("C", "\"quoted\""),
                ("FROM_HOST", "host's"),
                ("E", "")
            ])
        );
    }

    #[test]
    fn a_line_that_is_no_variable_is_refused() {
        assert_eq!(
            from_file(b"A=1\n=x\n").unwrap_err().to_string(),
            "Line 2 of 'vars' has no name in front of the '='"
        );
        assert!(matches!(
            from_file(b"B C=1"),
            Err(EnvironmentError::Line { line: 1, .. })
        ));
        assert!(matches!(
            from_file(b"A=\0\n"),
            Err(EnvironmentError::Line { line: 1, .. })
        ));
    }

    #[test]
    fn words_come_after_files() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vars");
        std::fs::write(&path, "A=file\nB=file\n").unwrap();

        let variables = collect(&[path], &["A=word".into()], &host).unwrap();

        assert_eq!(
            variables,
            pairs(&[("A", "file"), ("B", "file"), ("A", "word")])
        );
    }

    #[test]
    fn what_is_no_regular_file_is_refused_without_waiting() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &pipe,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR,
            0,
        )
        .unwrap();

        let of_pipe = collect(&[pipe], &[], &host).unwrap_err();
        let of_folder = collect(&[folder.path().to_owned()], &[], &host).unwrap_err();
        let of_nothing = collect(&[folder.path().join("none")], &[], &host).unwrap_err();

        assert!(matches!(of_pipe, EnvironmentError::NotAFile(_)));
        assert!(matches!(of_folder, EnvironmentError::NotAFile(_)));
        assert!(matches!(of_nothing, EnvironmentError::Unreadable { .. }));
    }

    #[test]
    fn a_file_above_the_bound_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vars");
        let large = vec![b'#'; usize::try_from(MAX_ENV_FILE_BYTES).unwrap() + 1];
        std::fs::write(&path, large).unwrap();

        assert!(matches!(
            collect(&[path], &[], &host),
            Err(EnvironmentError::TooLarge(_))
        ));
    }
}
