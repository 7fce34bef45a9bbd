//! Which file a command's program is, and why it can't be executed.

use std::ffi::OsStr;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use protocol::message::SpawnFailure;
use rustix::fs::{Access, AtFlags, CWD, FileType, OFlags};
use rustix::io::Errno;

use crate::files;
use crate::limits::MAX_QUOTED_BYTES;

/// What the kernel itself looks at to tell formats apart (`BINPRM_BUF_SIZE`).
const HEADER_BYTES: u64 = 256;
/// `EI_CLASS`, `EI_DATA` behind the magic number: 64 bits, little-endian (ELF-64 object file format, §4).
const ELF_64_LITTLE: &[u8] = b"\x7fELF\x02\x01";
/// `e_machine` of x86-64, at byte 18.
const ELF_X86_64: [u8; 2] = 62_u16.to_le_bytes();

/// A command that can't be started: the kind, and a sentence for its user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// What kind.
    pub kind: SpawnFailure,
    /// The sentence.
    pub message: String,
}

impl Failure {
    /// A failure of this kind.
    pub fn new(kind: SpawnFailure, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
        }
    }
}

/// A path or name for a message: bounded, and readable whatever is in it.
#[must_use]
pub fn quoted(bytes: &[u8]) -> String {
    let head = bytes.get(..MAX_QUOTED_BYTES).unwrap_or(bytes);
    String::from_utf8_lossy(head).into_owned()
}

/// Finds the file as execvp(3) does: a name with a slash is a path; any other is looked for in the folders
/// of `path`. One that may not be executed counts only if no other is found.
///
/// # Errors
/// [`SpawnFailure::NotFound`] or [`SpawnFailure::NotExecutable`].
pub fn find(program: &[u8], path: &[u8]) -> Result<PathBuf, Failure> {
    if program.is_empty() {
        return Err(Failure::new(
            SpawnFailure::NotFound,
            "The name of the program is empty",
        ));
    }
    if program.contains(&b'/') {
        let file = PathBuf::from(OsStr::from_bytes(program));
        return match executable(&file) {
            Ok(()) => Ok(file),
            Err(errno) => Err(refused(program, errno)),
        };
    }
    let mut forbidden = None;
    for folder in path.split(|byte| *byte == b':') {
        let folder = if folder.is_empty() { b"." } else { folder };
        let file = Path::new(OsStr::from_bytes(folder)).join(OsStr::from_bytes(program));
        match executable(&file) {
            Ok(()) => return Ok(file),
            Err(Errno::ACCESS) => forbidden = forbidden.or(Some(file)),
            Err(_) => {}
        }
    }
    match forbidden {
        Some(file) => Err(refused(file.as_os_str().as_bytes(), Errno::ACCESS)),
        None => Err(Failure::new(
            SpawnFailure::NotFound,
            format!("There is no program {:?} in PATH", quoted(program)),
        )),
    }
}

/// Refuses a file that is neither an ELF program for this processor nor a script with `#!`. The kernel would
/// say `ENOEXEC`, upon which the C library's exec functions hand the file to `/bin/sh`, whatever it is.
///
/// # Errors
/// [`SpawnFailure::NotExecutable`]. A file that may be executed but not read passes.
pub fn check_format(file: &Path) -> Result<(), Failure> {
    let Ok(header) = header(file) else {
        return Ok(());
    };
    let name = quoted(file.as_os_str().as_bytes());
    let elf = header.starts_with(ELF_64_LITTLE) && header.get(18..20) == Some(&ELF_X86_64);
    if elf || interpreter(&header).is_some() {
        return Ok(());
    }
    let reason = if header.starts_with(b"\x7fELF") {
        "is a program for another kind of processor"
    } else {
        "is neither a program nor a script that begins with #! and its interpreter"
    };
    Err(Failure::new(
        SpawnFailure::NotExecutable,
        format!("{name:?} {reason}"),
    ))
}

