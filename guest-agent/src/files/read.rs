//! Reading a file for the host.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use protocol::content::{self, MAX_PIECE_BYTES};
use protocol::file::{FileAnswer, FileDone, FileFailure};
use rustix::fs::OFlags;

use super::{answer, failed, metadata, say, wrong_kind};

/// Answers with what the file is, then sends its content. A content that breaks off has no end, which the host takes for a
/// failure.
pub(super) fn send(stream: &File, path: &Path) {
    match open(path) {
        Ok((file, done)) => {
            let said = say(stream, &FileAnswer { result: Ok(done) });
            if said.is_ok() {
                // A host that is gone needs no content.
                let _ = send_content(stream, &file);
            }
        }
        Err(failure) => answer(stream, Err(failure)),
    }
}

fn open(path: &Path) -> Result<(File, FileDone), FileFailure> {
    match open_regular(path, OFlags::empty()) {
        Ok((file, found)) => Ok((file, FileDone::Metadata(metadata::from(&found)))),
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            let name = path.display();
            Err(wrong_kind(format!("{name:?} is no regular file")))
        }
        Err(error) => Err(failed("read", path)(error)),
    }
}

/// Opens a regular file with these flags, and says what was opened: a program may put something else in its place at any time. A pipe is not
/// waited for, which has no writer.
///
/// # Errors
/// [`io::ErrorKind::InvalidInput`] when it is no regular file; else that of the system.
pub(crate) fn open_regular(path: &Path, flags: OFlags) -> io::Result<(File, Metadata)> {
    let flags = flags | OFlags::NONBLOCK;
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(flags.bits().cast_signed())
        .open(path)?;
    let found = file.metadata()?;
    if found.is_file() {
        Ok((file, found))
    } else {
        let error = "it is no regular file";
        Err(io::Error::new(io::ErrorKind::InvalidInput, error))
    }
}

/// All of `file` in pieces, and its end.
pub(super) fn send_content(mut stream: &File, mut file: &File) -> io::Result<()> {
    let mut piece = vec![0; MAX_PIECE_BYTES];
    loop {
        let count = match file.read(&mut piece) {
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        stream.write_all(&content::header(count))?;
        if count == 0 {
            return Ok(());
        }
        stream.write_all(piece.get(..count).unwrap_or_default())?;
    }
}
