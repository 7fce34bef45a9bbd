//! Functions of the host, called from a real guest.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use sandvmm::CallLimits;
use serde::{Deserialize, Serialize};

use crate::{Test, machine, printed};

pub(crate) const TESTS: &[Test] = &[
    (
        "a_function_is_called_from_python_and_from_a_shell_by_any_user",
        python_and_shell,
    ),
    (
        "nothing_listens_before_a_function_is_registered",
        nothing_registered,
    ),
    ("calls_run_at_once_and_keep_their_own_answers", at_once),
    (
        "a_function_that_takes_too_long_is_the_callers_error_and_the_sandbox_goes_on",
        too_long,
    ),
    ("a_storm_of_calls_and_huge_ones_harm_nobody", storm),
    ("a_warm_interpreter_has_the_module_too", warm),
    (
        "a_fork_calls_the_functions_that_are_its_own_and_its_parent_goes_on_with_its",
        forked,
    ),
];

#[derive(Clone, Copy, Deserialize)]
struct Lookup {
    id: usize,
}

#[derive(Serialize)]
struct Row {
    id: usize,
    name: &'static str,
}

fn lookup(args: Lookup) -> Result<Row, String> {
    match ["zero", "one", "zwölf"].get(args.id) {
        Some(name) => Ok(Row { id: args.id, name }),
        None => Err(format!("There is no row {}", args.id)),
    }
}

fn python_and_shell() {
    let sandbox = machine();
    sandbox.host_function("lookup", lookup).unwrap();

    let python = "from sandvmm import HostError, host
print(host.lookup(id=2)['name'])
for call in (lambda: host.lookup(id=7), lambda: host.lookup(), lambda: host.lookUp(id=1)):
    try: call()
    except HostError as error: print(error.kind, error)";
    let seen = printed(&sandbox, "python3", python);
    let mut lines = seen.lines();
    assert_eq!(lines.next(), Some("zwölf"));
    assert_eq!(lines.next(), Some("failed There is no row 7"));
    assert!(lines.next().unwrap().starts_with("arguments "), "{seen}");
    assert!(lines.next().unwrap().starts_with("unknown "), "{seen}");

    let shell = r#"sandvmm-call lookup '{"id":1}'; echo '{"id": 0}' | sandvmm-call lookup -
sandvmm-call lookup '{"id":9}' 2>&1; echo $?; sandvmm-call 2> /dev/null; echo $?"#;
    assert_eq!(
        printed(&sandbox, "sh", shell),
        "{\"id\":1,\"name\":\"one\"}\n{\"id\":0,\"name\":\"zero\"}\n\
         {\"kind\":\"failed\",\"message\":\"There is no row 9\"}\n1\n2\n"
    );
    let root = sandbox
        .command("sandvmm-call")
        .args(["lookup", "{\"id\":0}"])
        .user("root")
        .output()
        .unwrap();
    assert!(root.completion.outcome.success(), "{root:?}");
}

fn nothing_registered() {
    let sandbox = machine();
    let probe = "ls /run/sandvmm/host.sock 2>&1; sandvmm-call lookup; echo $?
python3 -c 'import sandvmm' 2>&1 | tail -n 1";

    let before = printed(&sandbox, "sh", probe);
    sandbox.host_function("lookup", lookup).unwrap();
    let after = printed(
        &sandbox,
        "sh",
        "test -S /run/sandvmm/host.sock && sandvmm-call lookup '{\"id\":0}'",
    );

    assert!(before.contains("127\n"), "{before}");
    assert!(before.contains("ModuleNotFoundError"), "{before}");
    assert!(after.contains("zero"), "{after}");
}

fn at_once() {
    let sandbox = machine();
    let seen = std::sync::Arc::new(Mutex::new(BTreeSet::new()));
    let threads = std::sync::Arc::clone(&seen);
    sandbox
        .host_function("double", move |number: u64| {
            threads
                .lock()
                .unwrap()
                .insert(format!("{:?}", std::thread::current().id()));
            std::thread::sleep(Duration::from_millis(50));
            Ok::<_, String>(number * 2)
        })
        .unwrap();

    let code = "from concurrent.futures import ThreadPoolExecutor
from sandvmm import host
with ThreadPoolExecutor(8) as pool:
    print(list(pool.map(host.double, range(40))) == [2 * n for n in range(40)])";

    assert_eq!(printed(&sandbox, "python3", code), "True\n");
    assert_eq!(seen.lock().unwrap().len(), 40, "a thread for each call");
}

