//! A script of the host: opened safely, and how a guest is to run it.

mod elf;

use std::ffi::{OsStr, OsString};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use elf::Elf;
use rustix::fs::OFlags;

/// Largest script, in bytes; a program of machine code counts as a script too.
pub const MAX_SCRIPT_BYTES: u64 = 64 << 20;

/// Bytes at the start of a file that tell how to run it.
const HEAD_BYTES: u64 = 4;

/// Why a script can't be run. Nothing has been started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ScriptError {
    /// There is no such file.
    #[error("There is no script '{}'", .0.display())]
    Missing(PathBuf),
    /// A link whose target is missing.
    #[error("'{}' is a link to what is not there", .0.display())]
    Dangling(PathBuf),
    /// A folder, a pipe, a socket or a device.
    #[error("'{}' is {kind}, not a script", .path.display())]
    NotAFile {
        /// What was named.
        path: PathBuf,
        /// What it is, with its article.
        kind: &'static str,
    },
    /// A file above [`MAX_SCRIPT_BYTES`].
    #[error("The script '{}' is larger than {} MiB", .0.display(), MAX_SCRIPT_BYTES >> 20)]
    TooLarge(PathBuf),
    /// Neither its name nor its first bytes tell how to run it.
    #[error(
        "How to run '{}' is not known: give it an extension (.py .sh .js .mjs .rb .pl) or a #! line, or \
         say the command", .0.display()
    )]
    Unknown(PathBuf),
    /// An ELF file whose end is missing.
    #[error("The program '{}' is cut short: its end is missing, copy it anew", .0.display())]
    Cut(PathBuf),
    /// An ELF file for another processor.
    #[error("'{}' is a program for another kind of processor: the guest's runs 64-bit x86 programs", .0.display())]
    Foreign(PathBuf),
    /// An ELF file that is none to be run.
    #[error("'{}' is an object file or a core file, not a program: link it, or name another", .0.display())]
    NotAProgram(PathBuf),
    /// The system refuses to open or read it.
    #[error("The script '{}' can't be read", .path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
}

/// How a guest runs a script.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Launch {
    /// As the first argument of this program, looked up in the guest's `PATH`.
    Interpreter(&'static str),
    /// As a program of its own: the guest's kernel follows the `#!` line, or loads the ELF file.
    Direct,
}

impl Launch {
    /// Tells from a file's name, then from its first four bytes (`#!`, or the ELF magic number). `.sh` with a
    /// `#!` line runs by that line.
    #[must_use]
    pub fn recognise(name: &Path, head: &[u8]) -> Option<Self> {
        let has_line = head.starts_with(b"#!");
        match name.extension().map(OsStr::as_bytes) {
            Some(b"py") => Some(Self::Interpreter("python3")),
            Some(b"sh") if !has_line => Some(Self::Interpreter("sh")),
            Some(b"js" | b"mjs") => Some(Self::Interpreter("node")),
            Some(b"rb") => Some(Self::Interpreter("ruby")),
            Some(b"pl") => Some(Self::Interpreter("perl")),
            _ if has_line || head.starts_with(elf::MAGIC) => Some(Self::Direct),
            _ => None,
        }
    }
}

/// A script that is open and known to be runnable.
///
/// ```
/// use std::path::Path;
/// use sandvmm::script::{Script, ScriptError};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let path = std::env::temp_dir().join(format!("{}.py", std::process::id()));
/// std::fs::write(&path, "print(6 * 7)")?;
/// let script = Script::open(&path)?;
/// assert_eq!(script.command_line(Path::new("a.py")), ["python3", "a.py"]);
/// assert!(matches!(Script::open(Path::new("/dev/null")), Err(ScriptError::NotAFile { .. })));
/// # std::fs::remove_file(&path)?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Script {
    file: File,
    name: OsString,
    launch: Launch,
}

