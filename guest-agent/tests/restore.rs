//! The agent's loop while its machine is saved and after it was restored, on this host's sockets; a folder and this test
//! play the kernel's freezer. One test, since a loop reaps all children of its process.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests fail as tests do"
)]

use std::fs;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use protocol::VERSION;
use protocol::frame::{self, FrameError, MAX_FROM_AGENT_BYTES, MAX_TO_AGENT_BYTES};
use protocol::message::{
    Configure, ExitStatus, Exited, FromAgent, Resume, Spawn, Stdio, StreamHeader, StreamKind,
    ToAgent,
};
use sandvmm_guest_agent::agent::{Agent, Setup};
use sandvmm_guest_agent::calls::Place;
use sandvmm_guest_agent::cgroup::Workload;

/// Longest wait for any answer.
const PATIENCE: Duration = Duration::from_secs(20);
/// Long enough for an answer that must not come.
const MOMENT: Duration = Duration::from_millis(100);

/// Where the agent dials anew.
static CONTROL_ADDRESS: OnceLock<PathBuf> = OnceLock::new();
/// The freezer's state, and what the agent was to become, when it became it.
static RENEWED: Mutex<Vec<(String, Resume)>> = Mutex::new(Vec::new());

fn freezer(name: &str) -> PathBuf {
    let folder = CONTROL_ADDRESS.get().unwrap().parent().unwrap();
    folder.join("workload").join(name)
}

fn redial() -> io::Result<OwnedFd> {
    Ok(UnixStream::connect(CONTROL_ADDRESS.get().unwrap())?.into())
}

struct Host {
    control: UnixStream,
    redials: UnixListener,
    streams: PathBuf,
}

impl Host {
    fn boot(folder: &Path) -> Self {
        CONTROL_ADDRESS.set(folder.join("control")).unwrap();
        let redials = UnixListener::bind(CONTROL_ADDRESS.get().unwrap()).unwrap();
        let streams = folder.join("streams");
        let listener = UnixListener::bind(&streams).unwrap();
        listener.set_nonblocking(true).unwrap();
        let (control, agent) = UnixStream::pair().unwrap();
        let setup = Setup {
            control: agent.into(),
            listener: listener.into(),
            workload: Workload::create(folder, 256 << 20).unwrap(),
            stage_program: env!("CARGO_BIN_EXE_sandvmm-guest-agent").to_owned(),
            warm_folder: folder.join("warm"),
            calls_place: Place {
                folder: folder.join("calls"),
                image: folder.join("image"),
            },
            configure: |_| Ok(()),
            prepare_renewal: || {
                // Not when somebody waits for the machine that was restored.
                fs::write(freezer("../prepared"), "").unwrap();
            },
            renew: |resume| {
                assert!(freezer("../prepared").exists());
                let state = fs::read_to_string(freezer("cgroup.freeze")).unwrap();
                RENEWED.lock().unwrap().push((state, resume.clone()));
                Ok(())
            },
            workspace: None,
            redial,
        };
        thread::spawn(move || Agent::new(setup).unwrap().run());
        control.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut host = Self {
            control,
            redials,
            streams,
        };
        host.send(&ToAgent::Configure(Configure {
            realtime_ns: 0,
            entropy: [0; 32],
            hostname: "box".into(),
            max_processes: None,
        }));
        host
    }

    fn send(&mut self, message: &ToAgent) {
        frame::write(&mut self.control, message, MAX_TO_AGENT_BYTES).unwrap();
    }

    fn next(&mut self) -> FromAgent {
        frame::read(&mut self.control, MAX_FROM_AGENT_BYTES).unwrap()
    }

    fn says_nothing(&mut self) {
        self.control.set_read_timeout(Some(MOMENT)).unwrap();
        let read = frame::read::<FromAgent>(&mut self.control, MAX_FROM_AGENT_BYTES);
        let blocked = matches!(&read, Err(FrameError::Stream(error)) if error.kind() == io::ErrorKind::WouldBlock);
        assert!(blocked, "{read:?}");
        self.control.set_read_timeout(Some(PATIENCE)).unwrap();
    }