fn too_long() {
    let sandbox = machine();
    let limits = CallLimits::default().deadline(Duration::from_secs(1));
    sandbox
        .host_function_with("sleep", limits, |seconds: u64| {
            std::thread::sleep(Duration::from_secs(seconds));
            Ok::<_, String>("slept")
        })
        .unwrap();

    let began = Instant::now();
    let late = printed(&sandbox, "sh", "sandvmm-call sleep 100 2>&1 || true");
    let fast = printed(&sandbox, "sh", "sandvmm-call sleep 0");

    assert!(late.contains("\"kind\":\"deadline\""), "{late}");
    assert_eq!(fast, "\"slept\"\n");
    assert!(began.elapsed() < Duration::from_secs(90));
}

fn storm() {
    let sandbox = machine();
    let limits = CallLimits::default().rate_per_s(20);
    sandbox
        .host_function_with("count", limits, |(): ()| Ok::<_, String>(1))
        .unwrap();
    sandbox
        .host_function("length", |text: String| Ok::<_, String>(text.len()))
        .unwrap();
    sandbox
        .host_function("long", |length: usize| Ok::<_, String>("x".repeat(length)))
        .unwrap();

    let code = "import socket, time
from sandvmm import HostError, host
def kind(call):
    try: return call()
    except HostError as error: return error.kind
kinds = [kind(host.count) for _ in range(100)]
print(set(kinds) <= {1, 'rate'}, kinds.count(1) >= 20, 'rate' in kinds)
print(kind(lambda: host.length('x' * 1_000_000)), kind(lambda: host.length('x' * 5_000_000)))
print(len(kind(lambda: host.long(1_000_000))), kind(lambda: host.long(2_000_000)))
held = []
for _ in range(200):
    stream = socket.socket(socket.AF_UNIX)
    stream.settimeout(0.1)
    try: stream.connect('/run/sandvmm/host.sock')
    except OSError: break
    stream.sendall(b'half a call')
    held.append(stream)
print(len(held) >= 64)
for stream in held: stream.close()
time.sleep(1)
print(host.length('abc'))";

    assert_eq!(
        printed(&sandbox, "python3", code),
        "True True True\n1000000 too_large\n1000000 too_large\nTrue\n3\n"
    );
}

fn warm() {
    let sandbox = machine();
    let warmed = sandbox.warm_up("import json, socket").output().unwrap();
    assert!(warmed.completion.outcome.success(), "{warmed:?}");
    sandbox.host_function("lookup", lookup).unwrap();

    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let output = sandbox
            .command("python3")
            .args(["-c", "from sandvmm import host; print(host.lookup(id=1))"])
            .output()
            .unwrap();
        assert_eq!(
            crate::text(&output),
            "{'id': 1, 'name': 'one'}\n",
            "{output:?}"
        );
        if output.completion.warm {
            break;
        }
        assert!(Instant::now() < deadline, "never forked");
    }
}

/// Removes a template when the test is over.
struct Removed(String);

impl Drop for Removed {
    fn drop(&mut self) {
        let _ = sandvmm::Template::remove(&self.0);
    }
}

fn forked() {
    let name = Removed(format!("calls-{}", std::process::id()));
    let parent = crate::machine_with(128);
    parent.host_function("lookup", lookup).unwrap();
    let call = "sandvmm-call lookup '{\"id\":1}' 2>&1 || true";
    assert!(printed(&parent, "sh", call).contains("\"one\""));

    let template = parent.snapshot(&name.0).unwrap();
    let fork = template.fork().unwrap();

    assert!(printed(&parent, "sh", call).contains("\"one\""));
    let before = printed(&fork, "sh", call);
    assert!(before.contains("No function of the host"), "{before}");
    fork.host_function("own", |(): ()| Ok::<_, String>("the fork's"))
        .unwrap();
    let unknown = printed(&fork, "sh", call);
    assert!(unknown.contains("unknown"), "{unknown}");
    let code = "from sandvmm import host; print(host.own())";
    assert_eq!(printed(&fork, "python3", code), "the fork's\n");
    let python = fork.python().unwrap();
    let run = python.run("from sandvmm import host; host.own()").unwrap();
    assert_eq!(run.text(), Some("\"the fork's\""));
}
