//! The real command, where no virtual machine is needed: what it refuses, prints and exits with.
#![expect(
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test's helper fails by panicking"
)]

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// After this a call counts as hung.
const HUNG_AFTER: Duration = Duration::from_secs(60);

fn sandvmm<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sandvmm"));
    command.args(args).stdin(Stdio::null());
    command
}

/// Calls it, and fails instead of waiting for ever.
fn call(command: &mut Command) -> Output {
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + HUNG_AFTER;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            child.kill().unwrap();
            panic!("{command:?} hung");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

fn run<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Output {
    let mut command = sandvmm(["run"]);
    command.args(args);
    call(&mut command)
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap()
}

fn fifo(path: &Path) {
    rustix::fs::mknodat(
        rustix::fs::CWD,
        path,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR,
        0,
    )
    .unwrap();
}

#[test]
fn usage_errors_are_2_and_say_what_to_say() {
    for line in [
        &["run"][..],
        &["run", "--bogus", "x.py"],
        &["run", "--timeout", "soon", "x.py"],
        &["run", "--memory", "256", "x.py"],
        &["run", "--cpus", "0", "x.py"],
        &["run", "-t", "-c"],
        &["bench", "boot", "-n", "0"],
        &["nonsense"],
        &[],
    ] {
        let output = call(&mut sandvmm(line));

        assert_eq!(code(&output), 2, "{line:?}: {output:?}");
        assert!(output.stdout.is_empty());
        assert!(said(&output).contains("Usage") || said(&output).contains("--help"));
    }
}

#[test]
fn help_names_the_four_ways_to_run() {
    let output = call(&mut sandvmm(["run", "--help"]));

    let help = String::from_utf8(output.stdout).unwrap();
    for part in [
        "SCRIPT [ARGS",
        "-- COMMAND",
        "-c CODE",
        "- [ARGS",
        "124 time-out",
    ] {
        assert!(help.contains(part), "{part}: {help}");
    }
    assert!(!help.contains("[default: 256]"), "{help}");
}

#[test]
fn what_is_no_script_is_refused_at_once_and_named() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe.py");
    fifo(&pipe);
    let notes = folder.path().join("notes");
    std::fs::write(&notes, "text").unwrap();
    let missing = folder.path().join("missing.py");

    for (path, word) in [
        (pipe.as_path(), "pipe"),
        (folder.path(), "folder"),
        (missing.as_path(), "missing.py"),
        (notes.as_path(), "#!"),
        (Path::new("/dev/null"), "device"),
    ] {
        let output = run([path]);

        assert_eq!(code(&output), 2, "{output:?}");
        let said = said(&output);
        assert!(
            said.starts_with("sandvmm: ") && said.contains(word),
            "{said}"
        );
        assert_eq!(said.lines().count(), 1, "{said}");
    }
}

#[test]
fn a_name_can_not_write_to_the_terminal() {
    let name = OsStr::from_bytes(b"/no/\x1b[2J\nx\xff.py");

    let said = said(&run([name]));

    assert!(!said.trim_end().contains(['\x1b', '\n']), "{said:?}");
    assert!(said.contains("\\u{1b}[2J\\nx"), "{said:?}");
}

#[test]
fn variables_that_are_none_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let bad = folder.path().join("bad");
    std::fs::write(&bad, "A=1\n=2\n").unwrap();
    let pipe = folder.path().join("pipe");
    fifo(&pipe);

    let nameless = run(["-e", "=1", "--", "true"]);
    assert_eq!(code(&nameless), 2);
    for (path, word) in [
        (bad.as_path(), "Line 2"),
        (pipe.as_path(), "regular"),
        (Path::new("/no/such"), "No such file"),
    ] {
        let output = run([
            OsStr::new("--env-file"),
            path.as_ref(),
            "--".as_ref(),
            "true".as_ref(),
        ]);

        assert_eq!(code(&output), 2, "{output:?}");
        assert!(said(&output).contains(word), "{output:?}");
    }
}

#[test]
fn a_terminal_is_needed_for_one() {
    let output = run(["-t", "--", "true"]);

    assert_eq!(code(&output), 2);
    assert!(said(&output).contains("not a terminal"), "{output:?}");
}