    /// Asks for a command with its streams, and returns those.
    fn sh(&mut self, command_id: u32, script: &str) -> [UnixStream; 2] {
        let streams = [StreamKind::Stdout, StreamKind::Stderr].map(|kind| {
            let mut stream = UnixStream::connect(&self.streams).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            let header = StreamHeader { command_id, kind };
            frame::write(&mut stream, &header, MAX_TO_AGENT_BYTES).unwrap();
            stream
        });
        let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
        self.send(&ToAgent::Spawn(Spawn {
            command_id,
            program: b"/bin/sh".to_vec(),
            args: vec![b"-c".to_vec(), script.as_bytes().to_vec()],
            env: Vec::new(),
            env_clear: false,
            env_remove: Vec::new(),
            cwd: Some(b"/".to_vec()),
            user: Some(format!("{}:{}", uid.as_raw(), gid.as_raw())),
            stdio: Stdio::Pipes { stdin: false },
            file: None,
        }));
        streams
    }

    fn freeze(&mut self, close_streams: bool) {
        fs::write(freezer("cgroup.events"), "populated 1\nfrozen 0\n").unwrap();
        self.send(&ToAgent::Freeze { close_streams });
        let deadline = Instant::now() + PATIENCE;
        while fs::read_to_string(freezer("cgroup.freeze")).unwrap_or_default() != "1" {
            assert!(Instant::now() < deadline);
            thread::sleep(Duration::from_millis(1));
        }
        self.says_nothing();
        fs::write(freezer("cgroup.events"), "populated 1\nfrozen 1\n").unwrap();
        assert_eq!(self.next(), FromAgent::Frozen);
    }

    /// The machine is another one: its streams are broken, and the agent dials.
    fn restore(&mut self) {
        self.control.shutdown(std::net::Shutdown::Both).unwrap();
        let (control, _) = self.redials.accept().unwrap();
        control.set_read_timeout(Some(PATIENCE)).unwrap();
        self.control = control;
        match self.next() {
            FromAgent::Restored(restored) => {
                assert_eq!(restored.version, VERSION);
                assert!(restored.noticed_ns <= restored.sent_ns && restored.noticed_ns > 0);
            }
            other => panic!("{other:?}"),
        }
    }

    fn exited(&mut self, id: u32) -> ExitStatus {
        match self.next() {
            FromAgent::Exited(Exited {
                command_id, status, ..
            }) if command_id == id => status,
            other => panic!("{other:?}"),
        }
    }
}

fn spawned(command_id: u32) -> FromAgent {
    let warm = false;
    FromAgent::Spawned { command_id, warm }
}

