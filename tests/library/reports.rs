//! What users of other sandboxes ran into, as far as no other test has it: the value that comes of it must be the right one.

use std::io::Read;
use std::time::{Duration, Instant};

use sandvmm::{Outcome, SpawnError, Stdio};

use crate::{HUNG_AFTER, Test, machine, machine_with, printed, text};

pub(crate) const TESTS: &[Test] = &[
    (
        "a_command_that_runs_has_no_end_and_keeps_nobody_waiting",
        no_end_made_up,
    ),
    (
        "a_command_ends_with_its_program_whatever_holds_its_pipes",
        held_pipes,
    ),
    (
        "a_command_without_input_goes_on_after_its_first_output",
        no_input,
    ),
    (
        "what_could_not_run_is_told_apart_and_may_be_tried_again",
        not_started,
    ),
    (
        "root_that_takes_all_memory_is_told_so_and_the_agent_lives",
        memory_of_root,
    ),
    (
        "files_are_where_commands_see_them_and_their_users",
        files_in_place,
    ),
    (
        "a_pipe_of_the_guest_ends_who_writes_to_it",
        pipe_in_the_guest,
    ),
    (
        "a_terminal_has_its_size_and_shows_without_a_key",
        terminal_at_once,
    ),
];

/// How soon one command is answered beside others, on an emulated processor.
const ANSWERED_WITHIN: Duration = Duration::from_secs(60);

/// An exit code of 0 while the process still ran; one hung command that everything waited for.
fn no_end_made_up() {
    let sandbox = machine();
    let mut command = sandbox.command("sh");
    command.arg("-c").arg("echo up; kill -STOP $$; exit 7");
    let mut child = command.spawn().unwrap();
    let mut up = [0; 3];
    child.stdout.as_mut().unwrap().read_exact(&mut up).unwrap();

    assert!(child.wait_timeout(Duration::from_secs(3)).is_none());
    assert!(child.try_wait().is_none());
    let asked = Instant::now();
    assert_eq!(printed(&sandbox, "sh", "echo beside"), "beside\n");
    sandbox.write("note", &b"kept"[..]).unwrap();
    assert!(asked.elapsed() < ANSWERED_WITHIN, "{:?}", asked.elapsed());
    child.signal(18).unwrap();

    assert_eq!(child.wait().outcome, Outcome::Exited(7));
}

/// An end that was never told while a helper held the pipe.
fn held_pipes() {
    let sandbox = machine();
    let mut command = sandbox.command("sh");
    command
        .arg("-c")
        .arg("(sleep 1000 &); echo out; echo err >&2; exit 3");

    let output = command.output().unwrap();

    assert_eq!(output.completion.outcome, Outcome::Exited(3));
    assert_eq!(
        (output.stdout.as_slice(), output.stderr.as_slice()),
        (&b"out\n"[..], &b"err\n"[..])
    );
}

/// A command without input that ended after its first output.
fn no_input() {
    let sandbox = machine();
    let mut command = sandbox.command("sh");
    command
        .arg("-c")
        .arg("echo first; sleep 3; echo second; sleep 3; echo third; exit 5")
        .stdin(Stdio::null());

    let output = command.output().unwrap();

    assert_eq!(text(&output), "first\nsecond\nthird\n");
    assert_eq!(output.completion.outcome, Outcome::Exited(5));
}

/// Missing commands that exit with 0, folders that are a silent 255, time-outs that are a success with −1.
fn not_started() {
    let sandbox = machine();
    let refused = |program: &str, folder: &str| {
        let mut command = sandbox.command(program);
        let error = command.current_dir(folder).spawn().unwrap_err();
        assert!(!error.may_have_run(), "{error:?}");
        error
    };

    let missing = refused("no-such-program", "/");
    assert!(matches!(&missing, SpawnError::NotFound(_)), "{missing:?}");
    assert!(missing.to_string().contains("no-such-program"));
    for program in ["/etc/passwd", "/usr"] {
        let forbidden = refused(program, "/");
        assert!(
            matches!(&forbidden, SpawnError::NotExecutable(_)),
            "{forbidden:?}"
        );
    }
    let folder = refused("true", "/no/such/folder");
    assert!(matches!(&folder, SpawnError::Invalid(_)), "{folder:?}");
    assert!(folder.to_string().contains("/no/such/folder"));
    // The sandbox's own end is another value than any of a command's.
    let mut asleep = sandbox.command("sleep").arg("1000").spawn().unwrap();
    sandbox.end();
    assert_eq!(asleep.wait().outcome, Outcome::SandboxEnded);
    let late = sandbox.command("true").spawn().unwrap_err();
    assert!(late.may_have_run(), "{late:?}");
}

