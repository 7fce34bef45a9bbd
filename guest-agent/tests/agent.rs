//! The agent's whole loop with real stages and programs, on this host's sockets instead of vsock, and on plain
//! folders instead of cgroups. It needs no rights: commands run as the tests' own user.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests fail as tests do"
)]

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use protocol::call::{Answer, FromBridge, MAX_FRAME_BYTES};
use protocol::file::{FileAnswer, FileOperation, FileRequest};
use protocol::frame::{self, MAX_FROM_AGENT_BYTES, MAX_TO_AGENT_BYTES};
use protocol::message::{
    Configure, ExitStatus, Exited, FromAgent, Spawn, SpawnFailure, Stdio, StreamHeader, StreamKind,
    TerminalSize, ToAgent,
};
use sandvmm_guest_agent::agent::{Agent, Setup};
use sandvmm_guest_agent::calls::Place;
use sandvmm_guest_agent::cgroup::Workload;

/// Longest wait for any answer.
const PATIENCE: Duration = Duration::from_secs(20);

/// The host's side. The loop reaps all children of its process, so that there is one for all tests.
struct Host {
    control: UnixStream,
    address: PathBuf,
    next_id: u32,
    _folder: tempfile::TempDir,
}

fn host() -> MutexGuard<'static, Host> {
    static HOST: OnceLock<Mutex<Host>> = OnceLock::new();
    HOST.get_or_init(|| Mutex::new(Host::boot()))
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
}

impl Host {
    fn boot() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let address = folder.path().join("streams");
        let listener = UnixListener::bind(&address).unwrap();
        listener.set_nonblocking(true).unwrap();
        let (mut control, agent) = UnixStream::pair().unwrap();
        let setup = Setup {
            control: agent.into(),
            listener: listener.into(),
            workload: Workload::create(folder.path(), 256 << 20).unwrap(),
            stage_program: env!("CARGO_BIN_EXE_sandvmm-guest-agent").to_owned(),
            warm_folder: folder.path().join("warm"),
            calls_place: Place {
                folder: folder.path().join("calls"),
                image: folder.path().join("image"),
            },
            configure: |_| Ok(()),
            renew: |_| Ok(()),
            settle: || {},
            redial: || Err(ErrorKind::Unsupported.into()),
        };
        thread::spawn(move || Agent::new(setup).unwrap().run());
        control.set_read_timeout(Some(PATIENCE)).unwrap();
        let configure = Configure {
            realtime_ns: 0,
            entropy: [0; 32],
            hostname: "box".into(),
        };
        frame::write(
            &mut control,
            &ToAgent::Configure(configure),
            MAX_TO_AGENT_BYTES,
        )
        .unwrap();
        Self {
            control,
            address,
            next_id: 1,
            _folder: folder,
        }
    }

    fn send(&mut self, message: &ToAgent) {
        frame::write(&mut self.control, message, MAX_TO_AGENT_BYTES).unwrap();
    }

    fn next(&mut self) -> FromAgent {
        frame::read(&mut self.control, MAX_FROM_AGENT_BYTES).unwrap()
    }

    fn dial(&self, command_id: u32, kind: StreamKind) -> UnixStream {
        let mut stream = UnixStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        frame::write(
            &mut stream,
            &StreamHeader { command_id, kind },
            MAX_TO_AGENT_BYTES,
        )
        .unwrap();
        stream
    }

    fn spawn(&mut self, program: &str, args: &[&str]) -> Spawn {
        self.next_id += 1;
        let (uid, gid) = (
            rustix::process::geteuid().as_raw(),
            rustix::process::getegid().as_raw(),
        );
        Spawn {
            command_id: self.next_id,
            program: program.into(),
            args: args
                .iter()
                .map(|argument| argument.as_bytes().to_vec())
                .collect(),
            env: vec![(b"PATH".to_vec(), b"/usr/bin:/bin".to_vec())],
            cwd: Some(b"/".to_vec()),
            user: Some(format!("{uid}:{gid}")),
            stdio: Stdio::Pipes { stdin: false },
            file: None,
        }
    }

    fn start(&mut self, spawn: &Spawn) -> Running {
        let id = spawn.command_id;
        let terminal = matches!(spawn.stdio, Stdio::Terminal(_));
        let dial = |wanted: bool, kind| wanted.then(|| self.dial(id, kind));
        let running = Running {
            id,
            stdin: dial(
                spawn.stdio == Stdio::Pipes { stdin: true },
                StreamKind::Stdin,
            ),
            stdout: dial(!terminal, StreamKind::Stdout),
            stderr: dial(!terminal, StreamKind::Stderr),
            terminal: dial(terminal, StreamKind::Terminal),
        };
        self.send(&ToAgent::Spawn(spawn.clone()));
        running
    }

    fn start_sh(&mut self, script: &str) -> Running {
        let spawn = self.spawn("sh", &["-c", script]);
        let running = self.start(&spawn);
        assert_eq!(
            self.next(),
            FromAgent::Spawned {
                command_id: running.id,
                warm: false,
            }
        );
        running
    }

    fn exited(&mut self, id: u32) -> ExitStatus {
        match self.next() {
            FromAgent::Exited(Exited {
                command_id, status, ..
            }) if command_id == id => status,
            other => panic!("Exited of {id} was expected, not {other:?}"),
        }
    }

    /// Runs `sh -c script` to its end.
    fn sh(&mut self, script: &str) -> (ExitStatus, String, String) {
        let running = self.start_sh(script);
        let (out, err) = running.output();
        (self.exited(running.id), out, err)
    }

    fn failure(&mut self, spawn: &Spawn) -> (SpawnFailure, String) {
        let running = self.start(spawn);
        match self.next() {
            FromAgent::SpawnFailed {
                command_id,
                kind,
                message,
            } if command_id == running.id => {
                running.output();
                (kind, message)
            }
            other => panic!("SpawnFailed was expected, not {other:?}"),
        }
    }
}

