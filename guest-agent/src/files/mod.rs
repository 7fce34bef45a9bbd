//! Doing what the host asks of a file. It runs in a stage that has become a user of the guest, so that the kernel decides
//! what may be read and written, and everything made belongs to the user.

mod folder;
mod metadata;
mod read;
mod tree;
mod watch;
mod write;

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use protocol::file::{
    FileAnswer, FileDone, FileFailure, FileFailureKind, FileOperation, FileRequest,
};
use protocol::frame::{self, FrameError, MAX_FROM_AGENT_BYTES};
use protocol::message::{MAX_NEW_FILE_BYTES, NewFile};
pub(crate) use read::open_regular;
use serde::Serialize;

use crate::limits::MAX_PATH_BYTES;
use crate::program::{Failure, quoted};
use crate::users::User;

/// Does what `request` says, with its content on `stream`, and answers there. `prepared` is how becoming its user went.
pub fn serve(stream: &File, request: &FileRequest, prepared: Result<User, Failure>) {
    let result = prepared
        .map_err(|failure| other(failure.message))
        .and_then(|user| Ok((target(&request.path, &user.home)?, user)));
    let (path, user) = match result {
        Ok(found) => found,
        Err(failure) => return answer(stream, Err(failure)),
    };
    match &request.operation {
        FileOperation::Write { mode } => answer(stream, write::receive(stream, &path, *mode)),
        FileOperation::Read => read::send(stream, &path),
        FileOperation::Metadata => answer(stream, metadata::of(&path).map(FileDone::Metadata)),
        FileOperation::List => folder::list(stream, &path),
        FileOperation::MakeFolder => answer(stream, folder::make(&path)),
        FileOperation::Rename { to } => answer(
            stream,
            target(to, &user.home).and_then(|to| folder::rename(&path, &to)),
        ),
        FileOperation::Remove => answer(stream, folder::remove(&path)),
        FileOperation::ReadTree => tree::send(stream, &path),
        FileOperation::WriteTree { keep_owners } => {
            answer(stream, tree::receive(stream, &path, *keep_owners));
        }
        FileOperation::Watch => watch::send(stream, &path),
        _ => answer(
            stream,
            Err(other(
                "The agent does not know this operation on files".into(),
            )),
        ),
    }
}

/// Writes the file that comes with a command, as the process's user.
///
/// # Errors
/// A sentence.
pub fn put(file: &NewFile, home: &str) -> Result<(), String> {
    if file.content.len() > MAX_NEW_FILE_BYTES {
        return Err(format!(
            "A file that comes with a command has at most {MAX_NEW_FILE_BYTES} bytes"
        ));
    }
    target(&file.path, home)
        .and_then(|path| write::put(&path, file.mode, &file.content))
        .map_err(|failure| failure.message)
}

/// The answer to a request that no stage takes.
#[must_use]
pub fn refusal(message: String) -> FileAnswer {
    FileAnswer {
        result: Err(other(message)),
    }
}

fn answer(stream: &File, result: Result<FileDone, FileFailure>) {
    // A host that is gone needs no answer.
    let _ = say(stream, &FileAnswer { result });
}

fn say<T: Serialize>(mut stream: &File, message: &T) -> Result<(), FrameError> {
    frame::write(&mut stream, message, MAX_FROM_AGENT_BYTES)
}

fn at(path: &Path) -> FileDone {
    FileDone::At(path.as_os_str().as_bytes().to_vec())
}

fn other(message: String) -> FileFailure {
    FileFailure {
        kind: FileFailureKind::Other,
        message,
    }
}

fn wrong_kind(message: String) -> FileFailure {
    FileFailure {
        kind: FileFailureKind::WrongKind,
        message,
    }
}

/// What failed, with the file's name: `failed("read", path)` for "can't be read".
fn failed<'a>(done: &'a str, path: &'a Path) -> impl Fn(io::Error) -> FileFailure + 'a {
    move |error| {
        let kind = match error.kind() {
            io::ErrorKind::NotFound => FileFailureKind::NotFound,
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                FileFailureKind::PermissionDenied
            }
            io::ErrorKind::StorageFull
            | io::ErrorKind::QuotaExceeded
            | io::ErrorKind::FileTooLarge => FileFailureKind::NoSpace,
            io::ErrorKind::NotADirectory | io::ErrorKind::IsADirectory => {
                FileFailureKind::WrongKind
            }
            _ => FileFailureKind::Other,
        };
        let name = quoted(path.as_os_str().as_bytes());
        FileFailure {
            kind,
            message: format!("The file {name:?} can't be {done}: {error}"),
        }
    }
}

/// The absolute path that the host means.
fn target(path: &[u8], home: &str) -> Result<PathBuf, FileFailure> {
    let target = Path::new(home).join(OsStr::from_bytes(path));
    let name = quoted(path);
    if target.as_os_str().len() > MAX_PATH_BYTES {
        return Err(other(format!(
            "The path {name:?} is longer than {MAX_PATH_BYTES} bytes"
        )));
    }
    if path.contains(&0) {
        return Err(other(format!("The path {name:?} has a zero in it")));
    }
    Ok(target)
}

#[cfg(test)]
mod tests;
