//! Whether this machine can run virtual machines, in plain words.

mod cell;
mod cgroup;
mod kernel;
mod kvm;

use crate::cell::Cell;
use crate::images::{Images, ImagesError};
pub use jailer::name_limit;
pub(crate) use kvm::open_kvm;

/// What was found out about this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct HostReport {
    /// One check each, in the order in which they matter.
    pub checks: Vec<Check>,
    /// What is on of the cell that a machine would have here; `None` where no process could be put into one.
    pub cell: Option<Cell>,
}

/// One thing that was checked.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Check {
    /// A short name, for example `KVM`.
    pub name: &'static str,
    /// How it stands.
    pub status: Status,
    /// What was found, in one sentence.
    pub detail: String,
    /// What to do, if something is to be done.
    pub advice: Option<String>,
}

/// How a check stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Status {
    /// As it should be.
    Ok,
    /// Sandboxes run, but with less: slower, or with fewer walls around the machine's process.
    Warning,
    /// Sandboxes cannot run.
    Missing,
}

impl HostReport {
    /// Looks at this machine, and puts a process into a cell to see which parts are on. Nothing stays changed but that the
    /// group which a cgroup was made in goes on to let its children be limited.
    #[must_use]
    pub fn inspect() -> Self {
        let (cell_check, cell) = cell::check();
        Self {
            cell,
            checks: vec![
                kvm::check_hardware(),
                kvm::check_kvm(),
                kernel::check_version(),
                check_images(),
                cgroup::check(),
                kernel::check_landlock(),
                kernel::check_user_namespaces(),
                cell_check,
            ],
        }
    }

    /// Whether sandboxes can run here.
    ///
    /// # Errors
    /// One sentence that says what is missing and what to do; the same that [`crate::SandboxBuilder::start`]
    /// gives.
    pub fn can_run(&self) -> Result<(), String> {
        match self
            .checks
            .iter()
            .find(|check| check.status == Status::Missing)
        {
            None => Ok(()),
            Some(check) => Err(check.sentence()),
        }
    }
}

impl Check {
    fn ok(name: &'static str, detail: impl Into<String>) -> Self {
        Self {
            name,
            status: Status::Ok,
            detail: detail.into(),
            advice: None,
        }
    }

    fn not_ok(
        name: &'static str,
        status: Status,
        detail: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        Self {
            name,
            status,
            detail: detail.into(),
            advice: Some(advice.into()),
        }
    }

    /// What was found and what to do, as one sentence.
    fn sentence(&self) -> String {
        match &self.advice {
            None => self.detail.clone(),
            Some(advice) => format!("{}: {advice}", self.detail),
        }
    }
}

/// Other files can be named for each sandbox, so that missing images are a warning.
fn check_images() -> Check {
    const NAME: &str = "Images";
    match Images::from_data_folder() {
        Ok(images) => Check::ok(
            NAME,
            format!(
                "Kernel, initramfs and root image are in {}",
                images.kernel.parent().unwrap_or(&images.kernel).display()
            ),
        ),
        Err(ImagesError::Missing { path }) => Check::not_ok(
            NAME,
            Status::Warning,
            format!("{} is missing", path.display()),
            "build it with `cargo xtask setup`, or name other files",
        ),
        Err(error) => Check::not_ok(NAME, Status::Warning, error.to_string(), "name other files"),
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn a_report_with_something_missing_cannot_run_and_says_what_to_do() {
        let missing = kvm::kvm_does_not_open(&io::ErrorKind::PermissionDenied.into());
        let report = HostReport {
            checks: vec![Check::not_ok("A", Status::Warning, "slow", "wait"), missing],
            cell: None,
        };

        let sentence = report.can_run().unwrap_err();

        assert!(
            sentence.starts_with("/dev/kvm may not be opened"),
            "{sentence}"
        );
        assert!(sentence.contains("group `kvm`"), "{sentence}");
    }

    #[test]
    fn warnings_alone_do_not_keep_sandboxes_from_running() {
        let report = HostReport {
            checks: vec![Check::not_ok("A", Status::Warning, "slow", "wait")],
            cell: None,
        };
        assert_eq!(report.can_run(), Ok(()));
    }

    #[test]
    fn this_machine_gets_an_answer_to_every_check() {
        let report = HostReport::inspect();

        let names: Vec<_> = report.checks.iter().map(|check| check.name).collect();
        assert_eq!(
            names,
            [
                "Hardware virtualization",
                "KVM",
                "Kernel",
                "Images",
                "cgroup v2",
                "Landlock",
                "User namespaces",
                "Cell"
            ]
        );
        for check in &report.checks {
            assert_eq!(
                check.status == Status::Ok,
                check.advice.is_none(),
                "{check:?}"
            );
            assert!(
                !check.detail.is_empty() && !check.detail.ends_with('.'),
                "{check:?}"
            );
        }
    }

    #[test]
    fn a_start_and_the_report_give_the_same_sentence() {
        let report = HostReport::inspect();
        let opened = open_kvm();
        let missing = report
            .checks
            .iter()
            .take(2)
            .find(|check| check.status == Status::Missing);
        assert_eq!(opened.err(), missing.map(Check::sentence));
    }
}
