//! Supervisors that end badly, and one without privileges: this program again.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::inmate::Order;
use crate::skip;
use crate::walls::{SOON, jailed, options};

/// The argument with which this program is a supervisor.
pub(crate) const WORD: &str = "supervise";

/// A user and group that own nothing.
const NOBODY: u32 = 65534;

/// Starts a process, says which, and how its cell is, and goes on until it is killed.
pub(crate) fn serve() {
    let jailed = jailed(options(&[]), Order::Wait);
    let cell = &jailed.cell;
    let cgroup = jailed.process.cgroup().unwrap_or_else(|| Path::new("-"));
    println!(
        "{} {} {} {}",
        jailed.process.id(),
        cgroup.display(),
        cell.namespaces.iter().count(),
        cell.empty_root
    );
    std::io::stdout().flush().unwrap();
    std::thread::sleep(SOON);
    drop(jailed.socket);
}

/// The words of a supervisor that was started with `command`.
fn started(command: &mut Command) -> (Child, Vec<String>) {
    let mut child = command.arg(WORD).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    (child, line.split_whitespace().map(str::to_owned).collect())
}

fn wait_until_gone(pid: &str) {
    let deadline = Instant::now() + SOON;
    while fs::exists(format!("/proc/{pid}")).unwrap() {
        assert!(Instant::now() < deadline, "{pid} lives on");
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub(crate) fn it_dies_with_its_supervisor() {
    let (mut supervisor, words) = started(&mut Command::new("/proc/self/exe"));
    let (pid, cgroup) = (&words[0], Path::new(&words[1]));
    assert!(fs::exists(format!("/proc/{pid}")).unwrap());

    supervisor.kill().unwrap();
    supervisor.wait().unwrap();

    wait_until_gone(pid);
    // Whoever starts the next machine removes the group.
    drop(jailed(options(&[]), Order::Wait));
    assert!(!cgroup.exists(), "{}", cgroup.display());
}

pub(crate) fn a_user_without_privileges_has_a_cell() {
    if !rustix::process::geteuid().is_root() {
        // All the other tests have shown it.
        return;
    }
    // This program's folder may be closed to others.
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let program = folder.path().join("program");
    fs::copy("/proc/self/exe", &program).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();

    let (mut supervisor, words) = started(Command::new(&program).uid(NOBODY).gid(NOBODY));

    let status = fs::read_to_string(format!("/proc/{}/status", words[0])).unwrap();
    let has = |line: &str| status.lines().any(|found| found == line);
    assert!(
        has("CapEff:\t0000000000000000") && has("NoNewPrivs:\t1"),
        "{status}"
    );
    assert!(
        has(&format!("Uid:\t{NOBODY}\t{NOBODY}\t{NOBODY}\t{NOBODY}")),
        "{status}"
    );
    if words[2] == "0" {
        skip(
            "a_user_without_privileges_has_a_cell, in part",
            "the host refuses user namespaces",
        );
    } else {
        assert_eq!(words[2..], ["7", "true"]);
        assert!(has("CapBnd:\t0000000000000000"), "{status}");
    }
    supervisor.kill().unwrap();
    supervisor.wait().unwrap();
    wait_until_gone(&words[0]);
}
