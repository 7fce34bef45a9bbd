//! Stages that stand still: whoever stops them takes neither the guest nor its files away.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use protocol::file::{FileAnswer, FileDone, FileOperation, FileRequest};
use protocol::frame::{self, MAX_FROM_AGENT_BYTES};
use protocol::message::{ExitStatus, SpawnFailure, StreamKind};
use rustix::process::{Pid, Signal};
use sandvmm_guest_agent::limits::{END_WAIT, FILE_END_WAIT, MAX_FILE_STAGES, START_WAIT};

use crate::host::{Host, PATIENCE, host};

/// Asks for a file to be written in `folder`, and sends nothing of it.
fn begin_write(host: &Host, folder: &tempfile::TempDir, user: &str) -> UnixStream {
    let request = FileRequest {
        path: folder.path().join("file").as_os_str().as_bytes().to_vec(),
        user: Some(user.to_owned()),
        operation: FileOperation::Write { mode: 0o640 },
    };
    host.dial(0, StreamKind::File(request))
}

/// Asks what `folder` is.
fn look(host: &Host, folder: &tempfile::TempDir, user: &str) -> Result<FileDone, String> {
    let request = FileRequest {
        path: folder.path().as_os_str().as_bytes().to_vec(),
        user: Some(user.to_owned()),
        operation: FileOperation::Metadata,
    };
    let mut stream = host.dial(0, StreamKind::File(request));
    let answer: FileAnswer = frame::read(&mut stream, MAX_FROM_AGENT_BYTES).unwrap();
    answer.result.map_err(|failure| failure.message)
}

/// Waits until `count` stages have begun their file in `folder`, which has no name yet, and returns their processes.
fn stages(folder: &tempfile::TempDir, count: usize) -> Vec<Pid> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let found: Vec<Pid> = fs::read_dir("/proc")
            .unwrap()
            .filter_map(|entry| entry.unwrap().file_name().into_string().ok()?.parse().ok())
            .filter(|number| *number != std::process::id())
            .filter(|number| has_open_in(*number, folder.path()))
            .filter_map(|number| Pid::from_raw(number.try_into().unwrap()))
            .collect();
        if found.len() == count {
            let left = fs::read_dir(folder.path()).unwrap().count();
            assert_eq!(left, 0, "a killed stage would leave it");
            return found;
        }
        assert!(Instant::now() < deadline, "{found:?}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Whether a process has a file in the folder open.
fn has_open_in(process: u32, folder: &Path) -> bool {
    let open = fs::read_dir(format!("/proc/{process}/fd"));
    let mut open = open.into_iter().flatten().flatten();
    open.any(|entry| {
        let path = fs::read_link(entry.path()).unwrap_or_default();
        path.parent() == Some(folder)
    })
}

/// Waits until nothing is left of what other tests have started: each takes a place.
fn wait_until_idle() {
    let deadline = Instant::now() + PATIENCE;
    let has_children = || {
        fs::read_dir("/proc/self/task").unwrap().any(|thread| {
            let children = thread.unwrap().path().join("children");
            fs::read_to_string(children).is_ok_and(|children| !children.is_empty())
        })
    };
    while has_children() && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_stage_that_is_stopped_is_ended_and_its_command_refused_with_a_sentence() {
    let mut host = host();
    let begun = Instant::now();

    host.hold_stages(true);
    let spawn = host.spawn("true", &[]);
    let (kind, message) = host.failure(&spawn);
    let waited = begun.elapsed();
    host.hold_stages(false);

    assert_eq!(kind, SpawnFailure::Exhausted);
    assert!(message.contains("not started within 20 s"), "{message}");
    assert!(
        (START_WAIT..START_WAIT + 2 * END_WAIT + Duration::from_secs(10)).contains(&waited),
        "{waited:?}"
    );
    let (status, out, _) = host.sh("echo on");
    assert_eq!((status, out.as_str()), (ExitStatus::Code(0), "on\n"));
}

#[test]
fn stopped_stages_for_files_end_some_time_after_the_host_has_closed_their_streams() {
    let mut host = host();
    let folder = tempfile::tempdir().unwrap();
    let user = host.spawn("true", &[]).user.unwrap();
    wait_until_idle();

    let streams: Vec<UnixStream> = (0..MAX_FILE_STAGES)
        .map(|_| begin_write(&host, &folder, &user))
        .collect();
    for stage in stages(&folder, MAX_FILE_STAGES) {
        rustix::process::kill_process(stage, Signal::STOP).unwrap();
    }
    let busy = look(&host, &folder, &user).unwrap_err();
    let closed = Instant::now();
    drop(streams);
    let done = loop {
        match look(&host, &folder, &user) {
            Err(_) if closed.elapsed() < PATIENCE => thread::sleep(Duration::from_millis(50)),
            done => break done,
        }
    };

    assert!(busy.contains("busy"), "{busy}");
    assert!(matches!(done, Ok(FileDone::Metadata(_))), "{done:?}");
    assert!(closed.elapsed() >= FILE_END_WAIT, "none was ended early");
}

#[test]
fn a_stage_for_a_file_that_the_host_gives_up_clears_up_by_itself() {
    let mut host = host();
    let folder = tempfile::tempdir().unwrap();
    let user = host.spawn("true", &[]).user.unwrap();

    let stream = begin_write(&host, &folder, &user);
    stages(&folder, 1);
    drop(stream);

    stages(&folder, 0);
}

#[test]
fn a_stage_for_a_file_that_is_killed_leaves_nothing_of_it() {
    let mut host = host();
    let folder = tempfile::tempdir().unwrap();
    let user = host.spawn("true", &[]).user.unwrap();

    let _stream = begin_write(&host, &folder, &user);
    let [stage] = stages(&folder, 1).try_into().unwrap();
    rustix::process::kill_process(stage, Signal::KILL).unwrap();

    stages(&folder, 0);
}

#[test]
fn no_user_may_signal_the_stages_that_act_for_it() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("Not looked at: only root can act for others");
        return;
    }
    let mut host = host();
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::chown(folder.path(), Some(1234), Some(1234)).unwrap();

    let stream = begin_write(&host, &folder, "1234:1234");
    let stage = stages(&folder, 1)[0].as_raw_pid();
    let status = fs::read_to_string(format!("/proc/{stage}/status")).unwrap();
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap().split_whitespace().collect::<Vec<_>>()
    };
    let mut spawn = host.spawn("sh", &["-c", &format!("kill -STOP {stage}; id -ru; id -u")]);
    spawn.user = Some("1234:1234".to_owned());
    let running = host.start(&spawn);
    host.next();
    let (out, err) = running.output();
    host.exited(running.id);
    drop(stream);

    // kill(2) goes by the first and the third, what a file's owner may by the others.
    assert_eq!(field("Uid:"), ["0", "1234", "0", "1234"]);
    assert_eq!(field("Gid:"), ["1234"; 4]);
    assert_eq!(field("CapEff:"), ["0000000000000000"]);
    assert!(err.contains("not permitted"), "{err}");
    assert_eq!(out, "1234\n1234\n", "a program is the user wholly");
}
