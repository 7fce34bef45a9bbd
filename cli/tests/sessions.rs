//! The commands for sessions against a supervisor that is only a lock and a socket: who believes it, and what happens while it is silent.
#![expect(
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test's helper fails by panicking"
)]

use std::fs::{self, File, Permissions};
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// After this a call counts as hung.
const HUNG_AFTER: Duration = Duration::from_secs(60);

/// What a supervisor named `dev` has on disk.
struct Silent {
    runtime: TempDir,
    listener: UnixListener,
    _lock: File,
}

impl Silent {
    fn new() -> Self {
        let runtime = tempfile::tempdir().unwrap();
        let folder = runtime.path().join("sandvmm/sessions/dev");
        fs::create_dir_all(&folder).unwrap();
        for path in folder.ancestors().take(4) {
            fs::set_permissions(path, Permissions::from_mode(0o700)).unwrap();
        }
        let lock = File::create(folder.join("lock")).unwrap();
        lock.lock().unwrap();
        Self {
            listener: UnixListener::bind(folder.join("socket")).unwrap(),
            runtime,
            _lock: lock,
        }
    }

    fn folder(&self) -> PathBuf {
        self.runtime.path().join("sandvmm/sessions/dev")
    }

    fn sandvmm<const N: usize>(&self, args: [&str; N]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sandvmm"));
        command
            .args(args)
            .env("XDG_RUNTIME_DIR", self.runtime.path())
            .env("SANDVMM_HOME", self.home());
        command
    }

    /// The data folder.
    fn home(&self) -> PathBuf {
        self.runtime.path().join("home")
    }

