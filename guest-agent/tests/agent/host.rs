//! The host's side of an agent.

use std::fs;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use protocol::frame::{self, MAX_FROM_AGENT_BYTES, MAX_TO_AGENT_BYTES};
use protocol::message::{
    Configure, ExitStatus, Exited, FromAgent, Spawn, SpawnFailure, Stdio, StreamHeader, StreamKind,
    ToAgent,
};
use sandvmm_guest_agent::agent::{Agent, Setup};
use sandvmm_guest_agent::calls::Place;
use sandvmm_guest_agent::cgroup::Workload;

/// Longest wait for any answer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(40);

/// What the host lets the guest have, fewer than go with its memory.
pub(crate) const MAX_PROCESSES: u32 = 100;

/// While it is there, stages are held.
const HOLD_FILE: &str = "hold";

/// The host's side. The loop reaps all children of its process, so that there is one for all tests.
pub(crate) struct Host {
    control: UnixStream,
    pub(crate) address: PathBuf,
    next_id: u32,
    folder: tempfile::TempDir,
}

pub(crate) fn host() -> MutexGuard<'static, Host> {
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
            stage_program: stage_program(folder.path()),
            warm_folder: folder.path().join("warm"),
            calls_place: Place {
                folder: folder.path().join("calls"),
                image: folder.path().join("image"),
            },
            configure: |_| Ok(()),
            prepare_renewal: || {},
            renew: |_| Ok(()),
            workspace: None,
            redial: || Err(ErrorKind::Unsupported.into()),
        };
        thread::spawn(move || Agent::new(setup).unwrap().run());
        control.set_read_timeout(Some(PATIENCE)).unwrap();
        let configure = Configure {
            realtime_ns: 0,
            entropy: [0; 32],
            hostname: "box".into(),
            max_processes: Some(MAX_PROCESSES),
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
            folder,
        }
    }

    /// The workload's bound on processes.
    pub(crate) fn pids_max(&self) -> String {
        fs::read_to_string(self.folder.path().join("workload/pids.max")).unwrap()
    }

    /// Whether stages from now on stand before their first step, as one does that was stopped.
    pub(crate) fn hold_stages(&self, is_held: bool) {
        let file = self.folder.path().join(HOLD_FILE);
        if is_held {
            fs::write(file, "").unwrap();
        } else {
            fs::remove_file(file).unwrap();
        }
    }

    pub(crate) fn send(&mut self, message: &ToAgent) {
        frame::write(&mut self.control, message, MAX_TO_AGENT_BYTES).unwrap();
    }

    pub(crate) fn next(&mut self) -> FromAgent {
        frame::read(&mut self.control, MAX_FROM_AGENT_BYTES).unwrap()
    }

    pub(crate) fn dial(&self, command_id: u32, kind: StreamKind) -> UnixStream {
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

    pub(crate) fn spawn(&mut self, program: &str, args: &[&str]) -> Spawn {
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
            env_clear: false,
            env_remove: Vec::new(),
            cwd: Some(b"/".to_vec()),
            user: Some(format!("{uid}:{gid}")),
            stdio: Stdio::Pipes { stdin: false },
            file: None,
        }
    }

    pub(crate) fn start(&mut self, spawn: &Spawn) -> Running {
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

    pub(crate) fn start_sh(&mut self, script: &str) -> Running {
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

    pub(crate) fn exited(&mut self, id: u32) -> ExitStatus {
        match self.next() {
            FromAgent::Exited(Exited {
                command_id, status, ..
            }) if command_id == id => status,
            other => panic!("Exited of {id} was expected, not {other:?}"),
        }
    }

    /// Runs `sh -c script` to its end.
    pub(crate) fn sh(&mut self, script: &str) -> (ExitStatus, String, String) {
        let running = self.start_sh(script);
        let (out, err) = running.output();
        (self.exited(running.id), out, err)
    }

    pub(crate) fn failure(&mut self, spawn: &Spawn) -> (SpawnFailure, String) {
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

/// The agent's own program, behind a look whether it is to begin.
fn stage_program(folder: &Path) -> String {
    let program = folder.join("stage");
    let (hold, agent) = (
        folder.join(HOLD_FILE),
        env!("CARGO_BIN_EXE_sandvmm-guest-agent"),
    );
    let script = format!(
        "#!/bin/bash\n[ -e '{}' ] && exec sleep 1000\nexec -a {} '{agent}'\n",
        hold.display(),
        sandvmm_guest_agent::stage::NAME,
    );
    fs::write(&program, script).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    program.into_os_string().into_string().unwrap()
}

pub(crate) struct Running {
    pub(crate) id: u32,
    pub(crate) stdin: Option<UnixStream>,
    pub(crate) stdout: Option<UnixStream>,
    pub(crate) stderr: Option<UnixStream>,
    pub(crate) terminal: Option<UnixStream>,
}

impl Running {
    pub(crate) fn output(&self) -> (String, String) {
        (
            read_all(self.stdout.as_ref()),
            read_all(self.stderr.as_ref()),
        )
    }
}

pub(crate) fn read_all(stream: Option<&UnixStream>) -> String {
    let mut bytes = Vec::new();
    match stream.unwrap().read_to_end(&mut bytes) {
        // The agent closes a stream on which it never read the host's bytes.
        Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
        result => drop(result.unwrap()),
    }
    String::from_utf8(bytes).unwrap()
}
