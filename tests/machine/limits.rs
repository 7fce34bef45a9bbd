//! What happens at the guest's bounds: named, with a status, and with the agent alive.

use sandvmm_tests::run;

/// Time for filling a guest's memory. Most of it may go after that: a guest whose memory is full may read its programs' code again and again before
/// its kernel kills one.
const FILLING_TIME: &str = "120s";

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn out_of_memory_is_named_and_the_output_before_it_is_kept() {
    let program = "print('before', flush=True)
hog = []
while True: hog.append(bytearray(1 << 20))";

    let ran = run(["--json", "--timeout", FILLING_TIME, "-c", program]).done();

    let json = ran.json();
    assert_eq!(json["reason"], "oom", "{json}");
    assert_eq!(json["exit_code"], 137, "{json}");
    assert_eq!(json["stdout"], "before\n");
    assert!(json["usage"]["oom_kills"].as_u64().unwrap() >= 1, "{json}");
    assert!(
        json["usage"]["peak_memory_bytes"].as_u64().unwrap() > 100 << 20,
        "{json}"
    );
    let plain = run(["--timeout", FILLING_TIME, "-c", program])
        .done()
        .expect(137);
    assert!(plain.stderr.contains("memory"), "{plain:?}");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_child_that_ran_out_of_memory_leaves_its_parent_alone() {
    // One that has little code to read again while memory is full: docs/cli.md.
    let program = "import subprocess
print(subprocess.run(['tail', '/dev/zero']).returncode)";
    let ran = run(["--timeout", FILLING_TIME, "-c", program])
        .done()
        .expect(0);
    assert_eq!(ran.text(), "-9\n");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_fork_bomb_hits_its_limit_and_the_status_still_comes() {
    // Children that wait for a writer of a pipe: the limit on processes is reached before that on memory.
    let program =
        "mkfifo pipe; n=0; trap 'echo $n' EXIT; while :; do (read line < pipe) & n=$((n+1)); done";

    let ran = run(["--json", "--timeout", "200s", "--", "sh", "-c", program])
        .done()
        .expect(2)
        .json();

    assert!(ran["stderr"].as_str().unwrap().contains("fork"), "{ran}");
    let count = ran["stdout"].as_str().unwrap().trim().parse::<u32>();
    assert!(count.unwrap() > 50, "{ran}");
    assert_eq!(ran["limits_hit"], serde_json::json!(["processes"]), "{ran}");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn fewer_processes_are_had_where_fewer_are_asked_for() {
    let program = "mkfifo pipe; while :; do (read line < pipe) & done";
    let args = ["--json", "--timeout", "120s", "--max-processes", "12"];

    let ran = run(args).args(["--", "sh", "-c", program]).done().json();

    assert_eq!(ran["limits_hit"], serde_json::json!(["processes"]), "{ran}");
    // The kernel counts the one that it refuses.
    let peak = ran["usage"]["peak_processes"].as_u64().unwrap();
    assert!((12..=13).contains(&peak), "{ran}");
}

/// Half a processor: a boot takes twice as long.
const HALF: [&str; 5] = ["--json", "--timeout", "200s", "--cpu-quota", "50%"];

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_share_of_the_processors_is_kept_and_named() {
    let busy = "import time
end = time.monotonic() + 8
while time.monotonic() < end: pass";
    let idle = "import time; time.sleep(1)";

    let held = run(HALF).args(["-c", busy]).done().expect(0).json();
    let free = run(["--json", "-c", idle]).done().expect(0).json();

    assert_eq!(
        held["limits_hit"],
        serde_json::json!(["cpu_quota"]),
        "{held}"
    );
    let micros = |field: &str| held["usage"][field].as_u64().unwrap();
    // One thread that wants a whole processor waits for half of the time, as the host's kernel counts it.
    assert!(micros("throttled_us") > micros("wall_us") / 4, "{held}");
    assert_eq!(free["limits_hit"], serde_json::json!([]), "{free}");
    assert_eq!(free["usage"]["throttled_us"], 0, "{free}");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn nothing_runs_without_what_keeps_its_share_of_the_processors() {
    // No control groups where there is no file system of them.
    let hidden =
        "umount -R /sys/fs/cgroup 2> /dev/null || umount -l /sys/fs/cgroup; exec sandvmm \"$@\"";
    let without = |args: &[&str]| {
        std::process::Command::new("unshare")
            .args(["--mount", "sh", "-c", hidden, "sh", "run", "--json"])
            .args(args)
            .args(["--", "true"])
            .output()
            .unwrap()
    };

    let refused = without(&["--cpu-quota", "50%"]);
    let plain = without(&[]);

    let object = |output: &std::process::Output| -> serde_json::Value {
        serde_json::from_slice(&output.stdout).unwrap()
    };
    assert_eq!(refused.status.code(), Some(125), "{refused:?}");
    let message = object(&refused)["message"].to_string();
    assert!(message.contains("control group"), "{message}");
    assert_eq!(plain.status.code(), Some(0), "{plain:?}");
    assert!(object(&plain)["cell"]["cgroup"].is_null(), "{plain:?}");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn filling_the_disk_is_an_error_to_the_program_that_does_it() {
    let program = "import errno
try:
    with open('filler', 'wb') as file:
        while True: file.write(bytes(1 << 20))
except OSError as error: print(errno.errorcode[error.errno])";
    let ran = run(["--timeout", FILLING_TIME, "-c", program])
        .done()
        .expect(0);
    assert_eq!(ran.text(), "ENOSPC\n");
}
