//! `cargo xtask host`: a command there is what it would be here, as far as its caller can tell.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{Read, Write};
use std::process::{Command, Output, Stdio};

fn on_host(command: &[&str], input: &[u8]) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .args(["host", "--"])
        .args(command)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            // A command that does not read it all is no fault of the caller's.
            let _ = stdin.write_all(input);
        });
        child.wait_with_output().unwrap()
    })
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn streams_folder_and_exit_code_are_passed_through_exactly() {
    let input: Vec<u8> = (0..3_000_001_u32).flat_map(u32::to_le_bytes).collect();
    let script = r#"cat; printf '\0\377no newline' >&2; test "$PWD" = "$0" && command -v sandvmm > /dev/null && exit 37"#;
    let folder = std::env::current_dir().unwrap();

    let output = on_host(&["sh", "-c", script, folder.to_str().unwrap()], &input);

    assert_eq!(output.status.code(), Some(37), "{:?}", output.stderr);
    assert!(output.stdout == input, "{} bytes", output.stdout.len());
    assert_eq!(output.stderr, b"\0\xffno newline");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_signal_and_a_program_that_is_not_there_have_a_shells_codes() {
    let killed = on_host(&["sh", "-c", "kill -9 $$"], b"");
    let missing = on_host(&["no-such-program"], b"");

    assert_eq!(killed.status.code(), Some(137), "{killed:?}");
    assert_eq!(missing.status.code(), Some(127), "{missing:?}");
    let said = String::from_utf8_lossy(&missing.stderr);
    assert!(said.contains("no-such-program"), "{said}");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_reader_that_closes_ends_a_command_that_would_write_for_ever() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .args(["host", "--", "yes"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdout = child.stdout.take().unwrap();
    let mut first = [0; 4];
    stdout.read_exact(&mut first).unwrap();
    drop(stdout);

    let status = child.wait().unwrap();

    assert_eq!(&first, b"y\ny\n");
    assert!(!status.success(), "{status}");
}
