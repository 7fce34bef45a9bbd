//! Which QEMU emulates the host: the one of a newer Debian, with its own libraries and mended; else a mended copy of the installed one.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::mend::{self, MendError};
use crate::cache::{Cache, Key};
use crate::packages::release::{self, ReleaseError};
use crate::packages::{self, Need, PackageError};
use crate::progress::Progress;
use crate::tool;

/// Name of the program, installed and in a package.
const PROGRAM: &str = "qemu-system-x86_64";
/// The least version of which, [mended](mend), no fault is known. Before 10.2 VMRUN sets a bit of the processor's pending interrupts
/// without the lock that other threads have for it, so that one of theirs may be lost.
const VERSION_MIN: Version = (11, 1, 3);
/// The Debian release whose QEMU is new enough, its part that has it, and the package.
const RELEASE: &str = "trixie";
const SUITE: &str = "trixie-backports";
const PACKAGE: &str = "qemu-system-x86";
/// Where the packages have programs and libraries, below their root.
const FOLDER: &str = "usr/bin";
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";

/// What is installed where that release's packages cannot be had.
const NEEDS: [Need; 1] = [Need::new(PROGRAM, PACKAGE)];

/// Major, minor and patch.
type Version = (u32, u32, u32);

/// Why no newer QEMU is used.
#[derive(Debug, thiserror::Error)]
enum NewerError {
    /// Its packages could not be had.
    #[error(transparent)]
    Release(#[from] ReleaseError),
    /// The cache could not be used.
    #[error(transparent)]
    Cache(#[from] crate::cache::CacheError),
    /// It could not be mended.
    #[error(transparent)]
    Mend(#[from] MendError),
    /// What was had does not start, or is not new enough either.
    #[error("The one of Debian {SUITE} is not new enough, or does not start")]
    Unfit,
}

/// A QEMU.
#[derive(Debug)]
pub(super) enum Emulator {
    /// A newer Debian's: the root of its packages.
    Unpacked(PathBuf),
    /// A copy of the installed one.
    Copied(PathBuf),
    /// The installed one.
    Installed,
}

impl Emulator {
    /// Finds the QEMU to use: that of Debian [`SUITE`] in the cache, mended, which is had the first time. Where that cannot be,
    /// it is a mended copy of the installed one, else that itself, and the developer is told.
    pub(super) fn find(cache: &Cache, progress: &Progress) -> Result<Self, PackageError> {
        let error = match Self::newer(cache, progress) {
            Ok(newer) => return Ok(newer),
            Err(error) => error,
        };
        packages::ensure(&NEEDS, progress)?;
        let (found, which) = match Self::copied(cache) {
            Ok(copy) => (
                copy,
                "a mended copy of the installed QEMU, which before 10.2 may lose an interrupt,"
                    .to_owned(),
            ),
            Err(why) => (
                Self::Installed,
                format!(
                    "the installed QEMU, with which guests and the host itself may crash ({why}),"
                ),
            ),
        };
        let version = found.version().map_or_else(|| "unknown".to_owned(), shown);
        progress.say(&format!(
            "The emulated host has {which} of version {version}: no mended QEMU {} can be had: {error}",
            shown(VERSION_MIN)
        ));
        Ok(found)
    }

    /// The QEMU of a newer Debian, without what is wrong in it.
    fn newer(cache: &Cache, progress: &Progress) -> Result<Self, NewerError> {
        let min = shown(VERSION_MIN);
        let root = cache.entry(
            "host-qemu",
            &Key::of([SUITE, PACKAGE, &*min].into_iter().chain(mend::patterns())),
            |staging| -> Result<(), NewerError> {
                let _step = progress.begin("Getting a newer QEMU for the emulated host");
                release::unpack(RELEASE, SUITE, PACKAGE, staging)?;
                Ok(mend::mend(&staging.join(FOLDER).join(PROGRAM))?)
            },
        )?;
        let newer = Self::Unpacked(root);
        if newer
            .version()
            .is_some_and(|version| version >= VERSION_MIN)
        {
            Ok(newer)
        } else {
            Err(NewerError::Unfit)
        }
    }

    /// A copy of the installed QEMU, without what is wrong in it.
    fn copied(cache: &Cache) -> Result<Self, MendError> {
        let program = packages::program(PROGRAM).ok_or(MendError::Absent)?;
        let code = std::fs::read(&program)?;
        let key = Key::of(std::iter::once(&*code).chain(mend::patterns().map(str::as_bytes)));
        let root = cache.entry("host-qemu", &key, |staging| -> Result<(), MendError> {
            let copy = staging.join(PROGRAM);
            std::fs::copy(&program, &copy)?;
            mend::mend(&copy)
        })?;
        let copy = Self::Copied(root.join(PROGRAM));
        if copy.version().is_some() {
            Ok(copy)
        } else {
            Err(MendError::Unfit)
        }
    }

    fn version(&self) -> Option<Version> {
        let mut command = Command::new(self.program());
        command.args(self.arguments()).arg("--version");
        let said = tool::run(command.envs(self.environment())).ok()?;
        version_in(&String::from_utf8_lossy(&said))
    }

    /// The program to start: for one that is not installed, the dynamic loader of its own C library.
    pub(super) fn program(&self) -> OsString {
        match self {
            Self::Unpacked(root) => root.join("usr/lib64/ld-linux-x86-64.so.2").into(),
            Self::Copied(program) => program.into(),
            Self::Installed => PROGRAM.into(),
        }
    }

    /// What is to be added to its environment: where its modules are.
    pub(super) fn environment(&self) -> Option<(&'static str, PathBuf)> {
        let root = self.root()?;
        Some(("QEMU_MODULE_DIR", root.join(LIBRARIES).join("qemu")))
    }

    /// Its first arguments: the loader's, and where the firmware is.
    pub(super) fn arguments(&self) -> Vec<OsString> {
        let mut arguments = Vec::new();
        if let Self::Unpacked(root) = self {
            arguments.extend([
                "--library-path".into(),
                root.join(LIBRARIES).into(),
                root.join(FOLDER).join(PROGRAM).into(),
            ]);
        }
        if let Some(root) = self.root() {
            for firmware in ["usr/share/qemu", "usr/share/seabios"] {
                arguments.extend(["-L".into(), root.join(firmware).into()]);
            }
        }
        arguments
    }

    /// Below which its files are, for one that is not where it looks for them.
    fn root(&self) -> Option<&Path> {
        match self {
            Self::Unpacked(root) => Some(root),
            Self::Copied(_) => Some(Path::new("/")),
            Self::Installed => None,
        }
    }
}

fn shown((major, minor, patch): Version) -> String {
    format!("{major}.{minor}.{patch}")
}

/// The version in what `--version` says: `QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)`.
fn version_in(said: &str) -> Option<Version> {
    let version = said.split_once("version ")?.1.split_whitespace().next()?;
    let mut numbers = version.split('.').map(str::parse);
    match (numbers.next(), numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor)), Some(Ok(patch))) => Some((major, minor, patch)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_read_from_what_qemu_says() {
        let debian = "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b3)\nCopyright\n";

        assert_eq!(version_in(debian), Some((7, 2, 22)));
        assert_eq!(
            version_in("QEMU emulator version 10.0.2\n"),
            Some((10, 0, 2))
        );
        assert_eq!(
            version_in("QEMU emulator version 9.1.50 (v9.1.0-1-g1)"),
            Some((9, 1, 50))
        );
    }

    #[test]
    fn test_version_in_invalid_text_returns_none() {
        for said in [
            "",
            "QEMU emulator",
            "QEMU emulator version ",
            "QEMU emulator version ten",
            "QEMU emulator version 10.0",
            "QEMU emulator version 99999999999.0.0",
        ] {
            assert_eq!(version_in(said), None, "{said}");
        }
    }

    #[test]
    fn a_copy_has_the_firmware_and_modules_of_the_installed_one() {
        let emulator = Emulator::Copied("/cache/of-it".into());

        assert_eq!(emulator.program(), "/cache/of-it");
        assert_eq!(
            emulator.arguments(),
            ["-L", "/usr/share/qemu", "-L", "/usr/share/seabios"]
        );
        assert_eq!(
            emulator.environment(),
            Some(("QEMU_MODULE_DIR", "/usr/lib/x86_64-linux-gnu/qemu".into()))
        );
    }

    #[test]
    fn an_unpacked_qemu_has_its_own_loader_libraries_and_firmware() {
        let emulator = Emulator::Unpacked("/root-of-it".into());

        assert_eq!(
            emulator.program(),
            "/root-of-it/usr/lib64/ld-linux-x86-64.so.2"
        );
        assert_eq!(
            emulator.arguments().get(..3),
            Some(
                &[
                    "--library-path".into(),
                    "/root-of-it/usr/lib/x86_64-linux-gnu".into(),
                    "/root-of-it/usr/bin/qemu-system-x86_64".into()
                ][..]
            )
        );
        assert_eq!(
            emulator.environment(),
            Some((
                "QEMU_MODULE_DIR",
                "/root-of-it/usr/lib/x86_64-linux-gnu/qemu".into()
            ))
        );
    }
}
