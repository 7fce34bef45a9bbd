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

    let missing = run(["--host-function", "a=/no/such/program", "--", "true"])
        .done()
        .expect(2);
    assert!(missing.stderr.contains("is not there"), "{missing:?}");

    // That its interpreter is missing is known by the call alone.
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("program");
    std::fs::write(&program, "#!/no/such/interpreter\n").unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&program, mode).unwrap();
    let function = format!("a={}", program.display());
    let broken = run(["--host-function", &function, "--", "sandvmm-call", "a"])
        .done()
        .expect(1);
    assert!(broken.stderr.contains("can't be started"), "{broken:?}");
}

/// The example, as it stands.
const QUERY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/query.py");

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn example_a_function_queries_a_database_of_the_host() {
    let folder = tempfile::tempdir().unwrap();
    let database = folder.path().join("rows.db");
    let fill = "import sqlite3, sys
with sqlite3.connect(sys.argv[1]) as database:
    database.execute('CREATE TABLE rows (id INTEGER PRIMARY KEY, name TEXT)')
    database.executemany('INSERT INTO rows VALUES (?, ?)', [(1, 'one'), (3, 'three')])";
    let filled = std::process::Command::new("/usr/bin/python3")
        .args(["-c", fill])
        .arg(&database)
        .status()
        .unwrap();
    assert!(filled.success());
    let code = "from sandvmm import HostError, host
print(host.query(id=3)['name'])
for hostile in (7, '1 OR 1=1', None):
    try: print(host.query(id=hostile))
    except HostError as error: print(error)";

    let path = std::env::var("PATH").unwrap();
    let path = format!("/usr/bin:/bin:{path}");
    let ran = run(["--host-function", &format!("query={QUERY}")])
        .args(["--timeout", "200s", "-c", code])
        .env("QUERY_DATABASE", &database)
        // The system's own Python starts at once, also on an emulated processor.
        .env("PATH", path)
        .done()
        .expect(0);

    assert_eq!(
        ran.text(),
        "three\nThere is no row 7\nAn id is needed, a whole number\nAn id is needed, a whole number\n"
    );
}
