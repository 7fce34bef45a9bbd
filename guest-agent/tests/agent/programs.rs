//! How programs start, what they find, how they end, and why one does not start.

use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use protocol::message::{ExitStatus, SpawnFailure, ToAgent};

use crate::host::{MAX_PROCESSES, host};

#[test]
fn a_command_runs_and_its_output_and_status_come_back() {
    let mut host = host();

    let (status, out, err) = host.sh("printf out; printf err >&2; exit 7");

    assert_eq!(
        (status, out.as_str(), err.as_str()),
        (ExitStatus::Code(7), "out", "err")
    );
}

#[test]
fn a_ceiling_of_processes_holds_before_the_first_command_runs() {
    let mut host = host();

    let (status, ..) = host.sh("exit 3");

    assert_eq!(status, ExitStatus::Code(3));
    assert_eq!(host.pids_max(), MAX_PROCESSES.to_string());
}

#[test]
fn a_command_without_variables_is_found_where_programs_are() {
    let mut host = host();
    let mut spawn = host.spawn("env", &[]);
    spawn.env = vec![(b"X".to_vec(), b"1".to_vec())];
    spawn.env_clear = true;
    let running = host.start(&spawn);
    host.next();

    let (out, _) = running.output();
    assert_eq!(host.exited(running.id), ExitStatus::Code(0));

    assert_eq!(out, "X=1\n");
}

#[test]
fn the_environment_is_the_default_and_what_was_asked_for() {
    let mut host = host();
    let mut spawn = host.spawn("env", &[]);
    spawn.env.push((b"X".to_vec(), b"a b\xff".to_vec()));
    let running = host.start(&spawn);
    host.next();

    let mut bytes = Vec::new();
    running
        .stdout
        .as_ref()
        .unwrap()
        .read_to_end(&mut bytes)
        .unwrap();
    host.exited(running.id);

    let lines: Vec<&[u8]> = bytes.split(|byte| *byte == b'\n').collect();
    assert!(lines.contains(&&b"X=a b\xff"[..]));
    assert!(lines.contains(&&b"LANG=C.UTF-8"[..]));
    assert!(lines.contains(&&b"PATH=/usr/bin:/bin"[..]));
    assert!(
        !lines
            .iter()
            .any(|line| line.starts_with(b"TERM=") || line.starts_with(b"CARGO"))
    );
}

/// Descriptors that every child of this process inherits: cargo's, of which the agent knows nothing.
fn inherited_descriptors() -> usize {
    fs::read_dir("/proc/self/fdinfo")
        .unwrap()
        .filter_map(|entry| {
            let entry = entry.unwrap();
            let number: u32 = entry.file_name().to_str()?.parse().ok()?;
            let info = fs::read_to_string(entry.path()).ok()?;
            let flags = info.lines().find_map(|line| line.strip_prefix("flags:"))?;
            let flags = u32::from_str_radix(flags.trim(), 8).ok()?;
            (number > 2 && flags & 0o2_000_000 == 0).then_some(())
        })
        .count()
}

#[test]
fn a_program_starts_with_clean_signals_descriptors_and_limits() {
    let mut host = host();
    let own = fs::read_to_string("/proc/self/status").unwrap();
    let ignored = |status: &str| {
        let mask = status
            .lines()
            .find_map(|line| line.strip_prefix("SigIgn:\t"));
        u64::from_str_radix(mask.unwrap(), 16).unwrap()
    };

    let (_, out, err) = host.sh(
        "ls /proc/self/fd | wc -l; cat /proc/self/oom_score_adj; umask; ulimit -n; \
         ps -o pid=,sid=,pgid= -p $$; echo $$; cat /proc/self/status",
    );

    let mut lines = out.lines();
    // Three, and the one with which ls reads the folder.
    assert_eq!(
        lines.next(),
        Some((4 + inherited_descriptors()).to_string().as_str()),
        "{out}{err}"
    );
    assert_eq!(
        [lines.next(), lines.next(), lines.next()],
        [Some("0"), Some("0022"), Some("1024")]
    );
    let ids: Vec<&str> = lines.next().unwrap().split_whitespace().collect();
    let pid = lines.next().unwrap();
    assert_eq!(ids, [pid, pid, pid]);
    assert!(out.contains("SigBlk:\t0000000000000000\n"), "{out}");
    // SIGPIPE, which Rust programs ignore, is the default again; what this host ignores stays. The C library's
    // posix_spawn leaves its own two signals, 32 and 33, ignored in every child.
    let (sigpipe, internal) = (1 << 12, 0b11 << 31);
    assert_eq!(
        ignored(&out) & !internal,
        ignored(&own) & !internal & !sigpipe
    );
}

