//! Files that options name, opened without waiting: a pipe that nobody has at its other end would be waited for (fifo(7)), and no time-out runs
//! yet.

use std::fs::{File, OpenOptions};
use std::io::{self, Cursor, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl, fstatfs};
use rustix::io::Errno;

/// The kind of a file system of pipes without names, as `statfs(2)` tells it (`PIPEFS_MAGIC`, `include/uapi/linux/magic.h`).
const PIPEFS_MAGIC: u64 = 0x5049_5045;

/// Opens it to be read. A pipe has somebody who writes, or who wrote what is still in it.
///
/// # Errors
/// What the system says, and of a pipe that nobody writes to.
pub(crate) fn to_read(path: &Path) -> io::Result<impl Read + use<>> {
    let file = open(OpenOptions::new().read(true), path)?;
    let mut first = Vec::new();
    if file.metadata()?.file_type().is_fifo() {
        // Without a writer it is at its end, with one that is silent so far there is nothing yet (read(2)). A pipe without a name had a
        // writer, and is empty: `<(true)`.
        let mut byte = [0];
        match rustix::io::read(&file, &mut byte) {
            Ok(0) if has_name(&file)? => {
                return Err(io::Error::other("it is a pipe that nobody writes to"));
            }
            Ok(length) => first.extend(byte.into_iter().take(length)),
            Err(Errno::AGAIN) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    wait_again(&file)?;
    Ok(Cursor::new(first).chain(file))
}

/// Opens it to be written by these options. A pipe has somebody who reads.
///
/// # Errors
/// What the system says, and of a pipe that nobody reads.
pub(crate) fn to_write(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    let opened = open(options, path).map_err(|error| {
        let is_pipe = std::fs::metadata(path).is_ok_and(|found| found.file_type().is_fifo());
        // open(2): ENXIO.
        match error.raw_os_error() {
            Some(errno) if is_pipe && errno == Errno::NXIO.raw_os_error() => {
                io::Error::other("it is a pipe that nobody reads")
            }
            _ => error,
        }
    });
    let file = opened?;
    wait_again(&file)?;
    Ok(file)
}

fn open(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    options.custom_flags(flags.bits().cast_signed()).open(path)
}

/// Whether a pipe lies in a folder: those of pipe(2) are in a file system of their own.
fn has_name(pipe: &File) -> io::Result<bool> {
    Ok(u64::try_from(fstatfs(pipe)?.f_type) != Ok(PIPEFS_MAGIC))
}

/// From here on it is waited for, as anybody does.
fn wait_again(file: &File) -> io::Result<()> {
    let flags = fcntl_getfl(file)?;
    Ok(fcntl_setfl(file, flags - OFlags::NONBLOCK)?)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsRawFd;
    use std::path::PathBuf;
    use std::thread;
    use std::time::Duration;

    use super::*;

    fn pipe() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        let (kind, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU);
        rustix::fs::mknodat(rustix::fs::CWD, &path, kind, mode, 0).unwrap();
        (folder, path)
    }

    fn both(path: &Path) -> File {
        File::options().read(true).write(true).open(path).unwrap()
    }

    #[test]
    fn a_pipe_that_nobody_has_at_its_other_end_is_not_waited_for() {
        let (_folder, path) = pipe();

        let read = to_read(&path).map(drop).unwrap_err();
        let written = to_write(OpenOptions::new().append(true), &path).unwrap_err();

        assert!(read.to_string().contains("nobody writes"), "{read}");
        assert!(written.to_string().contains("nobody reads"), "{written}");
    }

    #[test]
    fn a_pipe_without_a_name_whose_writer_has_written_nothing_is_empty() {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(writer);
        let path = format!("/proc/self/fd/{}", reader.as_raw_fd());

        let mut text = String::new();
        to_read(Path::new(&path))
            .unwrap()
            .read_to_string(&mut text)
            .unwrap();

        assert_eq!(text, "");
    }

    #[test]
    fn what_comes_through_a_pipe_is_read_whole_and_waited_for() {
        for is_early in [true, false] {
            let (_folder, path) = pipe();
            let mut writer = both(&path);
            if is_early {
                writer.write_all(b"one\n").unwrap();
            }

            let mut reader = to_read(&path).unwrap();
            let writing = thread::spawn(move || {
                // The reader is in its wait most likely.
                thread::sleep(Duration::from_millis(50));
                writer.write_all(b"two").unwrap();
            });
            let mut text = String::new();
            reader.read_to_string(&mut text).unwrap();

            writing.join().unwrap();
            assert_eq!(text, if is_early { "one\ntwo" } else { "two" });
        }
    }

    #[test]
    fn what_is_written_to_a_pipe_waits_for_its_reader() {
        let (_folder, path) = pipe();
        let mut reader = both(&path);
        // More than a pipe holds.
        let sent = vec![7; 1 << 20];

        let mut writer = to_write(OpenOptions::new().append(true), &path).unwrap();
        let length = sent.len();
        let writing = thread::spawn(move || writer.write_all(&sent));
        let mut received = vec![0; length];
        reader.read_exact(&mut received).unwrap();

        writing.join().unwrap().unwrap();
        assert!(received.iter().all(|byte| *byte == 7));
    }
}
