//! A session's supervisor and its clients, with a machine and an agent that are scripted.

use std::thread::{self, ScopedJoinHandle};

use super::*;
use crate::session::{
    MAX_CLIENTS, MAX_DETACHED, Pace, Session, SessionClaim, SessionEnd, SessionError,
};

/// A folder for sessions.
struct Root(tempfile::TempDir);

impl Root {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> std::path::PathBuf {
        self.0.path().join("own/sessions")
    }

    fn open(&self) -> Result<Session, SessionError> {
        Session::open_below(&self.path(), "dev")
    }

    fn left(&self) -> usize {
        std::fs::read_dir(self.path()).unwrap().count()
    }
}

/// Serves the sandbox as the session `dev` while `client` does what it does; all must be over then.
fn served(
    idle: Option<Duration>,
    client: impl FnOnce(&Root, &Peer, &mut UnixStream, &ScopedJoinHandle<'_, SessionEnd>),
) -> SessionEnd {
    served_at(Pace::default(), idle, client)
}

fn served_at(
    pace: Pace,
    idle: Option<Duration>,
    client: impl FnOnce(&Root, &Peer, &mut UnixStream, &ScopedJoinHandle<'_, SessionEnd>),
) -> SessionEnd {
    let root = Root::new();
    let (sandbox, peer, mut agent) = ready_sandbox(None);
    let claim = SessionClaim::below(&root.path(), "dev").unwrap();
    assert!(matches!(
        root.open().unwrap().commands(),
        Err(SessionError::NotReady { .. })
    ));
    let server = claim.listen(&sandbox, None, idle).unwrap().at_pace(pace);
    let end = thread::scope(|scope| {
        let serving = scope.spawn(|| server.run(&sandbox).unwrap());
        // An expectation that is not met ends the test, too.
        let done = std::panic::catch_unwind(AssertUnwindSafe(|| {
            client(&root, &peer, &mut agent, &serving);
        }));
        if let Err(panic) = done {
            sandbox.end();
            std::panic::resume_unwind(panic);
        }
        serving.join().unwrap()
    });
    assert!(matches!(root.open(), Err(SessionError::Missing { .. })));
    assert_eq!(root.left(), 0);
    end
}

/// The guest starts the next command: its number, and its ends of standard output and error.
fn start(peer: &Peer, agent: &mut UnixStream) -> (u32, UnixStream, UnixStream) {
    let ToAgent::Spawn(spawn) = hear(agent) else {
        panic!("no spawn came");
    };
    let ((stdout, _), (stderr, _)) = (peer.accept(), peer.accept());
    let command_id = spawn.command_id;
    say(
        agent,
        &FromAgent::Spawned {
            command_id,
            warm: false,
        },
    );
    (command_id, stdout, stderr)
}

#[test]
fn a_clients_command_has_its_streams_and_its_status() {
    let end = served(None, |root, peer, agent, _| {
        let session = root.open().unwrap();
        let (child, (id, mut stdout, stderr)) = thread::scope(|scope| {
            let spawning = scope.spawn(|| session.command("program").arg("one").spawn().unwrap());
            let started = start(peer, agent);
            (spawning.join().unwrap(), started)
        });
        let listed = session.commands().unwrap();
        assert_eq!((child.id(), listed.len()), (id, 1));
        assert_eq!(listed[0].words, ["program", "one"]);
        assert!(!listed[0].is_detached);

        child.signal(2).unwrap();
        assert!(matches!(
            hear(agent),
            ToAgent::Signal { command_id, signal: 2 } if command_id == id
        ));
        stdout.write_all(b"out").unwrap();
        say(agent, &exited(id, ExitStatus::Code(3), 0));
        drop((stdout, stderr));

        let mut out = String::new();
        child
            .stdout
            .as_ref()
            .unwrap()
            .read_to_string(&mut out)
            .unwrap();
        let completion = child.wait().unwrap();
        assert_eq!(
            (out.as_str(), completion.outcome),
            ("out", Outcome::Exited(3))
        );
        assert_eq!(child.wait().unwrap().outcome, Outcome::Exited(3));
        eventually_none(&session);
        session.stop().unwrap();
    });
    assert_eq!(end, SessionEnd::Sandbox);
}

fn eventually_logged(session: &Session, wanted: &str) {
    let begun = Instant::now();
    while session.log().unwrap() != wanted.as_bytes() {
        assert!(begun.elapsed() < SOON);
        thread::sleep(Duration::from_millis(5));
    }
}

fn eventually_none(session: &Session) {
    let begun = Instant::now();
    while !session.commands().unwrap().is_empty() {
        assert!(begun.elapsed() < SOON);
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_client_that_leaves_has_its_command_killed_and_the_detached_one_goes_on_into_the_log() {
    served(None, |root, peer, agent, _| {
        let session = root.open().unwrap();
        let (child, first) = thread::scope(|scope| {
            let spawning = scope.spawn(|| session.command("a").spawn().unwrap());
            let started = start(peer, agent);
            (spawning.join().unwrap(), started)
        });
        let (id, mut second) = thread::scope(|scope| {
            let spawning = scope.spawn(|| session.command("b").spawn_detached().unwrap());
            let started = start(peer, agent);
            (spawning.join().unwrap(), started)
        });

        drop(child);

        assert!(matches!(
            hear(agent),
            ToAgent::Kill { command_id } if command_id == first.0
        ));
        say(agent, &exited(first.0, ExitStatus::Signal(9), 0));
        second.1.write_all(b"line\nrest").unwrap();
        eventually_logged(&session, &format!("[{id}] line\n[{id}] rest\n"));
        say(agent, &exited(id, ExitStatus::Code(0), 0));
        drop((first, second));
        eventually_none(&session);
        let log = String::from_utf8(session.log().unwrap()).unwrap();
        assert_eq!(
            log,
            format!("[{id}] line\n[{id}] rest\n[session] Command {id} exited with 0\n")
        );
        session.stop().unwrap();
    });
}

#[test]
fn who_kills_a_command_has_it_out_of_the_list() {
    served(None, |root, peer, agent, _| {
        let session = root.open().unwrap();
        let (id, streams) = thread::scope(|scope| {
            let spawning = scope.spawn(|| session.command("a").spawn_detached().unwrap());
            let (id, stdout, stderr) = start(peer, agent);
            assert_eq!(spawning.join().unwrap(), id);
            (id, (stdout, stderr))
        });

        let listed = thread::scope(|scope| {
            let killing = scope.spawn(|| {
                session.signal(id, None).unwrap();
                session.commands().unwrap()
            });
            assert!(matches!(hear(agent), ToAgent::Kill { .. }));
            // It is not gone before its guest has said so.
            thread::sleep(Duration::from_millis(100));
            assert!(!killing.is_finished());
            say(agent, &exited(id, ExitStatus::Signal(9), 0));
            drop(streams);
            killing.join().unwrap()
        });

        assert!(listed.is_empty(), "{listed:?}");
        session.stop().unwrap();
    });
}

#[test]
fn who_waits_for_a_command_hears_that_the_session_was_stopped() {
    served(None, |root, peer, agent, _| {
        let session = root.open().unwrap();
        let (child, _streams) = thread::scope(|scope| {
            let spawning = scope.spawn(|| session.command("a").spawn().unwrap());
            let started = start(peer, agent);
            (spawning.join().unwrap(), started)
        });

        root.open().unwrap().stop().unwrap();

        assert_eq!(child.wait().unwrap().outcome, Outcome::SandboxEnded);
        assert!(matches!(
            session.commands(),
            Err(SessionError::Connection { .. } | SessionError::Gone)
        ));
    });
}

#[test]
fn idleness_ends_a_session_and_a_command_keeps_it() {
    const IDLE: Duration = Duration::from_millis(300);
    let end = served(Some(IDLE), |root, peer, agent, serving| {
        let session = root.open().unwrap();
        let (child, (id, ..)) = thread::scope(|scope| {
            let spawning = scope.spawn(|| session.command("a").spawn().unwrap());
            let started = start(peer, agent);
            (spawning.join().unwrap(), started)
        });
        thread::sleep(3 * IDLE);
        assert!(!serving.is_finished());
        say(agent, &exited(id, ExitStatus::Code(0), 0));
        child.wait().unwrap();
    });
    assert_eq!(end, SessionEnd::Idle);
}

#[test]
fn a_client_that_says_nothing_keeps_nobody_from_the_end() {
    served(None, |root, _, _, _| {
        let socket = root.path().join("dev/socket");
        let silent = UnixStream::connect(&socket).unwrap();
        let mut nonsense = UnixStream::connect(&socket).unwrap();
        nonsense.write_all(&[0xff; 64]).unwrap();
        let mut answer = [0; 4];
        nonsense.read_exact(&mut answer).unwrap();
        assert_eq!(answer, 3_u32.to_le_bytes(), "the version is told");

        root.open().unwrap().stop().unwrap();

        drop(silent);
    });
}

/// A supervisor that has no patience.
fn hasty() -> Pace {
    Pace {
        look_period: Duration::from_millis(50),
        end_limit: Duration::from_millis(50),
    }
}

#[test]
fn a_guest_that_does_not_tell_the_end_of_what_was_killed_keeps_no_place() {
    const IDLE: Duration = Duration::from_millis(300);
    let end = served_at(hasty(), Some(IDLE), |root, peer, agent, serving| {
        let session = root.open().unwrap();
        let (child, _streams) = thread::scope(|scope| {
            let spawning = scope.spawn(|| session.command("a").spawn().unwrap());
            let started = start(peer, agent);
            (spawning.join().unwrap(), started)
        });
        let (id, mut kept) = thread::scope(|scope| {
            let spawning = scope.spawn(|| session.command("b").spawn_detached().unwrap());
            let started = start(peer, agent);
            (spawning.join().unwrap(), started)
        });
        // What is not killed is waited for.
        thread::sleep(2 * IDLE);
        assert_eq!(session.commands().unwrap().len(), 2);

        drop(child);
        let untold = session.signal(id, None).unwrap_err().to_string();
        assert!(untold.contains("has not told its end"), "{untold}");

        kept.1.write_all(b"line\n").unwrap();
        let begun = Instant::now();
        let mut log = Vec::new();
        while !serving.is_finished() {
            assert!(begun.elapsed() < SOON);
            log = session
                .log()
                .ok()
                .filter(|log| !log.is_empty())
                .unwrap_or(log);
            thread::sleep(Duration::from_millis(5));
        }
        let log = String::from_utf8(log).unwrap();
        let last = format!("[session] Command {id} was killed, and the guest has not told its end");
        assert!(log.contains(&last), "{log}");
    });
    assert_eq!(end, SessionEnd::Idle);
}

#[test]
fn detached_commands_that_are_being_started_count() {
    served(None, |root, _, agent, _| {
        let session = root.open().unwrap();
        thread::scope(|scope| {
            for _ in 0..MAX_DETACHED {
                scope.spawn(|| {
                    let refused = session.command("a").spawn_detached().unwrap_err();
                    assert!(matches!(refused, SessionError::Spawn(_)), "{refused}");
                });
            }
            for _ in 0..MAX_DETACHED {
                assert!(matches!(hear(agent), ToAgent::Spawn(_)));
            }

            let refused = session.command("a").spawn_detached().unwrap_err();

            let said = refused.to_string();
            assert!(said.contains("64 detached commands already"), "{said}");
            root.open().unwrap().stop().unwrap();
        });
    });
}

#[test]
fn a_client_too_many_is_told_so() {
    served(None, |root, _, _, _| {
        let socket = root.path().join("dev/socket");
        let session = root.open().unwrap();
        let silent: Vec<_> = (0..MAX_CLIENTS)
            .map(|_| UnixStream::connect(&socket).unwrap())
            .collect();

        // Also one that has not said all of it when it is sent away.
        for bytes in [0, 2 << 20] {
            let argument = "x".repeat(bytes);
            let refused = session.command("a").arg(argument).spawn().unwrap_err();
            let said = refused.to_string();
            assert!(said.contains("128 clients already"), "{said}");
        }

        drop(silent);
        let begun = Instant::now();
        while session.commands().is_err() {
            assert!(begun.elapsed() < SOON);
            thread::sleep(Duration::from_millis(5));
        }
        session.stop().unwrap();
    });
}

#[test]
fn a_session_whose_folder_is_gone_ends() {
    let end = served_at(hasty(), None, |root, _, _, serving| {
        thread::sleep(4 * hasty().look_period);
        assert!(!serving.is_finished());

        std::fs::remove_dir_all(root.path().join("dev")).unwrap();
    });
    assert_eq!(end, SessionEnd::Unreachable);
}

#[test]
fn a_name_that_is_kept_is_free_when_all_is_taken_down() {
    let root = Root::new();
    let (sandbox, _peer, _agent) = ready_sandbox(None);
    let claim = SessionClaim::below(&root.path(), "dev").unwrap();
    let keep = claim.keep();
    let server = claim.listen(&sandbox, None, None).unwrap();
    let session = root.open().unwrap();
    sandbox.end();
    server.run(&sandbox).unwrap();

    assert!(matches!(session.commands(), Err(SessionError::Gone)));
    assert!(matches!(
        SessionClaim::below(&root.path(), "dev"),
        Err(SessionError::Exists { .. })
    ));
    thread::scope(|scope| {
        let stopping = scope.spawn(|| session.stop());
        thread::sleep(Duration::from_millis(200));
        assert!(!stopping.is_finished());
        drop(keep);
        stopping.join().unwrap().unwrap();
    });

    assert_eq!(root.left(), 0);
}
