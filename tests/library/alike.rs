//! Nothing that is to be a machine's own is in two of a hundred forks, and each has little memory of its own.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use sandvmm_tests::{children_of, now_s};
use serde_json::Value;

use crate::template::{Named, PRIVATE_KIB_MAX, private_kib, python, warmed};
use crate::{Test, printed};

pub(crate) const TESTS: &[Test] = &[(
    "a_hundred_forks_of_a_busy_machine_have_nothing_alike",
    nothing_alike,
)];

/// How many forks are compared.
const FORKS: usize = 100;

/// A program that is at it when the machine is saved: again and again it writes down, in this order, all that must be new in a fork.
/// What it has found out before a line is whole is the template's; all else must be the fork's.
const BUSY: &str = "import json, os, time
read = lambda path: open(path).read().strip()
with open('/tmp/record', 'w') as record:
    while True:
        line = [time.time(), os.getrandom(16).hex(), open('/dev/urandom', 'rb').read(16).hex(),
                read('/proc/sys/kernel/random/uuid'), read('/proc/sys/kernel/random/boot_id'), read('/etc/machine-id'),
                os.uname().nodename, os.getrandom(16).hex()]
        if record.tell() > 4 << 20: record.seek(0), record.truncate()
        record.write(json.dumps(line) + '\\n')
        record.flush()";

/// Where the clock, and what stays the same within one machine, are in a line.
const CLOCK: usize = 0;
const BOOT_ID: usize = 4;
const OF_THE_MACHINE: [usize; 3] = [4, 5, 6];

/// What a fork tells: the line that was not finished when it was saved with three that follow, and what the interpreter's generators draw.
const TELL: &str = "import sys
def new():
    with open('/tmp/record') as record:
        return [json.loads(line) for line in record if line.endswith('\\n') and not all(name in line for name in sys.argv[1:4])]
while len(lines := new()) < 4: time.sleep(0.01)
print(json.dumps({'lines': lines[:4], 'own': {
    'random': random.random(), 'sample': random.sample(range(10**9), 2), 'secrets': secrets.token_hex(8),
    'uuid4': str(uuid.uuid4()), 'uuid1': str(uuid.uuid1()), 'node': uuid.getnode(), 'ssl': ssl.RAND_bytes(8).hex(),
    'name': tempfile.mktemp(), 'salt': hashlib.scrypt(b'x', salt=os.urandom(16), n=2, r=1, p=1).hex()}}))";

/// What the interpreter has imported before it was saved: what is asked for, and the standard library's heaviest.
const IMPORTS: &str = "import hashlib, json, os, random, secrets, ssl, tempfile, time, uuid
import asyncio, concurrent.futures, ctypes, decimal, email.message, http.client, http.server, multiprocessing, sqlite3, unittest, urllib.request
import xml.dom.minidom, xmlrpc.client
";

/// What it has drawn before.
const DRAWN: &str = "random.random(), secrets.token_hex(8), uuid.uuid4(), uuid.uuid1(), ssl.RAND_bytes(8), tempfile.mktemp()";

fn nothing_alike() {
    let parent = warmed(&format!("{IMPORTS}{DRAWN}"));
    let _busy = python(&parent, BUSY).spawn().unwrap();
    let names = printed(
        &parent,
        "sh",
        "while ! [ -s /tmp/record ]; do sleep 0.1; done
         cat /proc/sys/kernel/random/boot_id /etc/machine-id; uname -n",
    );
    let names: Vec<&str> = names.split_whitespace().collect();
    let named = Named::of(&parent, "alike");
    let code = format!("{IMPORTS}{TELL}");

    let mut took: Vec<Duration> = Vec::new();
    let mut private: Vec<u64> = Vec::new();
    let mut straddling: Vec<Vec<Value>> = Vec::new();
    let mut seen: HashMap<String, usize> = HashMap::new();
    for number in 0..FORKS {
        let (begun, before) = (Instant::now(), now_s());
        let fork = named.template.fork().unwrap();
        let mut command = python(&fork, &code);
        let output = command.args(&names).output().unwrap();
        assert!(output.completion.warm, "fork {number}: {output:?}");
        let told: Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("fork {number}: {error}: {output:?}"));
        let after = now_s();
        took.push(begun.elapsed());
        let [machine] = children_of(std::process::id()).try_into().unwrap();
        private.push(private_kib(machine));
        drop(fork);
        let lines: Vec<Vec<Value>> = serde_json::from_value(told["lines"].clone()).unwrap();
        straddling.push(lines[0].clone());
        for (line_number, line) in lines.iter().enumerate().skip(1) {
            let clock = line[CLOCK].as_f64().unwrap();
            assert!(
                (before..=after).contains(&clock),
                "fork {number}: {clock} is not between {before} and {after}"
            );
            for (field, value) in line.iter().enumerate().skip(1) {
                // Names are the same in all lines of one fork, and are counted once.
                if line_number > 1 && OF_THE_MACHINE.contains(&field) {
                    assert_eq!(*value, lines[1][field]);
                    continue;
                }
                note(&mut seen, &format!("{field}={value}"), number);
            }
        }
        for (name, value) in told["own"].as_object().unwrap() {
            note(&mut seen, &format!("{name}={value}"), number);
        }
    }
    took.sort_unstable();
    private.sort_unstable();
    eprintln!(
        "told after p50 {:?}, at most {:?}; private memory p50 {} KiB, at most {} KiB",
        took[FORKS / 2],
        took[FORKS - 1],
        private[FORKS / 2],
        private[FORKS - 1]
    );
    assert!(private[FORKS - 1] < PRIVATE_KIB_MAX, "{private:?}");
    // The line that was under way: what was found out before is the same in all, and from some field on nothing is.
    let mut is_new = false;
    for field in 0..straddling[0].len() {
        let mut values: Vec<String> = straddling
            .iter()
            .map(|line| line[field].to_string())
            .collect();
        values.sort_unstable();
        values.dedup();
        assert!(
            values.len() == FORKS || values.len() == 1 && !is_new,
            "field {field} of the line under way has {} values in {FORKS} forks",
            values.len()
        );
        is_new = values.len() == FORKS;
    }
    assert!(
        is_new,
        "the boot id is field {BOOT_ID}, so some field of that line is new"
    );
}

#[track_caller]
fn note(seen: &mut HashMap<String, usize>, value: &str, fork: usize) {
    if let Some(other) = seen.insert(value.to_owned(), fork) {
        panic!("forks {other} and {fork} have {value}");
    }
}
