//! `cargo xtask test`: every test and check, the fast ones first, and a summary.

mod batch;
mod machine;
mod verdict;

use std::ffi::OsString;
use std::process::Command;
use std::time::{Duration, Instant};

use clap::ValueEnum;

use crate::cli::Part;
use crate::progress::Progress;
use crate::workspace::{Workspace, cargo};

/// The package of the whole-machine tests.
const MACHINE_TESTS: &str = "sandvmm-tests";
/// The test of that package which needs no Linux in the guest, and so no hardware virtualization.
const BARE_METAL_TESTS: [&str; 2] = ["hostile", "cell"];

/// The asynchronous face, which is off by default: its tests and its pages are checked like all others.
const FEATURES: [&str; 2] = ["--features", "sandvmm/tokio"];

/// The guest of that test, in a workspace of its own.
const HOSTILE_GUEST: &str = "tests/hostile-guest/Cargo.toml";

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
                    .args(FEATURES)
                    .args(["--", "-D", "warnings"]),
            )
            .and_then(|()| lint_hostile_guest(workspace)),
            Part::Unit => check(
                cargo()
                    .args(["test", "--workspace", "--exclude", MACHINE_TESTS])
                    .args(["--no-fail-fast"])
                    .args(FEATURES),
            )
            .and_then(|()| hostile_guest_without_hardware()),
            Part::Doc => check_documentation(),
            Part::Machine => machine::run(workspace, filters, progress).map_err(|error| {
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

/// The command comes first: the library has its name, and its pages take the place of the command's.
fn check_documentation() -> Result<(), String> {
    check(
        cargo()
            .args(["rustdoc", "--package", "sandvmm-cli", "--bin", "sandvmm"])
            .args(["--quiet", "--", "-D", "warnings"]),
    )?;
    check(
        cargo()
            .args(["doc", "--workspace", "--no-deps", "--quiet"])
            .args(FEATURES)
            .env("RUSTDOCFLAGS", "-D warnings"),
    )
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

/// The hostile guest, and the cell around its machines, on this machine's own `/dev/kvm`, if it has one that is served by software;
/// where the hardware serves it, the whole-machine tests run there. Without any, its tests say that they are ignored.
fn hostile_guest_without_hardware() -> Result<(), String> {
    if crate::host::is_here() {
        return Ok(());
    }
    BARE_METAL_TESTS.into_iter().try_for_each(|test| {
        check(cargo().args(["test", "--package", MACHINE_TESTS, "--test", test]))
    })
}

/// Runs a command with this process's output.
fn check(command: &mut Command) -> Result<(), String> {
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(status.to_string()),
        Err(error) => Err(format!("could not be started: {error}")),
    }
}
