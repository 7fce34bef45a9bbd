//! A program of another Debian release than this system's, with all its libraries: downloaded with a configuration and lists
//! apart, so that the machine's own sources stay as they are.

use std::path::Path;
use std::process::Command;

use super::PackageError;
use crate::cache::CacheError;
use crate::tool::{self, ToolError};

/// The keys with which Debian signs its archives, where the package debian-archive-keyring, a part of every Debian, has them.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
/// Seconds that a server may be silent.
const TIMEOUT_S: u32 = 20;
/// What is asked of apt about each index in the machine's own configuration; [`source_of`] reads the answers.
const TARGET_FORMAT: &str = "$(CREATED_BY) $(ORIGIN) $(LABEL) $(CODENAME) $(COMPONENT) $(REPO_URI)";

/// Why a package of another release could not be had.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReleaseError {
    /// The system is no stable Debian.
    #[error("This system is no release of Debian, whose archive has it")]
    NotDebian,
    /// apt's configuration does not say where Debian's archive is.
    #[error("apt's configuration has no archive of Debian {0}")]
    NoSource(String),
    /// apt or dpkg failed.
    #[error(transparent)]
    Package(#[from] PackageError),
    /// Its folders could not be written.
    #[error(transparent)]
    Cache(#[from] CacheError),
}

/// The code name of the stable Debian that this system is.
fn codename() -> Result<String, ReleaseError> {
    let description = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    codename_in(&description)
        .filter(|_| super::has_apt())
        .ok_or(ReleaseError::NotDebian)
}

/// Debian's code name in the text of an os-release(5) file; unstable has none.
fn codename_in(description: &str) -> Option<String> {
    let value = |key: &str| {
        description
            .lines()
            .find_map(|line| line.strip_prefix(key)?.strip_prefix('='))
            .map(|value| value.trim_matches(['"', '\'']))
    };
    value("VERSION_CODENAME")
        .filter(|_| value("ID") == Some("debian"))
        .map(str::to_owned)
}

/// Downloads `package` of Debian's `suite` with all that it depends on, from there or from the `release` below it, the C library
/// included, and unpacks them into `folder`, installing nothing.
pub(crate) fn unpack(
    release: &str,
    suite: &str,
    package: &str,
    folder: &Path,
) -> Result<(), ReleaseError> {
    let failed = |source: ToolError| PackageError::Apt {
        packages: package.to_owned(),
        source,
    };
    let uri = source(&codename()?, package)?;

    let state = folder.join("apt");
    for part in ["lists/partial", "cache/archives/partial"] {
        let part = state.join(part);
        std::fs::create_dir_all(&part).map_err(CacheError::io("create the folder", &part))?;
    }
    let lines =
        [release, suite].map(|suite| format!("deb [signed-by={KEYRING}] {uri} {suite} main\n"));
    // No package counts as installed: what this system has of another release does not serve.
    for (name, content) in [("sources.list", lines.concat()), ("status", String::new())] {
        let file = state.join(name);
        std::fs::write(&file, content).map_err(CacheError::io("write", &file))?;
    }

    tool::run(private_apt(&state).arg("update")).map_err(failed)?;
    tool::run(private_apt(&state).args([
        "install",
        "--yes",
        "--download-only",
        "--no-install-recommends",
        "--target-release",
        suite,
        package,
    ]))
    .map_err(failed)?;
    super::unpack_downloads(&state.join("cache/archives"), folder).map_err(failed)?;
    std::fs::remove_dir_all(&state).map_err(CacheError::io("remove", &state))?;
    Ok(())
}

/// apt-get that knows the sources in `state`, and those alone, and writes nowhere else.
fn private_apt(state: &Path) -> Command {
    let mut command = Command::new("apt-get");
    command.arg("-q");
    for (option, place) in [
        ("Dir::Etc::sourcelist", state.join("sources.list")),
        ("Dir::Etc::sourceparts", "/dev/null".into()),
        ("Dir::State::lists", state.join("lists")),
        ("Dir::State::status", state.join("status")),
        ("Dir::Cache", state.join("cache")),
    ] {
        command
            .arg("-o")
            .arg(format!("{option}={}", place.display()));
    }
    for option in [
        // The lock is the system's, and asks for root.
        "Debug::NoLocking=1".to_owned(),
        format!("Acquire::http::Timeout={TIMEOUT_S}"),
        format!("Acquire::https::Timeout={TIMEOUT_S}"),
    ] {
        command.arg("-o").arg(option);
    }
    command
}

/// Where this machine gets Debian from, by its own configuration: the archive has every release.
fn source(codename: &str, wanted: &str) -> Result<String, ReleaseError> {
    let ask = || {
        tool::run(Command::new("apt-get").args(["indextargets", "--format", TARGET_FORMAT]))
            .map(|listing| source_of(&String::from_utf8_lossy(&listing), codename))
            .map_err(|source| PackageError::Apt {
                packages: wanted.to_owned(),
                source,
            })
    };
    if let Some(uri) = ask()? {
        return Ok(uri);
    }
    // apt names only what it has lists of.
    super::update(wanted)?;
    ask()?.ok_or_else(|| ReleaseError::NoSource(codename.to_owned()))
}

/// The archive of Debian's release `codename` in a list of apt's indices as [`TARGET_FORMAT`] has them.
fn source_of(listing: &str, codename: &str) -> Option<String> {
    listing.lines().find_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            ["Packages", "Debian", "Debian", name, "main", uri] if *name == codename => {
                Some((*uri).to_owned())
            }
            _ => None,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_archive_is_the_one_of_the_release_and_of_debian() {
        let listing = "\
Packages Elsewhere Debian bookworm main http://elsewhere.example/debian/
Packages Debian Debian-Security bookworm-security main http://mirror.example/debian-security/
DEP-11 Debian Debian bookworm main http://wrong.example/
Packages Debian Debian bookworm-updates main http://updates.example/debian/
Packages Debian Debian bookworm contrib http://contrib.example/debian/
Packages Debian Debian bookworm main https://mirror.example/debian/
";

        let uri = source_of(listing, "bookworm");

        assert_eq!(uri.as_deref(), Some("https://mirror.example/debian/"));
        assert_eq!(source_of(listing, "trixie"), None);
        assert_eq!(source_of("", "bookworm"), None);
    }

    #[test]
    fn only_a_stable_debian_has_a_code_name() {
        let debian = "PRETTY_NAME=\"Debian\"\nVERSION_CODENAME=bookworm\nID=debian\n";
        let quoted = "ID=\"debian\"\nVERSION_CODENAME='trixie'\n";

        assert_eq!(codename_in(debian).as_deref(), Some("bookworm"));
        assert_eq!(codename_in(quoted).as_deref(), Some("trixie"));
        assert_eq!(
            codename_in("ID=ubuntu\nID_LIKE=debian\nVERSION_CODENAME=noble\n"),
            None
        );
        assert_eq!(codename_in("ID=debian\n"), None);
        assert_eq!(codename_in(""), None);
    }
}
