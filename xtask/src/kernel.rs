//! `cargo xtask kernel`: builds the guest's kernel from Debian's source and `guest-kernel/config`.
//!
//! The same inputs give the same bytes: the build runs inside its own source tree, with relative paths, without debug
//! information, in an emptied environment, and with a fixed date, user and host in the version string.

mod fragment;

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use self::fragment::{Fragment, FragmentError, NotKept};
use crate::cache::{Cache, CacheError, Key};
use crate::packages::{self, Need, PackageError};
use crate::progress::{Progress, Step};
use crate::reproducible::{self, Differs};
use crate::tool::{self, ToolError};

/// The name of the cache's folder, and what log files' names begin with.
const THING: &str = "kernel";
/// The configuration: every symbol with its reason.
const CONFIG: &str = include_str!("../../guest-kernel/config");
/// Changes to the source, in their order, each with its reason: for what no symbol of the configuration turns off.
const PATCHES: &[&str] = &[
    include_str!("../../guest-kernel/patches/0001-slub-no-files-in-sysfs-without-debugging.patch"),
    include_str!("../../guest-kernel/patches/0002-params-no-files-in-sysfs-without-modules.patch"),
    include_str!(
        "../../guest-kernel/patches/0003-x86-mm-do-not-ask-for-entries-that-are-not-there.patch"
    ),
];
/// Debian's package of the source.
const SOURCE_PACKAGE: &str = "linux-source-6.12";
/// What that package brings.
const SOURCE: &str = "/usr/src/linux-source-6.12.tar.xz";
/// What the build needs. Objtool, which reads object files through libelf, cannot be configured away on x86-64.
const NEEDS: &[Need] = &[
    Need::new(SOURCE, SOURCE_PACKAGE),
    Need::new("gcc", "gcc"),
    Need::new("make", "make"),
    Need::new("flex", "flex"),
    Need::new("bison", "bison"),
    Need::new("bc", "bc"),
    Need::new("patch", "patch"),
    Need::new("xz", "xz-utils"),
    Need::new("/usr/include/gelf.h", "libelf-dev"),
    Need::new("/usr/include/stdio.h", "libc6-dev"),
];

/// Counts changes of the recipe that none of the texts below show; it is part of the cache's key.
const RECIPE: &str = "1";
/// Large parts of the source that this configuration compiles nothing of. Kconfig and make read all `Kconfig` and `Makefile`.
const UNUSED_SOURCES: &[&str] = &[
    "*/Documentation/*.*",
    "*/drivers/gpu/*.[ch]",
    "*/drivers/net/ethernet/*.[ch]",
    "*/drivers/net/wireless/*.[ch]",
    "*/sound/*.[ch]",
    "*/tools/testing/*",
];
/// What the kernel's makefiles would otherwise take from this machine. 1970-01-01: the year is of no use to a guest.
const FIXED: &[&str] = &[
    "ARCH=x86_64",
    "CC=gcc",
    "HOSTCC=gcc",
    "KBUILD_BUILD_HOST=sandvmm",
    "KBUILD_BUILD_TIMESTAMP=Thu Jan  1 00:00:00 UTC 1970",
    "KBUILD_BUILD_USER=sandvmm",
    "KBUILD_BUILD_VERSION=1",
];
/// The goals of the build.
const GOALS: &[&str] = &["vmlinux", "bzImage"];
/// What is built, by its names in the cache's entry.
const VMLINUX: &str = "vmlinux";
/// The same, compressed.
const BZIMAGE: &str = "bzImage";
/// Symbols are not loaded into the guest; program headers stay as they are.
const STRIP: &[&str] = &["--strip-all"];

/// Lines that `make` writes for this configuration: the whole of which the progress line shows a share.
const EXPECTED_STEPS: usize = 1560;
/// The largest share that is shown, for a source that has more steps than expected.
const PERCENT_MAX: usize = 99;
/// Bytes of a failed build's log that are read for its error.
const LOG_TAIL_BYTES: u64 = 8192;

