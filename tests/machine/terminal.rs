//! `-t`: a terminal that behaves like one.

use std::io::{Read, Write};
use std::time::Duration;

use pty_process::Size;
use pty_process::blocking::{Command, Pty, open};
use sandvmm_tests::eventually;

fn read_until(pty: &mut Pty, text: &str) -> String {
    let mut seen = String::new();
    let mut piece = [0; 256];
    while !seen.contains(text) {
        match pty.read(&mut piece) {
            Ok(0) | Err(_) => panic!("the terminal ended before {text:?}: {seen:?}"),
            Ok(count) => seen.push_str(&String::from_utf8_lossy(&piece[..count])),
        }
    }
    seen
}

fn terminal(args: &[&str]) -> (Pty, std::process::Child) {
    let (pty, pts) = open().unwrap();
    pty.resize(Size::new(40, 111)).unwrap();
    let child = Command::new("sandvmm")
        .args(["run", "--timeout", "120s", "-t"])
        .args(args)
        .spawn(pts)
        .unwrap();
    (pty, child)
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn the_size_is_right_from_the_start_and_follows_the_window() {
    let (mut pty, mut child) = terminal(&[
        "--",
        "bash",
        "-c",
        "stty size; trap 'stty size; exit 4' WINCH; while :; do sleep 0.1; done",
    ]);

    read_until(&mut pty, "40 111");
    std::thread::sleep(Duration::from_millis(500));
    pty.resize(Size::new(50, 99)).unwrap();
    read_until(&mut pty, "50 99");

    assert_eq!(child.wait().unwrap().code(), Some(4));
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn all_three_streams_are_the_terminal_and_keys_arrive_uncooked() {
    let (mut pty, mut child) = terminal(&[
        "-c",
        "import os, sys
print(all(os.isatty(fd) for fd in range(3)), os.ttyname(0).startswith('/dev/pts/'), os.environ.get('TERM') is not None)
print('type:', flush=True)
print('read', sys.stdin.readline().strip(), flush=True)
try:
    print('wait:', flush=True)
    sys.stdin.readline()
except KeyboardInterrupt:
    print('interrupted'); sys.exit(8)",
    ]);

    read_until(&mut pty, "True True True");
    read_until(&mut pty, "type:");
    pty.write_all(b"abc\r").unwrap();
    read_until(&mut pty, "read abc");
    read_until(&mut pty, "wait:");
    pty.write_all(&[3]).unwrap();
    read_until(&mut pty, "interrupted");

    assert_eq!(child.wait().unwrap().code(), Some(8));
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn the_terminal_is_restored_however_the_run_ends() {
    for ending in ["exit", "kill", "term"] {
        let (mut pty, pts) = open().unwrap();
        pty.resize(Size::new(24, 80)).unwrap();
        let before = rustix::termios::tcgetattr(&pty).unwrap();
        let program = match ending {
            "exit" => "echo up; exit 0",
            "kill" => "echo up; kill -9 $$",
            _ => "echo up; sleep 1000",
        };
        let mut child = Command::new("sandvmm")
            .args(["run", "-t", "--", "sh", "-c", program])
            .spawn(pts)
            .unwrap();
        read_until(&mut pty, "up");
        if ending == "term" {
            let pid = rustix::process::Pid::from_raw(child.id().try_into().unwrap()).unwrap();
            rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        }
        eventually(Duration::from_secs(60), "the run ends", || {
            child.try_wait().unwrap().is_some()
        });

        let after = rustix::termios::tcgetattr(&pty).unwrap();
        assert_eq!(after.local_modes, before.local_modes, "{ending}");
        assert_eq!(after.input_modes, before.input_modes, "{ending}");
    }
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn without_a_terminal_t_is_a_usage_error() {
    let ran = sandvmm_tests::run(["-t", "--", "true"])
        .stdin("")
        .done()
        .expect(2);
    assert!(ran.stderr.contains("terminal"), "{ran:?}");
}
