//! However a run ends, nothing is left, and its neighbours notice nothing.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use sandvmm_tests::{Background, Nobodys, eventually, is_alive, run};

fn running() -> Background {
    let mut machine = Background::run(["--timeout", "0", "--", "sh", "-c", "echo up; sleep 1000"]);
    machine.wait_for_output("up\n");
    machine
}

fn signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid.try_into().unwrap()).unwrap(), signal).unwrap();
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn interrupt_terminate_and_hang_up_end_the_machine_at_once() {
    /// How long "at once" may take here: a run's own end takes a tenth of it on an emulated processor.
    const AT_ONCE: Duration = Duration::from_secs(10);
    for (sent, code) in [
        (Signal::INT, 130),
        (Signal::TERM, 143),
        (Signal::HUP, 129),
        (Signal::QUIT, 131),
    ] {
        let mut machine = Background::run([
            "--timeout",
            "0",
            "--",
            "sh",
            "-c",
            "trap '' INT TERM HUP QUIT; echo up; while :; do echo more; done",
        ]);
        machine.wait_for_output("up\n");
        let processes = machine.machines();
        assert_eq!(processes.len(), 1);

        // Nobody reads what it writes, and it heeds no signal.
        let sent_at = Instant::now();
        signal(machine.child().id(), sent);

        assert_eq!(machine.wait(), Some(code));
        assert!(
            sent_at.elapsed() < AT_ONCE,
            "{sent:?}: {:?}",
            sent_at.elapsed()
        );
        assert!(
            !is_alive(processes[0]),
            "the machine's process outlived the command"
        );
    }
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_machine_whose_parent_is_killed_ends_by_itself() {
    let mut machine = running();
    let processes = machine.machines();

    signal(machine.child().id(), Signal::KILL);
    machine.wait();

    eventually(
        Duration::from_secs(10),
        "the machine's process is gone",
        || processes.iter().all(|pid| !is_alive(*pid)),
    );
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_killed_machine_is_a_crash_to_its_own_run_and_nothing_to_another() {
    let mut doomed = running();
    let mut neighbour = Background::run([
        "-i",
        "--timeout",
        "0",
        "--",
        "sh",
        "-c",
        "echo up; read x; exit $x",
    ]);
    neighbour.wait_for_output("up\n");

    signal(doomed.machines()[0], Signal::KILL);

    assert_eq!(doomed.wait(), Some(125));
    let mut stdin = neighbour.child().stdin.take().unwrap();
    std::io::Write::write_all(&mut stdin, b"9\n").unwrap();
    assert_eq!(neighbour.wait(), Some(9));
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_stopped_machine_is_still_ended_by_the_time_out() {
    let mut machine =
        Background::run(["--timeout", "20s", "--", "sh", "-c", "echo up; sleep 1000"]);
    machine.wait_for_output("up\n");
    let processes = machine.machines();

    signal(processes[0], Signal::STOP);

    assert_eq!(machine.wait(), Some(124));
    assert!(!is_alive(processes[0]));
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_signal_while_the_machine_boots_leaves_no_cgroup() {
    for sent in [Signal::INT, Signal::QUIT] {
        let mut run = Background::run(["--timeout", "100s", "--", "sleep", "90"]);
        let id = run.child().id();
        let cgroups = || {
            std::fs::read_dir("/sys/fs/cgroup")
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .filter(|name| name.starts_with(&format!("sandvmm-{id}-")))
                .count()
        };
        eventually(Duration::from_secs(20), "the machine begins", || {
            cgroups() == 1
        });

        signal(id, sent);
        run.wait();

        assert_eq!(cgroups(), 0);
    }
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn groups_left_behind_do_not_keep_a_new_one_from_being_made() {
    let root = Path::new("/sys/fs/cgroup");
    // A group has what the one above it hands on, and on a host where nothing was limited before that is nothing.
    std::fs::write(root.join("cgroup.subtree_control"), "+cpu +memory +pids").unwrap();
    let crowded = root.join(format!("crowded-{}", std::process::id()));
    let inner = crowded.join("inner");
    // The first process has not begun then.
    let left = crowded.join("sandvmm-1-999999999-1");
    let _groups = Groups(vec![left.clone(), inner.clone(), crowded.clone()]);
    std::fs::create_dir_all(&inner).unwrap();
    std::fs::create_dir(&left).unwrap();
    std::fs::write(crowded.join("cgroup.max.descendants"), "2").unwrap();
    let script = "echo $$ > \"$1/cgroup.procs\"
        exec sandvmm run --timeout 0 -- sh -c 'echo up; sleep 1000'";

    let mut machine = Background::start(Command::new("sh").args(["-c", script, "sh"]).arg(&inner));
    machine.wait_for_output("up\n");

    let own = format!("sandvmm-{}-", machine.child().id());
    let groups: Vec<String> = std::fs::read_dir(&crowded)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with("sandvmm-"))
        .collect();
    assert!(
        groups.len() == 1 && groups[0].starts_with(&own),
        "{groups:?}"
    );
    signal(machine.child().id(), Signal::TERM);
    machine.wait();
}

/// Control groups of a test's own, removed at its end, whatever that is.
struct Groups(Vec<PathBuf>);

impl Drop for Groups {
    fn drop(&mut self) {
        for group in &self.0 {
            let deadline = Instant::now() + Duration::from_secs(10);
            while group.exists() && std::fs::remove_dir(group).is_err() && Instant::now() < deadline
            {
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_run_leaves_no_file_behind() {
    let folder = tempfile::tempdir().unwrap();
    let count = || std::fs::read_dir(folder.path()).unwrap().count();

    run(["-c", "print(1)"])
        .env("TMPDIR", folder.path())
        .current_dir(folder.path())
        .done()
        .expect(0);

    assert_eq!(count(), 0);
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn the_machines_process_holds_what_it_was_handed_and_nothing_of_its_parent() {
    let folder = tempfile::tempdir().unwrap();
    let secret = std::fs::File::create(folder.path().join("secret")).unwrap();
    let inheritable = rustix::io::dup(&secret).unwrap();
    rustix::io::fcntl_setfd(&inheritable, rustix::io::FdFlags::empty()).unwrap();
    let mut machine = running();
    drop(inheritable);

    let pid = machine.machines()[0];
    let open: Vec<String> = std::fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .flatten()
        .filter_map(|entry| std::fs::read_link(entry.path()).ok())
        .map(|target| target.display().to_string())
        .collect();
    let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap();

    assert!(
        !open.iter().any(|target| target.contains("secret")),
        "{open:?}"
    );
    assert!(open.len() < 60, "{open:?}");
    assert!(environment.is_empty(), "{environment:?}");
    signal(machine.child().id(), Signal::TERM);
    machine.wait();
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_machine_has_no_precedence_of_its_supervisors() {
    let script = "echo -500 > /proc/$$/oom_score_adj
        exec nice -n -5 ionice -c 1 chrt -f 5 \
            sandvmm run --timeout 0 -- sh -c 'echo up; sleep 1000'";

    let mut machine = Background::start(Command::new("sh").args(["-c", script]));
    machine.wait_for_output("up\n");

    let standing = |pid: u32| {
        let read = |file: &str| std::fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap();
        let stat = read("stat");
        let (_, fields) = stat.rsplit_once(") ").unwrap();
        let fields: Vec<&str> = fields.split(' ').collect();
        let io = Command::new("ionice")
            .args(["-p", &pid.to_string()])
            .output();
        // Nice, priority among the real-time ones, and policy: fields 19, 40 and 41, of which these are the ones from the third on.
        (
            [fields[16], fields[37], fields[38]].map(str::to_owned),
            String::from_utf8(io.unwrap().stdout)
                .unwrap()
                .trim()
                .to_owned(),
            read("oom_score_adj").trim().to_owned(),
        )
    };
    let [nice, real_time, policy] = ["-5", "5", "1"].map(str::to_owned);
    let (its, disks, spared) = standing(machine.child().id());
    assert_eq!((its, &*spared), ([nice, real_time, policy], "-500"));
    assert_eq!(disks, "realtime: prio 4");
    let (its, disks, spared) = standing(machine.machines()[0]);
    assert_eq!((its, &*spared), (["0"; 3].map(str::to_owned), "0"));
    assert!(disks.starts_with("none"), "{disks}");
    signal(machine.child().id(), Signal::TERM);
    machine.wait();
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_process_that_can_not_be_made_names_the_limits() {
    let nobodys = Nobodys::copied();
    let program = nobodys.folder().join("sandvmm");
    // So that it comes as far as to its first thread.
    let copied = Command::new("setpriv")
        .args(["--reuid", "64321", "--regid", "64321", "--clear-groups"])
        .args(["prlimit", "--nproc=1"])
        .arg(program)
        .args(["run", "--", "true"])
        .current_dir("/")
        .output()
        .unwrap();

    let said = String::from_utf8_lossy(&copied.stderr);
    assert_eq!(copied.status.code(), Some(125), "{said}");
    for limit in ["`ulimit -u`, RLIMIT_NPROC, is 1 here", "pids.max"] {
        assert!(said.contains(limit), "{said}");
    }
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_limit_of_file_sizes_is_told_and_ends_nothing_by_itself() {
    let folder = tempfile::tempdir().unwrap();
    let limited = |command: &str| {
        let script = format!("ulimit -f 8; exec {command}");
        let ran = Command::new("bash")
            .args(["-c", &script])
            .current_dir(folder.path())
            .env("TMPDIR", folder.path())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let own = format!("sandvmm-{}-", ran.id());
        let ran = ran.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&ran.stderr).into_owned();
        assert_eq!(ran.status.code(), Some(125), "{command}: {said}");
        assert!(said.contains("File too large"), "{command}: {said}");
        let groups = std::fs::read_dir("/sys/fs/cgroup").unwrap().flatten();
        for group in groups.map(|entry| entry.file_name().into_string().unwrap()) {
            assert!(!group.starts_with(&own), "{command}: {group}");
        }
    };

    limited("sandvmm run -- sh -c 'head -c 100000 /dev/zero; sleep 1' >output");
    limited("sandvmm run --workspace toolarge -- true");
    // Handled by the command alone: a program that it starts is ended by it, as it would be elsewhere.
    let mut machine = running();
    let status = std::fs::read_to_string(format!("/proc/{}/status", machine.child().id())).unwrap();
    signal(machine.child().id(), Signal::TERM);
    machine.wait();

    let is_in = |set: &str| {
        let mask = status
            .lines()
            .find_map(|line| line.strip_prefix(set))
            .unwrap();
        let mask = u64::from_str_radix(mask.trim_start_matches(':').trim(), 16).unwrap();
        mask >> (Signal::XFSZ.as_raw() - 1) & 1 == 1
    };
    assert!(is_in("SigCgt") && !is_in("SigIgn"), "{status}");
    let output = std::fs::metadata(folder.path().join("output")).unwrap();
    assert_eq!(output.len(), 8 << 10);
}

/// From the command's first thread to its last, the machine's among them.
const TASKS_OF_A_RUN: u32 = 9;

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_group_without_room_for_tasks_is_named_wherever_it_is_met() {
    let root = Path::new("/sys/fs/cgroup");
    std::fs::write(root.join("cgroup.subtree_control"), "+pids").unwrap();
    let tight = root.join(format!("tight-{}", std::process::id()));
    let _groups = Groups(vec![tight.clone()]);
    std::fs::create_dir(&tight).unwrap();
    let script = "echo $$ > \"$1/cgroup.procs\"
        exec sandvmm run --dangerously-leave-out cgroup -- true";
    for tasks in 1..TASKS_OF_A_RUN {
        std::fs::write(tight.join("pids.max"), tasks.to_string()).unwrap();

        let ran = Command::new("sh")
            .args(["-c", script, "sh"])
            .arg(&tight)
            .output()
            .unwrap();

        let said = String::from_utf8_lossy(&ran.stderr);
        assert_eq!(ran.status.code(), Some(125), "{tasks}: {said}");
        assert!(said.contains("`pids.max`"), "{tasks}: {said}");
    }
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_limit_that_is_below_what_a_machine_needs_is_named() {
    let refused = Command::new("prlimit")
        .args(["--nproc=1", "sandvmm", "run", "--", "true"])
        .output()
        .unwrap();
    let few = Command::new("prlimit")
        .args(["--nofile=12", "sandvmm", "run", "--", "true"])
        .output()
        .unwrap();

    for (ran, named) in [
        (
            &refused,
            "each user may have 1 at most (`ulimit -u`, RLIMIT_NPROC)",
        ),
        (&few, "`ulimit -n`, RLIMIT_NOFILE, is 12 here"),
    ] {
        let said = String::from_utf8_lossy(&ran.stderr);
        assert_eq!(ran.status.code(), Some(125), "{said}");
        assert!(said.contains(named), "{said}");
    }
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_limit_of_processor_time_is_named_where_it_ended_a_machine() {
    let ended = Command::new("prlimit")
        .args(["--cpu=1", "sandvmm", "run", "--timeout", "120s", "--"])
        .args(["sh", "-c", "while :; do :; done"])
        .output()
        .unwrap();

    let said = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(125), "{said}");
    assert!(said.contains("a limit of 1 s of processor time"), "{said}");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_user_who_may_not_open_kvm_is_told_and_leaves_nothing() {
    let nobodys = Nobodys::copied();
    let count = || std::fs::read_dir(nobodys.folder()).unwrap().count();
    let before = count();

    let output = nobodys
        .command()
        .args(["run", "--", "true"])
        .env("TMPDIR", nobodys.folder())
        .current_dir(nobodys.folder())
        .output()
        .unwrap();

    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(125), "{said}");
    assert!(said.contains("/dev/kvm may not be opened"), "{said}");
    assert_eq!(count(), before);
    let doctor = nobodys
        .command()
        .args(["doctor", "--json"])
        .output()
        .unwrap();
    let json: serde_json::Value = serde_json::from_slice(&doctor.stdout).unwrap();
    assert_eq!(doctor.status.code(), Some(1), "{json}");
    assert_eq!(json["can_run"], false, "{json}");
    assert_eq!(
        format!("sandvmm: {}\n", json["message"].as_str().unwrap()),
        said
    );
}
