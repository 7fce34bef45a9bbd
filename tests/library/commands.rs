//! Commands of a real guest: many, without a handle, killed.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use sandvmm::{Limit, Outcome, Sandbox, Stdio, Template};
use sandvmm_tests::HUNG_AFTER;

use crate::{Test, machine, machine_with, printed, text};

pub(crate) const TESTS: &[Test] = &[
    (
        "a_hundred_commands_run_at_once_and_keep_their_own_streams",
        hundred,
    ),
    (
        "a_killed_command_takes_all_with_it_that_it_started",
        killed_tree,
    ),
    (
        "a_command_that_ends_takes_all_with_it_that_it_started",
        ended_tree,
    ),
    ("a_detached_command_goes_on_and_is_attached_again", detached),
    (
        "a_ceiling_of_processes_is_kept_and_named_and_stays_in_forks",
        few_processes,
    ),
    (
        "variables_are_left_out_and_a_status_drops_what_is_written",
        left_out,
    ),
];

/// More commands than there are streams that may wait for theirs in the guest.
const MANY: usize = 100;

fn hundred() {
    let sandbox = machine_with(512);
    let mut children = Vec::new();
    for number in 0..MANY {
        let mut command = sandbox.command("sh");
        command
            .arg("-c")
            .arg("echo ready $0; read line; echo $line; echo $0 >&2; exit $(($0 % 7))")
            .arg(number.to_string())
            .stdin(Stdio::piped());
        children.push(command.spawn().unwrap());
    }
    for (number, child) in children.iter_mut().enumerate() {
        let expected = format!("ready {number}\n");
        let mut ready = vec![0; expected.len()];
        child
            .stdout
            .as_mut()
            .unwrap()
            .read_exact(&mut ready)
            .unwrap();
        assert_eq!(String::from_utf8(ready).unwrap(), expected);
    }
    assert_eq!(
        sandbox
            .commands()
            .iter()
            .filter(|info| info.is_running)
            .count(),
        MANY
    );
    // One more is answered meanwhile.
    let asked = Instant::now();
    assert_eq!(printed(&sandbox, "sh", "echo one more"), "one more\n");
    assert!(
        asked.elapsed() < Duration::from_secs(60),
        "{:?}",
        asked.elapsed()
    );
    for (number, child) in children.iter_mut().enumerate() {
        let mut stdin = child.stdin.take().unwrap();
        writeln!(stdin, "line {number}").unwrap();
    }
    for (number, child) in children.iter_mut().enumerate() {
        let (mut stdout, mut stderr) = (String::new(), String::new());
        child
            .stdout
            .as_mut()
            .unwrap()
            .read_to_string(&mut stdout)
            .unwrap();
        child
            .stderr
            .as_mut()
            .unwrap()
            .read_to_string(&mut stderr)
            .unwrap();
        assert_eq!(stdout, format!("line {number}\n"));
        assert_eq!(stderr, format!("{number}\n"));
        let code = i32::try_from(number % 7).unwrap();
        assert_eq!(child.wait().outcome, Outcome::Exited(code));
    }
}

/// What leaves the process group, the session and the parent, as daemons do.
const TREE: &str =
    "setsid sh -c 'trap \"\" TERM; (sleep 1001 &); sleep 1002' & sleep 1003 & echo up; wait";

fn killed_tree() {
    let sandbox = machine();
    let mut command = sandbox.command("sh");
    command.arg("-c").arg(TREE);
    let begin = |command: &mut sandvmm::Command| {
        let mut child = command.spawn().unwrap();
        let mut up = [0; 3];
        child.stdout.as_mut().unwrap().read_exact(&mut up).unwrap();
        child
    };

    let mut killed = begin(&mut command);
    let until = Instant::now() + Duration::from_secs(60);
    while left(&sandbox) != "3" {
        assert!(Instant::now() < until, "{}", left(&sandbox));
    }
    killed.kill().unwrap();
    assert_eq!(killed.wait().outcome, Outcome::Signaled(9));
    assert_eq!(left(&sandbox), "0");

    // A handle that is dropped does the same.
    drop(begin(&mut command));
    let until = Instant::now() + Duration::from_secs(60);
    while left(&sandbox) != "0" {
        assert!(Instant::now() < until);
    }
}

