//! Writing a file that the host sends: beside its place first, then renamed into it. It runs in a stage that has
//! become the file's user, so that the kernel decides what may be written, and everything made belongs to the
//! user.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use protocol::content::ContentReader;
use protocol::frame::{self, MAX_FROM_AGENT_BYTES};
use protocol::message::{FileWritten, WriteFile};

use crate::limits::MAX_PATH_BYTES;
use crate::program::{Failure, quoted};
use crate::users::User;

/// Receives the file on `stream` and answers there. `prepared` is how becoming its user went.
pub fn serve(stream: &File, file: &WriteFile, prepared: Result<User, Failure>) {
    let result = prepared
        .map_err(|failure| failure.message)
        .and_then(|user| receive(stream, file, &user.home));
    let answer = FileWritten {
        result: result.map(|path| path.as_os_str().as_bytes().to_vec()),
    };
    let mut writer = stream;
    // A host that is gone needs no answer.
    let _ = frame::write(&mut writer, &answer, MAX_FROM_AGENT_BYTES);
}

fn receive(stream: &File, file: &WriteFile, home: &str) -> Result<PathBuf, String> {
    let target = target(&file.path, home)?;
    let name = quoted(target.as_os_str().as_bytes());
    write_atomically(&target, file.mode & 0o7777, stream)
        .map_err(|error| format!("The file {name:?} can't be written: {error}"))?;
    Ok(target)
}

fn target(path: &[u8], home: &str) -> Result<PathBuf, String> {
    let name = quoted(path);
    let target = Path::new(home).join(OsStr::from_bytes(path));
    if target.as_os_str().len() > MAX_PATH_BYTES {
        return Err(format!(
            "The path {name:?} is longer than {MAX_PATH_BYTES} bytes"
        ));
    }
    let ends_in_name = !path.ends_with(b"/") && !path.ends_with(b"/.") && path != b".";
    if !ends_in_name || target.file_name().is_none() || path.contains(&0) {
        return Err(format!(
            "The path {name:?} does not end in the name of a file"
        ));
    }
    Ok(target)
}

/// Writes `content`, once it has come whole, to a new file beside `target` and renames it over it. A symbolic link at
/// `target` is replaced, not followed.
fn write_atomically(target: &Path, mode: u32, content: &File) -> io::Result<()> {
    let folder = target.parent().unwrap_or_else(|| Path::new("/"));
    fs::create_dir_all(folder)?;
    // One stage writes one file, so that its process number makes the name unique.
    let beside = folder.join(format!(".sandvmm-{}", std::process::id()));
    let _ = fs::remove_file(&beside);
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&beside)?;
    let written = io::copy(&mut ContentReader::new(content), &mut &file)
        .and_then(|_| file.set_permissions(Permissions::from_mode(mode)))
        .and_then(|()| fs::rename(&beside, target));
    if written.is_err() {
        let _ = fs::remove_file(&beside);
    }
    written
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::OwnedFd;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixStream;
    use std::thread;

    use protocol::content::{self, MAX_PIECE_BYTES};

    use super::*;

    /// Sends `content` in pieces and its end, and returns what was answered.
    fn write(path: &Path, mode: u32, content: &[u8], home: &Path) -> Result<Vec<u8>, String> {
        let (mut host, guest) = UnixStream::pair().unwrap();
        let file = WriteFile {
            path: path.as_os_str().as_bytes().to_vec(),
            mode,
            user: None,
        };
        let user = User {
            home: home.to_str().unwrap().to_owned(),
            ..crate::users::Accounts::default().resolve(None).unwrap()
        };
        let stage = thread::spawn(move || serve(&OwnedFd::from(guest).into(), &file, Ok(user)));
        // Refused paths are answered without reading.
        for piece in content.chunks(MAX_PIECE_BYTES).chain([&[][..]]) {
            let _ = host.write_all(&content::header(piece.len()));
            let _ = host.write_all(piece);
        }
        let answer: FileWritten = frame::read(&mut host, MAX_FROM_AGENT_BYTES).unwrap();
        stage.join().unwrap();
        answer.result
    }

    #[test]
    fn a_file_arrives_whole_with_its_mode_and_folders() {
        let home = tempfile::tempdir().unwrap();
        let content: Vec<u8> = (0..300_000_u32).flat_map(u32::to_le_bytes).collect();

        let path = write(Path::new("a/b/file"), 0o751, &content, home.path()).unwrap();

        let expected = home.path().join("a/b/file");
        assert_eq!(path, expected.as_os_str().as_bytes());
        assert_eq!(fs::read(&expected).unwrap(), content);
        assert_eq!(
            fs::metadata(&expected).unwrap().permissions().mode() & 0o7777,
            0o751
        );
        assert_eq!(fs::read_dir(expected.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn a_link_in_the_files_place_is_replaced_not_followed() {
        let home = tempfile::tempdir().unwrap();
        let victim = home.path().join("victim");
        fs::write(&victim, "kept").unwrap();
        symlink(&victim, home.path().join("link")).unwrap();

        write(Path::new("link"), 0o600, b"new", home.path()).unwrap();

        assert_eq!(fs::read(victim).unwrap(), b"kept");
        assert_eq!(fs::read(home.path().join("link")).unwrap(), b"new");
    }

    #[test]
    fn test_write_to_no_file_name_returns_a_sentence() {
        let home = tempfile::tempdir().unwrap();
        fs::create_dir(home.path().join("folder")).unwrap();
        for path in ["", ".", "..", "a/", "a/.", "folder"] {
            let error = write(Path::new(path), 0o600, b"", home.path()).unwrap_err();
            assert!(error.starts_with("The "), "{path}: {error}");
        }
        assert_eq!(fs::read_dir(home.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_content_without_its_end_makes_no_file() {
        let home = tempfile::tempdir().unwrap();
        let (mut host, guest) = UnixStream::pair().unwrap();
        host.write_all(&content::header(4)).unwrap();
        host.write_all(b"half").unwrap();
        host.shutdown(std::net::Shutdown::Write).unwrap();

        let written = write_atomically(
            &home.path().join("file"),
            0o600,
            &OwnedFd::from(guest).into(),
        );

        assert!(written.is_err());
        assert_eq!(fs::read_dir(home.path()).unwrap().count(), 0);
    }
}