impl Script {
    /// Opens a script. Never waits, whatever `path` names: what is no regular file is refused.
    ///
    /// # Errors
    /// See [`ScriptError`].
    pub fn open(path: &Path) -> Result<Self, ScriptError> {
        let unreadable = |source| ScriptError::Unreadable {
            path: path.to_owned(),
            source,
        };
        let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
        let opened = OpenOptions::new()
            .read(true)
            .custom_flags(flags.bits().cast_signed())
            .open(path);
        let mut file = match opened {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(if path.is_symlink() {
                    ScriptError::Dangling(path.to_owned())
                } else {
                    ScriptError::Missing(path.to_owned())
                });
            }
            // A socket can't be opened at all (ENXIO).
            Err(error) => match std::fs::metadata(path) {
                Ok(metadata) if !metadata.is_file() => {
                    return Err(not_a_file(path, metadata.file_type()));
                }
                _ => return Err(unreadable(error)),
            },
        };
        let metadata = file.metadata().map_err(unreadable)?;
        if !metadata.is_file() {
            return Err(not_a_file(path, metadata.file_type()));
        }
        if metadata.len() > MAX_SCRIPT_BYTES {
            return Err(ScriptError::TooLarge(path.to_owned()));
        }
        let mut head = Vec::new();
        file.by_ref()
            .take(HEAD_BYTES)
            .read_to_end(&mut head)
            .and_then(|_| file.seek(SeekFrom::Start(0)))
            .map_err(unreadable)?;
        let name = path.file_name().unwrap_or(path.as_os_str()).to_owned();
        let Some(launch) = Launch::recognise(Path::new(&name), &head) else {
            return Err(ScriptError::Unknown(path.to_owned()));
        };
        if launch == Launch::Direct && head == elf::MAGIC {
            match elf::look(&file).map_err(unreadable)? {
                Elf::Program => {}
                Elf::Cut => return Err(ScriptError::Cut(path.to_owned())),
                Elf::Foreign => return Err(ScriptError::Foreign(path.to_owned())),
                Elf::NotAProgram => return Err(ScriptError::NotAProgram(path.to_owned())),
            }
        }
        Ok(Self { file, name, launch })
    }

    /// The last part of the script's path: its name in the guest.
    #[must_use]
    pub fn name(&self) -> &OsStr {
        &self.name
    }

    /// How it is run.
    #[must_use]
    pub fn launch(&self) -> Launch {
        self.launch
    }

    /// The words that run the script where it lies at `guest_path` in the guest; its own arguments come
    /// after them. A relative path is one of the working folder, and is never taken for an option or looked
    /// up in `PATH`.
    #[must_use]
    pub fn command_line(&self, guest_path: &Path) -> Vec<OsString> {
        let bytes = guest_path.as_os_str().as_bytes();
        let is_bare = !bytes.contains(&b'/');
        let path = if is_bare && (bytes.starts_with(b"-") || self.launch == Launch::Direct) {
            Path::new(".").join(guest_path).into_os_string()
        } else {
            guest_path.as_os_str().to_owned()
        };
        match self.launch {
            Launch::Interpreter(program) => vec![program.into(), path],
            Launch::Direct => vec![path],
        }
    }

    /// All of a script that has at most `limit_bytes`; `None` for a longer one, or one that can't be read: [`Self::reader`] tells then.
    #[must_use]
    pub fn short(&self, limit_bytes: usize) -> Option<Vec<u8>> {
        let mut content = Vec::new();
        let bound = u64::try_from(limit_bytes).ok()?.saturating_add(1);
        let read = (&self.file).take(bound).read_to_end(&mut content);
        (&self.file).rewind().ok()?;
        (read.is_ok() && content.len() <= limit_bytes).then_some(content)
    }

    /// The script's bytes, [`MAX_SCRIPT_BYTES`] at most, also if the file grows meanwhile. To be read once:
    /// two readers share one position.
    pub fn reader(&self) -> impl Read {
        (&self.file).take(MAX_SCRIPT_BYTES)
    }
}

