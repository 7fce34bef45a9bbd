//! `--secret NAME@HOST,...[=SOURCE]`: a secret is named here, and where its value comes from; never the value itself, which other
//! users could read in the list of processes.

use std::io::Read;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};

use sandvmm::egress::{MAX_SECRET_BYTES, Secret, SecretError};

use crate::open;

/// What tells where a value comes from.
const ENV: &str = "env:";
const FILE: &str = "file:";
const COMMAND: &str = "command:";

/// What runs a command that prints a value.
const SHELL: &str = "/bin/sh";

/// Longest text that is read: a value and the end of its line.
const MAX_READ_BYTES: u64 = MAX_SECRET_BYTES as u64 + 3;

/// Why there is no secret. None shows what stands behind the `=`: it may be the value, by mistake.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SecretArgError {
    /// Not of the form.
    #[error(
        "A --secret has no '@': say NAME@HOST, NAME@HOST=file:PATH or NAME@HOST=command:COMMAND"
    )]
    Form,
    /// A source that is none.
    #[error(
        "The secret {0} has no source behind its '=': say env:VARIABLE, file:PATH or command:COMMAND, and never the value itself"
    )]
    Source(String),
    /// A variable that is not set.
    #[error("The secret {name} is to come from the variable {variable}, which is not set")]
    Unset {
        /// The secret's name.
        name: String,
        /// The variable.
        variable: String,
    },
    /// A file that can't be read.
    #[error("The secret {name} can't be read from '{}'", .path.display())]
    File {
        /// The secret's name.
        name: String,
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// A command that can't be run.
    #[error("The command that prints the secret {name} can't be run")]
    NoCommand {
        /// The secret's name.
        name: String,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// A command that failed.
    #[error("The command that prints the secret {name} failed: {status}")]
    Failed {
        /// The secret's name.
        name: String,
        /// How it ended.
        status: ExitStatus,
    },
    /// What came is no secret.
    #[error(transparent)]
    Secret(#[from] SecretError),
}

/// Reads a secret.
///
/// # Errors
/// See [`SecretArgError`].
pub(super) fn read(text: &str) -> Result<Secret, SecretArgError> {
    let (name, rest) = text.split_once('@').ok_or(SecretArgError::Form)?;
    let (hosts, source) = match rest.split_once('=') {
        Some((hosts, source)) => (hosts, Some(source)),
        None => (rest, None),
    };
    if name.contains('=') {
        return Err(SecretArgError::Form);
    }
    let hosts: Vec<&str> = hosts.split(',').collect();
    // The name and hosts are looked at before a value is asked for.
    Secret::new(name, &hosts, vec![b'x'; MAX_SECRET_BYTES])?;
    let value = match source {
        None => variable(name, name)?,
        Some(source) => {
            if let Some(word) = source.strip_prefix(ENV) {
                variable(name, word)?
            } else if let Some(path) = source.strip_prefix(FILE) {
                file(name, PathBuf::from(path))?
            } else if let Some(command) = source.strip_prefix(COMMAND) {
                printed(name, command)?
            } else {
                return Err(SecretArgError::Source(name.to_owned()));
            }
        }
    };
    Ok(Secret::new(name, &hosts, value)?)
}

fn variable(name: &str, variable: &str) -> Result<Vec<u8>, SecretArgError> {
    let value = std::env::var_os(variable).ok_or_else(|| SecretArgError::Unset {
        name: name.to_owned(),
        variable: variable.to_owned(),
    })?;
    Ok(value.into_vec())
}

fn file(name: &str, path: PathBuf) -> Result<Vec<u8>, SecretArgError> {
    match open::to_read(&path).and_then(text) {
        Ok(value) => Ok(value),
        Err(source) => Err(SecretArgError::File {
            name: name.to_owned(),
            path,
            source,
        }),
    }
}

/// Runs a command; what it says on standard error is seen, and it is interrupted as this program is.
fn printed(name: &str, command: &str) -> Result<Vec<u8>, SecretArgError> {
    let not_run = |source| SecretArgError::NoCommand {
        name: name.to_owned(),
        source,
    };
    let mut child = Command::new(SHELL)
        .args(["-c", command])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(not_run)?;
    let value = child.stdout.take().map(text).transpose();
    // One that says too much is told so by the closed pipe.
    let status = child.wait().map_err(not_run)?;
    let is_too_much = matches!(&value, Ok(Some(value)) if value.len() > MAX_SECRET_BYTES);
    if !status.success() && !is_too_much {
        return Err(SecretArgError::Failed {
            name: name.to_owned(),
            status,
        });
    }
    Ok(value.map_err(not_run)?.unwrap_or_default())
}

/// All of it, up to a bound, without the end of its last line.
fn text(source: impl Read) -> std::io::Result<Vec<u8>> {
    // In one piece: a buffer that grows leaves its bytes behind.
    let mut text = Vec::with_capacity(MAX_SECRET_BYTES * 2);
    source.take(MAX_READ_BYTES).read_to_end(&mut text)?;
    if text.last() == Some(&b'\n') {
        text.pop();
        if text.last() == Some(&b'\r') {
            text.pop();
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_comes_from_a_variable_a_file_or_a_command() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        std::fs::write(&path, "s3cr3t-value\r\n").unwrap();

        let secret = read(&format!(
            "TOKEN@a.example,*.b.example:8443=file:{}",
            path.display()
        ))
        .unwrap();
        assert_eq!(secret.name(), "TOKEN");
        let hosts: Vec<String> = secret.rules().map(ToString::to_string).collect();
        assert_eq!(hosts, ["a.example:443", "*.b.example:8443"]);
        read("TOKEN@a.example=command:echo s3cr3t=value@x").unwrap();
        read("TOKEN@a.example=env:PATH").unwrap();
        read("PATH@a.example").unwrap();
    }

    #[test]
    fn what_is_no_secret_is_refused_and_never_shown() {
        for text in [
            "s3cr3t-value",
            "TOKEN=s3cr3t-value@a.example",
            "TOKEN@a.example=s3cr3t-value",
            "TOKEN@a.example=file:/nowhere/at/all",
            "TOKEN@a.example=command:echo s3cr3t-value; exit 3",
            "TOKEN@a.example=command:echo; echo s3cr3t-value",
            "TOKEN@10.0.0.1=command:echo s3cr3t-value",
            "TOKEN@",
            "SANDVMM_IS_NOT_SET@a.example",
        ] {
            let error = read(text).unwrap_err();
            assert!(!format!("{error} {error:?}").contains("s3cr3t"), "{error}");
        }
        let long = format!(
            "TOKEN@a.example=command:head -c {} /dev/zero | tr '\\0' x",
            MAX_SECRET_BYTES * 4
        );
        read(&long).unwrap_err();
        // That the pipe was closed before it ended is not what is wrong with it.
        let flood = read("TOKEN@a.example=command:cat /dev/zero").unwrap_err();
        assert!(flood.to_string().contains("bytes"), "{flood}");
    }
}
