//! The command as it is released, with this program for its machine's process: one that attacks.

use std::fs;
use std::path::PathBuf;

use sandvmm_tests::run;

/// What every attempt's names and this program's own have in them, and nothing else of the project.
const TRACE: &[u8] = b"sandvmm-attack";

pub(crate) fn a_forbidden_call_is_told_as_policy() {
    let program = std::env::current_exe().unwrap();

    let ran = run(["--json", "--", "true"])
        .env("SANDVMM_BIN", &program)
        .done()
        .expect(125);
    let said = run(["--", "true"])
        .env("SANDVMM_BIN", &program)
        .done()
        .expect(125);

    let json = ran.json();
    assert_eq!(json["reason"], "policy", "{json}");
    assert!(
        json["message"].as_str().unwrap().contains("(open)"),
        "{json}"
    );
    assert!(said.stderr.contains("(open)"), "{said:?}");
}

pub(crate) fn the_released_command_has_no_trace_of_the_attack() {
    let has_trace = |file: PathBuf| {
        let bytes = fs::read(file).unwrap();
        bytes.windows(TRACE.len()).any(|window| window == TRACE)
    };

    assert!(has_trace(std::env::current_exe().unwrap()));
    assert!(!has_trace(sandvmm_tests::program()));
}
