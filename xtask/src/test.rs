//! `cargo xtask test`: every test and check, the fast ones first, and a summary.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use serde::Deserialize;

use crate::cache::{Cache, CacheError};
use crate::cli::Part;
use crate::host::{HostCommand, HostError};
use crate::image::{self, ImageError, Variant};
use crate::packages::{self, Need, PackageError};
use crate::progress::Progress;
use crate::setup::{self, SetupError};
use crate::tool::{self, ToolError};
use crate::workspace::{Workspace, cargo};

/// The package of the whole-machine tests.
const MACHINE_TESTS: &str = "sandvmm-tests";
/// The test of that package which needs no Linux in the guest, and so no hardware virtualization.
const HOSTILE_TEST: &str = "hostile";

/// The guest of that test, in a workspace of its own.
const HOSTILE_GUEST: &str = "tests/hostile-guest/Cargo.toml";

/// How long the whole-machine tests may take, in seconds; they are ended then.
const MACHINE_TESTS_MAX_S: u32 = 45 * 60;
/// Programs with which the whole-machine tests make their own images.
const NEEDS: [Need; 5] = [
    Need::new("busybox", "busybox-static"),
    Need::new("cpio", "cpio"),
    Need::new("mkfs.erofs", "erofs-utils"),
    Need::new("mkfs.ext4", "e2fsprogs"),
    Need::new("mksquashfs", "squashfs-tools"),
];
/// Exit code of timeout(1) for a command that it ended.
const EXIT_TIMED_OUT: u8 = 124;

/// Why the whole-machine tests were not run, or not all.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MachineTestsError {
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
    /// The tests do not build.
    #[error("Could not build the whole-machine tests")]
    Build(#[from] ToolError),
    /// No KVM host.
    #[error(transparent)]
    Host(#[from] HostError),
    /// Some tests failed.
    #[error("{0}")]
    Failed(String),
    /// They took too long.
    #[error("The whole-machine tests were ended after {MACHINE_TESTS_MAX_S} s")]
    TimedOut,
    /// No test was run, or some were left out.
    #[error("Whole-machine tests were skipped: {0}")]
    Skipped(String),
}

/// Runs the parts `only`, all where it is empty. Returns 0 where all that ran passed, else 1.
pub(crate) fn test(
    workspace: &Workspace,
    only: &[Part],
    filters: &[OsString],
    progress: &Progress,
) -> Result<u8, Box<dyn std::error::Error>> {
    std::env::set_current_dir(workspace.root())?;
    let mut results = Vec::new();
    for part in Part::value_variants() {
        if !only.is_empty() && !only.contains(part) {
            continue;
        }
        let title = title(*part);
        progress.say(&format!("── {title}"));
        let started = Instant::now();
        let result = match part {
            Part::Format => check(cargo().args(["fmt", "--all", "--check"])).and_then(|()| {
                check(cargo().args(["fmt", "--check", "--manifest-path", HOSTILE_GUEST]))
            }),
            Part::Lint => check(
                cargo()
                    .args(["clippy", "--workspace", "--all-targets", "--quiet"])
                    .args(["--", "-D", "warnings"]),
            )
            .and_then(|()| lint_hostile_guest(workspace)),
            Part::Unit => check(
                cargo()
                    .args(["test", "--workspace", "--exclude", MACHINE_TESTS])
                    .args(["--no-fail-fast"]),
            )
            .and_then(|()| hostile_guest_without_hardware()),
            Part::Doc => check(
                cargo()
                    .args(["doc", "--workspace", "--no-deps", "--quiet"])
                    .env("RUSTDOCFLAGS", "-D warnings"),
            ),
            Part::Machine => machine_tests(workspace, filters, progress).map_err(|error| {
                crate::report(&error);
                error.to_string()
            }),
        };
        results.push((title, result, started.elapsed()));
    }
    summarize(&results, progress);
    Ok(u8::from(
        results.iter().any(|(_, result, _)| result.is_err()),
    ))
}

fn title(part: Part) -> &'static str {
    match part {
        Part::Format => "formatting",
        Part::Lint => "lints",
        Part::Unit => "unit tests and bare-metal guests",
        Part::Doc => "documentation",
        Part::Machine => "whole machines on a KVM host",
    }
}

fn summarize(results: &[(&str, Result<(), String>, Duration)], progress: &Progress) {
    progress.say("── summary");
    for (title, result, took) in results {
        let seconds = took.as_secs_f32();
        match result {
            Ok(()) => progress.say(&format!("passed {seconds:7.1} s  {title}")),
            Err(reason) => {
                let reason = reason.lines().next().unwrap_or_default();
                progress.say(&format!("FAILED {seconds:7.1} s  {title}: {reason}"));
            }
        }
    }
}

fn lint_hostile_guest(workspace: &Workspace) -> Result<(), String> {
    check(
        cargo()
            .args(["clippy", "--release", "--quiet", "--manifest-path"])
            .arg(HOSTILE_GUEST)
            .arg("--target-dir")
            .arg(workspace.target().join("hostile-guest"))
            .args(["--", "-D", "warnings"]),
    )
}

