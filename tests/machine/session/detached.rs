//! What goes on without its client, and a session without who started it.

use std::time::Duration;

use rustix::process::Signal;
use sandvmm_tests::{Background, eventually};

use super::{Sessions, signal};

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
    assert_eq!(sessions.ps(), "", "it is gone when that returns");
    let last = format!("[session] Command {id} was ended by signal 9\n");
    assert!(log().ends_with(&last), "{}", log());
    sessions.call(["kill", "dev", id]).done().expect(125);
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
