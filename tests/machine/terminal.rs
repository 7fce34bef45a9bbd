//! `-t`: a terminal that behaves like one.

use std::io::{Read, Write};
use std::process::Child;
use std::time::Duration;

use pty_process::Size;
use pty_process::blocking::{Command, Pty, open};
use rustix::process::{Pid, Signal, kill_process};
use rustix::termios::LocalModes;
use sandvmm_tests::{children_of, eventually};

/// A terminal with the command in it, and what it has shown that no test has looked for yet.
struct Screen {
    pty: Pty,
    child: Child,
    shown: String,
}

impl Screen {
    fn new(size: Size, args: &[&str]) -> Self {
        Self::limited(size, "120s", args)
    }

    fn limited(size: Size, timeout: &str, args: &[&str]) -> Self {
        let (pty, pts) = open().unwrap();
        pty.resize(size).unwrap();
        let child = Command::new("sandvmm")
            .args(["run", "--timeout", timeout, "-t"])
            .args(args)
            .spawn(pts)
            .unwrap();
        Self {
            pty,
            child,
            shown: String::new(),
        }
    }

    /// Reads up to this text. The run's own time-out ends the wait for a text that does not come.
    #[track_caller]
    fn wait_for(&mut self, text: &str) {
        let mut piece = [0; 256];
        loop {
            if let Some(at) = self.shown.find(text) {
                self.shown.drain(..at + text.len());
                return;
            }
            match self.pty.read(&mut piece) {
                Ok(0) | Err(_) => panic!("the terminal ended before {text:?}: {:?}", self.shown),
                Ok(count) => self
                    .shown
                    .push_str(&String::from_utf8_lossy(&piece[..count])),
            }
        }
    }

    fn code(&mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn the_size_is_right_from_the_start_and_follows_the_window() {
    let mut screen = Screen::new(
        Size::new(40, 111),
        &[
            "--",
            "bash",
            "-c",
            "stty size; trap 'stty size; exit 4' WINCH; while :; do sleep 0.1; done",
        ],
    );

    screen.wait_for("40 111");
    std::thread::sleep(Duration::from_millis(500));
    screen.pty.resize(Size::new(50, 99)).unwrap();
    screen.wait_for("50 99");

    assert_eq!(screen.code(), Some(4));
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn all_three_streams_are_the_terminal_and_keys_arrive_uncooked() {
    let mut screen = Screen::new(Size::new(24, 80), &[
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

    screen.wait_for("True True True");
    screen.wait_for("type:");
    screen.pty.write_all(b"abc\r").unwrap();
    screen.wait_for("read abc");
    screen.wait_for("wait:");
    screen.pty.write_all(&[3]).unwrap();
    screen.wait_for("interrupted");

    assert_eq!(screen.code(), Some(8));
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn what_is_typed_to_a_script_from_a_terminal_arrives_whole() {
    let mut screen = Screen::new(Size::new(24, 80), &["-"]);

    // Its first bytes tell who runs it.
    screen.pty.write_all(b"print(6 * 7)\n").unwrap();
    screen.wait_for("42");
    screen.pty.write_all(b"exit(3)\r").unwrap();

    assert_eq!(screen.code(), Some(3));
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn the_terminal_is_restored_however_the_run_ends() {
    for ending in ["exit", "kill", "term", "hang up", "time-out", "crash"] {
        let program = match ending {
            "exit" => "sleep 1; echo up; read x",
            "kill" => "sleep 1; echo up; read x; kill -9 $$",
            _ => "sleep 1; echo up; sleep 1000",
        };
        let timeout = if ending == "time-out" { "25s" } else { "120s" };
        // Taken before the command can have changed anything: it boots a machine first.
        let args = ["--", "sh", "-c", program];
        let mut screen = Screen::limited(Size::new(24, 80), timeout, &args);
        let before = rustix::termios::tcgetattr(&screen.pty).unwrap();
        assert!(
            before
                .local_modes
                .contains(LocalModes::ICANON | LocalModes::ECHO)
        );
        screen.wait_for("up");
        let during = rustix::termios::tcgetattr(&screen.pty).unwrap();
        assert!(
            !during
                .local_modes
                .intersects(LocalModes::ICANON | LocalModes::ECHO)
        );
        let send = |pid: u32, signal| {
            kill_process(Pid::from_raw(pid.try_into().unwrap()).unwrap(), signal).unwrap();
        };
        match ending {
            "term" => send(screen.child.id(), Signal::TERM),
            "hang up" => send(screen.child.id(), Signal::HUP),
            "crash" => send(children_of(screen.child.id())[0], Signal::KILL),
            "time-out" => {}
            _ => screen.pty.write_all(b"\r").unwrap(),
        }
        eventually(Duration::from_secs(60), "the run ends", || {
            screen.child.try_wait().unwrap().is_some()
        });

        let after = rustix::termios::tcgetattr(&screen.pty).unwrap();
        // All of it: modes of all four kinds, special characters, speeds.
        assert_eq!(format!("{after:?}"), format!("{before:?}"), "{ending}");
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
