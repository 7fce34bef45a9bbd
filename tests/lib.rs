//! Drives the real `sandvmm` command, found on `PATH`, the way a user does.
//!
//! The tests in `machine/` need a KVM host, so each is marked as ignored with that reason: a plain
//! `cargo test` names them as such, and `cargo xtask test` runs all of them in a KVM host.
#![expect(
    clippy::panic,
    clippy::expect_used,
    reason = "a test's helper fails by panicking"
)]

pub mod hostile_guest;

use std::ffi::OsStr;
use std::fs::{OpenOptions, Permissions, set_permissions};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use libtest_mimic::{Arguments, Failed, Trial};
use serde_json::Value;
use tempfile::TempDir;

/// After this a run counts as hung, wherever it hangs. Generous: the processor may be emulated.
pub const HUNG_AFTER: Duration = Duration::from_secs(240);

/// Seconds since the epoch, on this host's clock.
#[must_use]
pub fn now_s() -> f64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .expect("the clock is after 1970")
        .as_secs_f64()
}

/// A test of a program with a harness of its own, and its name.
pub type NamedTest = (&'static str, fn());

/// Runs these tests, one at a time unless the command line says otherwise; without `/dev/kvm` they are named as ignored.
#[must_use]
pub fn run_on_kvm(tests: impl IntoIterator<Item = NamedTest>) -> ExitCode {
    let has_kvm = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .is_ok();
    let mut arguments = Arguments::from_args();
    arguments.test_threads.get_or_insert(1);
    let trials = tests.into_iter().map(|(name, test)| {
        Trial::test(name, move || {
            test();
            Ok::<(), Failed>(())
        })
        .with_ignored_flag(!has_kvm)
    });
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}

/// One call of the command.
#[derive(Debug)]
pub struct Call(assert_cmd::Command);

/// What a call did.
#[derive(Debug)]
pub struct Ran {
    /// The exit code; a test fails before this when a signal ended the command.
    pub code: i32,
    /// Standard output, as bytes.
    pub stdout: Vec<u8>,
    /// Standard error, as text.
    pub stderr: String,
    /// From the call to the end.
    pub wall: Duration,
}

/// Where the command is.
pub fn program() -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .map(|folder| folder.join("sandvmm"))
        .find(|file| file.is_file())
        .expect("sandvmm is on PATH")
}

/// `sandvmm run` with these arguments.
pub fn run<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Call {
    sandvmm(["run"]).args(args)
}

/// `sandvmm` with these arguments.
pub fn sandvmm<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Call {
    let mut command = assert_cmd::Command::new("sandvmm");
    command.timeout(HUNG_AFTER);
    Call(command).args(args)
}

impl Call {
    /// Adds arguments.
    #[must_use]
    pub fn args<S: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        for arg in args {
            self.0.arg(arg);
        }
        self
    }

    /// Adds one argument.
    #[must_use]
    pub fn arg(self, arg: impl AsRef<OsStr>) -> Self {
        self.args([arg])
    }

    /// Sets a variable of the command's own environment.
    #[must_use]
    pub fn env(mut self, key: &str, value: impl AsRef<OsStr>) -> Self {
        self.0.env(key, value);
        self
    }

    /// Sets the folder that the command is called in.
    #[must_use]
    pub fn current_dir(mut self, folder: impl AsRef<Path>) -> Self {
        self.0.current_dir(folder.as_ref());
        self
    }

    /// Bytes for standard input.
    #[must_use]
    pub fn stdin(mut self, bytes: impl Into<Vec<u8>>) -> Self {
        self.0.write_stdin(bytes);
        self
    }

    /// Gives it more time than [`HUNG_AFTER`] before it counts as hung.
    #[must_use]
    pub fn within(mut self, limit: Duration) -> Self {
        self.0.timeout(limit);
        self
    }

    /// Calls it and waits for its end.
    #[must_use]
    #[track_caller]
    pub fn done(mut self) -> Ran {
        let called = Instant::now();
        let output = match self.0.output() {
            Ok(output) => output,
            Err(error) => panic!("{:?} can't be called: {error}", self.0),
        };
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        let Some(code) = output.status.code() else {
            panic!(
                "{:?} was ended by a signal or hung: {}\n{stderr}",
                self.0, output.status
            );
        };
        Ran {
            code,
            stdout: output.stdout,
            stderr,
            wall: called.elapsed(),
        }
    }
}