/// The hostile guest on this machine's own `/dev/kvm`, if it has one that is served by software; where the hardware serves it, the
/// whole-machine tests run there. Without any, its tests say that they are ignored.
fn hostile_guest_without_hardware() -> Result<(), String> {
    if crate::host::is_here() {
        return Ok(());
    }
    check(cargo().args(["test", "--package", MACHINE_TESTS, "--test", HOSTILE_TEST]))
}

/// Runs a command with this process's output.
fn check(command: &mut Command) -> Result<(), String> {
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(status.to_string()),
        Err(error) => Err(format!("could not be started: {error}")),
    }
}

/// Sets everything up, builds the whole-machine tests here, and runs them on a KVM host.
fn machine_tests(
    workspace: &Workspace,
    filters: &[OsString],
    progress: &Progress,
) -> Result<(), MachineTestsError> {
    packages::ensure(&NEEDS, progress)?;
    let programs = build_machine_tests()?;
    let cache = Cache::open()?;
    let data = setup::setup(workspace, &cache, progress)?;
    let image = image::build(Variant::WithTests, &cache, progress)?;
    setup::build_command(workspace, progress)?;
    let scratch = Scratch::create()?;
    let mut passed = 0;
    let variables = [
        ("SANDVMM_HOME", data.path()),
        ("SANDVMM_TEST_ROOTFS", &image),
        // The tests look for what is left behind: nobody else may leave anything there.
        ("TMPDIR", &scratch.0),
        // Tells the tests that they are on a KVM host: they may not skip.
        ("SANDVMM_KVM_HOST", Path::new("1")),
    ];
    for program in programs {
        let words = ["timeout", "--kill-after=10"].map(OsString::from);
        let limit = OsString::from(MACHINE_TESTS_MAX_S.to_string());
        let command = words
            .into_iter()
            .chain([limit, program.into_os_string(), "--include-ignored".into()])
            .chain(filters.iter().cloned())
            .collect();
        let command = HostCommand {
            command,
            environment: variables
                .iter()
                .map(|(name, value)| (name.into(), value.into()))
                .collect(),
            count_instructions: false,
            resident: Vec::new(),
        };
        let (code, output) = command.watch(workspace, progress)?;
        passed += judge(code, &String::from_utf8_lossy(&output), filters.is_empty())?;
    }
    if passed == 0 {
        let reason = String::from("no test has these words in its name");
        return Err(MachineTestsError::Skipped(reason));
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
fn build_machine_tests() -> Result<Vec<PathBuf>, MachineTestsError> {
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

/// Judges one test program's run by its exit code and its last lines. `all` says that no filter left tests out. Returns how many
/// passed.
fn judge(code: u8, output: &str, all: bool) -> Result<u32, MachineTestsError> {
    if code == EXIT_TIMED_OUT {
        return Err(MachineTestsError::TimedOut);
    }
    let Some(line) = output
        .lines()
        .rev()
        .find(|line| line.starts_with("test result: "))
    else {
        let reason =
            format!("The whole-machine tests ended without a result, with exit code {code}");
        return Err(MachineTestsError::Failed(reason));
    };
    if code != 0 {
        return Err(MachineTestsError::Failed(line.to_owned()));
    }
    // "test result: ok. 5 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.00s"
    let count = |what: &str| {
        let words: Vec<&str> = line.split([' ', ';']).collect();
        words
            .windows(2)
            .find_map(|pair| match pair {
                [number, word] if *word == what => number.parse::<u32>().ok(),
                _ => None,
            })
            .unwrap_or(0)
    };
    let passed = count("passed");
    if count("ignored") > 0 || (all && (passed == 0 || count("filtered") > 0)) {
        return Err(MachineTestsError::Skipped(line.to_owned()));
    }
    Ok(passed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skipped_tests_are_no_success() {
        let line = |passed, ignored, filtered| {
            format!(
                "\ntest result: ok. {passed} passed; 0 failed; {ignored} ignored; 0 measured; {filtered} filtered out; finished in 1s\n"
            )
        };

        assert!(matches!(judge(0, &line(5, 0, 0), true), Ok(5)));
        assert!(matches!(judge(0, &line(5, 0, 3), false), Ok(5)));
        assert!(matches!(judge(0, &line(0, 0, 8), false), Ok(0)));
        assert!(matches!(
            judge(0, &line(0, 0, 0), true),
            Err(MachineTestsError::Skipped(_))
        ));
        assert!(matches!(
            judge(0, &line(5, 1, 0), true),
            Err(MachineTestsError::Skipped(_))
        ));
        assert!(matches!(
            judge(0, &line(5, 0, 1), true),
            Err(MachineTestsError::Skipped(_))
        ));
        assert!(matches!(
            judge(0, "", true),
            Err(MachineTestsError::Failed(_))
        ));
        assert!(matches!(
            judge(101, &line(5, 0, 0), true),
            Err(MachineTestsError::Failed(_))
        ));
        assert!(matches!(
            judge(124, "", true),
            Err(MachineTestsError::TimedOut)
        ));
    }
}
