//! Standard input, whole and only when asked for.

use std::io::Write;
use std::process::Command;

use sandvmm_tests::{Background, run};
use sha2::{Digest, Sha256};

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
    let started = std::time::Instant::now();
    let script = "sleep 100 | (sandvmm run --json --timeout 20s -; echo $?)";

    let output = Command::new("timeout")
        .args(["90", "bash", "-c", script])
        .output()
        .unwrap();

    let text = String::from_utf8_lossy(&output.stdout);
    // The shell waits for sleep too: the time is that of the object.
    assert!(text.trim().ends_with("124"), "{text}");
    assert!(text.contains("\"timeout\""), "{text}");
    assert!(started.elapsed().as_secs() >= 20);
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
    let script = "head -c 1073741824 /dev/zero | sandvmm run -i --timeout 600s -- cksum; head -c 1073741824 /dev/zero | cksum";

    let output = Command::new("bash").args(["-c", script]).output().unwrap();

    let text = String::from_utf8_lossy(&output.stdout);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 2, "{output:?}");
    assert_eq!(lines[0], lines[1]);
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
