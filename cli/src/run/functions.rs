//! Functions of the host that are programs: `--host-function NAME=PROGRAM`.
//!
//! For each call the program is started with the arguments, JSON, on its standard input; what it prints, JSON, is the result.
//! Nothing of what the guest says becomes a word of its command line.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{Access, AtFlags, CWD, accessat};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};
use sandvmm::{CallLimits, HostFunctionError, Sandbox};
use serde_json::value::RawValue;

/// The variable that tells a program which function it is.
const NAME_VARIABLE: &str = "SANDVMM_FUNCTION";

/// Where a program is looked for without a `PATH`, as of `execvp(3)` in the GNU C library.
const DEFAULT_PATH: &str = "/bin:/usr/bin";

/// How long a call may take. Then its program is killed with all that it started in its process group.
const CALL_LIMIT: Duration = Duration::from_secs(30);

/// How much later the library gives up on a call: a program that was killed is told first.
const CALL_GRACE: Duration = Duration::from_secs(2);

/// Largest result in bytes: what an answer can carry. A program that prints more has failed.
const MAX_RESULT_BYTES: u64 = 1 << 20;

/// Bytes of a program's standard error that are kept; the last line of them is the error's message.
const MAX_ERROR_BYTES: usize = 16 << 10;

/// How often a program that has closed its output is looked at for its end.
const END_PERIOD: Duration = Duration::from_millis(5);

/// A function and the program that it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HostFunction {
    name: String,
    program: PathBuf,
}

impl HostFunction {
    /// `NAME=PROGRAM`.
    pub(crate) fn parse(word: &OsStr) -> Result<Self, String> {
        let bytes = word.as_bytes();
        let equals = bytes.iter().position(|byte| *byte == b'=');
        let parts = equals.and_then(|at| Some((bytes.get(..at)?, bytes.get(at + 1..)?)));
        let (name, program) = parts.unwrap_or_default();
        let name = std::str::from_utf8(name).unwrap_or_default();
        if name.is_empty() || program.is_empty() {
            return Err("a name and a program with a `=` between them are needed".into());
        }
        Ok(Self {
            name: name.to_owned(),
            program: PathBuf::from(OsString::from(OsStr::from_bytes(program))),
        })
    }
}

/// Why a function can't be had.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FunctionError {
    /// Its name can't be.
    #[error(transparent)]
    Name(#[from] HostFunctionError),
    /// There is no such program.
    #[error("The program '{}' of the function {name} is not there: name one of PATH, or its path", .program.display())]
    NoProgram {
        /// The function's name.
        name: String,
        /// The program.
        program: PathBuf,
    },
    /// It is there and can't be executed.
    #[error("The program '{}' of the function {name} can't be executed: it must be a file that may be (chmod +x)", .program.display())]
    NotExecutable {
        /// The function's name.
        name: String,
        /// The program.
        program: PathBuf,
    },
}

/// The programs that run, each the leader of its process group.
#[derive(Debug, Clone, Default)]
pub(crate) struct Programs(Arc<Mutex<Live>>);

#[derive(Debug, Default)]
struct Live {
    groups: Vec<Pid>,
    is_over: bool,
}

impl Programs {
    fn lock(&self) -> MutexGuard<'_, Live> {
        // Nothing panics while it is held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks whether all functions can be registered and their programs started, before there is a guest.
    ///
    /// # Errors
    /// See [`FunctionError`].
    pub(crate) fn check(functions: &[HostFunction]) -> Result<(), FunctionError> {
        let mut known = BTreeSet::new();
        for HostFunction { name, program } in functions {
            if !sandvmm::is_host_function_name(name) {
                return Err(HostFunctionError::Name(name.clone()).into());
            }
            if !known.insert(name) {
                return Err(HostFunctionError::Taken(name.clone()).into());
            }
            let (name, program) = (name.clone(), program.clone());
            match find(&program, std::env::var_os("PATH").as_deref()) {
                Found::Executable => {}
                Found::Other => return Err(FunctionError::NotExecutable { name, program }),
                Found::Nothing => return Err(FunctionError::NoProgram { name, program }),
            }
        }
        Ok(())
    }

