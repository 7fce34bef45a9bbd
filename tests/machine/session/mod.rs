//! Sandboxes that outlive a command.

mod commands;
mod detached;
mod pause;
mod users;

use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use sandvmm_tests::{Background, Call, HUNG_AFTER, children_of, eventually, is_alive, sandvmm};
use serde_json::Value;
use tempfile::TempDir;

/// Sessions of one test, whose runtime folder is its own; all end with it. What it pauses is in the data folder of all: it has a name of its own then.
struct Sessions(TempDir, &'static str);

impl Sessions {
    fn new() -> Self {
        Self::of("dev")
    }

    fn of(name: &'static str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o700)).unwrap();
        Self(folder, name)
    }

    /// A started one, `dev`.
    fn dev(options: &[&str]) -> Self {
        Self::started("dev", options)
    }

    fn started(name: &'static str, options: &[&str]) -> Self {
        let sessions = Self::of(name);
        let started = sessions.call(["start", "--name", name]).args(options);
        started.done().expect(0);
        sessions
    }

    fn call<const N: usize>(&self, args: [&str; N]) -> Call {
        sandvmm(args).env("XDG_RUNTIME_DIR", self.0.path())
    }

    /// `exec NAME -- WORDS`.
    fn exec(&self, words: &[&str]) -> Call {
        self.call(["exec", self.1, "--"]).args(words)
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new("sandvmm");
        command.args(args).env("XDG_RUNTIME_DIR", self.0.path());
        command
    }

    /// All that run.
    fn list(&self) -> Vec<Value> {
        let mut listed = self.list_all();
        listed.retain(|info| info["state"] != "paused");
        listed
    }

    /// All, and what any test has paused.
    fn list_all(&self) -> Vec<Value> {
        let ran = self.call(["ls", "--json"]).done().expect(0);
        let lines = ran.text().lines();
        lines
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }

    fn pid(&self) -> u32 {
        let [info] = self.list().try_into().unwrap();
        info["pid"].as_u64().unwrap().try_into().unwrap()
    }

    fn ps(&self) -> String {
        let ran = self.call(["ps", "dev"]).done().expect(0);
        ran.text().to_owned()
    }

    /// What is on disk.
    fn left(&self) -> Vec<String> {
        let folder = self.0.path().join("sandvmm/sessions");
        let entries = std::fs::read_dir(folder).unwrap();
        entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect()
    }
}

impl Drop for Sessions {
    fn drop(&mut self) {
        let _ = self.command(&["stop", "--all"]).status();
    }
}

fn signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid.try_into().unwrap()).unwrap(), signal).unwrap();
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn state_stays_between_commands_and_nothing_after_the_stop() {
    let sessions = Sessions::dev(&["--memory", "200M", "--idle", "1h"]);

    sessions
        .exec(&["sh", "-c", "echo kept > note"])
        .done()
        .expect(0);
    let read = sessions
        .exec(&["sh", "-c", "cat note; echo no >&2; exit 7"])
        .done()
        .expect(7);
    assert_eq!((read.text(), read.stderr.as_str()), ("kept\n", "no\n"));
    let [info] = sessions.list().try_into().unwrap();
    assert_eq!(
        (&info["name"], &info["is_ready"]),
        (&"dev".into(), &true.into())
    );
    assert_eq!(
        (&info["memory_mib"], &info["idle_s"]),
        (&200.into(), &3600.0.into())
    );
    let supervisor = sessions.pid();
    let machines = children_of(supervisor);
    assert_eq!(machines.len(), 1);

    sessions.call(["stop", "dev"]).done().expect(0);

    // The name is free a moment before its process has left.
    eventually(Duration::from_secs(10), "the supervisor is gone", || {
        !is_alive(supervisor) || is_zombie(supervisor)
    });
    assert!(!is_alive(machines[0]));
    assert_eq!(sessions.left(), [""; 0]);
    let gone = sessions.exec(&["true"]).done().expect(125);
    assert!(
        gone.stderr.contains("There is no session \"dev\""),
        "{gone:?}"
    );
    sessions.call(["stop", "dev"]).done().expect(125);
}

