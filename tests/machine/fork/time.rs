//! A fork's clocks, when its template is no longer young.

use std::io::{BufRead, BufReader, Write};
use std::time::{Duration, Instant};

use sandvmm::{Sandbox, Stdio};

use sandvmm_tests::now_s;

use super::{Named, python, shell, warmed};

/// How old the template is.
const AGE: Duration = Duration::from_secs(61);

/// How far a fork's wall clock may be from the host's.
const CLOCK_TOLERANCE_S: f64 = 0.010;

/// How many forks' clocks are looked at.
const CLOCKS: usize = 4;

/// How often the clock is asked: the fastest answer tells it best.
const QUESTIONS: usize = 50;

/// How much longer than it should a wait may be, on an emulated processor.
const SLACK_S: f64 = 5.0;

/// Answers each line with the wall clock.
const CLOCK: &str = "import sys, time
for line in sys.stdin:
    print(time.time(), flush=True)";

/// Waits of every kind, begun before the machine is saved, and what the monotonic clock said: `name elapsed` when one is over.
const WAITING: &str = "import ctypes, os, select, signal, sys, threading, time
begun, begun_at, lock = time.monotonic(), time.time(), threading.Lock()
def over(name):
    with lock, open('/tmp/over', 'a') as file:
        file.write(f'{name} {time.monotonic() - begun}\\n')
def later(name, wait):
    threading.Thread(target=lambda: (wait(), over(name))).start()
class Span(ctypes.Structure):
    _fields_ = [('s', ctypes.c_long), ('ns', ctypes.c_long)]
def absolute():
    ctypes.CDLL(None).clock_nanosleep(0, 1, ctypes.byref(Span(int(begun_at) + 45, 0)), None)
signal.signal(signal.SIGALRM, lambda *_: over('alarm'))
signal.setitimer(signal.ITIMER_REAL, 15)
later('sleep', lambda: time.sleep(15))
later('select', lambda: select.select([], [], [], 15))
later('lock', lambda: threading.Event().wait(15))
later('absolute', absolute)
last, back = begun, 0
while True:
    now = time.monotonic()
    if now < last: over('BACKWARDS')
    if now - last > 30: over('JUMP')
    last = now
    time.sleep(0.001)";

/// How far the guest's wall clock is ahead of the host's, at least: half of the time of an answer is not known.
fn clock_error_s(sandbox: &Sandbox) -> f64 {
    let mut clock = python(sandbox, CLOCK)
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut to = clock.stdin.take().unwrap();
    let mut from = BufReader::new(clock.stdout.take().unwrap());
    let mut best = (f64::INFINITY, 0.0);
    for _ in 0..QUESTIONS {
        let asked = now_s();
        to.write_all(b"\n").unwrap();
        let mut line = String::new();
        from.read_line(&mut line).unwrap();
        let answered = now_s();
        let told: f64 = line.trim().parse().unwrap();
        let ahead = if told > answered {
            told - answered
        } else if told < asked {
            asked - told
        } else {
            0.0
        };
        if answered - asked < best.0 {
            best = (answered - asked, ahead);
        }
    }
    best.1
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn the_clocks_of_a_fork_are_right_when_its_template_is_a_minute_old() {
    let parent = warmed("import time");
    let _waiting = python(&parent, WAITING).spawn().unwrap();
    shell(&parent, "sleep 2; touch /tmp/over");
    let template = Named::of(&parent, "time");
    parent.end();
    std::thread::sleep(AGE);

    let fork = template.fork();

    // An emulated processor may be kept waiting while the clock is on its way: then another fork shows it.
    let mut error = clock_error_s(&fork);
    for _ in 1..CLOCKS {
        error = error.min(clock_error_s(&template.fork()));
    }
    assert!(error < CLOCK_TOLERANCE_S, "the wall clock is {error} s off");
    let slept = python(
        &fork,
        "import time; begun = time.monotonic(); time.sleep(0.1); print(time.monotonic() - begun)",
    )
    .output()
    .unwrap();
    let slept: f64 = String::from_utf8(slept.stdout)
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    assert!((0.1..SLACK_S).contains(&slept), "{slept}");
    // The wall clock's own wait was over while the template lay on the disk; the others have as long to go as they had.
    let deadline = Instant::now() + Duration::from_secs(120);
    let over = loop {
        let over = shell(&fork, "cat /tmp/over");
        if over.lines().count() >= 5 {
            break over;
        }
        assert!(Instant::now() < deadline, "{over:?}");
        std::thread::sleep(Duration::from_millis(200));
    };
    let mut names = Vec::new();
    for line in over.lines() {
        let (name, elapsed) = line.split_once(' ').unwrap();
        let elapsed: f64 = elapsed.parse().unwrap();
        match name {
            "absolute" => assert!(elapsed < 40.0, "{line}"),
            _ => assert!((15.0..15.0 + SLACK_S).contains(&elapsed), "{line}"),
        }
        names.push(name);
    }
    names.sort_unstable();
    assert_eq!(names, ["absolute", "alarm", "lock", "select", "sleep"]);
}
