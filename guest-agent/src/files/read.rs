//! Reading a file for the host.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use protocol::content::{self, MAX_PIECE_BYTES};
use protocol::file::{FileAnswer, FileDone, FileFailure};

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
    // Without waiting: a pipe has no writer.
    let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(path)
        .map_err(failed("read", path))?;
    let found = file.metadata().map_err(failed("looked at", path))?;
    if !found.is_file() {
        let name = path.display();
        return Err(wrong_kind(format!("{name:?} is no regular file")));
    }
    Ok((file, FileDone::Metadata(metadata::from(&found))))
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