/// In an emulated host nobody may reap what lost its parent.
fn is_zombie(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.is_empty() || stat.contains(") Z ")
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn of_two_starts_of_a_name_one_gets_it() {
    let sessions = Sessions::new();
    let start = || {
        sessions
            .command(&["start", "--name", "dev"])
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };

    let (one, two) = (start(), start());
    let ended = [one, two].map(|one| one.wait_with_output().unwrap());

    let mut codes = ended.each_ref().map(|one| one.status.code().unwrap());
    codes.sort_unstable();
    assert_eq!(codes, [0, 125], "{ended:?}");
    let refused = ended.iter().find(|one| !one.status.success()).unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(
        said.contains("There is a session \"dev\" already"),
        "{said}"
    );
    assert_eq!(sessions.exec(&["echo", "1"]).done().expect(0).text(), "1\n");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_start_that_fails_says_why_and_leaves_nothing() {
    let sessions = Sessions::new();

    let failed = sessions
        .call(["start", "--name", "dev", "--kernel", "/no/kernel"])
        .done()
        .expect(125);
    let named = sessions
        .call(["start", "--name", "../dev"])
        .done()
        .expect(2);

    assert!(failed.stderr.contains("/no/kernel"), "{failed:?}");
    assert!(named.stderr.contains("a name has 1 to 64"), "{named:?}");
    assert_eq!(sessions.left(), [""; 0]);
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_killed_supervisor_leaves_what_the_next_look_sweeps() {
    let sessions = Sessions::dev(&[]);
    let supervisor = sessions.pid();
    let machine = children_of(supervisor)[0];
    let mut client =
        Background::start(&mut sessions.command(&["exec", "dev", "--", "sleep", "1000"]));
    eventually(HUNG_AFTER, "it runs", || !sessions.ps().is_empty());

    signal(supervisor, Signal::KILL);

    assert_eq!(client.wait(), Some(125));
    eventually(Duration::from_secs(60), "the machine is gone", || {
        !is_alive(machine) || is_zombie(machine)
    });
    assert_eq!(sessions.left(), ["dev"]);
    assert!(sessions.list().is_empty());
    assert_eq!(sessions.left(), [""; 0]);
    sessions.call(["start", "--name", "dev"]).done().expect(0);
    sessions.exec(&["true"]).done().expect(0);
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_stopped_supervisor_is_killed_by_the_stop() {
    let sessions = Sessions::dev(&[]);
    let supervisor = sessions.pid();
    signal(supervisor, Signal::STOP);

    let mut stop = sessions.command(&["stop", "dev"]).spawn().unwrap();
    eventually(Duration::from_secs(120), "the stop is done", || {
        stop.try_wait().unwrap().is_some()
    });

    assert_eq!(stop.wait().unwrap().code(), Some(0));
    assert_eq!(sessions.left(), [""; 0]);
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn it_ends_when_idle_and_not_while_something_runs() {
    let sessions = Sessions::dev(&["--idle", "4s"]);

    sessions.exec(&["sleep", "8"]).done().expect(0);
    let ended_at = Instant::now();
    eventually(Duration::from_secs(60), "it ends by itself", || {
        sessions.list().is_empty()
    });

    assert!(ended_at.elapsed() >= Duration::from_secs(3));
    assert_eq!(sessions.left(), [""; 0]);
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn it_ends_when_its_time_is_over_and_says_so_to_who_waits() {
    let sessions = Sessions::dev(&["--timeout", "30s"]);

    let cut = sessions.exec(&["sleep", "1000"]).done().expect(124);

    assert!(cut.stderr.contains("The time of 30 s is over"), "{cut:?}");
    eventually(Duration::from_secs(10), "nothing is left", || {
        sessions.left().is_empty()
    });
}