/// The agent killed by the kernel for what another took, and the failure taken for another.
fn memory_of_root() {
    let sandbox = machine_with(128);
    let mut command = sandbox.command("python3");
    command
        .arg("-c")
        .arg("print('before', flush=True)\nx = []\nwhile True: x.append(bytearray(1 << 20))")
        .user("root");

    for _ in 0..2 {
        let output = command.output().unwrap();

        assert!(
            matches!(output.completion.outcome, Outcome::OutOfMemory { .. }),
            "{output:?}"
        );
        assert_eq!(text(&output), "before\n");
        assert_eq!(printed(&sandbox, "sh", "echo lives"), "lives\n");
    }
}

/// A copy that lands beneath a mount, or as root; folders made on the way that stay root's.
fn files_in_place() {
    let sandbox = machine();
    for path in ["/tmp/a/b/file", "/dev/shm/a/b/file", "on/the/way/file"] {
        sandbox.write(path, &b"content\n"[..]).unwrap();
        let above = path.rsplit_once('/').unwrap().0;
        let code = format!(
            "cat {path}; echo more >> {path}; touch {above}/beside {above}/../beside; stat -c %U {path} {above} {above}/.. | uniq"
        );
        let seen = printed(&sandbox, "sh", &code);
        let (content, owner) = seen.split_once('\n').unwrap();
        assert_eq!(content, "content");
        assert_eq!(owner.trim(), printed(&sandbox, "sh", "id -un").trim());
        assert_eq!(sandbox.read(path).unwrap(), b"content\nmore\n");
    }
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("in")).unwrap();
    std::fs::write(folder.path().join("in/file"), "copied\n").unwrap();
    let files = sandbox.files();
    files
        .copy_in(folder.path().join("in"), "/tmp/new/way/in")
        .unwrap();
    let seen = printed(
        &sandbox,
        "sh",
        "cat /tmp/new/way/in/file; stat -c %U /tmp/new /tmp/new/way /tmp/new/way/in | uniq | wc -l; touch /tmp/new/way/x",
    );
    assert_eq!(seen, "copied\n1\n");
    let mut entries = sandbox.list("/tmp/new/way").unwrap().into_iter();
    assert_eq!(entries.next().unwrap().name, "in");
}

/// `yes | head` that hangs, since SIGPIPE is ignored.
fn pipe_in_the_guest() {
    let sandbox = machine();

    let seen = printed(&sandbox, "bash", "yes | head -n 2; echo ${PIPESTATUS[0]}");

    assert_eq!(seen, "y\ny\n141\n");
}

/// A terminal of no columns; a key that is needed before anything shows.
fn terminal_at_once() {
    let sandbox = machine();
    let mut command = sandbox.command("sh");
    command
        .arg("-c")
        .arg("stty size; trap 'stty size; exit 4' WINCH; while :; do sleep 0.1; done")
        .pty(111, 40);

    let mut child = command.spawn().unwrap();
    let mut terminal = child.terminal.take().unwrap();
    let mut shown = Vec::new();
    let mut wait_for = |wanted: &str| {
        let until = Instant::now() + HUNG_AFTER;
        while !String::from_utf8_lossy(&shown).contains(wanted) {
            let mut byte = [0];
            assert_eq!(terminal.read(&mut byte).unwrap(), 1, "{shown:?}");
            shown.extend(byte);
            assert!(Instant::now() < until);
        }
    };
    wait_for("40 111");
    std::thread::sleep(Duration::from_secs(1));
    child.resize(99, 50).unwrap();
    wait_for("50 99");

    assert_eq!(child.wait().outcome, Outcome::Exited(4));
}
