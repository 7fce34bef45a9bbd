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
