//! `cargo xtask fuzz`: the targets of `fuzz/` under libFuzzer, one after another.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::Instant;

use crate::cache::CacheError;
use crate::packages::{self, Need, PackageError};
use crate::progress::Progress;
use crate::tool::{self, ToolError};
use crate::workspace::{Workspace, cargo};

/// The release of cargo-fuzz that is installed where there is none.
const CARGO_FUZZ: &str = "0.13.2";

/// The folder of libFuzzer's programs, and of the targets' corpora, below the project's root.
const PROGRAMS: &str = "fuzz/libfuzzer";
const CORPUS: &str = "fuzz/corpus";

/// The longest input, in bytes.
const INPUT_BYTES_MAX: u32 = 4096;

/// The longest that one input may take, in seconds: all that takes longer is a hang.
const INPUT_SECONDS_MAX: u32 = 25;

/// The most memory of a target, and of a single allocation, in MiB: AddressSanitizer needs most of the first.
const MEMORY_MIB_MAX: u32 = 1024;
const ALLOCATION_MIB_MAX: u32 = 128;

/// libFuzzer is C++.
const NEEDS: [Need; 1] = [Need::new("g++", "g++")];

/// Lines at the end of a target's output that tell how often it ran.
const EXECUTIONS: &str = "stat::number_of_executed_units:";

/// Why the targets were not fuzzed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FuzzError {
    /// A file or folder is not usable.
    #[error(transparent)]
    File(#[from] CacheError),
    /// A C++ compiler is missing.
    #[error(transparent)]
    Packages(#[from] PackageError),
    /// rustc did not say where it is.
    #[error("Could not ask rustc about its files")]
    Rustc(#[source] ToolError),
    /// The toolchain cannot find wrong accesses to memory.
    #[error(
        "This Rust toolchain lacks AddressSanitizer's runtime (librustc-*_rt.asan.a, looked for in {folder}): use one that rustup \
         installs"
    )]
    NoSanitizer {
        /// Where it would be.
        folder: PathBuf,
    },
    /// cargo-fuzz could not be installed.
    #[error(
        "Could not install cargo-fuzz: `cargo install cargo-fuzz --version {CARGO_FUZZ} --locked`"
    )]
    Install(#[source] ToolError),
    /// The targets do not build.
    #[error("Could not build the targets")]
    Build(#[source] ToolError),
    /// There is no such target.
    #[error("There is no target {name}: there are {all}")]
    NoTarget {
        /// What was asked for.
        name: String,
        /// What there is.
        all: String,
    },
    /// A target could not be started.
    #[error("Could not start the target {name}")]
    Start {
        /// Which.
        name: String,
        /// Why.
        source: io::Error,
    },
    /// Something was found.
    #[error(
        "The target {name} failed ({status}); what it said is in {log}, the input in {artifacts}. Mend what it shows, and keep the input as \
         {CORPUS}/{name}/found-WHAT"
    )]
    Found {
        /// Which.
        name: String,
        /// How it ended.
        status: ExitStatus,
        /// Where its output is.
        log: PathBuf,
        /// Where the input is.
        artifacts: PathBuf,
    },
}

/// Fuzzes `targets`, all where it is empty, each for `seconds`.
pub(crate) fn fuzz(
    workspace: &Workspace,
    seconds: u32,
    targets: &[String],
    progress: &Progress,
) -> Result<(), FuzzError> {
    let programs = workspace.root().join(PROGRAMS);
    let all = names(&programs.join("fuzz_targets"))?;
    let targets = if targets.is_empty() { &all } else { targets };
    if let Some(name) = targets.iter().find(|name| !all.contains(name)) {
        return Err(FuzzError::NoTarget {
            name: name.clone(),
            all: all.join(", "),
        });
    }
    packages::ensure(&NEEDS, progress)?;
    check_toolchain()?;
    install_cargo_fuzz(progress)?;
    let folder = workspace.target().join("fuzz");
    let built = build(workspace, &programs, &folder, progress)?;
    for name in targets {
        let started = Instant::now();
        let step = progress.begin(&format!("Fuzzing {name}"));
        let executions = run(workspace, &built.join(name), &folder, seconds)?;
        drop(step);
        println!(
            "{name}: {executions} executions in {} s, nothing found",
            started.elapsed().as_secs()
        );
    }
    Ok(())
}

/// The names of the targets: those of their programs' files.
fn names(folder: &Path) -> Result<Vec<String>, FuzzError> {
    let failed = || CacheError::io("read the folder", folder);
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed())? {
        let path = entry.map_err(failed())?.path();
        names.extend(
            path.file_stem()
                .map(|name| name.to_string_lossy().into_owned()),
        );
    }
    names.sort();
    Ok(names)
}

