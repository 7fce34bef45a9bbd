//! Which files a command needs in memory, so that a count of its instructions has no wait for another machine's disk in it.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;

/// What the loader reads first.
const LOADER_CACHE: &str = "/etc/ld.so.cache";

/// The program of `command`, the libraries that it is linked with, arguments that are files, and `more`: canonical paths, each
/// once, of files that exist.
pub(super) fn files(
    command: &[OsString],
    environment: &[(OsString, OsString)],
    more: &[PathBuf],
) -> Vec<PathBuf> {
    let path = environment
        .iter()
        .find_map(|(name, value)| (name == "PATH").then_some(value.as_os_str()))
        .unwrap_or_default();
    let program = command.first().and_then(|program| find(program, path));
    let libraries = program.as_deref().map(libraries).unwrap_or_default();
    let arguments = command.iter().skip(1).map(PathBuf::from);
    let all = program.into_iter().chain(libraries).chain(arguments);
    let all = all.chain(more.iter().cloned()).chain([LOADER_CACHE.into()]);
    let files: BTreeSet<PathBuf> = all
        .filter_map(|file| file.canonicalize().ok())
        .filter(|file| file.is_file())
        .collect();
    files.into_iter().collect()
}

/// The file that is started for `program`, as execvp(3) finds it.
fn find(program: &OsStr, path: &OsStr) -> Option<PathBuf> {
    if program.as_encoded_bytes().contains(&b'/') {
        return Some(program.into());
    }
    std::env::split_paths(path)
        .map(|folder| folder.join(program))
        .find(|file| file.is_file())
}

/// What ldd says that `program` is linked with; nothing for a static program or a script.
fn libraries(program: &Path) -> Vec<PathBuf> {
    let listing = Command::new("ldd").arg(program).output();
    let listing = listing.map(|output| output.stdout).unwrap_or_default();
    // "	libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x…)", "	/lib64/ld-linux-x86-64.so.2 (0x…)".
    String::from_utf8_lossy(&listing)
        .lines()
        .flat_map(|line| line.split_whitespace())
        .filter(|word| word.starts_with('/'))
        .map(PathBuf::from)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_comes_with_its_libraries_and_the_files_that_it_is_given() {
        let command = ["sh".into(), "/etc/passwd".into(), "/no/such/file".into()];
        let environment = [("PATH".into(), "/nowhere:/usr/bin:/bin".into())];

        let files = files(&command, &environment, &["/etc/group".into()]);

        let has = |part: &str| {
            files
                .iter()
                .any(|file| file.to_string_lossy().contains(part))
        };
        assert!(
            has("libc.so.6") && has("ld-linux") && has("/etc/passwd") && has("/etc/group"),
            "{files:?}"
        );
        assert!(!has("/no/such/file"), "{files:?}");
    }
}
