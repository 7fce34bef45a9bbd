//! Python contexts in a real guest.

use std::time::{Duration, Instant};

use sandvmm::{Outcome, PythonError};

use crate::{Test, machine, machine_with};

pub(crate) const TESTS: &[Test] = &[
    ("contexts_keep_their_own_state_and_files", own_state),
    ("an_interrupt_leaves_the_state_of_a_context", interrupt),
    ("a_context_out_of_memory_is_told_so_and_begins_anew", memory),
    ("a_context_is_forked_from_a_warm_interpreter", warm),
    (
        "figures_and_tables_come_out_of_a_script_that_does_not_ask_for_it",
        figures,
    ),
];

fn own_state() {
    let sandbox = machine();
    let (one, two) = (sandbox.python().unwrap(), sandbox.python().unwrap());
    sandbox.write("in.csv", &b"a,b\n1,2\n3,4\n"[..]).unwrap();

    one.run("import csv\nx = [row for row in csv.DictReader(open('in.csv'))]")
        .unwrap();
    two.run("x = 'two'").unwrap();
    let sum = one.run("sum(int(row['b']) for row in x)").unwrap();
    let other = two
        .run("import os; x, os.getuid() != 0, os.getcwd()")
        .unwrap();

    assert_eq!(sum.text(), Some("6"));
    assert_eq!(other.text(), Some("('two', True, '/home/sandbox')"));
    one.run("open('out', 'w').write(str(x))").unwrap();
    assert!(sandbox.read("out").unwrap().starts_with(b"[{'a': '1'"));
    let root = sandbox.command("python3").user("root").python().unwrap();
    assert_eq!(
        root.run("import os; os.getuid()").unwrap().text(),
        Some("0")
    );
    // At the same time.
    let began = Instant::now();
    std::thread::scope(|scope| {
        for python in [&one, &two] {
            scope.spawn(|| python.run("import time; time.sleep(10)").unwrap());
        }
    });
    assert!(began.elapsed() < Duration::from_secs(18));
}

fn interrupt() {
    let sandbox = machine();
    let python = sandbox.python().unwrap();
    python.run("x = 7").unwrap();

    let late = python
        .call("import subprocess\nprint('begun', flush=True)\nsubprocess.run(['sleep', '1000'])")
        .deadline(Duration::from_secs(8))
        .run()
        .unwrap();

    assert!(late.timed_out);
    assert_eq!(late.stdout_text(), "begun\n");
    assert_eq!(late.exception.unwrap().name, "KeyboardInterrupt");
    assert_eq!(python.run("x").unwrap().text(), Some("7"));
    // What it had started was interrupted too.
    let left = crate::printed(
        &sandbox,
        "sh",
        "cat /proc/[0-9]*/comm | grep -cx sleep; true",
    );
    assert_eq!(left, "0\n");
}

fn memory() {
    let sandbox = machine_with(128);
    let python = sandbox.python().unwrap();

    let ended = python
        .run("hog = []\nwhile True: hog.append(bytearray(1 << 20))")
        .unwrap_err();
    python.restart().unwrap();

    assert!(
        matches!(ended, PythonError::Ended(Outcome::OutOfMemory { .. })),
        "{ended:?}"
    );
    assert_eq!(python.run("1").unwrap().text(), Some("1"));
}

fn warm() {
    let sandbox = machine();
    let warmed = sandbox.warm_up("import json").output().unwrap();
    assert!(warmed.completion.outcome.success(), "{warmed:?}");

    for _ in 0..2 {
        let python = sandbox.python().unwrap();
        let run = python.run("import json, sys\nclass A: pass\nimport pickle; pickle.loads(pickle.dumps(A())).__class__ is A, sys.argv").unwrap();
        assert_eq!(run.text(), Some("(True, [''])"), "{run:?}");
    }
}

/// A script as people write them.
const SCRIPT: &str = "
import matplotlib.pyplot as plt
import pandas as pd
frame = pd.DataFrame({'x': [1, 2, 3], 'y': [1, 4, 9]})
plt.plot(frame.x, frame.y)
plt.title('squares')
plt.show()
plt.figure()
plt.bar(frame.x, frame.y)
frame
";

fn figures() {
    let image = std::env::var_os("SANDVMM_TEST_ROOTFS").unwrap();
    let sandbox = sandvmm::Sandbox::builder()
        .rootfs(image)
        .memory_mib(512)
        .start()
        .unwrap();
    let python = sandbox.python().unwrap();

    let run = python.run(SCRIPT).unwrap();
    let again = python
        .run("frame.y.sum(), plt.get_fignums(), 'MPLBACKEND' in __import__('os').environ")
        .unwrap();

    assert_eq!(run.exception, None, "{run:?}");
    assert_eq!(run.displays.len(), 2);
    for figure in &run.displays {
        let image = figure.png().unwrap();
        assert!(image.starts_with(b"\x89PNG\r\n\x1a\n") && image.len() > 1000);
    }
    let table = run.value.unwrap();
    assert!(table.html().unwrap().contains("<table"), "{table:?}");
    assert!(table.text().unwrap().contains("x  y"), "{table:?}");
    assert_eq!(again.text(), Some("(14, [], False)"));
    // A first import builds a cache, and says so; of a backend without a screen nothing is said.
    let said = String::from_utf8_lossy(&run.stderr).into_owned();
    assert!(!said.contains("Warning"), "{said}");
}
