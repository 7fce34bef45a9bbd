//! Sandboxes that outlive a command.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use pty_process::Size;
use rustix::process::{Pid, Signal, Uid, kill_process};
use rustix::thread::set_thread_res_uid;
use sandvmm_tests::{
    Background, Call, HUNG_AFTER, children_of, eventually, is_alive, program, sandvmm,
};
use serde_json::Value;
use tempfile::TempDir;

/// Sessions of one test; all end with it.
struct Sessions(TempDir);

impl Sessions {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o700)).unwrap();
        Self(folder)
    }

    /// A started one, `dev`.
    fn dev(options: &[&str]) -> Self {
        let sessions = Self::new();
        let started = sessions.call(["start", "--name", "dev"]).args(options);
        started.done().expect(0);
        sessions
    }

    fn call<const N: usize>(&self, args: [&str; N]) -> Call {
        sandvmm(args).env("XDG_RUNTIME_DIR", self.0.path())
    }

    /// `exec dev -- WORDS`.
    fn exec(&self, words: &[&str]) -> Call {
        self.call(["exec", "dev", "--"]).args(words)
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new("sandvmm");
        command.args(args).env("XDG_RUNTIME_DIR", self.0.path());
        command
    }

    fn list(&self) -> Vec<Value> {
        let ran = self.call(["ls", "--json"]).done().expect(0);
        let lines = ran.text().lines();
        lines
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }

    fn pid(&self) -> u32 {
        let [info] = self.list().try_into().unwrap();
        info["pid"].as_u64().unwrap().try_into().unwrap()
    }

    fn ps(&self) -> String {
        let ran = self.call(["ps", "dev"]).done().expect(0);
        ran.text().to_owned()
    }

    /// What is on disk.
    fn left(&self) -> Vec<String> {
        let folder = self.0.path().join("sandvmm/sessions");
        let entries = std::fs::read_dir(folder).unwrap();
        entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect()
    }
}

impl Drop for Sessions {
    fn drop(&mut self) {
        let _ = self.command(&["stop", "--all"]).status();
    }
}

fn signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid.try_into().unwrap()).unwrap(), signal).unwrap();
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn state_stays_between_commands_and_nothing_after_the_stop() {
    let sessions = Sessions::dev(&["--memory", "200M", "--idle", "1h"]);

    sessions
        .exec(&["sh", "-c", "echo kept > note"])
        .done()
        .expect(0);
    let read = sessions
        .exec(&["sh", "-c", "cat note; echo no >&2; exit 7"])
        .done()
        .expect(7);
    assert_eq!((read.text(), read.stderr.as_str()), ("kept\n", "no\n"));
    let [info] = sessions.list().try_into().unwrap();
    assert_eq!(
        (&info["name"], &info["is_ready"]),
        (&"dev".into(), &true.into())
    );
    assert_eq!(
        (&info["memory_mib"], &info["idle_s"]),
        (&200.into(), &3600.0.into())
    );
    let supervisor = sessions.pid();
    let machines = children_of(supervisor);
    assert_eq!(machines.len(), 1);

    sessions.call(["stop", "dev"]).done().expect(0);

    // The name is free a moment before its process has left.
    eventually(Duration::from_secs(10), "the supervisor is gone", || {
        !is_alive(supervisor) || is_zombie(supervisor)
    });
    assert!(!is_alive(machines[0]));
    assert_eq!(sessions.left(), [""; 0]);
    let gone = sessions.exec(&["true"]).done().expect(125);
    assert!(
        gone.stderr.contains("There is no session \"dev\""),
        "{gone:?}"
    );
    sessions.call(["stop", "dev"]).done().expect(125);
}

