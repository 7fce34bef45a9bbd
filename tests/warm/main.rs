//! The warm interpreter in a real guest: what a plain host can't show of it, since it takes another user, control groups,
//! and a kernel that runs out of memory. That its runs look like those of a new python3 is compared where the agent is
//! tested, without a machine.

#![allow(
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "an expectation that is not met is a failed test"
)]

use std::io::Read;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use sandvmm::{Command, Outcome, Output, Sandbox};
use sandvmm_tests::{HUNG_AFTER, NamedTest, run_on_kvm};

/// Longest wait for a process in reserve, also on an emulated processor.
const PATIENCE: Duration = Duration::from_secs(60);

/// What the tests here compare of a run: who it is and where.
const SELF: &str = "import os
print(os.getuid(), os.getgid(), os.getgroups(), os.getcwd(), os.getppid(), os.umask(0))
print(os.environ == os.environ.copy(), sorted(os.environ.items()))
print([len(open(f'/proc/self/{name}').read().split('/')) for name in ('cgroup',)])
print(open('/proc/self/oom_score_adj').read(), open('/proc/self/limits').read())
print([os.stat(n).st_uid for n in (0, 1, 2)], open('/dev/stderr', 'w').name, os.listdir('/proc/self/fd'))
print([line for line in open('/proc/self/status') if line[:3] in ('Cap', 'NoN', 'Uid', 'Gid', 'Gro')])";

fn main() -> ExitCode {
    sandvmm::init();
    let tests: [NamedTest; 4] = [
        (
            "a_forked_run_is_the_user_and_the_process_that_a_new_one_would_be",
            same_process,
        ),
        (
            "a_forked_run_is_held_by_its_own_control_group",
            own_control_group,
        ),
        (
            "a_run_can_not_reach_into_the_interpreter_that_it_was_forked_from",
            out_of_reach,
        ),
        (
            "a_forked_run_that_is_killed_takes_nothing_with_it",
            killed_alone,
        ),
    ];
    run_on_kvm(tests)
}

/// A machine with little memory, so that using it up takes an emulated processor no minutes.
fn machine() -> Sandbox {
    let builder = Sandbox::builder().memory_mib(128);
    builder.timeout(Some(HUNG_AFTER)).start().unwrap()
}

fn warmed(code: &str) -> Sandbox {
    let sandbox = machine();
    let output = sandbox.warm_up(code).output().unwrap();
    assert!(output.completion.outcome.success(), "{output:?}");
    sandbox
}

fn python(sandbox: &Sandbox, code: &str) -> Command {
    let mut command = sandbox.command("python3");
    command.args(["-c", code]);
    command
}

/// Runs it until it was forked; the next process in reserve takes a moment.
fn forked(command: &mut Command) -> Output {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let output = command.output().unwrap();
        if output.completion.warm {
            return output;
        }
        assert!(Instant::now() < deadline, "never forked: {output:?}");
    }
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn same_process() {
    let sandbox = machine();
    let anew = python(&sandbox, SELF).output().unwrap();
    let warming = sandbox
        .warm_up("import os; print(os.getuid())")
        .output()
        .unwrap();
    let run = forked(&mut python(&sandbox, SELF));

    assert!(anew.completion.outcome.success(), "{anew:?}");
    assert!(!anew.completion.warm);
    assert_eq!(text(&run), text(&anew));
    assert_eq!(run.stderr, anew.stderr);
    assert_ne!(text(&warming), "0\n", "the interpreter is not root's");

    let root = python(&sandbox, "import os; print(os.getuid())")
        .user("root")
        .output()
        .unwrap();
    assert_eq!((text(&root).as_str(), root.completion.warm), ("0\n", false));
}

fn own_control_group() {
    let sandbox = warmed("import json");
    let hog = "print('before', flush=True)\nhog = []\nwhile True: hog.append(bytearray(1 << 20))";

    let output = forked(&mut python(&sandbox, hog));

    assert_eq!(text(&output), "before\n");
    let out_of_memory = matches!(output.completion.outcome, Outcome::OutOfMemory { .. });
    assert!(out_of_memory, "{output:?}");
    assert!(output.completion.usage.oom_kills >= 1);
    assert!(output.completion.usage.peak_memory_bytes > 32 << 20);

    // The interpreter itself may have been the victim's neighbour, not the victim.
    let busy =
        "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass";
    let output = forked(&mut python(&sandbox, busy));
    assert!(output.completion.outcome.success(), "{output:?}");
    let used = output.completion.usage.cpu_time;
    assert!(used >= Duration::from_millis(200), "{used:?}");
    assert!(used < Duration::from_secs(20), "{used:?}");
}

fn out_of_reach() {
    let sandbox = warmed("secret = 'x'");
    let prying = "import os
def warm(pid):
    try:
        return b'/warm.py' in open(f'/proc/{pid}/cmdline', 'rb').read()
    except OSError:
        return False
for pid in sorted(int(name) for name in os.listdir('/proc') if name.isdigit()):
    if pid == os.getpid() or not warm(pid): continue
    for what in ('mem', 'environ', 'fd/900', 'maps'):
        try:
            open(f'/proc/{pid}/{what}', 'rb').read(1)
            print('read', what)
        except PermissionError:
            print('no', what)";
    let output = forked(&mut python(&sandbox, prying));
    let seen = text(&output);
    assert!(
        seen.contains("no mem\n") && !seen.contains("read"),
        "{output:?}"
    );
    // And it can be looked into itself, as any process by its own user.
    let own = "open('/proc/self/mem', 'rb'); open('/proc/self/maps').read(); print('own')";
    assert_eq!(text(&forked(&mut python(&sandbox, own))), "own\n");
}

fn killed_alone() {
    let sandbox = warmed("pass");
    let deadline = Instant::now() + PATIENCE;
    loop {
        let mut child = python(
            &sandbox,
            "import time\nprint('up', flush=True)\ntime.sleep(1000)",
        )
        .spawn()
        .unwrap();
        let mut up = [0; 3];
        child.stdout.as_mut().unwrap().read_exact(&mut up).unwrap();
        child.kill().unwrap();
        let completion = child.wait();
        assert_eq!(completion.outcome, Outcome::Signaled(9));
        if completion.warm {
            break;
        }
        assert!(Instant::now() < deadline, "never forked");
    }
    assert_eq!(text(&forked(&mut python(&sandbox, "print(1)"))), "1\n");
}