/// Why there is no kernel.
#[derive(Debug, thiserror::Error)]
pub(crate) enum KernelError {
    /// Programs or the source are missing.
    #[error("The kernel's source and tools could not be had")]
    Packages(#[from] PackageError),
    /// `guest-kernel/config` does not follow its own rules.
    #[error("The file guest-kernel/config is not valid")]
    Fragment(#[from] FragmentError),
    /// Kconfig changed what was asked for.
    #[error(
        "The kernel's configuration does not hold: {}. A symbol may need another one, or have another name in this version: \
         change guest-kernel/config",
        list(.0)
    )]
    NotKept(Vec<NotKept>),
    /// `make` failed.
    #[error("Building the kernel failed ({status} from make {goals}); the whole log is {}, its end:\n{tail}", log.display())]
    Make {
        /// What was to be made.
        goals: String,
        /// How make ended.
        status: ExitStatus,
        /// Where everything that it said stands.
        log: PathBuf,
        /// What it said last.
        tail: String,
    },
    /// Another program failed.
    #[error("A step of the kernel's build failed")]
    Tool(#[from] ToolError),
    /// The cache folder is not usable.
    #[error("The kernel could not be kept")]
    Cache(#[from] CacheError),
    /// Two builds gave different bytes.
    #[error("The kernel is not reproducible")]
    Differs(#[from] Differs),
}

fn list(not_kept: &[NotKept]) -> String {
    let lines: Vec<_> = not_kept.iter().map(ToString::to_string).collect();
    lines.join("; ")
}

/// Returns the guest kernel, `vmlinux`, building it where the cache has none for these inputs.
///
/// Beside it lie `bzImage`, `System.map` (addresses in a panic's words), `config` and `build.log`.
pub(crate) fn build(cache: &Cache, progress: &Progress) -> Result<PathBuf, KernelError> {
    packages::ensure(NEEDS, progress)?;
    let fragment = Fragment::parse(CONFIG)?;
    let key = key()?;
    let log = cache.folder().join(format!("{THING}-{}.log", key.as_str()));
    let entry = cache.entry(THING, &key, |staging| {
        progress.say("Building the guest's kernel: this takes minutes, once");
        Build::new(staging, &log).run(&fragment, progress)
    })?;
    Ok(entry.join(VMLINUX))
}

/// Builds the kernel once more and compares: the same source, tools and configuration must give the same bytes.
pub(crate) fn verify(kernel: &Path, cache: &Cache, progress: &Progress) -> Result<(), KernelError> {
    let fragment = Fragment::parse(CONFIG)?;
    let kept = kernel.with_file_name("");
    reproducible::verify(&kept, &[VMLINUX, BZIMAGE], cache, |again| {
        Build::new(again, &again.join("log")).run(&fragment, progress)
    })
}

/// The hash of everything that decides about the kernel's bytes.
fn key() -> Result<Key, KernelError> {
    let mut inputs = vec![
        RECIPE.as_bytes().to_vec(),
        CONFIG.as_bytes().to_vec(),
        version(Command::new("dpkg-query").args(["--show", SOURCE_PACKAGE]))?,
        version(Command::new("gcc").arg("--version"))?,
        version(Command::new("ld").arg("--version"))?,
    ];
    let recipe = [UNUSED_SOURCES, FIXED, GOALS, STRIP, PATCHES].concat();
    inputs.extend(recipe.iter().map(|text| text.as_bytes().to_vec()));
    Ok(Key::of(inputs))
}

fn version(command: &mut Command) -> Result<Vec<u8>, ToolError> {
    tool::run(command.env("LC_ALL", "C"))
}

/// A build under way.
struct Build<'a> {
    /// The cache entry to be.
    staging: &'a Path,
    /// The source and the objects, in it until they are no longer needed.
    tree: PathBuf,
    /// Outside of it, so that it outlives a failure.
    log: &'a Path,
}

impl<'a> Build<'a> {
    fn new(staging: &'a Path, log: &'a Path) -> Self {
        Self {
            staging,
            tree: staging.join("tree"),
            log,
        }
    }

    fn run(&self, fragment: &Fragment, progress: &Progress) -> Result<(), KernelError> {
        File::create(self.log).map_err(CacheError::io("create", self.log))?;
        self.unpack(progress)?;
        self.patch()?;
        self.configure(fragment, progress)?;
        let step = progress.begin("Compiling the kernel");
        self.make(GOALS, &[], Some(&step))?;
        drop(step);
        self.keep()
    }

    fn unpack(&self, progress: &Progress) -> Result<(), KernelError> {
        let _step = progress.begin("Unpacking the kernel's source");
        fs::create_dir(&self.tree).map_err(CacheError::io("create the folder", &self.tree))?;
        let mut tar = Command::new("tar");
        tar.args([
            "--extract",
            "--xz",
            "--no-same-owner",
            "--strip-components=1",
            "--file",
            SOURCE,
        ])
        .args(
            UNUSED_SOURCES
                .iter()
                .map(|pattern| format!("--exclude={pattern}")),
        )
        .arg("--directory")
        .arg(&self.tree);
        tool::run(&mut tar)?;
        Ok(())
    }

    /// Applies [`PATCHES`], none of which may have moved against this source.
    fn patch(&self) -> Result<(), KernelError> {
        for patch in PATCHES {
            let path = self.tree.join("change.patch");
            fs::write(&path, patch).map_err(CacheError::io("write", &path))?;
            let mut command = Command::new("patch");
            command.args(["--strip=1", "--fuzz=0", "--batch", "--forward", "--input"]);
            tool::run(command.arg(&path).current_dir(&self.tree))?;
        }
        Ok(())
    }

    /// Everything off, then the fragment, then what follows from it; and a check that the fragment holds.
    fn configure(&self, fragment: &Fragment, progress: &Progress) -> Result<(), KernelError> {
        let _step = progress.begin("Configuring the kernel");
        let path = self.tree.join("fragment");
        fs::write(&path, fragment.for_kconfig()).map_err(CacheError::io("write", &path))?;
        self.make(&["allnoconfig"], &["KCONFIG_ALLCONFIG=fragment"], None)?;
        self.make(&["olddefconfig"], &[], None)?;
        let path = self.tree.join(".config");
        let config = fs::read_to_string(&path).map_err(CacheError::io("read", &path))?;
        let not_kept = fragment.not_kept(&config);
        if not_kept.is_empty() {
            Ok(())
        } else {
            Err(KernelError::NotKept(not_kept))
        }
    }

    /// Runs make, adding what it says to the log and counting it in `step`.
    fn make(
        &self,
        goals: &[&str],
        variables: &[&str],
        step: Option<&Step>,
    ) -> Result<(), KernelError> {
        let mut make = Command::new("make");
        make.args(FIXED)
            .args(variables)
            .args(goals)
            .arg(format!("--jobs={}", jobs()));
        // Variables like KCFLAGS or LOCALVERSION would change the bytes; a MAKEFLAGS would change everything.
        make.env_clear()
            .envs(std::env::vars_os().filter(|(name, _)| name == "PATH" || name == "TMPDIR"))
            .envs([("LC_ALL", "C"), ("SOURCE_DATE_EPOCH", "0")])
            .current_dir(&self.tree)
            .stdin(Stdio::null());
        let status = run_logged(make, self.log, step)?;
        if status.success() {
            return Ok(());
        }
        Err(KernelError::Make {
            goals: goals.join(" "),
            status,
            log: self.log.to_owned(),
            tail: end_of(self.log).map_err(CacheError::io("read", self.log))?,
        })
    }

    /// Moves what is wanted out of the tree, and removes the tree.
    fn keep(&self) -> Result<(), KernelError> {
        let mut strip = Command::new("strip");
        strip.args(STRIP).arg("-o").arg(self.staging.join(VMLINUX));
        tool::run(strip.arg(self.tree.join("vmlinux")))?;
        for (from, name) in [
            (self.tree.join("arch/x86/boot/bzImage"), BZIMAGE),
            (self.tree.join("System.map"), "System.map"),
            (self.tree.join(".config"), "config"),
            (self.log.to_owned(), "build.log"),
        ] {
            let to = self.staging.join(name);
            fs::rename(&from, &to).map_err(CacheError::io("move", &from))?;
        }
        fs::remove_dir_all(&self.tree).map_err(CacheError::io("remove", &self.tree))?;
        Ok(())
    }
}

/// Compilers at once: one per processor that this process may use.
fn jobs() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Runs `command` to its end; both of its outputs go to the end of the file `log`, and their lines are counted in `step`.
fn run_logged(
    mut command: Command,
    log: &Path,
    step: Option<&Step>,
) -> Result<ExitStatus, KernelError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let failed = |source| ToolError::Start { program, source };
    let logging = CacheError::io("write", log);
    let (reader, writer) =
        match io::pipe().and_then(|(reader, writer)| Ok((reader, writer.try_clone()?, writer))) {
            Ok((reader, errors, writer)) => {
                command.stderr(errors);
                (reader, writer)
            }
            Err(error) => return Err(failed(error).into()),
        };
    let mut child = match command.stdout(writer).spawn() {
        Ok(child) => child,
        Err(error) => return Err(failed(error).into()),
    };
    // The command holds the pipe's other end: as long as it lives, reading never ends.
    drop(command);
    let copied = copy_counting(BufReader::new(reader), log, step);
    let status = child.wait().map_err(failed)?;
    copied.map_err(logging)?;
    Ok(status)
}

/// Copies lines to the end of the file `log`, showing in `step` how far a build is that writes [`EXPECTED_STEPS`] of them.
fn copy_counting(lines: impl BufRead, log: &Path, step: Option<&Step>) -> io::Result<()> {
    let mut log = File::options().append(true).open(log)?;
    for (index, line) in lines.split(b'\n').enumerate() {
        let mut line = line?;
        if let Some(step) = step {
            step.detail(&detail(index + 1, &String::from_utf8_lossy(&line)));
        }
        line.push(b'\n');
        log.write_all(&line)?;
    }
    Ok(())
}

/// What a progress line says about the `count`th line of a build: `42 %, mm/slub.o`.
fn detail(count: usize, line: &str) -> String {
    let percent = (count * 100 / EXPECTED_STEPS).min(PERCENT_MAX);
    let object = line.split_whitespace().last().unwrap_or_default();
    format!("{percent} %, {object}")
}

/// The last lines of a log.
fn end_of(log: &Path) -> io::Result<String> {
    let mut file = File::open(log)?;
    let size = file.metadata()?.len();
    file.seek(SeekFrom::Start(size.saturating_sub(LOG_TAIL_BYTES)))?;
    let mut end = Vec::new();
    file.read_to_end(&mut end)?;
    Ok(tool::tail(&end))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logged(script: &str) -> (ExitStatus, String) {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        File::create(&log).unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", script]);

        let status = run_logged(command, &log, None).unwrap();

        (status, fs::read_to_string(&log).unwrap())
    }

    #[test]
    fn the_projects_own_configuration_gives_a_reason_for_every_symbol() {
        let fragment = Fragment::parse(CONFIG).unwrap();

        assert!(fragment.for_kconfig().lines().count() > 100);
    }

    #[test]
    fn both_outputs_of_a_failing_build_are_in_its_log() {
        let (status, log) = logged("echo compiled; echo wrong >&2; printf unfinished; exit 2");

        assert_eq!(status.code(), Some(2));
        assert_eq!(log, "compiled\nwrong\nunfinished\n");
    }

    #[test]
    fn the_end_of_a_long_log_is_shown() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        fs::write(&log, "a line of the log\n".repeat(5000) + "the reason\n").unwrap();

        let end = end_of(&log).unwrap();

        assert!(end.ends_with("a line of the log\nthe reason\n"));
        assert!(end.len() as u64 <= LOG_TAIL_BYTES);
    }

    #[test]
    fn progress_is_a_share_that_never_says_done() {
        assert_eq!(
            detail(EXPECTED_STEPS / 2, "  CC      mm/slub.o"),
            "50 %, mm/slub.o"
        );
        assert_eq!(detail(EXPECTED_STEPS * 3, ""), "99 %, ");
    }
}
