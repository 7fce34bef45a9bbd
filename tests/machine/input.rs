//! Standard input, whole and only when asked for.

use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use sandvmm_tests::{Background, resident_kib, run};
use sha2::{Digest, Sha256};

use crate::output::BUSY_KIB_MAX;

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn without_i_the_program_reads_an_empty_input() {
    let ran = run(["--", "wc", "-c"]).stdin("not for it").done().expect(0);
    assert_eq!(ran.text().trim(), "0");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn with_i_the_programs_input_is_the_commands() {
    let bytes: Vec<u8> = (0..3_000_000u32)
        .map(|i| (i.wrapping_mul(i) >> 7) as u8)
        .collect();
    let expected: String = Sha256::digest(&bytes)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();

    let ran = run(["-i", "--", "sha256sum"]).stdin(bytes).done().expect(0);

    assert_eq!(ran.text(), format!("{expected}  -\n"));
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn the_time_is_kept_while_a_script_on_standard_input_does_not_come() {
    let started = Instant::now();
    let mut machine = Background::run(["--json", "--timeout", "20s", "-"]);
    // Held open, which a pipe without a writer is not.
    let _input = machine.child().stdin.take();

    let mut text = String::new();
    let mut stdout = machine.child().stdout.take().unwrap();
    stdout.read_to_string(&mut text).unwrap();

    assert!(text.contains("\"timeout\""), "{text}");
    assert_eq!(machine.wait(), Some(124));
    assert!(started.elapsed() >= Duration::from_secs(20));
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn an_input_that_can_not_be_read_is_no_empty_one() {
    let output = Command::new("bash")
        .args(["-c", "sandvmm run --timeout 100s -i -- wc -c < /tmp"])
        .output()
        .unwrap();

    assert_eq!(output.status.code(), Some(125), "{output:?}");
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("input"),
        "{output:?}"
    );
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_gigabyte_of_input_arrives_whole() {
    const PIECES: u64 = 1 << 10;
    const EARLY: u64 = 64;
    let mut machine = Background::run(["-i", "--timeout", "600s", "--", "cksum"]);
    let mut here = Command::new("cksum")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // No two words of a piece are equal, and no two pieces: what is lost, doubled or out of order changes the sum.
    let mut piece: Vec<u8> = (0..1u64 << 17)
        .flat_map(|word| word.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes())
        .collect();
    let mut stdins = [
        machine.child().stdin.take().unwrap(),
        here.stdin.take().unwrap(),
    ];
    let mut pids = Vec::new();
    let mut early = Vec::new();
    let resident =
        |pids: &[u32]| -> Vec<u64> { pids.iter().filter_map(|pid| resident_kib(*pid)).collect() };

    for number in 0..PIECES {
        piece[..8].copy_from_slice(&number.to_le_bytes());
        for stdin in &mut stdins {
            stdin.write_all(&piece).unwrap();
        }
        if number == EARLY {
            pids = [vec![machine.child().id()], machine.machines()].concat();
            early = resident(&pids);
        }
    }
    let late = resident(&pids);
    drop(stdins);

    let mut sum = String::new();
    let mut stdout = machine.child().stdout.take().unwrap();
    stdout.read_to_string(&mut sum).unwrap();
    assert_eq!(machine.wait(), Some(0));
    let expected = here.wait_with_output().unwrap().stdout;
    assert_eq!(sum.as_bytes(), expected);
    assert_eq!((early.len(), late.len()), (2, 2));
    for ((early, late), bound) in early.iter().zip(&late).zip(BUSY_KIB_MAX) {
        assert!(
            late.saturating_sub(*early) < bound,
            "grew from {early} to {late} KiB"
        );
    }
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_program_that_stops_reading_ends_as_usual() {
    let output = Command::new("bash")
        .args([
            "-c",
            "yes | sandvmm run -i -- head -n 2; echo \"${PIPESTATUS[1]}\"",
        ])
        .output()
        .unwrap();

    assert_eq!(String::from_utf8_lossy(&output.stdout), "y\ny\n0\n");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_program_that_reads_nothing_is_not_held_up_by_its_input() {
    let mut machine = Background::run(["-i", "--", "sh", "-c", "exit 6"]);
    let mut stdin = machine.child().stdin.take().unwrap();
    // More than every buffer on the way; how much is taken does not matter.
    let writer = std::thread::spawn(move || stdin.write_all(&vec![0; 8 << 20]).is_ok());

    assert_eq!(machine.wait(), Some(6));
    writer.join().unwrap();
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn input_that_never_ends_does_not_keep_a_program_that_ended() {
    let mut machine = Background::run(["-i", "--", "true"]);
    let _held_open = machine.child().stdin.take();
    assert_eq!(machine.wait(), Some(0));
}