fn not_a_file(path: &Path, kind: std::fs::FileType) -> ScriptError {
    use std::os::unix::fs::FileTypeExt;
    let kind = if kind.is_dir() {
        "a folder"
    } else if kind.is_fifo() {
        "a named pipe"
    } else if kind.is_socket() {
        "a socket"
    } else {
        "a device"
    };
    ScriptError::NotAFile {
        path: path.to_owned(),
        kind,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recognise(name: &str, head: &[u8]) -> Option<Launch> {
        Launch::recognise(Path::new(name), head)
    }

    fn open_named(name: &OsStr, content: &[u8]) -> Result<Script, ScriptError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, content).unwrap();
        Script::open(&path)
    }

    #[test]
    fn the_extension_comes_first() {
        for (name, program) in [
            ("a.py", "python3"),
            ("a.sh", "sh"),
            ("a.js", "node"),
            ("a.mjs", "node"),
            ("a.rb", "ruby"),
            ("a.b.pl", "perl"),
        ] {
            assert_eq!(
                recognise(name, b"text"),
                Some(Launch::Interpreter(program)),
                "{name}"
            );
        }
        assert_eq!(
            recognise("a.py", b"#!/b"),
            Some(Launch::Interpreter("python3"))
        );
        assert_eq!(recognise("a.sh", b"#!/b"), Some(Launch::Direct));
    }

    #[test]
    fn then_the_first_bytes_tell() {
        assert_eq!(recognise("tool", b"#!/u"), Some(Launch::Direct));
        assert_eq!(recognise("tool.x", b"\x7fELF"), Some(Launch::Direct));
        assert_eq!(recognise("tool", b"\x7fEL"), None);
        assert_eq!(recognise(".py", b"text"), None);
        assert_eq!(recognise("a.txt", b""), None);
        assert_eq!(recognise("a.PY", b"text"), None);
    }

    #[test]
    fn a_script_is_read_from_its_start() {
        let script = open_named(OsStr::new("a.py"), b"print(1)\n").unwrap();

        let mut content = Vec::new();
        script.reader().read_to_end(&mut content).unwrap();

        assert_eq!(content, b"print(1)\n");
    }

    #[test]
    fn a_short_script_is_given_whole_and_a_longer_one_can_still_be_read() {
        let script = open_named(OsStr::new("a.py"), b"print(1)\n").unwrap();

        assert_eq!(script.short(9).as_deref(), Some(b"print(1)\n".as_slice()));
        assert_eq!(script.short(8), None);
        let mut content = Vec::new();
        script.reader().read_to_end(&mut content).unwrap();
        assert_eq!(content, b"print(1)\n");
    }

    #[test]
    fn an_empty_script_with_an_extension_is_one() {
        let script = open_named(OsStr::new("a.py"), b"").unwrap();

        assert_eq!(script.launch(), Launch::Interpreter("python3"));
    }

    #[test]
    fn names_pass_as_bytes_and_never_as_options() {
        let name = OsStr::from_bytes(b"-\xff.py");
        let script = open_named(name, b"").unwrap();

        let words = script.command_line(Path::new(script.name()));

        assert_eq!(words[0], "python3");
        assert_eq!(words[1].as_bytes(), b"./-\xff.py");
    }

    #[test]
    fn a_direct_script_is_not_looked_up_in_path() {
        let script = open_named(OsStr::new("ls"), b"#!/bin/sh\n").unwrap();

        assert_eq!(script.command_line(Path::new("ls")), ["./ls"]);
        assert_eq!(script.command_line(Path::new("/home/u/ls")), ["/home/u/ls"]);
    }

    #[test]
    fn a_script_is_called_by_its_bare_name() {
        let script = open_named(OsStr::new("a.py"), b"").unwrap();

        assert_eq!(script.command_line(Path::new("a.py")), ["python3", "a.py"]);
    }

    #[test]
    fn what_is_no_script_is_refused_without_waiting() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe.py");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &pipe,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR,
            0,
        )
        .unwrap();
        let socket = folder.path().join("socket.py");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();

        for (path, kind) in [
            (pipe.as_path(), "a named pipe"),
            (socket.as_path(), "a socket"),
            (folder.path(), "a folder"),
            (Path::new("/dev/null"), "a device"),
        ] {
            match Script::open(path) {
                Err(ScriptError::NotAFile { kind: found, .. }) => assert_eq!(found, kind),
                other => panic!("{other:?}"),
            }
        }
        assert!(matches!(
            Script::open(&folder.path().join("none.py")),
            Err(ScriptError::Missing(_))
        ));
        let link = folder.path().join("link.py");
        std::os::unix::fs::symlink("/nowhere/at/all.py", &link).unwrap();
        assert!(matches!(Script::open(&link), Err(ScriptError::Dangling(_))));
        assert!(matches!(
            open_named(OsStr::new("notes"), b"text"),
            Err(ScriptError::Unknown(_))
        ));
    }

    #[test]
    fn a_file_above_the_bound_is_refused_before_it_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("large.py");
        File::create(&path)
            .unwrap()
            .set_len(MAX_SCRIPT_BYTES + 1)
            .unwrap();

        assert!(matches!(Script::open(&path), Err(ScriptError::TooLarge(_))));
    }
}