#[test]
fn json_is_one_object_also_when_nothing_ran() {
    let output = run(["--json", "/no/such.py"]);

    assert_eq!(code(&output), 2);
    assert!(output.stderr.is_empty());
    let object = json(&output);
    assert_eq!(object["exit_code"], 2);
    assert_eq!(object["error"], "usage");
    assert_eq!(object["reason"], Value::Null);
    assert!(object["message"].as_str().unwrap().contains("/no/such.py"));
}

#[test]
fn json_is_one_object_also_for_a_line_that_is_none() {
    for line in [
        &["--json"][..],
        &["--json", "--bogus", "x.py"],
        &["--json", "--cpus", "0", "x.py"],
        &["-t", "--json", "x.py"],
    ] {
        let output = run(line);

        assert_eq!(code(&output), 2, "{line:?}: {output:?}");
        let object = json(&output);
        assert_eq!(object["exit_code"], 2, "{object}");
        assert_eq!(object["error"], "usage", "{object}");
        assert_eq!(said(&output), "");
    }
}

#[test]
fn quiet_says_nothing() {
    let output = run(["-q", "/no/such.py"]);

    assert_eq!(code(&output), 2);
    assert!(output.stdout.is_empty() && output.stderr.is_empty());
}

#[test]
fn doctor_says_the_same_in_words_in_json_and_by_its_code() {
    let words = call(&mut sandvmm(["doctor"]));
    let object = call(&mut sandvmm(["doctor", "--json"]));

    let text = String::from_utf8(words.stdout.clone()).unwrap();
    let report = json(&object);
    let can_run = report["can_run"].as_bool().unwrap();
    assert_eq!(code(&words), i32::from(!can_run), "{text}");
    assert_eq!(code(&object), i32::from(!can_run));
    assert_eq!(report["message"].is_null(), can_run);
    let checks = report["checks"].as_array().unwrap();
    assert!(!checks.is_empty());
    for check in checks {
        assert!(text.contains(check["name"].as_str().unwrap()), "{text}");
        let status = check["status"].as_str().unwrap();
        assert!(["ok", "warning", "missing"].contains(&status), "{check}");
        assert!(check["detail"].is_string());
    }
    // This test's command is one that serves machines: it has been put into a cell.
    let cell = &report["cell"];
    assert_eq!(cell["seccomp"], true, "{report}");
    assert_eq!(cell["left_out"], Value::Array(Vec::new()), "{report}");
    assert!(
        cell["namespaces"].is_array() && cell["missing"].is_array(),
        "{report}"
    );
}

#[test]
fn without_images_or_kvm_a_run_fails_at_once_with_the_sentence_that_helps() {
    let folder = tempfile::tempdir().unwrap();
    let started = Instant::now();

    let mut command = sandvmm(["run", "-c", "print(1)"]);
    let output = call(command.env("SANDVMM_HOME", folder.path()));

    let doctor = json(&call(&mut sandvmm(["doctor", "--json"])));
    assert_eq!(code(&output), 125, "{output:?}");
    assert!(output.stdout.is_empty());
    let said = said(&output);
    match doctor["message"].as_str() {
        None => assert!(said.contains("cargo xtask setup"), "{said}"),
        Some(sentence) => assert!(
            said.contains("cargo xtask setup") || said.contains(sentence),
            "{said}"
        ),
    }
    assert!(started.elapsed() < Duration::from_secs(10));
}

#[test]
fn a_reader_that_is_gone_ends_doctor_as_sigpipe_would() {
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    drop(reader);

    let status = sandvmm(["doctor"]).stdout(writer).status().unwrap();

    assert_eq!(status.code(), Some(141));
}

#[test]
fn a_standard_output_that_is_full_is_told() {
    let full = std::fs::File::options()
        .write(true)
        .open("/dev/full")
        .unwrap();

    let output = sandvmm(["doctor"])
        .stdout(full)
        .stderr(Stdio::piped())
        .output()
        .unwrap();

    assert_eq!(code(&output), 125);
    assert!(said(&output).contains("can't be written"), "{output:?}");
}

#[test]
fn what_clap_says_can_not_write_to_the_terminal_either() {
    for line in [
        &["run", "--cpus", "\x1b[31mx\x07\n"][..],
        &["run", "--bo\x1b[31m\ngus", "x.py"],
        &["\x1b[31m\nnonsense"],
    ] {
        let output = call(&mut sandvmm(line));

        let said = said(&output);
        assert_eq!(code(&output), 2, "{said:?}");
        assert!(!said.contains(['\x1b', '\x07']), "{said:?}");
        assert!(said.contains("\\u{1b}[31m"), "{said:?}");
    }
}

