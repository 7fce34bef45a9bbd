//! A session's log, followed.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use sandvmm_tests::{Background, HUNG_AFTER, eventually};
use tempfile::TempDir;

/// A session that ends with the test.
struct Session(TempDir);

impl Session {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o700)).unwrap();
        let session = Self(folder);
        session.done(&["start", "--name", "followed"]);
        session
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new("sandvmm");
        command.args(args).env("XDG_RUNTIME_DIR", self.0.path());
        command
    }

    /// What it prints.
    #[track_caller]
    fn done(&self, args: &[&str]) -> String {
        let output = self.command(args).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = self.command(&["stop", "--all"]).status();
    }
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_log_is_followed_until_its_session_is_over() {
    let session = Session::start();
    let script =
        "echo early; printf 'name: '; while ! [ -e go ]; do sleep 0.1; done; echo late; sleep 1000";
    let id = session.done(&["exec", "-d", "followed", "--", "sh", "-c", script]);
    let id = id.trim();

    let mut follower = Background::start(&mut session.command(&["logs", "-f", "followed"]));
    follower.wait_for_output(&format!("[{id}] early\n"));
    // Who looks once sees what has no end yet, too.
    eventually(HUNG_AFTER, "the unfinished line is shown", || {
        session.done(&["logs", "followed"]) == format!("[{id}] early\n[{id}] name: \n")
    });
    assert_eq!(follower.child().try_wait().unwrap(), None);
    session.done(&["exec", "followed", "--", "touch", "go"]);
    follower.wait_for_output(&format!("[{id}] name: late\n"));
    session.done(&["stop", "followed"]);

    assert_eq!(follower.wait(), Some(0));
    let output = session.command(&["logs", "-f", "followed"]).output();
    assert_eq!(output.unwrap().status.code(), Some(125));
}