/// The project's own toolchain builds the targets, with what only its nightly sister offers by right (`RUSTC_BOOTSTRAP`); it has to have
/// AddressSanitizer.
fn check_toolchain() -> Result<(), FuzzError> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let printed = tool::run(Command::new(rustc).args(["--print", "target-libdir"]))
        .map_err(FuzzError::Rustc)?;
    let folder = PathBuf::from(String::from_utf8_lossy(&printed).trim());
    let has_runtime = fs::read_dir(&folder)
        .into_iter()
        .flatten()
        .flatten()
        .any(|entry| {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            name.starts_with("librustc-") && name.ends_with("_rt.asan.a")
        });
    if has_runtime {
        Ok(())
    } else {
        Err(FuzzError::NoSanitizer { folder })
    }
}

fn install_cargo_fuzz(progress: &Progress) -> Result<(), FuzzError> {
    if tool::run(cargo().args(["fuzz", "--version"])).is_ok() {
        return Ok(());
    }
    progress.say(&format!("Installing cargo-fuzz {CARGO_FUZZ}"));
    let _step = progress.begin("Installing cargo-fuzz");
    tool::run(cargo().args(["install", "cargo-fuzz", "--version", CARGO_FUZZ, "--locked"]))
        .map(drop)
        .map_err(FuzzError::Install)
}

/// Builds all targets and returns their folder.
fn build(
    workspace: &Workspace,
    programs: &Path,
    folder: &Path,
    progress: &Progress,
) -> Result<PathBuf, FuzzError> {
    // The same crates as everywhere; cargo adds libFuzzer's.
    let (from, to) = (
        workspace.root().join("Cargo.lock"),
        programs.join("Cargo.lock"),
    );
    fs::copy(&from, &to).map_err(CacheError::io("write", &to))?;
    let target = folder.join("build");
    let _step = progress.begin("Building the targets");
    tool::run(
        cargo()
            .current_dir(programs)
            .env("RUSTC_BOOTSTRAP", "1")
            .args(["fuzz", "build", "--fuzz-dir", ".", "--target-dir"])
            .arg(&target),
    )
    .map_err(FuzzError::Build)?;
    Ok(target.join("x86_64-unknown-linux-gnu/release"))
}

/// Runs one target and returns how many inputs it ran.
fn run(
    workspace: &Workspace,
    program: &Path,
    folder: &Path,
    seconds: u32,
) -> Result<u64, FuzzError> {
    let name = program
        .file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default();
    let grown = folder.join("corpus").join(&name);
    let artifacts = folder.join("artifacts").join(&name);
    for made in [&grown, &artifacts] {
        fs::create_dir_all(made).map_err(CacheError::io("create the folder", made))?;
    }
    let log = folder.join(format!("{name}.log"));
    let output = fs::File::create(&log).map_err(CacheError::io("write", &log))?;
    let copy = output.try_clone().map_err(CacheError::io("write", &log))?;
    let mut prefix = OsString::from("-artifact_prefix=");
    prefix.push(&artifacts);
    prefix.push("/");
    let status = Command::new(program)
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-timeout={INPUT_SECONDS_MAX}"))
        .arg(format!("-rss_limit_mb={MEMORY_MIB_MAX}"))
        .arg(format!("-malloc_limit_mb={ALLOCATION_MIB_MAX}"))
        .arg(format!("-max_len={INPUT_BYTES_MAX}"))
        .arg("-print_final_stats=1")
        .arg(prefix)
        .args([&grown, &workspace.root().join(CORPUS).join(&name)])
        .stdin(std::process::Stdio::null())
        .stdout(copy)
        .stderr(output)
        .status()
        .map_err(|source| FuzzError::Start {
            name: name.clone(),
            source,
        })?;
    if !status.success() {
        return Err(FuzzError::Found {
            name,
            status,
            log,
            artifacts,
        });
    }
    let said = fs::read(&log).map_err(CacheError::io("read", &log))?;
    Ok(executions(&String::from_utf8_lossy(&said)))
}

/// How many inputs were run, by what libFuzzer says at its end; 0 where it says nothing.
fn executions(said: &str) -> u64 {
    said.lines()
        .rev()
        .find_map(|line| line.strip_prefix(EXECUTIONS))
        .and_then(|count| count.trim().parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executions_are_read_from_the_final_statistics() {
        let said = "Done\nstat::number_of_executed_units: 1244\nstat::peak_rss_mb: 365\n";

        assert_eq!(executions(said), 1244);
        assert_eq!(executions("nothing"), 0);
    }
}