impl Ran {
    /// Standard output as text; fails when it is not UTF-8.
    #[must_use]
    #[track_caller]
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.stdout).expect("standard output is UTF-8")
    }

    /// Standard output as the one JSON object of `--json`.
    #[must_use]
    #[track_caller]
    pub fn json(&self) -> Value {
        match serde_json::from_slice(&self.stdout) {
            Ok(value) => value,
            Err(error) => panic!("no JSON on standard output ({error}): {self:?}"),
        }
    }

    /// Checks the exit code and shows everything when it differs.
    #[track_caller]
    pub fn expect(self, code: i32) -> Self {
        assert_eq!(self.code, code, "exit code of {self:#?}");
        self
    }
}

/// The command for a user who owns nothing: a copy in a folder that anybody may look into, since the build's may be closed to others.
#[derive(Debug)]
pub struct Nobodys(TempDir);

impl Nobodys {
    /// The user's number, and the group's.
    pub const ID: u32 = 65534;

    /// Makes the copy, which goes with this.
    #[must_use]
    pub fn copied() -> Self {
        let folder = tempfile::tempdir().expect("there is room for a folder");
        set_permissions(folder.path(), Permissions::from_mode(0o755))
            .expect("the folder is this test's");
        // By another program: what this one has open for writing while another test's thread makes a process is open there too, for a moment, and
        // can't be executed meanwhile (ETXTBSY).
        let copied = Command::new("cp")
            .arg(program())
            .arg(folder.path().join("sandvmm"))
            .status()
            .expect("cp is on PATH");
        assert!(copied.success(), "cp: {copied}");
        Self(folder)
    }

    /// Where the copy is, and nothing else.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.0.path()
    }

    /// A call of the copy, as that user.
    #[must_use]
    pub fn command(&self) -> Command {
        let mut command = Command::new(self.folder().join("sandvmm"));
        command.uid(Self::ID).gid(Self::ID).current_dir("/");
        command
    }
}

/// A call that goes on beside the test; killed when dropped.
#[derive(Debug)]
pub struct Background(Child);

impl Background {
    /// Starts `sandvmm run` with these arguments and pipes for all three streams.
    #[track_caller]
    pub fn run<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Self {
        Self::start(Command::new("sandvmm").arg("run").args(args))
    }

    /// Starts this command with pipes for all three streams.
    #[track_caller]
    pub fn start(command: &mut Command) -> Self {
        let child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("sandvmm is on PATH");
        Self(child)
    }

    /// The process, for its streams and number.
    pub fn child(&mut self) -> &mut Child {
        &mut self.0
    }

    /// Reads standard output until it has this text.
    #[track_caller]
    pub fn wait_for_output(&mut self, text: &str) {
        let stdout = self.0.stdout.as_mut().expect("standard output is a pipe");
        let mut seen = Vec::new();
        let mut byte = [0];
        while !seen.ends_with(text.as_bytes()) {
            match stdout.read(&mut byte) {
                Ok(1) => seen.extend_from_slice(&byte),
                other => panic!("output ended before {text:?}: {other:?}, {seen:?}"),
            }
        }
    }

    /// Numbers of the machines' processes that this call has started.
    #[must_use]
    pub fn machines(&self) -> Vec<u32> {
        children_of(self.0.id())
    }

    /// Waits for the end; fails when it does not come. `None` when a signal ended it.
    #[track_caller]
    pub fn wait(&mut self) -> Option<i32> {
        let deadline = Instant::now() + HUNG_AFTER;
        loop {
            match self.0.try_wait().expect("the child can be waited for") {
                Some(status) => return status.code(),
                None if Instant::now() > deadline => panic!("{:?} hung", self.0),
                None => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        // Either call fails only when the child has already been waited for.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Numbers of a process's children, of all its threads.
#[must_use]
pub fn children_of(pid: u32) -> Vec<u32> {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else {
        return Vec::new();
    };
    threads
        .flatten()
        .filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok())
        .flat_map(|list| {
            list.split_whitespace()
                .filter_map(|number| number.parse().ok())
                .collect::<Vec<_>>()
        })
        .collect()
}

/// Whether a process with this number exists, a zombie included.
#[must_use]
pub fn is_alive(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

/// Waits until `condition` holds; fails with `what` when it does not come true in `bound`.
#[track_caller]
pub fn eventually(bound: Duration, what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + bound;
    while !condition() {
        assert!(Instant::now() < deadline, "not within {bound:?}: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Resident memory of a process, in KiB.
#[must_use]
pub fn resident_kib(pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse().ok()
}
