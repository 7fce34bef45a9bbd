//! Supervisors that end badly, and one without privileges: this program again.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Resource;
use rustix::thread::CapabilitySet;
use sandvmm_jailer::Ids;

use crate::inmate::Order;
use crate::walls::{SOON, jailed, options};
use crate::{limits, precedence, refusals, skip};

/// The argument with which this program is a supervisor.
pub(crate) const WORD: &str = "supervise";

/// The argument after that with which it comes before other processes; and with which it gives way to them.
pub(crate) const FAVOURED: &str = "favoured";
pub(crate) const GIVING_WAY: &str = "giving-way";

/// The ones with which its user may have no other process, or fewer than a machine needs, or with which it is of a kind of real-time that makes
/// no others: it says why none was started.
pub(crate) const ALONE: &str = "alone";
pub(crate) const FEW: &str = "few";
pub(crate) const DEADLINE: &str = "deadline";

/// The one with which it may have less memory than a guest.
pub(crate) const NARROW: &str = "narrow";

/// The one with which it says why none was started, as it is; and with which its user has no room for one more key.
pub(crate) const CROWDED: &str = "crowded";
pub(crate) const HOARDING: &str = "hoarding";

/// How a supervisor says whose ids its machine has.
pub(crate) const NOBODYS: &str = "nobodys";
pub(crate) const SUPERVISORS: &str = "supervisors";

/// A user and group that own nothing; and some that run nothing either.
pub(crate) const NOBODY: u32 = 65534;
pub(crate) const ALONE_ID: u32 = 65533;
pub(crate) const HOARDERS_ID: u32 = 65532;

/// Starts a process, says which, and how its cell is, and goes on until it is killed. The word after its own says what it does to itself before.
pub(crate) fn serve() {
    match std::env::args().nth(2).as_deref() {
        Some(FAVOURED) => precedence::favour_this_process(),
        Some(GIVING_WAY) => precedence::have_this_process_give_way(),
        Some(ALONE) => {
            return limits::say_why_it_is_alone(|| limits::limit(Resource::Nproc, 1, 100));
        }
        Some(NARROW) => {
            return limits::say_why_it_is_alone(|| {
                limits::limit(Resource::Data, 32 << 20, 32 << 20)
            });
        }
        Some(FEW) => return limits::say_why_it_is_alone(|| limits::limit(Resource::Nproc, 1, 1)),
        Some(CROWDED) => return limits::say_why_it_is_alone(|| {}),
        Some(HOARDING) => refusals::hoard_keys(),
        Some(DEADLINE) => match limits::have_a_deadline() {
            Ok(()) => return limits::say_why_it_is_alone(|| {}),
            Err(error) => return println!("unset {error}"),
        },
        _ => {}
    }
    let jailed = jailed(options(&[]), Order::Wait);
    let cell = &jailed.cell;
    let cgroup = jailed.process.cgroup().unwrap_or_else(|| Path::new("-"));
    let missing: Vec<String> = cell.missing.iter().map(ToString::to_string).collect();
    println!(
        "{} {} {} {} {} {}",
        jailed.process.id(),
        cgroup.display(),
        cell.namespaces.iter().count(),
        cell.empty_root,
        match cell.ids {
            Ids::Own(_) => "own",
            Ids::Nobodys => NOBODYS,
            _ => SUPERVISORS,
        },
        missing.join("; ")
    );
    std::io::stdout().flush().unwrap();
    std::thread::sleep(SOON);
    drop(jailed.socket);
}

/// The words of a supervisor that was started with `command`.
pub(crate) fn started(command: &mut Command) -> (Child, Vec<String>) {
    started_as(command, "")
}

/// The same, of one that does this to itself before.
pub(crate) fn started_as(command: &mut Command, what: &str) -> (Child, Vec<String>) {
    let words = [WORD, what];
    let mut child = command.args(words).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    (child, line.split_whitespace().map(str::to_owned).collect())
}

/// Whether this process may have others run as any user: it is root, of no user namespace that has a few ids alone, and may change ids.
pub(crate) fn may_give_ids() -> bool {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap();
    let has_all = map.split_whitespace().eq(["0", "0", "4294967295"]);
    let may_change = rustix::thread::capabilities(None)
        .unwrap()
        .effective
        .contains(CapabilitySet::SETUID | CapabilitySet::SETGID);
    rustix::process::geteuid().is_root() && has_all && may_change
}

/// Ends a supervisor as the kernel does, and its machine with it.
pub(crate) fn end(mut supervisor: Child) {
    supervisor.kill().unwrap();
    supervisor.wait().unwrap();
}

pub(crate) fn wait_until_gone(pid: &str) {
    let deadline = Instant::now() + SOON;
    while fs::exists(format!("/proc/{pid}")).unwrap() {
        assert!(Instant::now() < deadline, "{pid} lives on");
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub(crate) fn it_dies_with_its_supervisor() {
    let (supervisor, words) = started(&mut Command::new("/proc/self/exe"));
    let (pid, cgroup) = (&words[0], Path::new(&words[1]));
    assert!(fs::exists(format!("/proc/{pid}")).unwrap());

    end(supervisor);

    wait_until_gone(pid);
    // Whoever starts the next machine removes the group.
    drop(jailed(options(&[]), Order::Wait));
    assert!(!cgroup.exists(), "{}", cgroup.display());
}

/// A copy of this program that other users may execute, and the folder that it goes with: this program's own may be closed to others.
pub(crate) fn program_for_others() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let program = folder.path().join("program");
    // By a program of its own: a file that this one had open for writing can't be executed as long as a process has a copy of the descriptor that
    // another test's thread has just made.
    let copied = Command::new("install")
        .args(["-m", "755"])
        .args([&std::env::current_exe().unwrap(), &program])
        .status()
        .unwrap();
    assert!(copied.success());
    (folder, program)
}

pub(crate) fn a_user_without_privileges_has_a_cell() {
    if !may_give_ids() {
        // All the other tests have shown it.
        return;
    }
    let (_folder, program) = program_for_others();

    let (supervisor, words) = started(Command::new(&program).uid(NOBODY).gid(NOBODY));

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
        assert_eq!(words[2..5], ["7", "true", SUPERVISORS]);
        assert!(!words[5..].join(" ").contains("namespaces"), "{words:?}");
        assert!(has("CapBnd:\t0000000000000000"), "{status}");
    }
    end(supervisor);
    wait_until_gone(&words[0]);
}
