//! Writing a file that the host sends: beside its place first, then renamed into it.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Read};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

use protocol::content::ContentReader;
use protocol::file::{FileDone, FileFailure, MODE_BITS};

use super::{at, failed, wrong_kind};

/// Receives the file on `stream`.
pub(super) fn receive(stream: &File, target: &Path, mode: u32) -> Result<FileDone, FileFailure> {
    if let Some(folder) = target.parent() {
        fs::create_dir_all(folder).map_err(failed("written", target))?;
    }
    replace(target, mode, ContentReader::new(stream))?;
    Ok(at(target))
}

/// Writes the file that comes with a command; its folders too.
pub(super) fn put(target: &Path, mode: u32, content: &[u8]) -> Result<(), FileFailure> {
    if let Some(folder) = target.parent() {
        fs::create_dir_all(folder).map_err(failed("written", target))?;
    }
    replace(target, mode, content).map(drop)
}

/// Writes `content`, once it has come whole, to a new file beside `target` and renames it over it. A symbolic link at
/// `target` is replaced, not followed.
pub(super) fn replace(target: &Path, mode: u32, content: impl Read) -> Result<File, FileFailure> {
    // `..` has no name at its end, and `name/` means a folder.
    let bytes = target.as_os_str().as_encoded_bytes();
    let ends_in_name = !bytes.ends_with(b"/") && !bytes.ends_with(b"/.");
    let (true, Some(folder), Some(_)) = (ends_in_name, target.parent(), target.file_name()) else {
        return Err(wrong_kind(format!(
            "The path {:?} does not end in the name of a file",
            target.display()
        )));
    };
    write_atomically(folder, target, mode & MODE_BITS, content).map_err(failed("written", target))
}

fn write_atomically(
    folder: &Path,
    target: &Path,
    mode: u32,
    mut content: impl Read,
) -> io::Result<File> {
    // One stage writes one file at a time, so that its process number makes the name unique.
    let beside = folder.join(format!(".sandvmm-{}", std::process::id()));
    let _ = fs::remove_file(&beside);
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&beside)?;
    let written = io::copy(&mut content, &mut &file)
        .and_then(|_| file.set_permissions(Permissions::from_mode(mode)))
        .and_then(|()| fs::rename(&beside, target));
    if written.is_err() {
        let _ = fs::remove_file(&beside);
    }
    written.map(|()| file)
}
