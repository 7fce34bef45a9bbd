//! The whole-machine tests, on a KVM host.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;

use super::MACHINE_TESTS;
use super::verdict::{self, Verdict};
use crate::cache::{Cache, CacheError};
use crate::host::{HostCommand, HostError, Showing};
use crate::image::{self, ImageError, Variant};
use crate::packages::{self, Need, PackageError};
use crate::progress::Progress;
use crate::setup::{self, SetupError};
use crate::tool::{self, ToolError};
use crate::workspace::{Workspace, cargo};

/// How long one program of tests may take, in seconds; it is ended then.
const PROGRAM_MAX_S: u32 = 45 * 60;
/// How often the tests go on in a new emulated host when the one before died, and how often a test that failed in one is run in all:
/// guests hang there, and the host's kernel dies, where its QEMU could not be mended ([`crate::host`]). What is run again is named in
/// the output.
const HOST_DEATHS_MAX: u32 = 8;
const TRIES_MAX: u32 = 3;
/// Programs with which the whole-machine tests make their own images and the network outside.
const NEEDS: [Need; 9] = [
    Need::new("busybox", "busybox-static"),
    Need::new("cpio", "cpio"),
    Need::new("curl", "curl"),
    Need::new("ip", "iproute2"),
    Need::new("mkfs.erofs", "erofs-utils"),
    Need::new("mkfs.ext4", "e2fsprogs"),
    Need::new("mksquashfs", "squashfs-tools"),
    Need::new("openssl", "openssl"),
    Need::new("python3", "python3"),
];
/// Exit code of timeout(1) for a command that it ended.
const EXIT_TIMED_OUT: u8 = 124;