    /// Registers all functions.
    ///
    /// # Errors
    /// See [`HostFunctionError`].
    pub(crate) fn register(
        &self,
        sandbox: &Sandbox,
        functions: &[HostFunction],
    ) -> Result<(), HostFunctionError> {
        for function in functions {
            let (programs, own) = (self.clone(), function.clone());
            let limits = CallLimits::default().deadline(CALL_LIMIT + CALL_GRACE);
            sandbox.host_function_with(&function.name, limits, move |args: Box<RawValue>| {
                programs.call(&own, args.get(), Instant::now() + CALL_LIMIT)
            })?;
        }
        Ok(())
    }

    /// Ends all programs: the run is over.
    pub(crate) fn end(&self) {
        let mut live = self.lock();
        live.is_over = true;
        for group in live.groups.drain(..) {
            kill(group);
        }
    }

    fn call(
        &self,
        function: &HostFunction,
        args: &str,
        deadline: Instant,
    ) -> Result<Box<RawValue>, String> {
        let mut child = self.start(function)?;
        let group = Pid::from_child(&child);
        let output = converse(&mut child, args.as_bytes(), deadline);
        // What it has left behind in its group goes with it; as long as it was not waited for, its number is its own.
        self.lock().groups.retain(|known| *known != group);
        kill(group);
        let status = child.wait().map_err(|error| error.to_string())?;
        let (output, error) = output?;
        result(function, status, &output, &error)
    }

    fn start(&self, function: &HostFunction) -> Result<Child, String> {
        let mut live = self.lock();
        if live.is_over {
            return Err("The run is over".to_owned());
        }
        let child = Command::new(&function.program)
            .env(NAME_VARIABLE, &function.name)
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| format!("The function's program can't be started: {error}"))?;
        live.groups.push(Pid::from_child(&child));
        Ok(child)
    }
}

/// What a program's name leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    Executable,
    Other,
    Nothing,
}

/// Looks for a program as `execvp(3)` does: a name without a slash in the folders of `PATH`.
fn find(program: &Path, path: Option<&OsStr>) -> Found {
    if program.as_os_str().as_bytes().contains(&b'/') {
        return look_at(program);
    }
    let mut found = Found::Nothing;
    for folder in std::env::split_paths(path.unwrap_or_else(|| OsStr::new(DEFAULT_PATH))) {
        match look_at(&Path::new(".").join(folder).join(program)) {
            Found::Executable => return Found::Executable,
            Found::Other => found = Found::Other,
            Found::Nothing => {}
        }
    }
    found
}

fn look_at(file: &Path) -> Found {
    match std::fs::metadata(file) {
        Err(error) if matches!(error.kind(), ErrorKind::PermissionDenied) => Found::Other,
        Err(_) => Found::Nothing,
        Ok(metadata) => {
            let access = match accessat(CWD, file, Access::EXEC_OK, AtFlags::EACCESS) {
                // A container's filter that does not know the call (Linux 5.8). The older one asks by the real ids.
                Err(Errno::PERM) => accessat(CWD, file, Access::EXEC_OK, AtFlags::empty()),
                access => access,
            };
            if metadata.is_file() && access.is_ok() {
                Found::Executable
            } else {
                Found::Other
            }
        }
    }
}

fn kill(group: Pid) {
    // A group without processes needs nothing.
    let _ = rustix::process::kill_process_group(group, Signal::KILL);
}

/// Gives a program its arguments and takes what it prints, on both streams, until it has ended.
fn converse(
    child: &mut Child,
    args: &[u8],
    deadline: Instant,
) -> Result<(Vec<u8>, Vec<u8>), String> {
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let args = args.to_vec();
    detached(move || {
        // A program that does not read its arguments has no use for them.
        let _ = stdin.map(|mut stdin| stdin.write_all(&args));
    });
    let output = detached(move || {
        let mut bytes = Vec::new();
        if let Some(stdout) = stdout {
            let _ = stdout.take(MAX_RESULT_BYTES + 1).read_to_end(&mut bytes);
        }
        bytes
    });
    let error = detached(move || stderr.map_or_else(Vec::new, last_bytes));
    let late = |_| "The function took too long, and was ended".to_owned();
    let output = before(&output, deadline).map_err(late)?;
    if output.len() as u64 > MAX_RESULT_BYTES {
        return Err(format!(
            "The result is above {} MiB",
            MAX_RESULT_BYTES >> 20
        ));
    }
    let error = before(&error, deadline).map_err(late)?;
    while !has_ended(child) {
        if Instant::now() >= deadline {
            return Err(late(RecvTimeoutError::Timeout));
        }
        thread::sleep(END_PERIOD);
    }
    Ok((output, error))
}

