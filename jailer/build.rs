//! Compiles the filters of system calls.
#![expect(
    clippy::panic,
    clippy::expect_used,
    reason = "a build script fails by panicking"
)]

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

use seccompiler::{TargetArch, compile_from_json};
use serde_json::Value;

/// The filters, by the names of their files and of their constants.
const FILTERS: [(&str, &str); 2] = [("main", "MAIN"), ("vcpu", "VCPU")];

/// Most system calls of all filters together.
const MAX_CALLS: usize = 32;

fn main() {
    println!("cargo::rerun-if-changed=filters");
    let mut code = String::new();
    let mut calls = BTreeSet::new();
    for (name, constant) in FILTERS {
        let path = format!("filters/{name}.json");
        let text = fs::read_to_string(&path).expect("the filter is there");
        check(&path, &text, &mut calls);
        let programs = compile_from_json(text.as_bytes(), TargetArch::x86_64)
            .unwrap_or_else(|error| panic!("{path}: {error}"));
        let program = programs.get(name).expect("the filter has its file's name");
        let length = program.len();
        writeln!(code, "static {constant}: [sock_filter; {length}] = [")
            .expect("a string takes all");
        for step in program {
            let (code_, jt, jf, k) = (step.code, step.jt, step.jf, step.k);
            writeln!(
                code,
                "sock_filter {{ code: {code_}, jt: {jt}, jf: {jf}, k: {k} }},"
            )
            .expect("a string takes all");
        }
        code.push_str("];\n");
    }
    assert!(
        calls.len() <= MAX_CALLS,
        "the filters have {} system calls, and {MAX_CALLS} are the most",
        calls.len()
    );
    let folder = env::var_os("OUT_DIR").expect("cargo says where");
    fs::write(Path::new(&folder).join("filters.rs"), code).expect("the folder takes a file");
}

/// Checks that each call has a reason, and collects the calls.
fn check(path: &str, text: &str, calls: &mut BTreeSet<String>) {
    let filters: Value =
        serde_json::from_str(text).unwrap_or_else(|error| panic!("{path}: {error}"));
    for filter in filters.as_object().expect("an object of filters").values() {
        assert_eq!(filter["mismatch_action"], "trap", "{path}");
        for rule in filter["filter"].as_array().expect("a list of rules") {
            let call = rule["syscall"].as_str().expect("a call has a name");
            let reason = rule["comment"].as_str().unwrap_or_default();
            assert!(!reason.is_empty(), "{path}: {call} has no reason");
            calls.insert(call.to_owned());
        }
    }
}
