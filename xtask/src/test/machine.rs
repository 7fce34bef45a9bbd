//! The whole-machine tests, on a KVM host.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use serde::Deserialize;

use super::MACHINE_TESTS;
use super::batch::{self, Batch, TestProgram};
use crate::cache::{Cache, CacheError};
use crate::host::{HostError, Showing};
use crate::image::{self, ImageError, Variant};
use crate::kernel::{self, KernelError};
use crate::packages::{self, Need, PackageError};
use crate::progress::Progress;
use crate::setup::{self, SetupError};
use crate::tool::{self, ToolError};
use crate::workspace::{Workspace, cargo};

/// Programs with which the whole-machine tests make their own images and the network outside.
const NEEDS: [Need; 12] = [
    Need::new("busybox", "busybox-static"),
    Need::new("cpio", "cpio"),
    Need::new("curl", "curl"),
    Need::new("dpkg-deb", "dpkg"),
    Need::new("git", "git"),
    Need::new("ip", "iproute2"),
    Need::new("mkfs.erofs", "erofs-utils"),
    Need::new("mkfs.ext4", "e2fsprogs"),
    Need::new("mksquashfs", "squashfs-tools"),
    Need::new("openssl", "openssl"),
    Need::new("python3", "python3"),
    Need::new("/usr/lib/python3/dist-packages/h2", "python3-h2"),
];
/// What runs on a KVM host: the whole-machine tests, and the tests of other packages that are to show something of a KVM that hardware
/// serves, and of a host with control groups. Each is the arguments for cargo.
const PROGRAMS: [&[&str]; 3] = [
    &["--package", MACHINE_TESTS],
    &["--package", "sandvmm-jailer", "--test", "cell"],
    &["--package", "sandvmm-vmm", "--test", "bare_metal"],
];

/// Why the whole-machine tests were not run, or not all.
#[derive(Debug, thiserror::Error)]
pub(super) enum MachineTestsError {
    /// A program that the tests use is missing.
    #[error(transparent)]
    Packages(#[from] PackageError),
    /// No kernel, image, agent or command.
    #[error(transparent)]
    Setup(#[from] SetupError),
    /// No kernel.
    #[error(transparent)]
    Kernel(#[from] KernelError),
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
    #[error("Whole-machine tests were ended after {} s: {}", batch::MAX_S, .0)]
    TimedOut(String),
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
    let bzimage = kernel::build(&cache, progress)?.with_file_name("bzImage");
    let image = image::build(Variant::WithTests, &cache, progress)?;
    let clients = image::build(Variant::WithClients, &cache, progress)?;
    setup::build_command(workspace, progress)?;
    if filters.is_empty() {
        // What all that follows goes through; it is called here, and not on the host.
        super::check(
            cargo()
                .args(["test", "--package", "xtask", "--test", "host"])
                .args(["--", "--ignored"]),
        )
        .map_err(MachineTestsError::Failed)?;
    }
    let scratch = Scratch::create()?;
    let variables = [
        ("SANDVMM_HOME", data.path()),
        ("SANDVMM_TEST_BZIMAGE", &bzimage),
        ("SANDVMM_TEST_ROOTFS", &image),
        ("SANDVMM_TEST_CLIENTS_ROOTFS", &clients),
        // The tests look for what is left behind: nobody else may leave anything there.
        ("TMPDIR", &scratch.0),
        // Tells the tests that they are on a KVM host: they may not skip.
        ("SANDVMM_KVM_HOST", Path::new("1")),
    ];
    let environment = variables.map(|(name, value)| (name.into(), value.into()));
    let programs = programs
        .into_iter()
        .map(|program| TestProgram::list(program, filters))
        .collect::<Result<Vec<_>, _>>()?;
    let batches = batch::of(&programs, environment.as_ref());
    if batches.is_empty() {
        let reason = String::from("no test has these words in its name");
        return Err(MachineTestsError::Skipped(reason));
    }
    run_batches(batches, workspace, progress)
}

/// Runs all batches, several beside each other where there may be several hosts.
fn run_batches(
    batches: VecDeque<Batch<'_>>,
    workspace: &Workspace,
    progress: &Progress,
) -> Result<(), MachineTestsError> {
    let hosts = crate::host::at_a_time().min(batches.len());
    if hosts > 1 {
        crate::host::prepare(progress)?;
    }
    let queue = Mutex::new(batches);
    let next = || {
        let mut queue = queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.pop_front()
    };
    let work = |showing| {
        let mut result = Ok(());
        // The other batches are run all the same; the first failure is what is told in the end.
        while let Some(batch) = next() {
            if let Err(error) = batch.run(showing, workspace, progress) {
                progress.say(&error.to_string());
                result = result.and(Err(error));
            }
        }
        result
    };
    std::thread::scope(|scope| {
        let beside: Vec<_> = (1..hosts)
            .map(|_| scope.spawn(|| work(Showing::AtTheEnd)))
            .collect();
        let result = work(Showing::AtOnce);
        beside.into_iter().fold(result, |result, worker| {
            let worked = worker
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            result.and(worked)
        })
    })
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
    let mut programs = Vec::new();
    for arguments in PROGRAMS {
        let mut build = cargo();
        build
            .args(["test", "--no-run", "--quiet", "--message-format", "json"])
            .args(arguments);
        let messages = tool::run(&mut build)?;
        let before = programs.len();
        programs.extend(
            String::from_utf8_lossy(&messages)
                .lines()
                .filter_map(|line| serde_json::from_str::<Artifact>(line).ok()?.executable),
        );
        if programs.len() == before {
            let reason = format!("{} has none", arguments.join(" "));
            return Err(MachineTestsError::Skipped(reason));
        }
    }
    Ok(programs)
}