/// In an emulated host nobody may reap what lost its parent.
fn is_zombie(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.is_empty() || stat.contains(") Z ")
}

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
fn a_client_that_is_gone_takes_its_command_along_and_a_detached_one_stays() {
    let sessions = Sessions::dev(&[]);
    let script = "echo up; (sleep 1001 &) ; exec sleep 1000";
    let mut client =
        Background::start(&mut sessions.command(&["exec", "dev", "--", "sh", "-c", script]));
    client.wait_for_output("up\n");
    let detached = sessions
        .call(["exec", "-d", "dev", "--", "sh", "-c"])
        .arg("echo one; echo two >&2; exec sleep 2000")
        .done()
        .expect(0);
    let id = detached.text().trim();
    assert!(sessions.ps().contains("attached\tsh -c echo up"));

    signal(client.child().id(), Signal::KILL);

    let running = || {
        sessions
            .exec(&["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"])
            .done()
            .expect(0)
    };
    eventually(Duration::from_secs(60), "its processes go", || {
        !running().text().contains("sleep 100")
    });
    assert!(running().text().contains("sleep 2000"));
    assert!(
        sessions.ps().contains("detached\tsh -c echo one"),
        "{}",
        sessions.ps()
    );
    let log = || {
        sessions
            .call(["logs", "dev"])
            .done()
            .expect(0)
            .text()
            .to_owned()
    };
    eventually(Duration::from_secs(60), "both lines are in the log", || {
        log().contains(&format!("[{id}] one\n")) && log().contains(&format!("[{id}] two\n"))
    });
    sessions.call(["kill", "dev", id]).done().expect(0);
    eventually(Duration::from_secs(60), "it is gone", || {
        sessions.ps().is_empty()
    });
    let last = format!("[session] Command {id} was ended by signal 9\n");
    assert!(log().ends_with(&last), "{}", log());
    sessions.call(["kill", "dev", id]).done().expect(125);
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

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn of_two_starts_of_a_name_one_gets_it() {
    let sessions = Sessions::new();
    let start = || {
        sessions
            .command(&["start", "--name", "dev"])
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };

    let (one, two) = (start(), start());
    let ended = [one, two].map(|one| one.wait_with_output().unwrap());

    let mut codes = ended.each_ref().map(|one| one.status.code().unwrap());
    codes.sort_unstable();
    assert_eq!(codes, [0, 125], "{ended:?}");
    let refused = ended.iter().find(|one| !one.status.success()).unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(
        said.contains("There is a session \"dev\" already"),
        "{said}"
    );
    assert_eq!(sessions.exec(&["echo", "1"]).done().expect(0).text(), "1\n");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_start_that_fails_says_why_and_leaves_nothing() {
    let sessions = Sessions::new();

    let failed = sessions
        .call(["start", "--name", "dev", "--kernel", "/no/kernel"])
        .done()
        .expect(125);
    let named = sessions
        .call(["start", "--name", "../dev"])
        .done()
        .expect(2);

    assert!(failed.stderr.contains("/no/kernel"), "{failed:?}");
    assert!(named.stderr.contains("no name of a session"), "{named:?}");
    assert_eq!(sessions.left(), [""; 0]);
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_killed_supervisor_leaves_what_the_next_look_sweeps() {
    let sessions = Sessions::dev(&[]);
    let supervisor = sessions.pid();
    let machine = children_of(supervisor)[0];
    let mut client =
        Background::start(&mut sessions.command(&["exec", "dev", "--", "sleep", "1000"]));
    eventually(HUNG_AFTER, "it runs", || !sessions.ps().is_empty());

    signal(supervisor, Signal::KILL);

    assert_eq!(client.wait(), Some(125));
    eventually(Duration::from_secs(60), "the machine is gone", || {
        !is_alive(machine) || is_zombie(machine)
    });
    assert_eq!(sessions.left(), ["dev"]);
    assert!(sessions.list().is_empty());
    assert_eq!(sessions.left(), [""; 0]);
    sessions.call(["start", "--name", "dev"]).done().expect(0);
    sessions.exec(&["true"]).done().expect(0);
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_stopped_supervisor_is_killed_by_the_stop() {
    let sessions = Sessions::dev(&[]);
    let supervisor = sessions.pid();
    signal(supervisor, Signal::STOP);

    let mut stop = sessions.command(&["stop", "dev"]).spawn().unwrap();
    eventually(Duration::from_secs(120), "the stop is done", || {
        stop.try_wait().unwrap().is_some()
    });

    assert_eq!(stop.wait().unwrap().code(), Some(0));
    assert_eq!(sessions.left(), [""; 0]);
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn it_ends_when_idle_and_not_while_something_runs() {
    let sessions = Sessions::dev(&["--idle", "4s"]);

    sessions.exec(&["sleep", "8"]).done().expect(0);
    let ended_at = Instant::now();
    eventually(Duration::from_secs(60), "it ends by itself", || {
        sessions.list().is_empty()
    });

    assert!(ended_at.elapsed() >= Duration::from_secs(3));
    assert_eq!(sessions.left(), [""; 0]);
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn it_ends_when_its_time_is_over_and_says_so_to_who_waits() {
    let sessions = Sessions::dev(&["--timeout", "30s"]);

    let cut = sessions.exec(&["sleep", "1000"]).done().expect(124);

    assert!(cut.stderr.contains("The time of 30 s is over"), "{cut:?}");
    eventually(Duration::from_secs(10), "nothing is left", || {
        sessions.left().is_empty()
    });
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_paused_session_goes_on_where_it_was() {
    let sessions = Sessions::dev(&[]);
    sessions
        .exec(&["sh", "-c", "echo kept > /tmp/note"])
        .done()
        .expect(0);

    sessions.call(["pause", "dev"]).done().expect(0);
    assert!(sessions.list().is_empty());
    sessions.call(["resume", "dev"]).done().expect(0);

    let read = sessions.exec(&["cat", "/tmp/note"]).done().expect(0);
    assert_eq!(read.text(), "kept\n");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_resume_that_is_interrupted_loses_nothing() {
    let sessions = Sessions::dev(&[]);
    let keep = ["sh", "-c", "echo kept > /tmp/note"];
    sessions.exec(&keep).done().expect(0);
    sessions.call(["pause", "dev"]).done().expect(0);
    // A resume that is on its way, and its supervisor, which is not the one of before.
    let resume = |before: u32| {
        let mut command = sessions.command(&["resume", "dev"]);
        let caller = command.stderr(Stdio::piped()).spawn().unwrap();
        let record = sessions.0.path().join("sandvmm/sessions/dev/record");
        let mut info = Value::Null;
        eventually(HUNG_AFTER, "the name is taken", || {
            let read = std::fs::read(&record).unwrap_or_default();
            info = serde_json::from_slice(&read).unwrap_or_default();
            info["pid"]
                .as_u64()
                .is_some_and(|pid| pid != u64::from(before))
        });
        (
            caller,
            u32::try_from(info["pid"].as_u64().unwrap()).unwrap(),
        )
    };

    let (caller, supervisor) = resume(0);
    while !catches(supervisor, Signal::TERM) {}
    signal(supervisor, Signal::TERM);
    let ended = caller.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(125), "{said}");
    assert!(said.contains("it is paused as before"), "{said}");

    let (mut caller, _) = resume(supervisor);
    caller.kill().unwrap();
    caller.wait().unwrap();
    eventually(HUNG_AFTER, "it goes on without its caller", || {
        sessions.list().iter().any(|info| info["is_ready"] == true)
    });

    let read = sessions.exec(&["cat", "/tmp/note"]).done().expect(0);
    assert_eq!(read.text(), "kept\n");
}

/// Whether a process has a handler for a signal (proc_pid_status(5)).
fn catches(pid: u32, signal: Signal) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("SigCgt:"))
        .unwrap();
    u64::from_str_radix(mask.trim(), 16).unwrap() >> (signal.as_raw() - 1) & 1 == 1
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn it_holds_nothing_of_who_started_it() {
    let sessions = Sessions::new();
    let (reader, writer) = std::io::pipe().unwrap();
    let inheritable = rustix::io::dup(&writer).unwrap();
    rustix::io::fcntl_setfd(&inheritable, rustix::io::FdFlags::empty()).unwrap();
    let (stdout, stderr) = (writer.try_clone().unwrap(), writer);
    let mut start = sessions.command(&["start", "--name", "dev"]);
    let status = start.stdout(stdout).stderr(stderr).status().unwrap();
    drop((start, inheritable));
    assert!(status.success());

    let (told, heard) = std::sync::mpsc::channel();
    std::thread::spawn(move || told.send(std::io::read_to_string(reader).unwrap()));

    let said = heard.recv_timeout(Duration::from_secs(10)).unwrap();
    assert_eq!(said, "");
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", sessions.pid())).unwrap();
    let session: u32 = stat
        .rsplit(')')
        .next()
        .unwrap()
        .split_whitespace()
        .nth(3)
        .unwrap()
        .parse()
        .unwrap();
    assert_eq!(session, sessions.pid(), "a session of its own");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn nobody_else_is_served() {
    const NOBODY: u32 = 65534;
    let sessions = Sessions::dev(&[]);
    let copy = tempfile::tempdir().unwrap();
    std::fs::set_permissions(copy.path(), PermissionsExt::from_mode(0o755)).unwrap();
    std::fs::copy(program(), copy.path().join("sandvmm")).unwrap();
    let output = Command::new(copy.path().join("sandvmm"))
        .args(["exec", "dev", "--", "true"])
        .env("XDG_RUNTIME_DIR", sessions.0.path())
        .current_dir("/")
        .uid(NOBODY)
        .gid(NOBODY)
        .output()
        .unwrap();
    // Somebody else's runtime folder is none.
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(125), "{said}");
    assert!(said.contains("There is no session \"dev\""), "{said}");

    // Only who the client is keeps it out now.
    let folder = sessions.0.path();
    let inner = folder.join("sandvmm/sessions/dev");
    let walls = [
        folder,
        &folder.join("sandvmm"),
        &folder.join("sandvmm/sessions"),
        &inner,
        &inner.join("socket"),
    ];
    let change = |mode| {
        for wall in walls {
            std::fs::set_permissions(wall, PermissionsExt::from_mode(mode)).unwrap();
        }
    };
    change(0o777);
    let served = as_user(NOBODY, || {
        let mut stream = UnixStream::connect(inner.join("socket")).unwrap();
        stream.set_read_timeout(Some(HUNG_AFTER)).unwrap();
        // It may be closed before all is written.
        let _ = stream.write_all(&[0xff; 64]);
        std::io::Read::read(&mut stream, &mut [0; 4])
    });
    change(0o700);
    match served {
        Ok(count) => assert_eq!(count, 0, "it is answered"),
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
    }
    sessions.exec(&["true"]).done().expect(0);
}

/// On a thread that is another user's.
fn as_user<T: Send>(uid: u32, work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            let uid = Uid::from_raw(uid);
            set_thread_res_uid(uid, uid, uid).unwrap();
            work()
        });
        worker.join().unwrap()
    })
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn a_supervisor_of_another_user_is_not_talked_to() {
    const SOMEBODY: u32 = 1234;
    let sessions = Sessions::new();
    let inner = sessions.0.path().join("sandvmm/sessions/dev");
    std::fs::create_dir_all(&inner).unwrap();
    let change = |mode| {
        for folder in inner.ancestors().take(4) {
            std::fs::set_permissions(folder, PermissionsExt::from_mode(mode)).unwrap();
        }
    };
    let lock = std::fs::File::create(inner.join("lock")).unwrap();
    lock.lock().unwrap();
    change(0o777);
    let listener = as_user(SOMEBODY, || {
        UnixListener::bind(inner.join("socket")).unwrap()
    });
    change(0o700);

    let refused = sessions.call(["ps", "dev"]).done().expect(125);

    assert!(
        refused.stderr.contains("another user's process"),
        "{refused:?}"
    );
    drop((listener, lock));
}