fn ended_tree() {
    let sandbox = machine();
    for (end, outcome) in [
        ("exit 3", Outcome::Exited(3)),
        ("kill -15 $$", Outcome::Signaled(15)),
    ] {
        let mut command = sandbox.command("sh");
        // What it leaves has closed the command's streams, so that nothing but its control group tells whose it is.
        command.arg("-c").arg(format!(
            "setsid sh -c 'trap \"\" TERM; (sleep 1001 &); sleep 1002' > /dev/null 2>&1 & \
             until [ $(cat /proc/[0-9]*/comm | grep -cx sleep) = 2 ]; do :; done; {end}"
        ));

        let ended = command.spawn().unwrap().wait();

        assert_eq!(ended.outcome, outcome);
        assert_eq!(left(&sandbox), "0", "{end}");
    }
}

/// How many of the tree's processes there are.
fn left(sandbox: &sandvmm::Sandbox) -> String {
    printed(
        sandbox,
        "sh",
        "cat /proc/[0-9]*/comm | grep -cx sleep; true",
    )
    .trim()
    .to_owned()
}

fn detached() {
    let sandbox = machine();
    let mut command = sandbox.command("sh");
    command
        .arg("-c")
        .arg("echo first; read line; echo $line; exit 4")
        .stdin(Stdio::piped());

    let id = command.spawn().unwrap().detach();
    let listed = sandbox.commands();
    let mut child = sandbox.attach(id).unwrap();
    writeln!(child.stdin.take().unwrap(), "second").unwrap();
    let mut text = String::new();
    child
        .stdout
        .as_mut()
        .unwrap()
        .read_to_string(&mut text)
        .unwrap();

    assert_eq!(
        (listed.len(), listed[0].id, listed[0].is_detached),
        (1, id, true)
    );
    assert_eq!(text, "first\nsecond\n");
    assert_eq!(child.wait().outcome, Outcome::Exited(4));
}

/// Starts processes that wait for a writer of a pipe until one can't be started, and says how many there were.
const BOMB: &str =
    "mkfifo pipe; n=0; trap 'echo $n' EXIT; while :; do (read line < pipe) & n=$((n+1)); done";

/// What the guest's kernel has been told.
const BOUND: &str = "cat /sys/fs/cgroup/workload/pids.max";

fn few_processes() {
    let builder = Sandbox::builder().timeout(Some(HUNG_AFTER));
    let sandbox = builder.max_processes(Some(20)).start().unwrap();

    let bomb = sandbox.command("sh").args(["-c", BOMB]).output().unwrap();

    assert_eq!(bomb.completion.outcome, Outcome::Exited(2), "{bomb:?}");
    assert_eq!(bomb.completion.limits_hit, [Limit::Processes], "{bomb:?}");
    // The kernel counts the one that it refuses.
    let peak = bomb.completion.usage.peak_processes;
    assert!((20..=21).contains(&peak), "{bomb:?}");
    // The shell itself is one of them.
    assert_eq!(text(&bomb), "19\n");
    let next = sandbox.command("true").status().unwrap();
    assert!(next.outcome.success() && next.limits_hit.is_empty());

    let fork = sandbox.fork(1).unwrap().remove(0);
    assert_eq!(printed(&fork, "sh", BOUND), "20\n");
    drop(fork);
    let name = format!("few-{}", std::process::id());
    let template = sandbox.snapshot(&name).unwrap();
    let fork = template.sandbox().max_processes(Some(10)).start().unwrap();
    assert_eq!(printed(&fork, "sh", BOUND), "10\n");
    drop(fork);
    Template::remove(&name).unwrap();
}

fn left_out() {
    let sandbox = machine();

    let cleared = sandbox
        .command("env")
        .env("A", "1")
        .env_clear()
        .env("B", "2")
        .output()
        .unwrap();
    let removed = sandbox
        .command("env")
        .env("A", "1")
        .env_remove("A")
        .env_remove("LANG")
        .output()
        .unwrap();
    let loud = "head -c 8M /dev/zero; head -c 8M /dev/zero >&2; exit 3";
    let status = sandbox.command("sh").args(["-c", loud]).status().unwrap();
    let mut command = sandbox.command("sh");
    let child = command.args(["-c", "echo out; exit 4"]).spawn();
    let output = child.unwrap().wait_with_output().unwrap();

    assert_eq!(text(&cleared), "B=2\n");
    let removed = text(&removed);
    assert!(
        removed.contains("PATH=") && removed.contains("HOME="),
        "{removed}"
    );
    assert!(
        !removed.contains("A=1") && !removed.contains("LANG="),
        "{removed}"
    );
    assert_eq!(status.outcome, Outcome::Exited(3));
    assert_eq!(status.usage.bytes_out, 16 << 20);
    assert_eq!(output.completion.outcome, Outcome::Exited(4));
    assert_eq!(output.stdout, b"out\n");
}
