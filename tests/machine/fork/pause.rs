//! A sandbox that is put on disk goes on as it was.

use sandvmm::{PauseError, Sandbox};

use super::{machine, shell, text};

/// How often it is put on disk and taken from there.
const CYCLES: usize = 20;

/// A digest of all files that the sandbox has, by name, permissions and content: those of a machine's names, which are new, and what is no file left out.
const TREE: &str = "cd /; files() { find home tmp var opt srv root -xdev -type f \"$@\"; }
{ files -printf '%p %m %U %s\\n'; files -exec sha256sum {} +; } | sort | sha256sum";

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn twenty_times_put_on_disk_every_file_is_as_it_was() {
    let name = format!("test-{}", std::process::id());
    let mut sandbox = Sandbox::builder()
        .memory_mib(super::MEMORY_MIB)
        .hostname("kept")
        .start()
        .unwrap();
    shell(
        &sandbox,
        "mkdir -p ~/tree/a/b; for n in $(seq 30); do head -c $((n * 997)) /dev/urandom > ~/tree/a/b/$n; done
         ln -s a/b ~/tree/link; chmod 600 ~/tree/a/b/7
         (n=0; while true; do n=$((n+1)); echo $n > /dev/shm/count; sleep 0.05; done) > /dev/null 2>&1 &",
    );
    let tree = |sandbox: &Sandbox| text(sandbox.command("sh").args(["-c", TREE]).user("root"));
    for cycle in 0..CYCLES {
        shell(&sandbox, &format!("echo {cycle} > ~/tree/{cycle}"));
        let before = tree(&sandbox);

        sandbox.pause(&name).unwrap();
        sandbox = Sandbox::resume(&name).unwrap();

        assert_eq!(tree(&sandbox), before, "cycle {cycle}");
        assert_eq!(shell(&sandbox, "uname -n"), "kept\n");
    }
    assert_eq!(
        shell(&sandbox, "ls ~/tree | wc -l"),
        format!("{}\n", CYCLES + 2)
    );
    // It was resumed: there is nothing left to go on with.
    let error = Sandbox::resume(&name).unwrap_err();
    assert!(matches!(error, PauseError::Missing { .. }), "{error:?}");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_name_is_taken_once_and_a_sandbox_that_was_put_on_disk_is_over() {
    let name = format!("test-taken-{}", std::process::id());
    let (first, second) = (machine(), machine());
    first.pause(&name).unwrap();

    let error = second.pause(&name).unwrap_err();

    assert!(matches!(error, PauseError::Exists { .. }), "{error:?}");
    assert_eq!(shell(&second, "echo lives"), "lives\n");
    first.command("true").spawn().unwrap_err();
    Sandbox::resume(&name).unwrap();
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn of_two_that_are_paused_at_once_under_one_name_the_other_goes_on() {
    let name = format!("test-twice-{}", std::process::id());
    let sandboxes = [machine(), machine()];

    let paused: Vec<_> = std::thread::scope(|scope| {
        let pausing = sandboxes
            .each_ref()
            .map(|sandbox| scope.spawn(|| sandbox.pause(&name)));
        pausing.map(|one| one.join().unwrap()).into()
    });

    let (won, lost) = if paused[0].is_ok() { (0, 1) } else { (1, 0) };
    let error = paused[lost].as_ref().unwrap_err();
    assert!(
        matches!(error, PauseError::Exists { .. } | PauseError::Taken { .. }),
        "{error:?}"
    );
    paused[won].as_ref().unwrap();
    assert_eq!(shell(&sandboxes[lost], "echo lives"), "lives\n");
    Sandbox::resume(&name).unwrap();
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn what_has_begun_to_go_on_is_still_paused_where_that_comes_to_nothing() {
    let name = format!("test-begun-{}", std::process::id());
    let sandbox = machine();
    shell(&sandbox, "echo kept > /tmp/note");
    sandbox.pause(&name).unwrap();

    let (begun, paused) = Sandbox::begin_resume(&name).unwrap();
    begun.wait_ready().unwrap();
    let busy = Sandbox::resume(&name).unwrap_err();
    let exists = machine().pause(&name).unwrap_err();
    begun.end();
    drop(paused);

    assert!(matches!(busy, PauseError::Busy { .. }), "{busy:?}");
    assert!(matches!(exists, PauseError::Exists { .. }), "{exists:?}");
    let (sandbox, paused) = Sandbox::begin_resume(&name).unwrap();
    paused.remove().unwrap();
    assert_eq!(shell(&sandbox, "cat /tmp/note"), "kept\n");
    let error = Sandbox::resume(&name).unwrap_err();
    assert!(matches!(error, PauseError::Missing { .. }), "{error:?}");
}
