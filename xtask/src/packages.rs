//! The programs of other projects that the tasks need: found, installed on Debian and Ubuntu, named elsewhere.

pub(crate) mod release;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::progress::Progress;
use crate::tool::{self, ToolError};

/// Seconds for which apt waits while another process uses the package database.
const APT_LOCK_TIMEOUT_S: u32 = 300;

/// Why packages could not be had.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PackageError {
    /// Something is missing on a system that is neither Debian nor a child of it.
    #[error(
        "Missing: {missing}. Install what your system calls these Debian packages, then try again: {packages}"
    )]
    NotDebian {
        /// Programs and files that were not found.
        missing: String,
        /// Debian's names of the packages.
        packages: String,
    },
    /// apt reported success and the thing is still missing.
    #[error("Still missing after installing {packages}: {missing}")]
    StillMissing {
        /// Programs and files that were not found.
        missing: String,
        /// The packages that were to bring them.
        packages: String,
    },
    /// A kernel for the emulated host is had from Debian's packages only.
    #[error(
        "This machine has no hardware virtualization, and the emulated host needs apt for its kernel ({packages}). Use \
         Debian or Ubuntu, or a machine with hardware virtualization"
    )]
    NoApt {
        /// The packages that were to be downloaded.
        packages: String,
    },
    /// apt or dpkg failed.
    #[error("Could not get the packages {packages}")]
    Apt {
        /// The packages in question.
        packages: String,
        /// What apt said.
        source: ToolError,
    },
}

/// A program or file that a task needs, and the Debian package that brings it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Need {
    /// A program's name, or a file's absolute path.
    pub(crate) what: &'static str,
    /// Debian's (and Ubuntu's) name of the package.
    pub(crate) package: &'static str,
}

impl Need {
    /// `what`, which Debian's `package` brings.
    pub(crate) const fn new(what: &'static str, package: &'static str) -> Self {
        Self { what, package }
    }

    fn is_met(&self) -> bool {
        if self.what.starts_with('/') {
            Path::new(self.what).exists()
        } else {
            program(self.what).is_some()
        }
    }
}

/// Finds a program on PATH, or where Debian keeps the administrator's programs.
pub(crate) fn program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from))
        .map(|folder| folder.join(name))
        .find(|candidate| candidate.is_file())
}

/// Makes sure that all of `needs` are there: installs what is missing where apt is, saying so first.
pub(crate) fn ensure(needs: &[Need], progress: &Progress) -> Result<(), PackageError> {
    let missing = unmet(needs);
    if missing.is_empty() {
        return Ok(());
    }
    let packages = names(missing.iter().map(|need| need.package));
    let missing = names(missing.iter().map(|need| need.what));
    if !has_apt() {
        return Err(PackageError::NotDebian {
            missing,
            packages: packages.clone(),
        });
    }
    progress.say(&format!("Installing the missing packages: {packages}"));
    let step = progress.begin("Installing packages");
    update(&packages)?;
    let mut install = apt_get();
    install
        .args(["install", "--yes", "--no-install-recommends"])
        .args(packages.split(' '));
    apt(&mut install, &packages)?;
    drop(step);
    let missing = unmet(needs);
    if missing.is_empty() {
        Ok(())
    } else {
        Err(PackageError::StillMissing {
            missing: names(missing.iter().map(|need| need.what)),
            packages,
        })
    }
}

/// Downloads `packages` and unpacks them into `folder`, installing nothing.
pub(crate) fn unpack(packages: &[String], folder: &Path) -> Result<(), PackageError> {
    let listed = packages.join(" ");
    if !has_apt() {
        return Err(PackageError::NoApt { packages: listed });
    }
    let downloads = folder.join("downloads");
    let failed = |source| PackageError::Apt {
        packages: listed.clone(),
        source,
    };
    tool::run(Command::new("mkdir").arg("-p").arg(&downloads)).map_err(failed)?;
    tool::run(
        Command::new("apt-get")
            .arg("download")
            .args(packages)
            .current_dir(&downloads),
    )
    .map_err(failed)?;
    unpack_downloads(&downloads, folder).map_err(failed)?;
    tool::run(Command::new("rm").arg("-r").arg(&downloads)).map_err(failed)?;
    Ok(())
}

/// Unpacks each package in `downloads` into `folder`.
fn unpack_downloads(downloads: &Path, folder: &Path) -> Result<(), ToolError> {
    let listing = std::fs::read_dir(downloads).into_iter().flatten().flatten();
    for package in listing.map(|found| found.path()) {
        if package.extension() == Some(OsStr::new("deb")) {
            tool::run(Command::new("dpkg-deb").arg("-x").arg(&package).arg(folder))?;
        }
    }
    Ok(())
}

/// The packages on which `package` depends directly, by apt's lists (which are fetched where there are none yet).
pub(crate) fn dependencies(package: &str) -> Result<Vec<String>, PackageError> {
    if !has_apt() {
        return Err(PackageError::NoApt {
            packages: package.to_owned(),
        });
    }
    let ask = || tool::run(Command::new("apt-cache").args(["depends", package]));
    let listing = match ask() {
        Ok(listing) => listing,
        Err(_) => {
            update(package)?;
            ask().map_err(|source| PackageError::Apt {
                packages: package.to_owned(),
                source,
            })?
        }
    };
    Ok(String::from_utf8_lossy(&listing)
        .lines()
        .filter_map(|line| line.trim().strip_prefix("Depends: "))
        .map(str::to_owned)
        .collect())
}

/// Whether packages can be had from apt here.
pub(crate) fn has_apt() -> bool {
    program("apt-get").is_some() && program("dpkg-deb").is_some()
}

/// Fetches apt's package lists. `wanted` is what they are fetched for.
pub(crate) fn update(wanted: &str) -> Result<(), PackageError> {
    apt(apt_get().arg("update"), wanted)
}

fn apt(command: &mut Command, packages: &str) -> Result<(), PackageError> {
    tool::run(command)
        .map(drop)
        .map_err(|source| PackageError::Apt {
            packages: packages.to_owned(),
            source,
        })
}

/// A command as root: as it is for root, through sudo for anyone else.
pub(crate) fn privileged(program: &str) -> Command {
    if rustix::process::geteuid().is_root() {
        return Command::new(program);
    }
    let mut sudo = Command::new("sudo");
    sudo.arg(program);
    sudo
}

/// apt-get as root, asking no questions.
fn apt_get() -> Command {
    let mut command = privileged("env");
    command
        .args(["DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", "-o"])
        .arg(format!("DPkg::Lock::Timeout={APT_LOCK_TIMEOUT_S}"));
    command
}

fn unmet(needs: &[Need]) -> Vec<Need> {
    needs
        .iter()
        .copied()
        .filter(|need| !need.is_met())
        .collect()
}

/// `names`, sorted, each once, with spaces between them.
fn names(names: impl Iterator<Item = &'static str>) -> String {
    let mut names: Vec<_> = names.collect();
    names.sort_unstable();
    names.dedup();
    names.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_found_and_a_missing_one_is_not() {
        assert!(program("sh").is_some());
        assert!(program("no-such-program-at-all").is_none());
    }

    #[test]
    fn a_package_that_brings_two_things_is_named_once() {
        assert_eq!(names(["b", "a", "b"].into_iter()), "a b");
    }
}
