//! Compiles the filters of system calls.
#![expect(
    clippy::panic,
    clippy::expect_used,
    reason = "a build script fails by panicking"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

use seccompiler::{BpfProgram, TargetArch, compile_from_json, sock_filter};
use serde_json::{Value, json};

/// The filters, by the names of their files and of their constants.
const FILTERS: [(&str, &str); 2] = [("main", "MAIN"), ("vcpu", "VCPU")];

/// Most system calls of all filters together.
const MAX_CALLS: usize = 32;

/// What each compiled filter begins with: the check of the architecture, and the load of the call's number.
const HEAD_STEPS: usize = 4;

/// Jumps of classic BPF (`linux/bpf_common.h`): equal to a constant, at least a constant, always.
const JUMP_EQUAL: u16 = 0x15;
const JUMP_AT_LEAST: u16 = 0x35;
const JUMP: u16 = 0x05;

fn main() {
    println!("cargo::rerun-if-changed=filters");
    let mut code = String::new();
    let mut calls = BTreeSet::new();
    for (name, constant) in FILTERS {
        let path = format!("filters/{name}.json");
        let text = fs::read_to_string(&path).expect("the filter is there");
        check(&path, &text, &mut calls);
        let program = compile(&path, name, &text);
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

/// Compiles a filter so that a call is found by halving.
///
/// seccompiler's own order is a chain: a call that is not in it is compared with all that are. The kernel runs a new filter for each
/// number that a call can have, to know which it may skip later (`seccomp_cache_prepare`, `kernel/seccomp.c`), and with
/// a chain that is half a million instructions.
fn compile(path: &str, name: &str, text: &str) -> BpfProgram {
    let filters: Value = serde_json::from_str(text).expect("it was checked");
    let filter = filters.get(name).expect("the filter has its file's name");
    let mut rules: BTreeMap<&str, Vec<&Value>> = BTreeMap::new();
    for rule in filter["filter"].as_array().expect("a list of rules") {
        let call = rule["syscall"].as_str().expect("a call has a name");
        rules.entry(call).or_default().push(rule);
    }
    let mut head = BpfProgram::new();
    let mut calls: BTreeMap<u32, BpfProgram> = BTreeMap::new();
    for rules in rules.values() {
        let alone = json!({ name: {
            "mismatch_action": filter["mismatch_action"],
            "match_action": filter["match_action"],
            "filter": rules,
        } });
        let mut programs = compile_from_json(alone.to_string().as_bytes(), TargetArch::x86_64)
            .unwrap_or_else(|error| panic!("{path}: {error}"));
        let mut program = programs.remove(name).expect("the filter has its name");
        let body = program.split_off(HEAD_STEPS);
        assert!(head.is_empty() || head == program, "one head for all calls");
        head = program;
        let first = body.first().expect("a filter with a rule has steps");
        assert_eq!(first.code, JUMP_EQUAL, "a call's number is compared first");
        calls.insert(first.k, body);
    }
    let calls: Vec<(u32, BpfProgram)> = calls.into_iter().collect();
    head.extend(halve(&calls));
    head
}

/// The steps for these calls, by rising number. Each way through them ends in an action.
fn halve(calls: &[(u32, BpfProgram)]) -> BpfProgram {
    let step = |code, jt, jf, k| sock_filter { code, jt, jf, k };
    match calls {
        [] => panic!("a filter without calls"),
        [(number, body)] => {
            // Another number is not taken past the rules, but to what they end in at once.
            let otherwise = body.last().expect("a body has steps").clone();
            let mut steps = vec![step(JUMP_EQUAL, 1, 0, *number), otherwise];
            steps.extend(body.iter().cloned());
            steps
        }
        _ => {
            let (low, high) = calls.split_at(calls.len() / 2);
            let (first_high, _) = high.first().expect("half of two or more");
            let low = halve(low);
            let length = u32::try_from(low.len()).expect("a filter has at most 4096 steps");
            let mut steps = vec![
                step(JUMP_AT_LEAST, 0, 1, *first_high),
                step(JUMP, 0, 0, length),
            ];
            steps.extend(low);
            steps.extend(halve(high));
            steps
        }
    }
}
