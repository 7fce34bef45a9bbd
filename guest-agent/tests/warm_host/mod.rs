//! An agent with real stages on this host's sockets, for runs of python3; and what can be seen of a run.

use std::fs;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use protocol::frame::{self, MAX_FROM_AGENT_BYTES, MAX_TO_AGENT_BYTES};
use protocol::message::{
    Configure, ExitStatus, Exited, FromAgent, NewFile, Spawn, Stdio, StreamHeader, StreamKind,
    ToAgent,
};
use rustix::process::{Pid, Signal};
use sandvmm_guest_agent::agent::{Agent, Setup};
use sandvmm_guest_agent::calls::Place;
use sandvmm_guest_agent::cgroup::Workload;

/// Longest wait for anything.
const PATIENCE: Duration = Duration::from_secs(30);
/// From a spare's birth until the agent surely knows of it.
const NEWS: Duration = Duration::from_millis(30);
/// The versions of `guest-agent/src/warm/server.py`.
const KNOWN_VERSIONS: [&str; 1] = ["Python 3.11."];

/// A run of python3.
#[derive(Debug, Clone)]
pub(crate) struct Run {
    args: Vec<String>,
    files: Vec<(String, String)>,
    env: Vec<(String, String)>,
    input: Option<Vec<u8>>,
    folder: Option<String>,
    stdio: Option<Stdio>,
    sent: Option<(String, String)>,
}

impl Run {
    pub(crate) fn new(args: &[&str]) -> Self {
        Self {
            args: args.iter().map(|&argument| argument.to_owned()).collect(),
            files: Vec::new(),
            env: Vec::new(),
            input: None,
            folder: None,
            stdio: None,
            sent: None,
        }
    }

    /// A file that comes with the request.
    pub(crate) fn sent(mut self, name: &str, text: &str) -> Self {
        self.sent = Some((name.to_owned(), text.to_owned()));
        self
    }

    /// A file in its working folder; one that looks Latin is written in that encoding.
    pub(crate) fn file(mut self, name: &str, text: &str) -> Self {
        self.files.push((name.to_owned(), text.to_owned()));
        self
    }

    pub(crate) fn env(mut self, name: &str, value: &str) -> Self {
        self.env.push((name.to_owned(), value.to_owned()));
        self
    }

    pub(crate) fn input(mut self, input: &[u8]) -> Self {
        self.input = Some(input.to_vec());
        self
    }

    pub(crate) fn folder(mut self, folder: &str) -> Self {
        self.folder = Some(folder.to_owned());
        self
    }

    pub(crate) fn stdio(mut self, stdio: Stdio) -> Self {
        self.stdio = Some(stdio);
        self
    }
}

/// What can be seen of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) out: String,
    pub(crate) err: String,
    pub(crate) status: ExitStatus,
    pub(crate) warm: bool,
    /// Names and contents of the files that it left in its working folder.
    pub(crate) files: Vec<(String, String)>,
}

impl Seen {
    /// Whether it is the same but for addresses, and for having been forked.
    pub(crate) fn looks_like(&self, other: &Self) -> bool {
        self.status == other.status
            && without_addresses(&self.out) == without_addresses(&other.out)
            && without_addresses(&self.err) == without_addresses(&other.err)
            && self.files == other.files
    }
}

/// Addresses of objects and numbers of processes and threads are those of another process.
fn without_addresses(text: &str) -> String {
    let mut kept = String::new();
    let mut pieces = text.split("0x");
    kept.push_str(pieces.next().unwrap());
    for piece in pieces {
        kept.push_str("0x");
        kept.push_str(piece.trim_start_matches(|c: char| c.is_ascii_hexdigit()));
    }
    kept
}

pub(crate) struct Host {
    control: UnixStream,
    folder: PathBuf,
    next_id: u32,
    _keep: tempfile::TempDir,
}

pub(crate) struct Running {
    pub(crate) id: u32,
    streams: Vec<UnixStream>,
    warm: bool,
}

impl Running {
    pub(crate) fn line(&self) -> String {
        let mut line = String::new();
        let mut reader = BufReader::with_capacity(1, &self.streams[0]);
        reader.read_line(&mut line).unwrap();
        line
    }
}

