//! A program that stops all that its user may takes nothing of the agent's with it.

use std::io::{BufRead, BufReader};
use std::time::{Duration, Instant};

use sandvmm::Stdio;

use super::{HUNG_AFTER, python, shell, text, warmed};

/// Stops every other process that its user may, again and again: those of commands, the warm interpreter and what that has in reserve.
const STOPPER: &str = "import os, signal
print('on', flush=True)
while True:
    try: os.kill(-1, signal.SIGSTOP)
    except OSError: pass";

/// After this the host takes an agent that has not answered for broken.
const UNANSWERED: Duration = Duration::from_secs(60);

/// More than the agent works on at one time.
const FILES: usize = 40;

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_program_that_stops_all_of_its_user_takes_neither_files_nor_the_machine_away() {
    let sandbox = warmed("pass");
    // Started by a shell, it leaves the process in reserve where it is, and stops it.
    let mut stopper = sandbox.command("sh");
    stopper.args(["-c", "exec python3 -c \"$0\"", STOPPER]);
    let mut stopper = stopper.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    let mut output = BufReader::new(stopper.stdout.take().unwrap());
    output.read_line(&mut line).unwrap();
    assert_eq!(line, "on\n");

    let files = sandbox.files();
    for number in 0..FILES {
        let path = format!("/tmp/file-{number}");
        files.write(&path, path.as_bytes()).unwrap();
        assert_eq!(files.read(&path).unwrap(), path.as_bytes());
    }
    let begun = Instant::now();
    let asked = python(&sandbox, "print('never')").spawn();
    let took = begun.elapsed();
    eprintln!("Asked for while all is stopped: {asked:?} after {took:?}");
    assert!(took < UNANSWERED, "{took:?}");
    drop(asked);

    stopper.kill().unwrap();
    stopper.wait_timeout(HUNG_AFTER).unwrap();
    assert_eq!(shell(&sandbox, "cat /tmp/file-7"), "/tmp/file-7");
    assert_eq!(text(&mut python(&sandbox, "print(6 * 7)")), "42\n");
}