/// Whether it has ended; its status and number are kept.
fn has_ended(child: &Child) -> bool {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    let waited = rustix::process::waitid(WaitId::Pid(Pid::from_child(child)), options);
    !matches!(waited, Ok(None))
}

/// Does it on a thread that nobody waits for longer than the deadline.
fn detached<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Receiver<T> {
    let (sender, receiver) = channel();
    // Without a thread the sender is dropped, which is told.
    let _ = thread::Builder::new().spawn(move || sender.send(work()));
    receiver
}

fn before<T>(receiver: &Receiver<T>, deadline: Instant) -> Result<T, RecvTimeoutError> {
    receiver.recv_timeout(deadline.saturating_duration_since(Instant::now()))
}

fn last_bytes(mut stream: impl Read) -> Vec<u8> {
    let (mut kept, mut chunk) = (Vec::new(), [0; 4096]);
    while let Ok(count @ 1..) = stream.read(&mut chunk) {
        kept.extend_from_slice(chunk.get(..count).unwrap_or_default());
        let surplus = kept.len().saturating_sub(MAX_ERROR_BYTES);
        kept.drain(..surplus);
    }
    kept
}

/// The result, or what a program that failed said last.
fn result(
    function: &HostFunction,
    status: ExitStatus,
    output: &[u8],
    error: &[u8],
) -> Result<Box<RawValue>, String> {
    let program = Path::new(&function.program).file_name().unwrap_or_default();
    if !status.success() {
        let error = String::from_utf8_lossy(error);
        let last = error.lines().rev().find(|line| !line.trim().is_empty());
        return Err(last.map_or_else(
            || format!("{} ended with {status}", program.display()),
            |line| line.trim().to_owned(),
        ));
    }
    if output.trim_ascii().is_empty() {
        return serde_json::from_str("null").map_err(|error| error.to_string());
    }
    serde_json::from_slice(output)
        .map_err(|error| format!("What {} printed is no JSON: {error}", program.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A function whose program is this script. Another process writes it: while one of this process has it open for writing, which
    /// also a process is that another test is just about to start, it can't be executed (`ETXTBSY`).
    fn function(script: &str) -> (HostFunction, tempfile::TempDir) {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("program");
        let mut install = Command::new("install")
            .args(["--mode=755", "/dev/stdin"])
            .arg(&program)
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let mut text = install.stdin.take().unwrap();
        write!(text, "#!/bin/sh\n{script}").unwrap();
        drop(text);
        assert!(install.wait().unwrap().success());
        let name = "f".to_owned();
        (HostFunction { name, program }, folder)
    }

    fn call(script: &str, args: &str, limit: Duration) -> Result<String, String> {
        let (function, _folder) = function(script);
        let result = Programs::default().call(&function, args, Instant::now() + limit);
        result.map(|value| value.get().to_owned())
    }

    const SOON: Duration = Duration::from_secs(20);

    #[test]
    fn names_that_are_none_or_twice_are_told_before_there_is_a_guest() {
        let function = |name: &str| HostFunction {
            name: name.to_owned(),
            program: "true".into(),
        };

        let bad = Programs::check(&[function("a-b")]).unwrap_err();
        let twice = Programs::check(&["a", "b", "a"].map(function)).unwrap_err();

        assert!(matches!(bad, FunctionError::Name(HostFunctionError::Name(name)) if name == "a-b"));
        assert!(
            matches!(twice, FunctionError::Name(HostFunctionError::Taken(name)) if name == "a")
        );
        Programs::check(&["a", "b"].map(function)).unwrap();
    }

    #[test]
    fn a_program_that_is_not_there_or_none_is_told_before_there_is_a_guest() {
        let check = |program: &Path| {
            let (name, program) = ("f".to_owned(), program.to_owned());
            Programs::check(&[HostFunction { name, program }])
        };
        let (own, folder) = function("");
        let plain = folder.path().join("plain");
        std::fs::write(&plain, "#!/bin/sh\n").unwrap();

        for program in [own.program.as_path(), Path::new("sh"), Path::new("/bin/sh")] {
            check(program).unwrap();
        }
        for program in ["nosuch", "/no/such", "./nosuch", "/bin/sh/x"] {
            let refused = check(Path::new(program)).unwrap_err();
            assert!(
                matches!(refused, FunctionError::NoProgram { .. }),
                "{refused}"
            );
        }
        for program in [plain.as_path(), folder.path(), Path::new("/dev/null")] {
            let refused = check(program).unwrap_err();
            assert!(
                matches!(refused, FunctionError::NotExecutable { .. }),
                "{refused}"
            );
        }
        // The first of PATH that can be executed is it, wherever others of its name are.
        let path = format!("{}:{}", plain.display(), folder.path().display());
        assert_eq!(
            find(Path::new("plain"), Some(OsStr::new(&path))),
            Found::Other
        );
        assert_eq!(
            find(Path::new("program"), Some(OsStr::new(&path))),
            Found::Executable
        );
        assert_eq!(find(Path::new("sh"), None), Found::Executable);
    }

    #[test]
    fn arguments_go_in_and_the_result_comes_out_as_they_are() {
        let args = r#"{"a": "$(x)", "b": [1.0e3]}"#;

        assert_eq!(call("cat", args, SOON).unwrap(), args);
        assert_eq!(call("cat > /dev/null", "1", SOON).unwrap(), "null");
        assert_eq!(
            call("printf '\"%s\"' \"$SANDVMM_FUNCTION\"", "1", SOON).unwrap(),
            "\"f\""
        );
    }

    #[test]
    fn a_program_that_fails_is_told_by_its_last_words() {
        let said = call("echo first >&2; echo 'No row 7' >&2; exit 3", "1", SOON);
        let silent = call("exit 3", "1", SOON).unwrap_err();
        let garbage = call("echo garbage", "1", SOON).unwrap_err();
        let flood = call("cat /dev/zero", "1", SOON).unwrap_err();

        assert_eq!(said.unwrap_err(), "No row 7");
        assert!(silent.contains("exit status: 3"), "{silent}");
        assert!(garbage.contains("no JSON"), "{garbage}");
        assert!(flood.contains("1 MiB"), "{flood}");
    }

    #[test]
    fn a_program_that_takes_too_long_is_ended_with_all_of_its_group() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("alive");
        let script = format!(
            "(while :; do date +%s%N > {}; sleep 0.01; done) & wait",
            file.display()
        );
        let began = Instant::now();

        let late = call(&script, "1", Duration::from_millis(300)).unwrap_err();

        assert!(late.contains("too long"), "{late}");
        assert!(began.elapsed() < SOON);
        thread::sleep(Duration::from_millis(100));
        let last = std::fs::read(&file).unwrap();
        thread::sleep(Duration::from_millis(100));
        assert_eq!(std::fs::read(&file).unwrap(), last);
    }

    #[test]
    fn the_runs_end_is_that_of_its_programs() {
        let (function, _folder) = function("exec sleep 1000");
        let programs = Programs::default();
        let calling = programs.clone();
        let called = thread::spawn(move || calling.call(&function, "1", Instant::now() + SOON));
        let until = Instant::now() + SOON;
        while programs.lock().groups.is_empty() {
            assert!(Instant::now() < until);
            thread::yield_now();
        }

        programs.end();

        let error = called.join().unwrap().unwrap_err();
        assert!(error.contains("signal: 9"), "{error}");
    }

    #[test]
    fn a_function_is_a_name_and_a_program() {
        let parsed = HostFunction::parse(OsStr::new("a=./b=c")).unwrap();
        assert_eq!(parsed.name, "a");
        assert_eq!(parsed.program, PathBuf::from("./b=c"));
        for word in ["", "a", "a=", "=b"] {
            HostFunction::parse(OsStr::new(word)).unwrap_err();
        }
    }
}