impl Host {
    /// The agent reaps all children of its process, so that there is one for all tests; each begins without a warm
    /// interpreter.
    pub(crate) fn boot() -> Option<MutexGuard<'static, Self>> {
        static HOST: OnceLock<Mutex<Host>> = OnceLock::new();
        let version = Command::new("/usr/bin/python3").arg("--version").output();
        let version = String::from_utf8(version.ok()?.stdout).unwrap();
        if !KNOWN_VERSIONS
            .iter()
            .any(|known| version.starts_with(known))
        {
            return None;
        }
        let host = HOST
            .get_or_init(|| Mutex::new(Self::new()))
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        host.kill_server();
        Some(host)
    }

    fn new() -> Self {
        // Orphans come to this process, as they do to PID 1.
        rustix::process::set_child_subreaper(Some(rustix::process::getpid())).unwrap();
        let keep = tempfile::tempdir().unwrap();
        let folder = keep.path().to_owned();
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
        let listener = UnixListener::bind(folder.join("streams")).unwrap();
        listener.set_nonblocking(true).unwrap();
        let (control, agent) = UnixStream::pair().unwrap();
        let setup = Setup {
            control: agent.into(),
            listener: listener.into(),
            workload: Workload::create(&folder, 256 << 20).unwrap(),
            stage_program: env!("CARGO_BIN_EXE_sandvmm-guest-agent").to_owned(),
            warm_folder: folder.join("warm"),
            calls_place: Place {
                folder: folder.join("calls"),
                image: folder.join("image"),
            },
            configure: |_| Ok(()),
            prepare_renewal: || {},
            renew: |_| Ok(()),
            workspace: None,
            redial: || Err(ErrorKind::Unsupported.into()),
        };
        thread::spawn(move || Agent::new(setup).unwrap().run());
        control.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut host = Self {
            control,
            folder,
            next_id: 1,
            _keep: keep,
        };
        host.send(&ToAgent::Configure(Configure {
            realtime_ns: 0,
            entropy: [0; 32],
            hostname: "box".into(),
            max_processes: None,
        }));
        host
    }

    pub(crate) fn send(&mut self, message: &ToAgent) {
        frame::write(&mut self.control, message, MAX_TO_AGENT_BYTES).unwrap();
    }

    fn next(&mut self) -> FromAgent {
        frame::read(&mut self.control, MAX_FROM_AGENT_BYTES).unwrap()
    }

    /// The run's request and its streams; its working folder holds its files and nothing else.
    fn prepare(&mut self, run: &Run) -> (Spawn, Vec<UnixStream>) {
        let work = self.folder.join("work");
        let _ = fs::remove_dir_all(&work);
        fs::create_dir(&work).unwrap();
        for (name, text) in &run.files {
            let path = work.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, encoded(text)).unwrap();
        }
        fs::create_dir_all(work.join("sub")).unwrap();
        self.next_id += 1;
        let stdin = run.input.is_some();
        let stdio = run.stdio.unwrap_or(Stdio::Pipes { stdin });
        let bytes = |text: &String| text.clone().into_bytes();
        // The user's home is not the tests' to write to: a whole path is taken as it is.
        let file = run.sent.as_ref().map(|(name, text)| NewFile {
            path: work.join(name).into_os_string().into_encoded_bytes(),
            mode: 0o741,
            content: text.clone().into_bytes(),
        });
        let folder = run.folder.clone().map_or(work, PathBuf::from);
        let spawn = Spawn {
            command_id: self.next_id,
            program: b"python3".to_vec(),
            args: run.args.iter().map(bytes).collect(),
            env: run
                .env
                .iter()
                .map(|(name, value)| (bytes(name), bytes(value)))
                .collect(),
            env_clear: false,
            env_remove: Vec::new(),
            cwd: Some(folder.into_os_string().into_encoded_bytes()),
            user: Some(own_user()),
            stdio,
            file,
        };
        let kinds = match stdio {
            Stdio::Terminal(_) => vec![StreamKind::Terminal],
            _ if stdin => vec![StreamKind::Stdout, StreamKind::Stderr, StreamKind::Stdin],
            _ => vec![StreamKind::Stdout, StreamKind::Stderr],
        };
        let streams = kinds.into_iter().map(|kind| self.dial(kind)).collect();
        (spawn, streams)
    }

    fn dial(&self, kind: StreamKind) -> UnixStream {
        let mut stream = UnixStream::connect(self.folder.join("streams")).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let header = StreamHeader {
            command_id: self.next_id,
            kind,
        };
        frame::write(&mut stream, &header, MAX_TO_AGENT_BYTES).unwrap();
        stream
    }

    fn spawned(&mut self, streams: Vec<UnixStream>) -> Result<Running, FromAgent> {
        match self.next() {
            FromAgent::Spawned { command_id, warm } if command_id == self.next_id => Ok(Running {
                id: command_id,
                streams,
                warm,
            }),
            other => Err(other),
        }
    }

    pub(crate) fn start(&mut self, run: &Run) -> Running {
        let (spawn, streams) = self.prepare(run);
        self.send(&ToAgent::Spawn(spawn));
        self.spawned(streams).unwrap()
    }

    /// Runs it to its end; one that can't be started is seen as the sentence that says why.
    pub(crate) fn run(&mut self, run: &Run) -> Seen {
        let (spawn, streams) = self.prepare(run);
        self.send(&ToAgent::Spawn(spawn));
        let running = match self.spawned(streams) {
            Ok(running) => running,
            Err(refused) => {
                return Seen {
                    out: String::new(),
                    err: format!("{refused:?}").replace(&self.next_id.to_string(), "N"),
                    status: ExitStatus::Code(-1),
                    warm: false,
                    files: Vec::new(),
                };
            }
        };
        if let Some(input) = &run.input {
            let mut stream = running.streams.last().unwrap();
            // A run that reads nothing closes its end.
            let _ = stream.write_all(input);
            let _ = stream.shutdown(Shutdown::Write);
        }
        self.finish(&running)
    }

    /// Runs it when there is a process in reserve. On a busy host the agent may not know of that one yet: then again.
    pub(crate) fn fork(&mut self, run: &Run) -> Seen {
        let deadline = Instant::now() + PATIENCE;
        loop {
            self.wait_for_spare();
            let seen = self.run(run);
            if seen.warm || Instant::now() > deadline {
                return seen;
            }
        }
    }

    pub(crate) fn finish(&mut self, running: &Running) -> Seen {
        let [out, err] = [0, 1].map(|place| {
            let mut bytes = Vec::new();
            if let Some(mut stream) = running.streams.get(place) {
                // The agent closes a stream on which it never read the host's bytes.
                let _ = stream.read_to_end(&mut bytes);
            }
            String::from_utf8_lossy(&bytes).into_owned()
        });
        let status = match self.next() {
            FromAgent::Exited(Exited {
                command_id, status, ..
            }) if command_id == running.id => status,
            other => panic!("{other:?}"),
        };
        Seen {
            out,
            err,
            status,
            warm: running.warm,
            files: files_of(&self.folder.join("work")),
        }
    }

    pub(crate) fn try_warm_up(&mut self, code: &str) -> Seen {
        let (spawn, streams) = self.prepare(&Run::new(&["-c", code]));
        self.send(&ToAgent::WarmUp(spawn));
        let running = self.spawned(streams).unwrap();
        self.finish(&running)
    }

    pub(crate) fn warm_up(&mut self, code: &str) {
        let seen = self.try_warm_up(code);
        assert_eq!(seen.status, ExitStatus::Code(0), "{seen:?}");
    }

    pub(crate) fn refused_warm_up(&mut self) -> FromAgent {
        let (spawn, _streams) = self.prepare(&Run::new(&["-c", "pass"]));
        self.send(&ToAgent::WarmUp(spawn));
        self.next()
    }

    /// The server, and the process that it has in reserve: the oldest and the newest that run its program.
    fn warm_processes(&self) -> Vec<Pid> {
        let program = self.folder.join("warm/warm.py").into_os_string();
        let mut found: Vec<(u64, Pid)> = fs::read_dir("/proc")
            .unwrap()
            .filter_map(|entry| {
                let path = entry.unwrap().path();
                let cmdline = fs::read(path.join("cmdline")).ok()?;
                let mut arguments = cmdline.split(|byte| *byte == 0);
                if arguments.nth(1)? != program.as_encoded_bytes() {
                    return None;
                }
                let stat = fs::read_to_string(path.join("stat")).ok()?;
                // proc_pid_stat(5), behind the name: state, parent, group, session, …, start time.
                let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split(' ').collect();
                let pid: i32 = path.file_name()?.to_str()?.parse().ok()?;
                let leads = fields[3].parse() == Ok(pid) && fields[0] != "Z";
                let is_ours = fields[1].parse() == Ok(std::process::id());
                let place = (fields[19].parse().unwrap(), Pid::from_raw(pid)?);
                (leads && is_ours).then_some(place)
            })
            .collect();
        found.sort_by_key(|(started, pid)| (*started, pid.as_raw_pid()));
        found.into_iter().map(|(_, pid)| pid).collect()
    }

    fn wait(&self, wanted: impl Fn(&[Pid]) -> bool) -> Vec<Pid> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let found = self.warm_processes();
            if wanted(&found) {
                return found;
            }
            assert!(Instant::now() < deadline, "{found:?}");
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits until the agent has a process in reserve.
    pub(crate) fn wait_for_spare(&self) {
        self.wait(|found| found.len() == 2);
        thread::sleep(NEWS);
    }

    pub(crate) fn kill_spare(&self) {
        self.signal_spare(Signal::KILL);
    }

    pub(crate) fn signal_spare(&self, signal: Signal) {
        let found = self.wait(|found| found.len() == 2);
        rustix::process::kill_process(found[1], signal).unwrap();
    }

    /// Kills the server, and its process in reserve.
    pub(crate) fn kill_server(&self) {
        for pid in self.warm_processes() {
            let _ = rustix::process::kill_process(pid, Signal::KILL);
        }
        self.wait(<[Pid]>::is_empty);
        thread::sleep(NEWS);
    }
}

fn own_user() -> String {
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    format!("{}:{}", uid.as_raw(), gid.as_raw())
}

fn encoded(text: &str) -> Vec<u8> {
    if text.contains("latin-1") {
        return text
            .chars()
            .map(|c| u8::try_from(u32::from(c)).unwrap())
            .collect();
    }
    text.as_bytes().to_vec()
}

/// Files that a run has made, without the compiled ones.
fn files_of(folder: &Path) -> Vec<(String, String)> {
    let mut files: Vec<(String, String)> = fs::read_dir(folder)
        .unwrap()
        .filter_map(|entry| {
            let path = entry.unwrap().path();
            let content = fs::read(&path).ok()?;
            let name = path.file_name()?.to_string_lossy().into_owned();
            Some((name, String::from_utf8_lossy(&content).into_owned()))
        })
        .collect();
    files.sort();
    files
}