struct Running {
    id: u32,
    stdin: Option<UnixStream>,
    stdout: Option<UnixStream>,
    stderr: Option<UnixStream>,
    terminal: Option<UnixStream>,
}

impl Running {
    fn output(&self) -> (String, String) {
        (
            read_all(self.stdout.as_ref()),
            read_all(self.stderr.as_ref()),
        )
    }
}

fn read_all(stream: Option<&UnixStream>) -> String {
    let mut bytes = Vec::new();
    match stream.unwrap().read_to_end(&mut bytes) {
        // The agent closes a stream on which it never read the host's bytes.
        Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
        result => drop(result.unwrap()),
    }
    String::from_utf8(bytes).unwrap()
}

fn script(folder: &Path, name: &str, mode: u32, content: &str) -> String {
    let path = folder.join(name);
    fs::write(&path, content).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    path.to_str().unwrap().to_owned()
}

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
fn streams_may_come_after_the_request() {
    let mut host = host();
    let spawn = host.spawn("echo", &["hi"]);

    host.send(&ToAgent::Spawn(spawn.clone()));
    thread::sleep(Duration::from_millis(20));
    let stdout = host.dial(spawn.command_id, StreamKind::Stdout);
    let _stderr = host.dial(spawn.command_id, StreamKind::Stderr);

    assert_eq!(
        host.next(),
        FromAgent::Spawned {
            command_id: spawn.command_id,
            warm: false,
        }
    );
    assert_eq!(read_all(Some(&stdout)), "hi\n");
    assert_eq!(host.exited(spawn.command_id), ExitStatus::Code(0));
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

#[test]
fn standard_streams_can_be_opened_by_name() {
    let mut host = host();

    let (status, out, err) = host.sh("echo one > /dev/stdout; echo two > /dev/stderr");

    assert_eq!(
        (status, out.as_str(), err.as_str()),
        (ExitStatus::Code(0), "one\n", "two\n")
    );
}

#[test]
fn input_arrives_and_ends_and_its_reader_may_leave() {
    let mut host = host();
    let mut spawn = host.spawn("wc", &["-c"]);
    spawn.stdio = Stdio::Pipes { stdin: true };
    let mut running = host.start(&spawn);
    host.next();
    let mut stdin = running.stdin.take().unwrap();
    stdin.write_all(&vec![b'x'; 5_000_000]).unwrap();
    stdin.shutdown(Shutdown::Write).unwrap();
    assert_eq!(running.output().0, "5000000\n");
    assert_eq!(host.exited(running.id), ExitStatus::Code(0));

    let mut spawn = host.spawn("sh", &["-c", "exec <&-; sleep 0.2; echo alive"]);
    spawn.stdio = Stdio::Pipes { stdin: true };
    let mut running = host.start(&spawn);
    host.next();
    let mut stdin = running.stdin.take().unwrap();
    let broken = (0..10_000).any(|_| stdin.write_all(&[0; 4096]).is_err());
    assert!(
        broken,
        "the host can write for ever to a program that reads no more"
    );
    assert_eq!(running.output().0, "alive\n");
    assert_eq!(host.exited(running.id), ExitStatus::Code(0));
}

#[test]
fn a_host_that_closes_the_output_ends_the_writer_with_sigpipe() {
    let mut host = host();
    let spawn = host.spawn("yes", &[]);
    let mut running = host.start(&spawn);
    host.next();
    let mut some = [0; 4];
    running
        .stdout
        .as_ref()
        .unwrap()
        .read_exact(&mut some)
        .unwrap();

    drop(running.stdout.take());

    assert_eq!(host.exited(running.id), ExitStatus::Signal(13));
}

#[test]
fn the_status_does_not_wait_for_a_slow_reader_and_nothing_is_lost() {
    let mut host = host();
    let running = host.start_sh("head -c 60000 /dev/zero; exit 3");

    assert_eq!(host.exited(running.id), ExitStatus::Code(3));
    thread::sleep(Duration::from_millis(100));

    assert_eq!(running.output().0.len(), 60_000);
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
fn an_escaped_holder_of_the_pipe_does_not_keep_the_stream_open() {
    let mut host = host();
    // The plain folder that stands for a cgroup kills nobody, as if the sleep had escaped from it.
    let started = Instant::now();
    let running = host.start_sh("setsid sleep 15 & echo done");

    assert_eq!(host.exited(running.id), ExitStatus::Code(0));
    assert_eq!(running.output().0, "done\n");
    assert!(started.elapsed() < Duration::from_secs(10));
}

#[test]
fn a_terminal_has_its_size_from_the_start_and_hears_of_a_new_one() {
    let mut host = host();
    let mut spawn = host.spawn(
        "sh",
        &["-c", "stty size; tty; trap 'stty size; exit 5' WINCH; echo ready; while :; do sleep 0.05; done"],
    );
    spawn.stdio = Stdio::Terminal(TerminalSize {
        columns: 101,
        rows: 33,
    });
    let mut running = host.start(&spawn);
    host.next();
    let mut terminal = running.terminal.take().unwrap();
    let mut shown = String::new();
    while !shown.contains("ready") {
        let mut bytes = [0; 256];
        let count = terminal.read(&mut bytes).unwrap();
        assert!(count > 0, "{shown}");
        shown.push_str(std::str::from_utf8(&bytes[..count]).unwrap());
    }
    assert!(shown.starts_with("33 101\r\n/dev/"), "{shown}");

    host.send(&ToAgent::Resize {
        command_id: running.id,
        size: TerminalSize {
            columns: 40,
            rows: 10,
        },
    });

    let status = host.exited(running.id);
    let mut rest = String::new();
    terminal.read_to_string(&mut rest).unwrap();
    assert!(rest.ends_with("10 40\r\n"), "{rest:?}");
    assert_eq!(status, ExitStatus::Code(5));
}

#[test]
fn a_host_that_closes_the_terminal_hangs_up() {
    let mut host = host();
    let mut spawn = host.spawn("sleep", &["100"]);
    spawn.stdio = Stdio::Terminal(TerminalSize {
        columns: 80,
        rows: 24,
    });
    let mut running = host.start(&spawn);
    host.next();

    drop(running.terminal.take());

    assert_eq!(host.exited(running.id), ExitStatus::Signal(1));
}

#[test]
fn files_are_written_and_refused() {
    let mut host = host();
    let folder = tempfile::tempdir().unwrap();
    let spawn = host.spawn("true", &[]);
    let write = |path: &Path, user: Option<String>| {
        let request = FileRequest {
            path: path.as_os_str().as_bytes().to_vec(),
            user,
            operation: FileOperation::Write { mode: 0o640 },
        };
        let mut stream = host.dial(0, StreamKind::File(request));
        let _ = stream.write_all(b"\x07\0\0\0content\0\0\0\0");
        frame::read::<FileAnswer>(&mut stream, MAX_FROM_AGENT_BYTES)
            .unwrap()
            .result
    };

    write(&folder.path().join("a/b"), spawn.user.clone()).unwrap();
    assert_eq!(fs::read(folder.path().join("a/b")).unwrap(), b"content");
    assert!(
        write(&folder.path().join("c"), Some("no-such-user".into()))
            .unwrap_err()
            .message
            .contains("no-such-user")
    );
    write(&folder.path().join("a/b/c"), spawn.user).unwrap_err();
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
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

#[test]
fn calls_are_carried_over_the_newest_stream() {
    let host = host();
    let ready = |host: &Host| {
        let mut stream = host.dial(0, StreamKind::Calls);
        let first: FromBridge = frame::read(&mut stream, MAX_FRAME_BYTES).unwrap();
        assert_eq!(first, FromBridge::Ready);
        stream
    };
    let mut former = ready(&host);
    let mut stream = ready(&host);
    let socket = host.address.parent().unwrap().join("calls/host.sock");

    let mut program = UnixStream::connect(socket).unwrap();
    program.set_read_timeout(Some(PATIENCE)).unwrap();
    program.write_all(b"a call\n").unwrap();
    let call: FromBridge = frame::read(&mut stream, MAX_FRAME_BYTES).unwrap();
    let FromBridge::Call { id, line } = call else {
        panic!("{call:?}");
    };
    let answer = Answer {
        id,
        line: b"an answer".to_vec(),
    };
    frame::write(&mut stream, &answer, MAX_FRAME_BYTES).unwrap();
    let mut heard = [0; 10];
    program.read_exact(&mut heard).unwrap();

    assert_eq!((line.as_slice(), &heard), (&b"a call"[..], b"an answer\n"));
    // The former one's bridge was ended.
    assert_eq!(former.read(&mut [0]).unwrap(), 0);
    drop(stream);
    let mut rest = Vec::new();
    program.read_to_end(&mut rest).unwrap();
    assert_eq!(rest, b"");
}