    /// A paused sandbox, of which what is on record can't be read.
    fn paused(&self, name: &str) -> PathBuf {
        let folder = self.home().join("paused").join(name);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("memory"), "x").unwrap();
        folder
    }

    fn listed(&self) -> String {
        let output = self.sandvmm(["ls"]).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// A client that has asked for something.
    fn accept(&self) -> UnixStream {
        self.listener.set_nonblocking(true).unwrap();
        let deadline = Instant::now() + HUNG_AFTER;
        loop {
            match self.listener.accept() {
                Ok((mut client, _)) => {
                    client.set_nonblocking(false).unwrap();
                    client.set_read_timeout(Some(HUNG_AFTER)).unwrap();
                    client.read_exact(&mut [0; 8]).unwrap();
                    return client;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    assert!(Instant::now() < deadline, "no client comes");
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
}

fn end_of(child: &mut Child) -> ExitStatus {
    let deadline = Instant::now() + HUNG_AFTER;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if Instant::now() > deadline {
            child.kill().unwrap();
            panic!("it hung");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_runtime_folder_that_others_may_look_into_is_none() {
    let silent = Silent::new();
    let runtime = silent.runtime.path();
    assert!(silent.listed().starts_with("dev\t"));

    for mode in [0o701, 0o755, 0o777] {
        fs::set_permissions(runtime, Permissions::from_mode(mode)).unwrap();
        assert!(!silent.listed().contains("dev\t"), "{mode:o}");
    }
}

#[test]
fn a_folder_of_sessions_that_others_may_look_into_is_not_believed() {
    let silent = Silent::new();
    let base = silent.runtime.path().join("sandvmm");
    fs::set_permissions(base, Permissions::from_mode(0o777)).unwrap();

    for args in [["stop", "dev"], ["ps", "dev"], ["ls", "--json"]] {
        let output = silent.sandvmm(args).output().unwrap();

        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(125), "{args:?}: {said}");
        assert!(said.contains("must be a folder of yours"), "{said}");
    }
    assert!(silent.folder().join("socket").exists());
}

#[test]
fn a_signal_ends_an_exec_whose_command_has_not_been_started() {
    let silent = Silent::new();
    let mut exec = silent
        .sandvmm(["exec", "dev", "--", "true"])
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let _asked = silent.accept();

    let pid = Pid::from_raw(exec.id().try_into().unwrap()).unwrap();
    kill_process(pid, Signal::TERM).unwrap();

    assert_eq!(end_of(&mut exec).signal(), Some(Signal::TERM.as_raw()));
}

#[test]
fn a_reader_that_is_gone_ends_logs_as_sigpipe_would() {
    let silent = Silent::new();
    fs::write(silent.folder().join("log"), "[1] one\n").unwrap();
    let (reader, writer) = io::pipe().unwrap();
    drop(reader);

    let whole = silent.sandvmm(["logs", "dev"]).output().unwrap();
    let status = silent.sandvmm(["logs", "dev"]).stdout(writer).status();

    assert_eq!(whole.stdout, b"[1] one\n");
    assert_eq!(status.unwrap().code(), Some(141));
}

#[test]
fn a_folder_that_is_no_sessions_keeps_none_from_being_listed() {
    let silent = Silent::new();
    let stray = silent.folder().with_file_name("stray");
    fs::create_dir_all(stray.join("lock")).unwrap();

    let listed = silent.sandvmm(["ls"]).output().unwrap();
    assert!(listed.status.success(), "{listed:?}");
    let rows = String::from_utf8_lossy(&listed.stdout);
    assert!(
        rows.starts_with("dev\t") && rows.lines().count() == 1,
        "{rows}"
    );
    let said = String::from_utf8_lossy(&listed.stderr);
    assert!(said.contains("/stray/lock"), "{said}");
}

#[test]
fn what_is_paused_is_listed_and_removed_by_name() {
    let silent = Silent::new();
    let (kept, folder) = (silent.paused("early"), silent.paused("late"));
    // Its session is on its way.
    silent.paused("dev");

    let listed = silent.listed();
    let json = silent.sandvmm(["ls", "--json"]).output().unwrap().stdout;
    let stopped = silent.sandvmm(["stop", "late"]).output().unwrap();
    let missing = silent.sandvmm(["stop", "late"]).output().unwrap();

    let states: Vec<_> = listed
        .lines()
        .map(|line| line.splitn(3, '\t').take(2).collect::<Vec<_>>())
        .collect();
    assert_eq!(
        states,
        [["dev", "ready"], ["early", "paused"], ["late", "paused"]]
    );
    let objects: Vec<serde_json::Value> = json
        .split(|byte| *byte == b'\n')
        .filter(|line| !line.is_empty())
        .map(|line| serde_json::from_slice(line).unwrap())
        .collect();
    assert_eq!(objects[1]["name"], "early");
    assert_eq!(
        (&objects[1]["state"], &objects[1]["is_ready"]),
        (&"paused".into(), &false.into())
    );
    assert_eq!(objects[0]["state"], "ready");
    assert!(stopped.status.success(), "{stopped:?}");
    assert!(!folder.exists());
    let said = String::from_utf8_lossy(&missing.stderr).into_owned();
    assert_eq!(missing.status.code(), Some(125), "{said}");
    assert!(said.contains("There is no session \"late\""), "{said}");
    assert!(kept.join("memory").exists());
}

#[test]
fn a_paused_sandbox_that_somebody_goes_on_with_is_not_removed() {
    let silent = Silent::new();
    let folder = silent.paused("late");
    let lock = File::open(&folder).unwrap();
    lock.lock().unwrap();

    let refused = silent.sandvmm(["stop", "late"]).output().unwrap();

    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(125), "{said}");
    assert!(said.contains("is being resumed by somebody else"), "{said}");
    assert!(folder.join("memory").exists());
}

#[test]
fn stop_all_leaves_what_is_paused() {
    let silent = Silent::new();
    let folder = silent.paused("late");
    fs::remove_dir_all(silent.folder()).unwrap();

    let stopped = silent.sandvmm(["stop", "--all"]).output().unwrap();

    assert!(stopped.status.success(), "{stopped:?}");
    assert!(folder.exists());
}

#[test]
fn the_name_of_a_paused_sandbox_is_not_started_anew() {
    let silent = Silent::new();
    silent.paused("late");

    let refused = silent
        .sandvmm(["start", "--name", "late"])
        .output()
        .unwrap();

    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(125), "{said}");
    assert!(
        said.contains("There is a paused sandbox \"late\"")
            && said.contains("sandvmm resume late")
            && said.contains("sandvmm stop late"),
        "{said}"
    );
    assert!(!silent.runtime.path().join("sandvmm/sessions/late").exists());
}
