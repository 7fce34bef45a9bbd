//! The bridge with programs of this host, a socket pair as its data stream, and folders of its own.

use std::os::fd::OwnedFd;
use std::process::Command;
use std::time::Duration;

use super::*;

/// Longest wait for anything.
const PATIENCE: Duration = Duration::from_secs(20);

struct Host {
    stream: UnixStream,
    place: Place,
    _folder: tempfile::TempDir,
}

fn host() -> Host {
    let folder = tempfile::tempdir().unwrap();
    let place = Place {
        folder: folder.path().join("run"),
        image: folder.path().join("image"),
    };
    fs::create_dir_all(place.image.join("usr/lib/python3/dist-packages")).unwrap();
    let (stream, theirs) = UnixStream::pair().unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let served = place.clone();
    let theirs = File::from(OwnedFd::from(theirs));
    std::thread::spawn(move || serve(theirs, &served));
    let mut host = Host {
        stream,
        place,
        _folder: folder,
    };
    assert_eq!(host.hear(), FromBridge::Ready);
    host
}

impl Host {
    fn hear(&mut self) -> FromBridge {
        frame::read(&mut self.stream, MAX_FRAME_BYTES).unwrap()
    }

    fn call(&mut self) -> (u32, String) {
        match self.hear() {
            FromBridge::Call { id, line } => (id, String::from_utf8(line).unwrap()),
            other => panic!("{other:?}"),
        }
    }

    fn answer(&mut self, id: u32, line: &str) {
        let line = line.as_bytes().to_vec();
        frame::write(&mut self.stream, &Answer { id, line }, MAX_FRAME_BYTES).unwrap();
    }

