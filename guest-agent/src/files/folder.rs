//! Folders: what is in them, making, renaming and removing.

use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use protocol::file::{FileAnswer, FileDone, FileFailure, FolderItem};

use super::{answer, at, failed, metadata, say, wrong_kind};

/// Answers, then says what is in the folder.
pub(super) fn list(stream: &File, path: &Path) {
    let entries = match fs::read_dir(path).map_err(failed("listed", path)) {
        Ok(entries) => entries,
        Err(failure) => return answer(stream, Err(failure)),
    };
    let done = FileAnswer {
        result: Ok(at(path)),
    };
    let mut said = say(stream, &done);
    for entry in entries {
        if said.is_err() {
            // A host that is gone needs no more of it.
            return;
        }
        let item = entry.and_then(|entry| {
            Ok(FolderItem::Entry {
                name: entry.file_name().as_bytes().to_vec(),
                metadata: metadata::from(&entry.metadata()?),
            })
        });
        said = match item {
            Ok(item) => say(stream, &item),
            // Removed meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => {
                let _ = say(stream, &FolderItem::Failed(failed("listed", path)(error)));
                return;
            }
        };
    }
    let _ = said.and_then(|()| say(stream, &FolderItem::End));
}

/// Makes the folder and those on the way.
pub(super) fn make(path: &Path) -> Result<FileDone, FileFailure> {
    match fs::create_dir_all(path) {
        Ok(()) => Ok(at(path)),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Err(wrong_kind(format!(
            "{:?} is there, and is no folder",
            path.display()
        ))),
        Err(error) => Err(failed("made", path)(error)),
    }
}

/// Gives it another place.
pub(super) fn rename(from: &Path, to: &Path) -> Result<FileDone, FileFailure> {
    fs::rename(from, to).map_err(failed("renamed", from))?;
    Ok(at(to))
}

/// Removes it with all that is in it.
pub(super) fn remove(path: &Path) -> Result<FileDone, FileFailure> {
    let kind = fs::symlink_metadata(path).map_err(failed("removed", path))?;
    if kind.is_dir() {
        fs::remove_dir_all(path)
    } else {
        fs::remove_file(path)
    }
    .map_err(failed("removed", path))?;
    Ok(at(path))
}
