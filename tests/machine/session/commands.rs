//! What a command, a shell and a copy are in a session.

use std::io::Write;
use std::process::Stdio;
use std::time::Duration;

use pty_process::Size;
use rustix::process::Signal;
use sandvmm_tests::{Background, eventually};

use super::{Sessions, signal};

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn commands_end_as_with_run() {
    let sessions = Sessions::dev(&[]);

    for (words, code) in [
        (&["sh", "-c", "kill -9 $$"][..], 137),
        (&["no-such-program"], 127),
        (&["/etc/passwd"], 126),
        (&["sh", "-c", "exit 255"], 255),
    ] {
        sessions.exec(words).done().expect(code);
    }
    let env = sessions
        .call([
            "exec", "-e", "A=b c", "-w", "/tmp", "-u", "root", "dev", "--",
        ])
        .args(["sh", "-c", "echo $A; pwd; id -u"]);
    assert_eq!(env.done().expect(0).text(), "b c\n/tmp\n0\n");
    let input = sessions
        .call(["exec", "-i", "dev", "--", "cat"])
        .stdin("a\0b");
    assert_eq!(input.done().expect(0).stdout, b"a\0b");
    let empty = sessions.call(["exec", "dev", "--", "cat"]).stdin("a");
    assert_eq!(empty.done().expect(0).stdout, b"");
    sessions.call(["exec", "dev", "true"]).done().expect(2);
    sessions
        .call(["exec", "a/b", "--", "true"])
        .done()
        .expect(2);
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_reader_that_waits_stops_the_writer_and_gets_every_byte() {
    const BYTES: usize = 20_000_000;
    let sessions = Sessions::dev(&[]);
    let script = format!("head -c {BYTES} /dev/zero; echo done > /tmp/done");
    let mut writer = sessions
        .command(&["exec", "dev", "--", "sh", "-c", &script])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();

    std::thread::sleep(Duration::from_secs(5));
    let early = sessions.exec(&["test", "-e", "/tmp/done"]).done();
    let mut seen = Vec::new();
    std::io::Read::read_to_end(writer.stdout.as_mut().unwrap(), &mut seen).unwrap();

    assert_eq!(early.code, 1, "it has written what nobody has read");
    assert_eq!(
        (writer.wait().unwrap().code(), seen.len()),
        (Some(0), BYTES)
    );
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_signal_goes_to_the_command_and_its_status_comes_back() {
    let sessions = Sessions::dev(&[]);
    let script = "trap 'echo bye; exit 5' INT; echo up; while :; do sleep 0.1; done";
    let mut client =
        Background::start(&mut sessions.command(&["exec", "dev", "--", "sh", "-c", script]));
    client.wait_for_output("up\n");

    signal(client.child().id(), Signal::INT);

    client.wait_for_output("bye\n");
    assert_eq!(client.wait(), Some(5));
    let deaf = "trap '' INT; echo up; while :; do sleep 0.1; done";
    let mut client =
        Background::start(&mut sessions.command(&["exec", "dev", "--", "sh", "-c", deaf]));
    client.wait_for_output("up\n");
    signal(client.child().id(), Signal::INT);
    std::thread::sleep(Duration::from_secs(1));
    signal(client.child().id(), Signal::INT);
    assert_eq!(client.wait(), Some(130));
    eventually(Duration::from_secs(60), "it is killed", || {
        sessions.ps().is_empty()
    });
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_shell_has_a_terminal_with_size_interrupt_and_resize() {
    let sessions = Sessions::dev(&[]);
    let (mut pty, pts) = pty_process::blocking::open().unwrap();
    pty.resize(Size::new(40, 111)).unwrap();
    let mut child = pty_process::blocking::Command::new("sandvmm")
        .args(["shell", "dev"])
        .env("XDG_RUNTIME_DIR", sessions.0.path())
        .spawn(pts)
        .unwrap();
    let mut shown = String::new();
    let mut wait_for = |pty: &mut pty_process::blocking::Pty, text: &str| {
        let mut piece = [0; 256];
        while !shown.contains(text) {
            match std::io::Read::read(pty, &mut piece) {
                Ok(count @ 1..) => shown.push_str(&String::from_utf8_lossy(&piece[..count])),
                other => panic!("{other:?} before {text:?}: {shown:?}"),
            }
        }
        let end = shown.find(text).unwrap() + text.len();
        shown.drain(..end);
    };

    pty.write_all(b"stty size\r").unwrap();
    wait_for(&mut pty, "40 111");
    pty.write_all(b"echo sl''eeps; sleep 1000\r").unwrap();
    wait_for(&mut pty, "sleeps");
    std::thread::sleep(Duration::from_secs(1));
    pty.write_all(&[3]).unwrap();
    pty.resize(Size::new(50, 99)).unwrap();
    std::thread::sleep(Duration::from_secs(1));
    pty.write_all(b"stty size; exit 4\r").unwrap();
    wait_for(&mut pty, "50 99");

    eventually(Duration::from_secs(60), "the shell ends", || {
        child.try_wait().unwrap().is_some()
    });
    assert_eq!(child.wait().unwrap().code(), Some(4));
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn files_go_in_and_out_from_where_the_caller_stands() {
    let sessions = Sessions::dev(&[]);
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(folder.path().join("tree/deep")).unwrap();
    std::fs::write(folder.path().join("tree/deep/a"), "one").unwrap();

    let cp = |from: &str, to: &str| {
        sessions
            .call(["cp", from, to])
            .current_dir(folder.path())
            .done()
    };
    cp("tree", "dev:t").expect(0);
    cp("dev:t/deep/a", "b").expect(0);
    cp("dev:t", "./back").expect(0);

    let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
    assert_eq!(
        (read("b"), read("back/deep/a")),
        ("one".into(), "one".into())
    );
    let missing = cp("no-such-file", "dev:x").expect(125);
    assert!(missing.stderr.contains("'no-such-file'"), "{missing:?}");
    cp("dev:/no-such-file", "x").expect(125);
    cp("a", "b").expect(2);
}