fn read_all(mut stream: &UnixStream) -> String {
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

fn resume(realtime_ns: u64) -> Resume {
    Resume {
        realtime_ns,
        entropy: [1; 32],
        hostname: "fork".to_owned(),
        machine_id: [2; 16],
        boot_id: [3; 16],
        max_processes: Some(50),
    }
}

#[test]
fn a_machine_is_saved_goes_on_and_is_restored_twice() {
    let folder = tempfile::tempdir().unwrap();
    let mut host = Host::boot(folder.path());
    let until = |name: &str| {
        let path = folder.path().join(name);
        let path = path.display();
        format!("n=0; until [ -e {path} ] || [ $n = 2000 ]; do n=$((n+1)); sleep 0.01; done")
    };
    let set = |name: &str| fs::write(folder.path().join(name), "").unwrap();
    let pids_max = || fs::read_to_string(freezer("pids.max")).unwrap();

    // A machine that is saved and goes on keeps its streams, and starts late what was asked for meanwhile.
    let talker = host.sh(1, &format!("{}; echo word", until("talk")));
    assert_eq!(host.next(), spawned(1));
    host.freeze(false);
    let late = host.sh(2, "echo late");
    host.says_nothing();
    host.send(&ToAgent::Thaw);
    assert_eq!(host.next(), FromAgent::Thawed);
    assert_eq!(host.next(), spawned(2));
    assert_eq!(host.exited(2), ExitStatus::Code(0));
    assert_eq!(read_all(&late[0]), "late\n");
    assert_eq!(fs::read_to_string(freezer("cgroup.freeze")).unwrap(), "0");
    set("talk");
    assert_eq!(host.exited(1), ExitStatus::Code(0));
    assert_eq!(read_all(&talker[0]), "word\n");

    // A restored machine closes them; what ran runs on, and nobody is told of its end.
    let left = host.sh(3, &format!("trap '' PIPE; {}", until("leave")));
    assert_eq!(host.next(), spawned(3));
    host.freeze(false);
    let restored = std::time::Instant::now();
    host.restore();
    assert_eq!(read_all(&left[0]), "");
    assert_eq!(read_all(&left[1]), "");

    // Before it is told what is new, nothing starts or goes on.
    assert_ne!(pids_max(), "50");
    let early = host.sh(3, "echo early");
    host.says_nothing();
    assert_eq!(fs::read_to_string(freezer("cgroup.freeze")).unwrap(), "1");
    assert_eq!(RENEWED.lock().unwrap().len(), 0);
    host.send(&ToAgent::Resume(resume(7)));
    assert_eq!(host.next(), FromAgent::Resumed);
    assert_eq!(host.next(), spawned(3));
    assert_eq!(read_all(&early[0]), "early\n");
    assert_eq!(host.exited(3), ExitStatus::Code(0));
    let [(freezer_state, renewed)] = &RENEWED.lock().unwrap().clone()[..] else {
        panic!("not once");
    };
    assert_eq!(
        freezer_state, "1",
        "all was frozen while the machine became another one"
    );
    // The clock, and half of the time that the answer took.
    let took_ns = u64::try_from(restored.elapsed().as_nanos()).unwrap();
    assert!((8..7 + took_ns / 2).contains(&renewed.realtime_ns));
    let as_sent = Resume {
        realtime_ns: 7,
        ..renewed.clone()
    };
    assert_eq!(as_sent, resume(7));
    assert_eq!(fs::read_to_string(freezer("cgroup.freeze")).unwrap(), "0");
    assert_eq!(pids_max(), "50");
    let cgroups = || ["0-3", "1-3"].map(|name| freezer(name).exists());
    assert!(cgroups()[0], "the former machine's command has its own");
    set("leave");
    host.says_nothing();

    // A template's streams are closed before it is saved, and a second restore is as the first.
    let closed = host.sh(4, "exec sleep 20");
    assert_eq!(host.next(), spawned(4));
    host.freeze(true);
    assert_eq!(read_all(&closed[0]), "");
    host.restore();
    host.send(&ToAgent::Resume(resume(8)));
    assert_eq!(host.next(), FromAgent::Resumed);
    assert_eq!(RENEWED.lock().unwrap().len(), 2);
    let again = host.sh(4, "echo again");
    assert_eq!(host.next(), spawned(4));
    assert_eq!(read_all(&again[0]), "again\n");
    assert_eq!(host.exited(4), ExitStatus::Code(0));

    // What can't be frozen goes on.
    fs::remove_file(freezer("cgroup.freeze")).unwrap();
    fs::create_dir(freezer("cgroup.freeze")).unwrap();
    host.send(&ToAgent::Freeze {
        close_streams: true,
    });
    match host.next() {
        FromAgent::FreezeFailed { message } => {
            assert!(message.contains("can't be frozen"), "{message}");
        }
        other => panic!("{other:?}"),
    }
    let still = host.sh(5, "echo still");
    assert_eq!(host.next(), spawned(5));
    assert_eq!(read_all(&still[0]), "still\n");
}
