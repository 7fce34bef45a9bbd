//! Writing a file that the host sends: without a name first, then renamed into its place.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

use protocol::content::ContentReader;
use protocol::file::{FileDone, FileFailure, MODE_BITS};
use rustix::fs::{AtFlags, CWD, OFlags, linkat};
use rustix::io::Errno;

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
    let (file, has_name) = begin(folder, &beside)?;
    let written = io::copy(&mut content, &mut &file)
        .and_then(|_| file.set_permissions(Permissions::from_mode(mode)))
        .and_then(|()| {
            if has_name {
                Ok(())
            } else {
                name(&file, &beside)
            }
        })
        .and_then(|()| fs::rename(&beside, target));
    if written.is_err() {
        let _ = fs::remove_file(&beside);
    }
    written.map(|()| file)
}

/// An empty file that has no name, so that it goes with a stage that is killed; or this one, where the file system has none without.
fn begin(folder: &Path, beside: &Path) -> io::Result<(File, bool)> {
    let mut options = OpenOptions::new();
    options.write(true).mode(0o600);
    let nameless = options
        .custom_flags(OFlags::TMPFILE.bits().cast_signed())
        .open(folder);
    match nameless {
        Ok(file) => Ok((file, false)),
        // open(2), ERRORS, of `O_TMPFILE`.
        Err(error)
            if matches!(
                Errno::from_io_error(&error),
                Some(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL)
            ) =>
        {
            let mut options = OpenOptions::new();
            let file = options
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(beside)?;
            Ok((file, true))
        }
        Err(error) => Err(error),
    }
}

/// Gives a file without a name one. Another way, by an empty path, needs a right that a user has not (linkat(2), `AT_EMPTY_PATH`).
fn name(file: &File, path: &Path) -> io::Result<()> {
    let opened = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(linkat(CWD, opened, CWD, path, AtFlags::SYMLINK_FOLLOW)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Content that looks at the folder when it is read.
    struct Looking<'a>(&'a Path, usize);

    impl Read for Looking<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let names = fs::read_dir(self.0)?;
            let names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
            assert_eq!(names, ["target"], "a killed stage would leave it");
            self.1 += 1;
            if self.1 > 3 {
                return Ok(0);
            }
            buffer[0] = b'x';
            Ok(1)
        }
    }

    #[test]
    fn what_is_being_written_has_no_name() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("target");
        fs::write(&target, "old").unwrap();

        replace(&target, 0o640, Looking(folder.path(), 0)).unwrap();

        assert_eq!(fs::read(&target).unwrap(), b"xxx");
        let mode = fs::metadata(&target).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o640);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn content_that_breaks_off_leaves_what_was_there() {
        struct Broken;
        impl Read for Broken {
            fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
                Err(io::ErrorKind::UnexpectedEof.into())
            }
        }
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("target");
        fs::write(&target, "old").unwrap();

        replace(&target, 0o644, Broken).unwrap_err();

        assert_eq!(fs::read(&target).unwrap(), b"old");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
