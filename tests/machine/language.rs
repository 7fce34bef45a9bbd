//! Which interpreter runs a script, and what the script sees of its own call.

use std::os::unix::fs::PermissionsExt;

use sandvmm_tests::run;

fn script(name: &str, content: &[u8]) -> (tempfile::TempDir, std::path::PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, content).unwrap();
    (folder, path)
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_python_script_sees_the_call_that_python_would_give_it() {
    let (_folder, path) = script(
        "probe.py",
        b"import os, sys
print(sys.argv, __name__, os.path.basename(__file__), os.path.dirname(os.path.abspath(__file__)) == os.getcwd(), sys.path[0] == os.getcwd())
",
    );

    let ran = run([&path])
        .args(["a", "-x", "--json", "b c", ""])
        .done()
        .expect(0);

    assert_eq!(
        ran.text(),
        "['probe.py', 'a', '-x', '--json', 'b c', ''] __main__ probe.py True True\n"
    );
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn the_extension_chooses_the_interpreter() {
    let (_sh, sh) = script("a.sh", b"echo \"sh $1\"\n");
    let (_pl, pl) = script("a.pl", b"print \"pl $ARGV[0]\\n\";\n");
    assert_eq!(run([&sh]).arg("x").done().expect(0).text(), "sh x\n");
    assert_eq!(run([&pl]).arg("x").done().expect(0).text(), "pl x\n");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn the_first_line_chooses_where_the_extension_says_nothing() {
    let (_folder, path) = script(
        "tool",
        b"#!/usr/bin/env -S python3 -u\nimport sys; print('py', sys.argv[1:])\n",
    );
    assert_eq!(run([&path]).arg("x").done().expect(0).text(), "py ['x']\n");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_user_without_a_home_can_run_a_script() {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("who.py");
    std::fs::write(
        &script,
        "import os, sys\nprint(os.getuid(), os.path.basename(sys.argv[0]))",
    )
    .unwrap();
    for (user, uid) in [("12345", 12345), ("nobody", 65534)] {
        let ran = run(["--timeout", "100s", "-u", user])
            .arg(&script)
            .done()
            .expect(0);
        assert_eq!(ran.text(), format!("{uid} who.py\n"));
    }
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn an_elf_program_runs_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("echo");
    std::fs::copy("/bin/echo", &path).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();

    assert_eq!(run([&path]).arg("hello").done().expect(0).text(), "hello\n");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_text_of_unknown_kind_is_a_usage_error() {
    let (_folder, path) = script("notes.txt", b"just text\n");
    let ran = run([&path]).done().expect(2);
    assert!(ran.stderr.contains("notes.txt"), "{ran:?}");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn code_on_the_command_line_and_from_standard_input_run_as_with_python() {
    let code = run(["-c", "import sys; print(sys.argv)", "a", "-b"])
        .done()
        .expect(0);
    let stdin = run(["-", "a", "-b"])
        .stdin("import sys; print(sys.argv, __name__)")
        .done()
        .expect(0);

    assert_eq!(code.text(), "['-c', 'a', '-b']\n");
    assert_eq!(stdin.text(), "['-', 'a', '-b'] __main__\n");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_script_from_standard_input_may_name_its_interpreter() {
    let ran = run(["-", "x"])
        .stdin("#!/bin/sh\necho \"sh $1\"\n")
        .done()
        .expect(0);
    assert_eq!(ran.text(), "sh x\n");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn names_with_spaces_and_other_scripts_are_kept() {
    let (_folder, path) = script("naïve name 字.py", b"import sys; print(sys.argv)\n");
    assert_eq!(
        run([&path]).done().expect(0).text(),
        "['naïve name 字.py']\n"
    );
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_traceback_shows_the_scripts_own_lines_and_exits_1() {
    let (_folder, path) = script(
        "broken.py",
        b"def f():\n    raise ValueError('here')\nf()\n",
    );
    let ran = run([&path]).done().expect(1);
    assert!(
        ran.stderr.contains("line 2, in f") && ran.stderr.contains("ValueError: here"),
        "{ran:?}"
    );
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_working_folder_leaves_the_script_at_home() {
    let (_folder, path) = script(
        "where.py",
        b"import os, sys; print(os.getcwd(), os.path.basename(__file__))\n",
    );
    let ran = run(["-w", "/tmp"]).arg(&path).done().expect(0);
    assert_eq!(ran.text(), "/tmp where.py\n");
}