fn script(folder: &Path, name: &str, mode: u32, content: &str) -> String {
    let path = folder.join(name);
    fs::write(&path, content).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn test_spawn_of_what_cannot_run_returns_its_kind_and_a_sentence() {
    let mut host = host();
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let plain = script(folder.path(), "plain", 0o644, "#!/bin/sh\n");
    let orphan = script(folder.path(), "orphan", 0o755, "#!/no/such/interpreter\n");
    let text = script(folder.path(), "text", 0o755, "echo hi\n");
    let rows = [
        ("no-such-program", SpawnFailure::NotFound, "no-such-program"),
        (
            "/no/such/program",
            SpawnFailure::NotFound,
            "/no/such/program",
        ),
        (&plain, SpawnFailure::NotExecutable, "plain"),
        (&orphan, SpawnFailure::NotFound, "/no/such/interpreter"),
        (&text, SpawnFailure::NotExecutable, "neither"),
        ("/", SpawnFailure::NotExecutable, "/"),
    ];
    for (program, kind, part) in rows {
        let spawn = host.spawn(program, &[]);
        let (got, message) = host.failure(&spawn);
        assert_eq!(got, kind, "{program}: {message}");
        assert!(message.contains(part), "{program}: {message}");
    }
}

#[test]
fn test_spawn_of_an_impossible_request_returns_invalid() {
    let mut host = host();
    let base = host.spawn("true", &[]);
    let mut requests = vec![base.clone(); 5];
    requests[0].cwd = Some(b"/no/such/folder".to_vec());
    requests[1].user = Some("no-such-user".to_owned());
    requests[2].env.push((b"A=B".to_vec(), Vec::new()));
    requests[3].args.push(b"nul\0byte".to_vec());
    requests[4].args.push(vec![b'x'; 3 << 20]);
    for (index, mut request) in requests.into_iter().enumerate() {
        request.command_id = base.command_id + 1_000_000 + u32::try_from(index).unwrap();
        let (kind, message) = host.failure(&request);
        assert_eq!(kind, SpawnFailure::Invalid, "{index}: {message}");
        assert!(
            index != 0 || message.contains("\"/no/such/folder\""),
            "{message}"
        );
    }
}

#[test]
fn signals_go_to_the_whole_process_group() {
    let mut host = host();
    let running = host.start_sh("sleep 100 & echo ready; wait; echo not reached");
    let mut ready = [0; 6];
    running
        .stdout
        .as_ref()
        .unwrap()
        .read_exact(&mut ready)
        .unwrap();

    host.send(&ToAgent::Signal {
        command_id: running.id,
        signal: 15,
    });

    assert_eq!(host.exited(running.id), ExitStatus::Signal(15));
    // The sleep held the pipe too.
    assert_eq!(running.output().0, "");
}

#[test]
fn a_thousand_orphans_leave_no_zombies() {
    let mut host = host();
    let (status, ..) = host.sh("i=0; while [ $i -lt 1000 ]; do (: &) ; i=$((i+1)); done");
    assert_eq!(status, ExitStatus::Code(0));

    for _ in 0..20 {
        let running = host.start_sh("true");
        assert_eq!(host.exited(running.id), ExitStatus::Code(0));
    }
    let own = std::process::id().to_string();
    let zombies = fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| fs::read_to_string(entry.unwrap().path().join("stat")).ok())
        .filter_map(|stat| {
            let (_, fields) = stat.rsplit_once(") ")?;
            let mut fields = fields.split(' ').map(str::to_owned);
            Some((fields.next()?, fields.next()?))
        })
        .filter(|(state, parent)| state == "Z" && *parent == own)
        .count();
    assert_eq!(zombies, 0);
}
