//! Which QEMU emulates the host: the installed one where it is new enough, else Debian's backport of a newer one.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cache::{Cache, Key};
use crate::packages::backports::{self, BackportsError};
use crate::progress::Progress;
use crate::tool;

/// Name of the program, installed and in a package.
pub(super) const PROGRAM: &str = "qemu-system-x86_64";
/// The least major version in whose nested virtualization guests with several processors live: with QEMU 7.2 one of about
/// 25 such boots, two at a time, ends in a triple fault of the guest or a crash of the host's kernel; with QEMU 10.0, none of 50.
const MAJOR_MIN: u32 = 10;
/// Packages with the program, its modules, and its firmware. Libraries and the BIOS are those of the stable release's packages.
const PACKAGES: [&str; 3] = ["qemu-system-x86", "qemu-system-common", "qemu-system-data"];
/// Folders with firmware of the stable release's packages: the BIOS, network cards' boot ROMs.
const FIRMWARE: [&str; 2] = ["/usr/share/seabios", "/usr/share/qemu"];

/// Why no newer QEMU is used.
#[derive(Debug, thiserror::Error)]
enum NewerError {
    /// The backports could not be had.
    #[error(transparent)]
    Backports(#[from] BackportsError),
    /// The cache could not be used.
    #[error(transparent)]
    Cache(#[from] crate::cache::CacheError),
    /// What was had does not start, or is not new enough either.
    #[error("The one in Debian's backports is not new enough, or does not start")]
    Unfit,
}

/// A QEMU.
#[derive(Debug)]
pub(super) struct Emulator {
    program: PathBuf,
    /// Where its modules are, for one that is not in its own place.
    modules: Option<PathBuf>,
    /// Where its firmware is, likewise.
    firmware: Vec<PathBuf>,
}

impl Emulator {
    /// Finds the QEMU to use: the installed one, or a newer one in the cache, which is filled the first time. Where none is new
    /// enough it is the installed one, and the developer is told.
    pub(super) fn find(cache: &Cache, progress: &Progress) -> Self {
        let installed = Self {
            program: PROGRAM.into(),
            modules: None,
            firmware: Vec::new(),
        };
        let version = installed.version();
        if version.is_some_and(is_new_enough) {
            return installed;
        }
        match Self::newer(cache, progress) {
            Ok(newer) => newer,
            Err(error) => {
                let version = version.map_or_else(
                    || "unknown".to_owned(),
                    |(major, minor)| format!("{major}.{minor}"),
                );
                progress.say(&format!(
                    "The emulated host has QEMU {version}, with which guests of several processors may crash; there is no QEMU \
                     {MAJOR_MIN} here: {error}"
                ));
                installed
            }
        }
    }

    /// The QEMU of Debian's backports.
    fn newer(cache: &Cache, progress: &Progress) -> Result<Self, NewerError> {
        let codename = backports::codename()?;
        let major = MAJOR_MIN.to_string();
        let inputs = PACKAGES.iter().copied().chain([&*codename, &*major]);
        let root = cache.entry("host-qemu", &Key::of(inputs), |staging| {
            let _step = progress.begin("Getting a newer QEMU for the emulated host");
            backports::unpack(&codename, &PACKAGES, staging)
        })?;
        let newer = Self::unpacked(&root);
        if newer.version().is_some_and(is_new_enough) {
            Ok(newer)
        } else {
            Err(NewerError::Unfit)
        }
    }

    /// The QEMU whose packages are unpacked in `root`.
    fn unpacked(root: &Path) -> Self {
        let firmware = [root.join("usr/share/qemu")].into_iter();
        Self {
            program: root.join("usr/bin").join(PROGRAM),
            modules: Some(root.join("usr/lib/x86_64-linux-gnu/qemu")),
            firmware: firmware.chain(FIRMWARE.map(PathBuf::from)).collect(),
        }
    }

    fn version(&self) -> Option<(u32, u32)> {
        let mut command = Command::new(&self.program);
        command.arg("--version").envs(self.environment());
        let said = tool::run(&mut command).ok()?;
        version_in(&String::from_utf8_lossy(&said))
    }

    /// The program.
    pub(super) fn program(&self) -> &OsStr {
        self.program.as_os_str()
    }

    /// What is to be added to its environment.
    pub(super) fn environment(&self) -> Option<(&'static str, &Path)> {
        self.modules
            .as_deref()
            .map(|folder| ("QEMU_MODULE_DIR", folder))
    }

    /// Its first arguments.
    pub(super) fn arguments(&self) -> impl Iterator<Item = OsString> {
        self.firmware
            .iter()
            .flat_map(|folder| [OsString::from("-L"), folder.clone().into_os_string()])
    }
}

fn is_new_enough((major, _minor): (u32, u32)) -> bool {
    major >= MAJOR_MIN
}

/// Major and minor version in what `--version` says: `QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)`.
fn version_in(said: &str) -> Option<(u32, u32)> {
    let version = said.split_once("version ")?.1.split_whitespace().next()?;
    let mut numbers = version.split('.').map(str::parse);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => Some((major, minor)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_read_from_what_qemu_says() {
        let debian = "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b3)\nCopyright\n";

        assert_eq!(version_in(debian), Some((7, 2)));
        assert_eq!(version_in("QEMU emulator version 10.0.2\n"), Some((10, 0)));
        assert_eq!(
            version_in("QEMU emulator version 9.1.50 (v9.1.0-1-g1)"),
            Some((9, 1))
        );
    }

    #[test]
    fn test_version_in_invalid_text_returns_none() {
        for said in [
            "",
            "QEMU emulator",
            "QEMU emulator version ",
            "QEMU emulator version ten",
            "QEMU emulator version 10",
            "QEMU emulator version 99999999999.0",
        ] {
            assert_eq!(version_in(said), None, "{said}");
        }
    }

    #[test]
    fn versions_compare_as_numbers() {
        assert!(!is_new_enough((7, 2)) && !is_new_enough((9, 2)));
        assert!(is_new_enough((10, 0)) && is_new_enough((11, 1)));
    }

    #[test]
    fn an_unpacked_qemu_looks_in_its_own_folders_first() {
        let emulator = Emulator::unpacked(Path::new("/root-of-it"));

        let arguments: Vec<OsString> = emulator.arguments().collect();

        assert_eq!(emulator.program(), "/root-of-it/usr/bin/qemu-system-x86_64");
        assert_eq!(
            arguments.get(..2),
            Some(&["-L".into(), "/root-of-it/usr/share/qemu".into()][..])
        );
        assert_eq!(
            emulator.environment(),
            Some((
                "QEMU_MODULE_DIR",
                Path::new("/root-of-it/usr/lib/x86_64-linux-gnu/qemu")
            ))
        );
    }
}
