//! Bytes are bytes: all of them, in order, as they are made, with memory flat.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::Command;
use std::time::Duration;

use sandvmm_tests::{Background, eventually, resident_kib, run};
use sha2::{Digest, Sha256};

/// How much the command and the machine's process may grow, in KiB, while nobody reads and while a GiB passes. The guest's memory is a part of the
/// machine's process, and comes in huge pages of 2 MiB as the guest touches it: a page here, a page there.
const RESTING_KIB_MAX: [u64; 2] = [1 << 10, 16 << 10];
pub(crate) const BUSY_KIB_MAX: [u64; 2] = [8 << 10, 96 << 10];

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn output_that_can_not_be_written_ends_a_program_that_would_go_on() {
    let started = std::time::Instant::now();
    let output = Command::new("bash")
        .args([
            "-c",
            "sandvmm run --timeout 300s -- sh -c 'echo lost; sleep 250' > /dev/full",
        ])
        .output()
        .unwrap();

    assert_eq!(output.status.code(), Some(125), "{output:?}");
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("output"),
        "{output:?}"
    );
    assert!(started.elapsed() < Duration::from_secs(200), "{output:?}");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn all_byte_values_pass_unchanged_on_both_streams() {
    let program = "import sys
sys.stdout.buffer.write(bytes(range(256)) * 300)
sys.stderr.buffer.write(bytes(range(32, 127)) * 10)";

    let ran = run(["-c", program]).done().expect(0);

    let all: Vec<u8> = (0..=255).collect();
    assert_eq!(ran.stdout, all.repeat(300));
    assert_eq!(ran.stderr.len(), 950);
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn output_without_a_newline_and_no_output_at_all_are_as_they_are() {
    assert_eq!(
        run(["--", "printf", "no newline"]).done().expect(0).stdout,
        b"no newline"
    );
    assert_eq!(run(["--", "true"]).done().expect(0).stdout, b"");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn many_megabytes_arrive_whole() {
    let program = "import hashlib, sys
block = bytes((i * 7 + i // 251) & 255 for i in range(1 << 20))
digest = hashlib.sha256()
for i in range(32):
    piece = i.to_bytes(4, 'big') + block
    digest.update(piece)
    sys.stdout.buffer.write(piece)
sys.stderr.write(digest.hexdigest())";

    let ran = run(["--timeout", "200s", "-c", program]).done().expect(0);

    let digest: String = Sha256::digest(&ran.stdout)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    assert_eq!(ran.stdout.len(), 32 * ((1 << 20) + 4));
    assert_eq!(digest, ran.stderr);
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn output_of_the_last_microsecond_is_not_lost() {
    let program = "import os
os.write(2, b'e' * 65536)
os.write(1, b'x' * 65536)
os._exit(5)";
    for _ in 0..5 {
        let ran = run(["-c", program]).done().expect(5);
        assert_eq!((ran.stdout.len(), ran.stderr.len()), (65536, 65536));
    }
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn output_comes_as_it_is_made_and_input_is_answered() {
    let mut machine = Background::run([
        "-i",
        "--",
        "sh",
        "-c",
        "while read line; do echo \"got $line\"; done",
    ]);
    let mut stdin = machine.child().stdin.take().unwrap();
    let mut stdout = BufReader::new(machine.child().stdout.take().unwrap());

    for word in ["one", "two", "three"] {
        writeln!(stdin, "{word}").unwrap();
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        assert_eq!(line, format!("got {word}\n"));
    }

    drop(stdin);
    assert_eq!(machine.wait(), Some(0));
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_reader_that_closes_ends_the_run_as_it_would_a_local_program() {
    let output = Command::new("bash")
        .args([
            "-c",
            "sandvmm run -- yes | head -n 3; echo \"${PIPESTATUS[0]}\"",
        ])
        .output()
        .unwrap();

    assert_eq!(String::from_utf8_lossy(&output.stdout), "y\ny\ny\n141\n");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_reader_that_stops_stops_the_program_and_memory_stays_flat() {
    let mut machine = Background::run(["--timeout", "100s", "--", "sh", "-c", "cat /dev/zero"]);
    let mut stdout = machine.child().stdout.take().unwrap();
    stdout.read_exact(&mut [0; 1 << 20]).unwrap();
    let pids = [vec![machine.child().id()], machine.machines()].concat();
    assert_eq!(pids.len(), 2, "the command and its machine");

    std::thread::sleep(Duration::from_secs(2));
    let before: Vec<u64> = pids.iter().filter_map(|pid| resident_kib(*pid)).collect();
    std::thread::sleep(Duration::from_secs(6));
    let after: Vec<u64> = pids.iter().filter_map(|pid| resident_kib(*pid)).collect();

    for ((before, after), bound) in before.iter().zip(&after).zip(RESTING_KIB_MAX) {
        assert!(
            after.saturating_sub(*before) < bound,
            "grew from {before} to {after} KiB"
        );
    }
    drop(stdout);
    assert_eq!(machine.wait(), Some(141));
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn output_in_bulk_passes_with_memory_flat() {
    let mut machine = Background::run([
        "--timeout",
        "600s",
        "--",
        "head",
        "-c",
        "268435456",
        "/dev/zero",
    ]);
    let mut stdout = machine.child().stdout.take().unwrap();
    let mut piece = vec![0; 1 << 20];
    stdout.read_exact(&mut piece).unwrap();
    let pids = [vec![machine.child().id()], machine.machines()].concat();
    let early: Vec<u64> = pids.iter().filter_map(|pid| resident_kib(*pid)).collect();
    let mut total = piece.len();
    let mut late = Vec::new();
    loop {
        match stdout.read(&mut piece).unwrap() {
            0 => break,
            count => total += count,
        }
        if total < 250_000_000 {
            late.clear();
        } else if late.is_empty() {
            late = pids.iter().filter_map(|pid| resident_kib(*pid)).collect();
        }
    }

    assert_eq!(total, 256 << 20);
    assert_eq!(machine.wait(), Some(0));
    for ((early, late), bound) in early.iter().zip(&late).zip(BUSY_KIB_MAX) {
        assert!(
            late.saturating_sub(*early) < bound,
            "grew from {early} to {late} KiB"
        );
    }
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn the_two_streams_do_not_wait_for_each_other() {
    let mut machine = Background::run([
        "--timeout",
        "100s",
        "-c",
        "import os\nos.write(2, b'e' * 1000000)\nos.write(1, b'now')\nos.read(0, 1)",
    ]);
    let mut stderr = machine.child().stderr.take().unwrap();
    let reader = std::thread::spawn(move || {
        let mut all = Vec::new();
        stderr.read_to_end(&mut all).map(|_| all.len())
    });
    machine.wait_for_output("now");

    assert_eq!(machine.wait(), Some(0));
    assert_eq!(reader.join().unwrap().unwrap(), 1_000_000);
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_closed_standard_error_ends_only_who_writes_to_it() {
    let mut machine = Background::run(["--", "sh", "-c", "sleep 1; echo x >&2; echo $?"]);
    drop(machine.child().stderr.take());
    let mut stdout = machine.child().stdout.take().unwrap();

    let mut all = String::new();
    stdout.read_to_string(&mut all).unwrap();

    eventually(Duration::from_secs(60), "the run ends", || {
        machine.child().try_wait().unwrap().is_some()
    });
    assert!(all.is_empty() || all == "1\n", "{all:?}");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn verbose_adds_the_kernels_words_and_the_phases_and_quiet_takes_all_of_sandvmms() {
    let verbose = run(["-v", "--", "echo", "out"]).done().expect(0);
    let timed_out = run([
        "-q",
        "--timeout",
        "10s",
        "--",
        "sh",
        "-c",
        "echo out; sleep 1000",
    ])
    .done()
    .expect(124);
    let told = run(["--timeout", "10s", "--", "sh", "-c", "echo out; sleep 1000"])
        .done()
        .expect(124);

    for ran in [&verbose, &timed_out, &told] {
        assert_eq!(ran.text(), "out\n", "{ran:?}");
    }
    assert!(verbose.stderr.contains("Linux version"), "{verbose:?}");
    for phase in ["vCPU running", "agent ready", "first output"] {
        let lines = verbose.stderr.lines();
        let count = lines.filter(|line| line.contains(phase)).count();
        assert_eq!(count, 1, "{phase}: {verbose:?}");
    }
    assert_eq!(timed_out.stderr, "");
    assert_eq!(told.stderr.lines().count(), 1, "{told:?}");
}