#[test]
fn the_object_of_a_line_that_is_none_has_the_whole_sentence() {
    for (line, sentence) in [
        (
            &["--json", "--cpu", "1", "x.py"][..],
            "Unexpected argument '--cpu' found; a similar argument exists: '--cpus'; to pass '--cpu' as a value, use '-- --cpu'",
        ),
        (
            &["--json", "--cpus", "x", "x.py"],
            "Invalid value 'x' for '--cpus <N>': Say a whole number from 1 to 32",
        ),
        (
            &["--json", "--cpus", "-1", "x.py"],
            "Invalid value '-1' for '--cpus <N>': Say a whole number from 1 to 32",
        ),
    ] {
        let object = json(&run(line));

        assert_eq!(object["message"], sentence);
        assert_eq!(object["exit_code"], 2);
    }
}

#[test]
fn what_can_not_be_is_refused_before_anything_boots() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    fifo(&pipe);
    let pipe = pipe.to_str().unwrap();
    let cut = folder.path().join("cut");
    std::fs::write(&cut, b"\x7fELF\x02\x01\x01").unwrap();
    let secret = format!("A@b.example=file:{pipe}");

    for (line, words) in [
        (
            &["--host-function", "x=nosuch", "-c", "1"][..],
            "'nosuch' of the function x is not there",
        ),
        (
            &["--host-function", "x=/dev/null", "-c", "1"],
            "can't be executed",
        ),
        (&["--disk", "1M", "-c", "1"], "32M to 16384G"),
        (&["-u", "4294967295", "-c", "1"], "0 to 4294967294"),
        (&["--allow-host", "http://a.b", "-c", "1"], "is a URL"),
        (
            &["--allow-host", "a.b:0", "-c", "1"],
            "ports from 1 to 65535",
        ),
        (&["--allow-file", pipe, "-c", "1"], "nobody writes"),
        (&["--egress-log", pipe, "-c", "1"], "nobody reads"),
        (&["--secret", &secret, "-c", "1"], "nobody writes"),
        (&["--template", "../x", "-c", "1"], "a name has 1 to 64"),
        (&["--workspace", "../x", "-c", "1"], "a name has 1 to 64"),
        (&[cut.to_str().unwrap()], "is cut short"),
    ] {
        let output = run(line);

        let said = said(&output);
        assert_eq!(code(&output), 2, "{line:?}: {said}");
        assert!(said.contains(words), "{line:?}: {said}");
    }
}

#[test]
fn what_a_template_is_to_be_built_from_is_looked_for_first() {
    for line in [
        &["--copy", "/no/such:/x"][..],
        &["--copy", "/dev/null:/x"],
        &["--allow-file", "/no/such"],
    ] {
        let mut command = sandvmm(["template", "build", "x"]);

        let output = call(command.args(line));

        assert_eq!(code(&output), 2, "{line:?}: {output:?}");
        assert_eq!(said(&output).lines().count(), 1, "{output:?}");
    }
}

#[test]
fn what_lies_with_the_workspaces_keeps_none_from_being_listed() {
    let folder = tempfile::tempdir().unwrap();
    let workspaces = folder.path().join("workspaces");
    std::fs::create_dir_all(workspaces.join("stray.ext4")).unwrap();
    std::fs::write(workspaces.join("dev.ext4"), "").unwrap();

    let output = call(sandvmm(["workspace", "list"]).env("SANDVMM_HOME", folder.path()));

    assert_eq!(code(&output), 0, "{output:?}");
    assert_eq!(output.stdout, b"dev  0M of 0M\n");
    assert!(
        said(&output).contains("stray.ext4' is no workspace"),
        "{output:?}"
    );
    assert_eq!(said(&output).lines().count(), 1);
}

#[test]
fn help_that_can_not_be_printed_is_told() {
    for line in [&["--help"][..], &["--version"], &["doctor", "--help"]] {
        let full = std::fs::File::options()
            .write(true)
            .open("/dev/full")
            .unwrap();

        let output = sandvmm(line)
            .stdout(full)
            .stderr(Stdio::piped())
            .output()
            .unwrap();

        assert_eq!(code(&output), 125, "{line:?}");
        assert!(said(&output).contains("can't be written"), "{output:?}");
    }
    let help = call(&mut sandvmm(["doctor", "--help"]));
    assert!(String::from_utf8_lossy(&help.stdout).contains("1 it can't"));
}