/// Why the whole-machine tests were not run, or not all.
#[derive(Debug, thiserror::Error)]
pub(super) enum MachineTestsError {
    /// A program that the tests use is missing.
    #[error(transparent)]
    Packages(#[from] PackageError),
    /// No kernel, image, agent or command.
    #[error(transparent)]
    Setup(#[from] SetupError),
    /// No image with the standard library's tests.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// A folder is not usable.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The tests do not build, or do not say their names.
    #[error("Could not build the whole-machine tests")]
    Build(#[from] ToolError),
    /// No KVM host.
    #[error(transparent)]
    Host(#[from] HostError),
    /// Some tests failed.
    #[error("{0}")]
    Failed(String),
    /// They took too long.
    #[error("The whole-machine tests were ended after {PROGRAM_MAX_S} s")]
    TimedOut,
    /// No test was run, or some were left out.
    #[error("Whole-machine tests were skipped: {0}")]
    Skipped(String),
}

/// Sets everything up, builds the whole-machine tests here, and runs them on a KVM host.
pub(super) fn run(
    workspace: &Workspace,
    filters: &[OsString],
    progress: &Progress,
) -> Result<(), MachineTestsError> {
    packages::ensure(&NEEDS, progress)?;
    let programs = build()?;
    let cache = Cache::open()?;
    let data = setup::setup(workspace, &cache, progress)?;
    let image = image::build(Variant::WithTests, &cache, progress)?;
    setup::build_command(workspace, progress)?;
    let scratch = Scratch::create()?;
    let variables = [
        ("SANDVMM_HOME", data.path()),
        ("SANDVMM_TEST_ROOTFS", &image),
        // The tests look for what is left behind: nobody else may leave anything there.
        ("TMPDIR", &scratch.0),
        // Tells the tests that they are on a KVM host: they may not skip.
        ("SANDVMM_KVM_HOST", Path::new("1")),
    ];
    let mut tests = Vec::new();
    for program in programs {
        let test = Tests {
            names: names(&program, filters)?,
            program,
            environment: variables.map(|(name, value)| (name.into(), value.into())),
            filters,
        };
        if !test.names.is_empty() {
            tests.push(test);
        }
    }
    if tests.is_empty() {
        let reason = String::from("no test has these words in its name");
        return Err(MachineTestsError::Skipped(reason));
    }
    run_programs(tests, workspace, progress)
}

/// Runs all of `programs`, the one with the most tests beside the others where there may be two hosts.
fn run_programs(
    mut programs: Vec<Tests<'_>>,
    workspace: &Workspace,
    progress: &Progress,
) -> Result<(), MachineTestsError> {
    programs.sort_by_key(|tests| Reverse(tests.names.len()));
    let beside = if programs.len() > 1 && crate::host::at_a_time() > 1 {
        crate::host::prepare(progress)?;
        programs.split_off(1)
    } else {
        Vec::new()
    };
    let run = |programs: &[Tests<'_>], showing| {
        let mut result = Ok(());
        // The other programs are run all the same; the first failure is what is told in the end.
        for tests in programs {
            if let Err(error) = tests.run(showing, workspace, progress) {
                progress.say(&error.to_string());
                result = result.and(Err(error));
            }
        }
        result
    };
    std::thread::scope(|scope| {
        let beside = scope.spawn(|| run(&beside, Showing::AtTheEnd));
        let result = run(&programs, Showing::AtOnce);
        let beside = beside
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        result.and(beside)
    })
}

/// One program of tests.
struct Tests<'a> {
    program: PathBuf,
    /// Those to run.
    names: BTreeSet<String>,
    environment: [(OsString, OsString); 4],
    /// Words of which a test's name has one; all tests where there are none.
    filters: &'a [OsString],
}

impl Tests<'_> {
    /// Runs them until each has a verdict.
    fn run(
        &self,
        showing: Showing,
        workspace: &Workspace,
        progress: &Progress,
    ) -> Result<(), MachineTestsError> {
        let mut verdicts = verdict::Verdicts::new();
        let mut host_deaths = 0;
        let mut tries = 1;
        let code = loop {
            let (result, output) = self
                .command(verdicts.keys())
                .watch(showing, workspace, progress);
            verdicts.extend(verdict::in_output(&String::from_utf8_lossy(&output)));
            match result {
                Err(error @ HostError::Died { .. }) if host_deaths < HOST_DEATHS_MAX => {
                    host_deaths += 1;
                    progress.say(&error.to_string());
                    progress.say(&format!(
                        "The {} tests that had not ended by then run on a new emulated host",
                        self.names
                            .difference(&verdicts.keys().cloned().collect())
                            .count()
                    ));
                }
                other => {
                    let code = other?;
                    let failed = verdict::failed(&verdicts);
                    if failed.is_empty() || tries == TRIES_MAX || crate::host::is_here() {
                        break code;
                    }
                    tries += 1;
                    progress.say(&format!(
                        "Failed, and tried again on a new emulated host: {}",
                        failed.join(", ")
                    ));
                    verdicts.retain(|_, verdict| *verdict != Verdict::Failed);
                }
            }
        };
        if code == EXIT_TIMED_OUT {
            return Err(MachineTestsError::TimedOut);
        }
        judge(code, &self.names, &verdicts)
    }

    fn command<'b>(&self, ended: impl Iterator<Item = &'b String>) -> HostCommand {
        let mut command = ["timeout", "--kill-after=10"].map(OsString::from).to_vec();
        command.push(PROGRAM_MAX_S.to_string().into());
        command.push(self.program.clone().into());
        command.push("--include-ignored".into());
        command.extend(self.filters.iter().cloned());
        if self.filters.is_empty() {
            // The words of filters are parts of names, and then those to skip are as well.
            command.push("--exact".into());
        }
        for name in ended {
            command.extend(["--skip".into(), name.into()]);
        }
        HostCommand {
            command,
            environment: self.environment.to_vec(),
            count_instructions: false,
            resident: Vec::new(),
        }
    }
}

/// The names of the tests of `program` to run.
fn names(program: &Path, filters: &[OsString]) -> Result<BTreeSet<String>, ToolError> {
    let mut list = Command::new(program);
    list.args(["--list", "--format", "terse", "--include-ignored"])
        .args(filters);
    let output = tool::run(&mut list)?;
    Ok(String::from_utf8_lossy(&output)
        .lines()
        .filter_map(|line| line.strip_suffix(": test"))
        .map(String::from)
        .collect())
}

/// Judges one program's tests.
fn judge(
    code: u8,
    wanted: &BTreeSet<String>,
    verdicts: &verdict::Verdicts,
) -> Result<(), MachineTestsError> {
    let failed = verdict::failed(verdicts);
    if !failed.is_empty() {
        let reason = format!("{} failed: {}", failed.len(), failed.join(", "));
        return Err(MachineTestsError::Failed(reason));
    }
    if code != 0 {
        let reason = format!("The tests ended with exit code {code}, though none of them failed");
        return Err(MachineTestsError::Failed(reason));
    }
    let passed = |name: &String| verdicts.get(name) == Some(&Verdict::Passed);
    let silent: Vec<&str> = wanted
        .iter()
        .filter(|name| !passed(name))
        .map(String::as_str)
        .collect();
    if !silent.is_empty() {
        return Err(MachineTestsError::Skipped(silent.join(", ")));
    }
    Ok(())
}

/// A folder for temporary files; removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn create() -> Result<Self, CacheError> {
        let folder = std::env::temp_dir().join(format!("sandvmm-test-{}", std::process::id()));
        std::fs::create_dir(&folder).map_err(CacheError::io("create the folder", &folder))?;
        Ok(Self(folder))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // It is empty unless a test failed, and in the emulated host all writing to it was to that host's memory.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// One line of cargo's JSON; the lines for other things have no `executable`.
#[derive(Deserialize)]
struct Artifact {
    executable: Option<PathBuf>,
}

/// Builds the tests and returns their programs.
fn build() -> Result<Vec<PathBuf>, MachineTestsError> {
    let mut build = cargo();
    build.args([
        "test",
        "--no-run",
        "--quiet",
        "--message-format",
        "json",
        "--package",
        MACHINE_TESTS,
    ]);
    let messages = tool::run(&mut build)?;
    let programs: Vec<PathBuf> = String::from_utf8_lossy(&messages)
        .lines()
        .filter_map(|line| serde_json::from_str::<Artifact>(line).ok()?.executable)
        .collect();
    if programs.is_empty() {
        return Err(MachineTestsError::Skipped(format!(
            "{MACHINE_TESTS} has none"
        )));
    }
    Ok(programs)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(names: &[&str]) -> BTreeSet<String> {
        names.iter().copied().map(String::from).collect()
    }

    #[test]
    fn all_tests_that_passed_are_a_success() {
        let verdicts = verdict::in_output("test a::b ... ok\ntest c ... ok\n");

        judge(0, &wanted(&["a::b", "c"]), &verdicts).unwrap();
    }

    #[test]
    fn a_test_without_a_word_or_ignored_is_no_success() {
        let verdicts = verdict::in_output("test a ... ok\ntest b ... ignored, no KVM host\n");

        let missing = judge(0, &wanted(&["a", "c"]), &verdicts);
        let ignored = judge(0, &wanted(&["a", "b"]), &verdicts);

        assert!(matches!(missing, Err(MachineTestsError::Skipped(names)) if names == "c"));
        assert!(matches!(ignored, Err(MachineTestsError::Skipped(names)) if names == "b"));
    }

    #[test]
    fn a_failure_is_one_whatever_came_after_it() {
        let verdicts = verdict::in_output("test a ... FAILED\ntest b ... ok\n");

        let judged = judge(0, &wanted(&["a", "b"]), &verdicts);

        assert!(matches!(judged, Err(MachineTestsError::Failed(reason)) if reason.contains('a')));
    }

    #[test]
    fn a_program_that_fails_without_a_test_that_does_is_no_success() {
        let verdicts = verdict::in_output("test a ... ok\n");

        assert!(matches!(
            judge(101, &wanted(&["a"]), &verdicts),
            Err(MachineTestsError::Failed(_))
        ));
    }
}
