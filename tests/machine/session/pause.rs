//! A session is put on disk and goes on.

use std::process::Stdio;
use std::time::Duration;

use rustix::process::Signal;
use sandvmm::Images;
use sandvmm_tests::{HUNG_AFTER, children_of, eventually, is_alive};
use serde_json::Value;

use super::{Sessions, signal};

/// The name of the one that is interrupted.
const INTERRUPTED: &str = "interrupted";

/// Most attempts to meet one between its machine's beginning and its being ready: tens of milliseconds, even where nothing else runs.
const RESUMES: u32 = 10;

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_paused_session_goes_on_where_it_was() {
    let sessions = Sessions::started("paused", &["--memory", "200M"]);
    sessions
        .exec(&["sh", "-c", "echo kept > /tmp/note"])
        .done()
        .expect(0);

    sessions.call(["pause", "paused"]).done().expect(0);
    assert!(sessions.list().is_empty());
    let listed = sessions.list_all();
    let listed = listed.iter().find(|info| info["name"] == "paused").unwrap();
    assert_eq!(
        (&listed["state"], &listed["memory_mib"], &listed["cpus"]),
        (&"paused".into(), &200.into(), &1.into())
    );
    assert!(listed["disk_bytes"].as_u64().unwrap() > 1 << 20);
    let again = sessions
        .call(["start", "--name", "paused"])
        .done()
        .expect(125);
    assert!(again.stderr.contains("sandvmm resume paused"), "{again:?}");
    sessions.call(["resume", "paused"]).done().expect(0);

    let read = sessions.exec(&["cat", "/tmp/note"]).done().expect(0);
    assert_eq!(read.text(), "kept\n");
    let is_paused = |name| {
        let all = sessions.list_all();
        all.iter()
            .any(|info| info["name"] == name && info["state"] == "paused")
    };
    assert!(!is_paused("paused"));

    // And it is removed without going on.
    sessions.call(["pause", "paused"]).done().expect(0);
    assert!(is_paused("paused"));
    sessions.call(["stop", "paused"]).done().expect(0);
    assert!(!is_paused("paused"));
    sessions.call(["resume", "paused"]).done().expect(125);
    sessions
        .call(["start", "--name", "paused"])
        .done()
        .expect(0);
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_resume_that_is_interrupted_loses_nothing() {
    let sessions = Sessions::started(INTERRUPTED, &[]);
    let keep = ["sh", "-c", "echo kept > /tmp/note"];
    sessions.exec(&keep).done().expect(0);
    sessions.call(["pause", INTERRUPTED]).done().expect(0);
    // A resume that is on its way, and its supervisor, which is not the one of before.
    let resume = |before: u32| {
        let mut command = sessions.command(&["resume", INTERRUPTED]);
        let caller = command.stderr(Stdio::piped()).spawn().unwrap();
        let folder = sessions.0.path().join("sandvmm/sessions").join(INTERRUPTED);
        let record = folder.join("record");
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

    let folder = sessions.0.path().join("sandvmm/sessions").join(INTERRUPTED);
    // Brings one to a stand, and says whether that was before it was ready.
    let stands_early = |supervisor: u32| {
        signal(supervisor, Signal::STOP);
        eventually(HUNG_AFTER, "it stands", || is_stopped(supervisor));
        !folder.join("socket").exists()
    };

    // Told to end when it hears that, and is not ready yet.
    let kernel = Images::from_data_folder().unwrap().kernel;
    let memory = kernel.with_file_name("paused").join(INTERRUPTED);
    let memory = memory.join("memory");
    let mut supervisor = 0;
    let is_told = (0..RESUMES).any(|_| {
        let (mut caller, resuming) = resume(supervisor);
        supervisor = resuming;
        while !catches(resuming, Signal::TERM) {}
        let is_told = stands_early(resuming);
        if is_told {
            signal(resuming, Signal::TERM);
        }
        signal(resuming, Signal::CONT);
        // Whenever it is killed on its way to its end, nothing is lost.
        while is_told && caller.try_wait().unwrap().is_none() {
            assert!(memory.exists(), "it is on disk no more");
            std::thread::sleep(Duration::from_millis(5));
        }
        let ended = caller.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr);
        if is_told {
            assert_eq!(ended.status.code(), Some(125), "{said}");
            assert!(said.contains("it is paused as before"), "{said}");
        } else {
            assert!(ended.status.success(), "{said}");
            sessions.call(["pause", INTERRUPTED]).done().expect(0);
        }
        is_told
    });
    assert!(is_told, "it was ready before, each time");

    // Killed when its machine is there, and it is not ready yet.
    let is_hit = (0..RESUMES).any(|_| {
        let (caller, resuming) = resume(supervisor);
        supervisor = resuming;
        while children_of(resuming).is_empty() {
            assert!(is_alive(resuming), "it ended by itself");
        }
        let is_hit = stands_early(resuming);
        signal(resuming, if is_hit { Signal::KILL } else { Signal::CONT });
        assert_eq!(caller.wait_with_output().unwrap().status.success(), !is_hit);
        if !is_hit {
            sessions.call(["pause", INTERRUPTED]).done().expect(0);
        }
        is_hit
    });
    assert!(is_hit, "it was ready before, each time");

    let (mut caller, _) = resume(supervisor);
    caller.kill().unwrap();
    caller.wait().unwrap();
    eventually(HUNG_AFTER, "it goes on without its caller", || {
        sessions.list().iter().any(|info| info["is_ready"] == true)
    });

    let read = sessions.exec(&["cat", "/tmp/note"]).done().expect(0);
    assert_eq!(read.text(), "kept\n");
}

/// Whether all threads of a process stand still for a signal (proc_pid_stat(5)).
fn is_stopped(pid: u32) -> bool {
    let mut threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    threads.all(|thread| {
        let stat = thread.unwrap().path().join("stat");
        std::fs::read_to_string(stat).is_ok_and(|stat| stat.contains(") T "))
    })
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