/// What it means that `execve` failed on `file` with `error`.
#[must_use]
pub fn exec_failure(file: &Path, error: &io::Error) -> Failure {
    let name = quoted(file.as_os_str().as_bytes());
    let errno = Errno::from_io_error(error);
    match errno {
        Some(Errno::NOENT | Errno::NOTDIR) => match header(file).map(|header| interpreter(&header))
        {
            Ok(Some(interpreter)) => Failure::new(
                SpawnFailure::NotFound,
                format!(
                    "The interpreter {:?} of the script {name:?} does not exist",
                    quoted(&interpreter)
                ),
            ),
            Ok(None) => Failure::new(
                SpawnFailure::NotFound,
                format!("The program {name:?} is there, but the loader that it names is not"),
            ),
            Err(_) => refused(file.as_os_str().as_bytes(), Errno::NOENT),
        },
        Some(errno @ (Errno::ACCESS | Errno::PERM | Errno::LOOP))
            if let Ok(Some(interpreter)) = header(file).map(|header| interpreter(&header))
                && executable(file).is_ok() =>
        {
            let interpreter = quoted(&interpreter);
            let reason = if errno == Errno::LOOP {
                "leads to itself, or to too many others"
            } else {
                "may not be executed: it is no file, or lacks the permission"
            };
            Failure::new(
                SpawnFailure::NotExecutable,
                format!("The interpreter {interpreter:?} of the script {name:?} {reason}"),
            )
        }
        Some(Errno::TOOBIG) => Failure::new(
            SpawnFailure::Invalid,
            format!(
                "The arguments and variables of {name:?} are longer than Linux allows (execve(2))"
            ),
        ),
        Some(Errno::AGAIN | Errno::NOMEM | Errno::MFILE | Errno::NFILE) => Failure::new(
            SpawnFailure::Exhausted,
            format!("The guest has no room to start {name:?}: {error}"),
        ),
        Some(errno) => refused(file.as_os_str().as_bytes(), errno),
        // The standard library's own refusal: a NUL byte in an argument or a variable.
        None => Failure::new(
            SpawnFailure::Invalid,
            format!("{name:?} can't be started with these arguments: {error}"),
        ),
    }
}

/// Whether the caller may execute the file.
fn executable(file: &Path) -> Result<(), Errno> {
    let status = rustix::fs::stat(file)?;
    if FileType::from_raw_mode(status.st_mode) != FileType::RegularFile {
        return Err(Errno::ACCESS);
    }
    // The real user is not the command's yet.
    rustix::fs::accessat(CWD, file, Access::EXEC_OK, AtFlags::EACCESS)
}

fn refused(file: &[u8], errno: Errno) -> Failure {
    let name = quoted(file);
    match errno {
        Errno::NOENT | Errno::NOTDIR | Errno::NAMETOOLONG | Errno::LOOP => Failure::new(
            SpawnFailure::NotFound,
            format!("The program {name:?} does not exist"),
        ),
        Errno::ACCESS | Errno::PERM => Failure::new(
            SpawnFailure::NotExecutable,
            format!("{name:?} may not be executed: it is no file, or lacks the permission"),
        ),
        errno => Failure::new(
            SpawnFailure::NotExecutable,
            format!("{name:?} can't be executed: {}", io::Error::from(errno)),
        ),
    }
}

fn header(file: &Path) -> io::Result<Vec<u8>> {
    let mut header = Vec::new();
    let (file, _) = files::open_regular(file, OFlags::empty())?;
    file.take(HEADER_BYTES).read_to_end(&mut header)?;
    Ok(header)
}

