//! `--host-function`: programs of the host that the guest may call.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use sandvmm_tests::run;

fn program(folder: &tempfile::TempDir, name: &str, text: &str) -> PathBuf {
    let path = folder.path().join(name);
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_program_of_the_host_answers_the_guest_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let echo = program(&folder, "echo", "#!/bin/sh\ncat; echo called >> calls\n");
    let fail = program(
        &folder,
        "fail",
        "#!/bin/sh\necho 'No such row' >&2; exit 1\n",
    );
    let code = "from sandvmm import HostError, host
print(host.echo(a='$(touch x)', b=[1, None]))
try: host.fail(1)
except HostError as error: print(error.kind, error)
try: host.other()
except HostError as error: print(error.kind)";

    let ran = run(["--host-function", &format!("echo={}", echo.display())])
        .args(["--host-function", &format!("fail={}", fail.display())])
        .args(["-c", code])
        .current_dir(folder.path())
        .done()
        .expect(0);

    assert_eq!(
        ran.text(),
        "{'a': '$(touch x)', 'b': [1, None]}\nfailed No such row\nunknown\n"
    );
    assert_eq!(
        fs::read_to_string(folder.path().join("calls")).unwrap(),
        "called\n"
    );
    assert!(!folder.path().join("x").exists());
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn names_that_are_none_are_usage_errors_and_a_missing_program_is_the_callers_error() {
    run(["--host-function", "a", "--", "true"]).done().expect(2);
    let name = run(["--host-function", "a-b=/bin/cat", "--", "true"])
        .done()
        .expect(2);
    assert!(name.stderr.contains("a-b"), "{name:?}");

    let missing = run([
        "--host-function",
        "a=/no/such/program",
        "--",
        "sandvmm-call",
        "a",
    ])
    .done()
    .expect(1);
    assert!(missing.stderr.contains("can't be started"), "{missing:?}");
}