    fn connect(&self) -> BufReader<UnixStream> {
        let stream = UnixStream::connect(self.place.folder.join(SOCKET_FILE)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        BufReader::new(stream)
    }

    /// A run of Python that calls by the installed module.
    fn python(&self, code: &str) -> std::process::Child {
        let socket = self.place.folder.join(SOCKET_FILE);
        let code = format!("import sandvmm; sandvmm.SOCKET = {socket:?}\n{code}");
        Command::new("python3")
            .args(["-c", &code])
            .env(
                "PYTHONPATH",
                self.place.image.join("usr/lib/python3/dist-packages"),
            )
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap()
    }
}

fn output(child: std::process::Child) -> String {
    String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap()
}

fn line(stream: &mut BufReader<UnixStream>) -> String {
    let mut line = String::new();
    stream.read_line(&mut line).unwrap();
    line
}

#[test]
fn answers_reach_their_callers_in_whatever_order_they_come() {
    let mut host = host();
    let (mut one, mut two) = (host.connect(), host.connect());

    one.get_mut().write_all(b"one\n").unwrap();
    let first = host.call();
    two.get_mut().write_all(b"two\n").unwrap();
    let second = host.call();
    host.answer(second.0, "to two");
    host.answer(u32::MAX, "to nobody");
    host.answer(first.0, "to one");

    assert_eq!((first.1.as_str(), second.1.as_str()), ("one", "two"));
    assert_eq!(line(&mut one), "to one\n");
    assert_eq!(line(&mut two), "to two\n");
}

#[test]
fn a_connection_carries_one_call_after_the_other_and_a_last_one_without_an_end() {
    let mut host = host();
    let mut stream = host.connect();

    stream.get_mut().write_all(b"a\nb\nc").unwrap();
    stream
        .get_mut()
        .shutdown(std::net::Shutdown::Write)
        .unwrap();
    for name in ["a", "b", "c"] {
        let (id, line) = host.call();
        assert_eq!(line, name);
        host.answer(id, name);
    }

    let mut all = String::new();
    stream.read_to_string(&mut all).unwrap();
    assert_eq!(all, "a\nb\nc\n");
}

#[test]
fn a_call_above_the_bound_is_answered_by_the_bridge_and_harms_no_other() {
    let mut host = host();
    let mut stream = host.connect();
    let long = vec![b'x'; MAX_CALL_BYTES + 1];

    stream.get_mut().write_all(&long).unwrap();
    assert!(line(&mut stream).contains("\"too_large\""));
    let mut other = host.connect();
    other.get_mut().write_all(b"other\n").unwrap();

    let (id, _) = host.call();
    host.answer(id, "ok");
    assert_eq!(line(&mut other), "ok\n");
}

#[test]
fn as_many_programs_as_the_bound_are_connected_and_the_next_waits() {
    let mut host = host();
    let held: Vec<_> = (0..MAX_CALL_CONNECTIONS).map(|_| host.connect()).collect();
    let mut next = host.connect();
    next.get_mut().write_all(b"late\n").unwrap();
    host.stream
        .set_read_timeout(Some(Duration::from_millis(200)))
        .unwrap();
    frame::read::<FromBridge>(&mut host.stream, MAX_FRAME_BYTES).unwrap_err();

    drop(held);

    host.stream.set_read_timeout(Some(PATIENCE)).unwrap();
    assert_eq!(host.call().1, "late");
}

#[test]
fn the_end_of_the_hosts_stream_is_the_bridges() {
    let (stream, theirs) = UnixStream::pair().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let place = Place {
        folder: folder.path().join("run"),
        image: folder.path().join("image"),
    };
    drop(stream);

    // Its first word may meet the closed stream already.
    let _ = serve(File::from(OwnedFd::from(theirs)), &place);

    assert!(place.folder.join(SOCKET_FILE).exists());
}

#[test]
fn python_calls_by_name_with_keywords_a_value_or_nothing() {
    let mut host = host();
    let child = host.python(
        "from sandvmm import host
print(host.lookup(id=3, name='ä'), host.sum([1, 2]), host.now(), host.call('call'))",
    );

    for (expected, answer) in [
        (
            r#"{"call": "lookup", "args": {"id": 3, "name": "\u00e4"}}"#,
            r#"{"ok":{"row":[1,null]}}"#,
        ),
        (r#"{"call": "sum", "args": [1, 2]}"#, r#"{"ok":3}"#),
        (r#"{"call": "now"}"#, r#"{"ok":null}"#),
        (r#"{"call": "call"}"#, r#"{"ok":"x"}"#),
    ] {
        let (id, line) = host.call();
        assert_eq!(line, expected);
        host.answer(id, answer);
    }

    assert_eq!(output(child), "{'row': [1, None]} 3 None x\n");
}

#[test]
fn an_error_is_raised_and_threads_and_forks_have_connections_of_their_own() {
    let mut host = host();
    let child = host.python(
        "import os, threading
from sandvmm import HostError, host
try: host.fail()
except HostError as error: print(error.kind, error)
answers = []
threads = [threading.Thread(target=lambda: answers.append(host.both())) for _ in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(answers, flush=True)
pid = os.fork()
if not pid:
    print(host.child(), flush=True)
    os._exit(0)
os.waitpid(pid, 0)
print(host.parent())",
    );

    let (id, _) = host.call();
    host.answer(
        id,
        r#"{"error":{"kind":"failed","message":"No row \"7\""}}"#,
    );
    // Both are under way at once.
    let (one, two) = (host.call(), host.call());
    host.answer(two.0, r#"{"ok":1}"#);
    host.answer(one.0, r#"{"ok":1}"#);
    for name in ["child", "parent"] {
        let (id, line) = host.call();
        assert!(line.contains(name));
        host.answer(id, &format!("{{\"ok\":\"{name}\"}}"));
    }

    assert_eq!(
        output(child),
        "failed No row \"7\"\n[1, 1]\nchild\nparent\n"
    );
}

#[test]
fn what_programs_need_is_linked_into_the_image() {
    let host = host();

    let command = host.place.image.join("usr/local/bin/sandvmm-call");
    let mode = fs::metadata(command).unwrap().permissions().mode();
    let python = host.place.image.join("usr/lib/python3/dist-packages");

    assert_eq!(mode & 0o777, 0o755);
    assert!(
        fs::read_to_string(python.join("sandvmm.py"))
            .unwrap()
            .contains("class HostError")
    );
}