/// The interpreter of a `#!` line, as `fs/binfmt_script.c` reads it: one whose name does not end within the header is none.
fn interpreter(header: &[u8]) -> Option<Vec<u8>> {
    let rest = header.strip_prefix(b"#!")?;
    let line = rest.split(|byte| *byte == b'\n').next()?;
    let name = line.trim_ascii_start();
    let is_cut = header.len() as u64 == HEADER_BYTES
        && line.len() == rest.len()
        && !name.iter().any(|byte| matches!(byte, b' ' | b'\t' | 0));
    if is_cut {
        return None;
    }
    line.split(|byte| matches!(byte, b' ' | b'\t' | 0))
        .find(|word| !word.is_empty())
        .map(<[u8]>::to_vec)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn file(folder: &Path, name: &str, mode: u32, content: &[u8]) -> PathBuf {
        let path = folder.join(name);
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        path
    }

    #[test]
    fn the_first_executable_in_path_is_taken() {
        let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        file(first.path(), "tool", 0o644, b"");
        let wanted = file(second.path(), "tool", 0o755, b"");
        let path = [
            first.path().as_os_str().as_bytes(),
            second.path().as_os_str().as_bytes(),
        ]
        .join(&b':');

        assert_eq!(find(b"tool", &path).unwrap(), wanted);
    }

    #[test]
    fn test_find_missing_or_forbidden_program_returns_its_kind() {
        let folder = tempfile::tempdir().unwrap();
        let plain = file(folder.path(), "plain", 0o644, b"");
        fs::create_dir(folder.path().join("folder")).unwrap();
        let path = folder.path().as_os_str().as_bytes();
        let kind = |program: &[u8]| find(program, path).unwrap_err().kind;

        assert_eq!(kind(b"absent"), SpawnFailure::NotFound);
        assert_eq!(kind(b"plain"), SpawnFailure::NotExecutable);
        assert_eq!(kind(b"folder"), SpawnFailure::NotExecutable);
        assert_eq!(
            kind(plain.as_os_str().as_bytes()),
            SpawnFailure::NotExecutable
        );
        assert_eq!(kind(b"./absent"), SpawnFailure::NotFound);
        assert_eq!(kind(b""), SpawnFailure::NotFound);
    }

    #[test]
    fn test_check_format_of_no_program_returns_not_executable() {
        let folder = tempfile::tempdir().unwrap();
        let mut foreign = vec![0; 64];
        foreign[..6].copy_from_slice(ELF_64_LITTLE);
        foreign[18] = 183;
        // The kernel looks at the first 256 bytes alone.
        let long = [&b"#!/"[..], &[b'a'; 300], b"\nexit\n"].concat();
        for (name, content) in [
            ("empty", &b""[..]),
            ("text", b"echo hi\n"),
            ("bare", b"#! \n"),
            ("long", &long),
            ("foreign", &foreign),
        ] {
            let path = file(folder.path(), name, 0o755, content);
            assert_eq!(
                check_format(&path).unwrap_err().kind,
                SpawnFailure::NotExecutable,
                "{name}"
            );
        }
        check_format(&file(folder.path(), "script", 0o755, b"#!/bin/sh\n")).unwrap();
        check_format(Path::new("/proc/self/exe")).unwrap();
    }

    #[test]
    fn a_missing_interpreter_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let script = file(
            folder.path(),
            "script",
            0o755,
            b"#! /no/such/python -u\nprint()\n",
        );

        let failure = exec_failure(&script, &Errno::NOENT.into());

        assert_eq!(failure.kind, SpawnFailure::NotFound);
        assert!(
            failure.message.contains("/no/such/python"),
            "{}",
            failure.message
        );
    }

    #[test]
    fn an_interpreter_that_is_none_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let script = file(folder.path(), "script", 0o755, b"#!/tmp -u\nprint()\n");

        for (errno, reason) in [
            (Errno::ACCESS, "may not be"),
            (Errno::LOOP, "leads to itself"),
        ] {
            let failure = exec_failure(&script, &errno.into());

            assert_eq!(failure.kind, SpawnFailure::NotExecutable);
            assert!(
                failure.message.contains("The interpreter \"/tmp\""),
                "{failure:?}"
            );
            assert!(failure.message.contains(reason), "{failure:?}");
        }
    }

    #[test]
    fn a_line_as_long_as_the_kernel_reads_has_an_interpreter() {
        let words = [&b"#!/bin/sh "[..], &[b'a'; 300]].concat();

        assert_eq!(interpreter(&words[..256]).unwrap(), b"/bin/sh");
        assert_eq!(interpreter(b"#!/bin/sh").unwrap(), b"/bin/sh");
    }

    #[test]
    fn exec_errors_have_their_kinds() {
        let kind = |errno: Errno| exec_failure(Path::new("/x"), &errno.into()).kind;

        assert_eq!(kind(Errno::TOOBIG), SpawnFailure::Invalid);
        assert_eq!(kind(Errno::AGAIN), SpawnFailure::Exhausted);
        assert_eq!(kind(Errno::ACCESS), SpawnFailure::NotExecutable);
        assert_eq!(kind(Errno::NOENT), SpawnFailure::NotFound);
    }
}
