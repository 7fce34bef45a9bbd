//! Each rule of the filters is one that a machine needs: over the lives that a machine can have, each is used.

use std::fmt::Write as _;
use std::fs;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use jailer::{ProcessEnd, Thread, call_name};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use vmm::control::{EndReason, FromMachine};

use crate::machine::{MEMORY_MIB, Machine, SOON, Wanted};
use crate::measure;
use crate::order::Order;
use crate::supervisor;
use crate::table::CASES;
use crate::trace::{self, Call};

/// The argument with which this program drives machines; what it is to drive follows.
pub(crate) const WORD: &str = "drive";

/// The filters as they are written.
const FILTERS: [(Thread, &str, &str); 2] = [
    (
        Thread::Main,
        "main",
        include_str!("../../jailer/filters/main.json"),
    ),
    (
        Thread::Vcpu,
        "vcpu",
        include_str!("../../jailer/filters/vcpu.json"),
    ),
];

/// The hostile guest's cases that do what an ordinary guest does too, each for what it has a process do.
const LIVES: [&str; 10] = [
    // Disks: reads, writes, flushes, zeroes, space given back.
    "a_disk_is_used_for_all_that_it_can",
    "ranges_that_overflow",
    "writes_to_a_read_only_disk",
    // Streams: from both sides, ended by both, to a reader that waits, and by a reset of the device.
    "data_at_the_wrong_time",
    "data_beyond_credit",
    "reader_that_never_reads",
    "reset_with_streams_open",
    // A device that can't be taken into service, and says so from the processor's thread.
    "rings_of_two_queues_overlap",
    // Ends: a crash of the guest, and one that needs the processor's registers to be told.
    "triple_fault",
    "unemulated_instruction",
];

/// What is driven here, since the suite's supervisor does not do its part.
const OWN_LIVES: [&str; 6] = [
    "heap_grows",
    "panics",
    "terminated",
    "unheard",
    "read_late",
    "snapshot",
];

/// What the guest sends to its late reader, in bytes: more than a socket of the system's holds, less than the device lets wait.
const LATE_BYTES: usize = 240 << 10;

/// A rule of a filter.
struct Rule {
    thread: Thread,
    name: String,
    conditions: Vec<Condition>,
    is_used: bool,
}

/// What a rule says of an argument, of which it looks at the lower half.
struct Condition {
    index: usize,
    mask: u64,
    value: u64,
}

impl Rule {
    fn all() -> Vec<Self> {
        FILTERS
            .into_iter()
            .flat_map(|(thread, name, text)| {
                let filters: Value = serde_json::from_str(text).unwrap();
                let rules = filters[name]["filter"].as_array().unwrap().clone();
                rules.into_iter().map(move |rule| Self::of(thread, &rule))
            })
            .collect()
    }

    fn of(thread: Thread, rule: &Value) -> Self {
        let conditions = rule["args"].as_array().into_iter().flatten();
        Self {
            thread,
            name: rule["syscall"].as_str().unwrap().to_owned(),
            conditions: conditions.map(Condition::of).collect(),
            is_used: false,
        }
    }

    fn allows(&self, thread: Thread, call: &Call) -> bool {
        let number = u32::try_from(call.number).unwrap_or(u32::MAX);
        self.thread == thread
            && call_name(number) == Some(self.name.as_str())
            && self.conditions.iter().all(|condition| {
                call.arguments[condition.index] & condition.mask == condition.value
            })
    }

    fn describe(&self) -> String {
        let mut text = format!("{:?}: {}", self.thread, self.name);
        for condition in &self.conditions {
            let _ = write!(text, " argument {} {:#x}", condition.index, condition.value);
        }
        text
    }
}

impl Condition {
    fn of(argument: &Value) -> Self {
        assert_eq!(argument["type"], "dword", "{argument}");
        let mask = match &argument["op"] {
            Value::String(op) if op == "eq" => u64::from(u32::MAX),
            op => op["masked_eq"].as_u64().unwrap(),
        };
        Self {
            index: usize::try_from(argument["index"].as_u64().unwrap()).unwrap(),
            mask,
            value: argument["val"].as_u64().unwrap(),
        }
    }
}

pub(crate) fn each_rule_is_used() {
    let mut rules = Rule::all();
    let mut forbidden = Vec::new();
    for life in LIVES.into_iter().chain(OWN_LIVES) {
        let has_succeeded = trace::run(&[WORD, life], |thread, call| {
            let mut is_allowed = false;
            for rule in rules.iter_mut().filter(|rule| rule.allows(thread, &call)) {
                is_allowed = true;
                rule.is_used = true;
            }
            if !is_allowed {
                forbidden.push((thread, call));
            }
        });
        assert!(has_succeeded.unwrap(), "{life} failed, as said above");
    }
    let unused: Vec<String> = rules
        .iter()
        .filter(|rule| !rule.is_used)
        // The one call that the library makes in debug builds alone.
        .filter(|rule| cfg!(debug_assertions) || rule.name != "fcntl")
        // A processor's thread asks for the time alone where its host has no memory for it.
        .filter(|rule| {
            rule.name != "clock_gettime" || is_clock_a_call() && rule.thread == Thread::Main
        })
        .map(Rule::describe)
        .collect();
    assert!(unused.is_empty(), "never used: {unused:#?}");
    assert!(forbidden.is_empty(), "{forbidden:#?}");
}

/// Whether this host's clock can't be read without a system call: it is none of those that the kernel lays open to programs
/// (`arch/x86/include/asm/vdso/clocksource.h` of Linux).
fn is_clock_a_call() -> bool {
    const OPEN: [&str; 3] = ["tsc", "kvm-clock", "hyperv_clocksource_tsc_page"];
    let path = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    let name = fs::read_to_string(path).unwrap_or_default();
    !OPEN.contains(&name.trim())
}

/// Drives one life of a machine; whether it went as it should.
pub(crate) fn drive(life: &str) -> bool {
    // Traced from here on.
    let mut begin = String::new();
    if std::io::stdin().read_line(&mut begin).is_err() {
        return false;
    }
    let result = match life {
        "heap_grows" => [Thread::Main, Thread::Vcpu]
            .into_iter()
            .try_for_each(heap_grows),
        "snapshot" => snapshot(),
        "read_late" => read_late(),
        "panics" => [Thread::Main, Thread::Vcpu]
            .into_iter()
            .try_for_each(panics),
        "terminated" => terminated(),
        "unheard" => unheard(),
        case => CASES
            .iter()
            .find(|one| one.name == case)
            .ok_or_else(|| "the table has no such case".to_owned())
            .and_then(supervisor::run),
    };
    if let Err(reason) = &result {
        eprintln!("{life}: {reason}");
    }
    result.is_ok()
}

fn started(wanted: &Wanted<'_>) -> Result<Machine, String> {
    Machine::wanted(wanted).map_err(|error| error.to_string())
}

/// What a thread allocates does not fit into the heap as it is.
fn heap_grows(thread: Thread) -> Result<(), String> {
    let machine = started(&Wanted {
        order: Order::Grow(thread),
        ..Wanted::case("triple_fault")
    })?;
    machine.has_ended()
}

/// A machine is saved, goes on, and another goes on from where it was.
fn snapshot() -> Result<(), String> {
    let mut machine = started(&Wanted {
        max_file_bytes: u64::from(MEMORY_MIB) << 20,
        ..Wanted::case("spins_for_ever")
    })?;
    running(&machine)?;
    // Its processor is in the guest, and so its thread is closed in.
    machine.console_says("FOREVER\n")?;
    let snapshot = match machine.snapshot() {
        Ok(snapshot) => snapshot,
        Err(error) => return Err(format!("{error}: {:?}", machine.ended())),
    };
    computes(machine.pid())?;
    machine.close()?;
    let fork = started(&Wanted {
        snapshot: Some(&snapshot),
        ..Wanted::case("")
    })?;
    running(&fork)?;
    fork.close()
}

/// Bytes of the guest's wait for their reader.
fn read_late() -> Result<(), String> {
    let mut machine = started(&Wanted::case("data_for_a_late_reader"))?;
    running(&machine)?;
    let socket = machine.socket.as_ref().ok_or("no socket")?;
    let (message, streams) = socket
        .receive::<FromMachine>()
        .map_err(|error| error.to_string())?;
    let Some(stream) = streams.into_iter().next() else {
        return Err(format!("{message:?}"));
    };
    machine.console_says("DONE")?;
    let mut stream = UnixStream::from(stream);
    let mut bytes = vec![0; LATE_BYTES];
    stream
        .read_exact(&mut bytes)
        .map_err(|error| error.to_string())?;
    machine.close()
}

/// A fault of this program's own, with its backtrace.
fn panics(thread: Thread) -> Result<(), String> {
    let machine = started(&Wanted {
        order: Order::Panic(thread),
        ..Wanted::case("halts_for_ever")
    })?;
    let (end, _, said) = machine.ended();
    if end != ProcessEnd::Exited(101) || !said.contains("backtrace: 0x") {
        return Err(format!("{end:?}: {said}"));
    }
    Ok(())
}

/// Somebody asks the process to end.
fn terminated() -> Result<(), String> {
    let machine = started(&Wanted::case("halts_for_ever"))?;
    running(&machine)?;
    let pid = Pid::from_raw(machine.pid().cast_signed()).ok_or("no process")?;
    kill_process(pid, Signal::TERM).map_err(|error| error.to_string())?;
    match machine.ended() {
        (ProcessEnd::Exited(143), None, _) => Ok(()),
        other => Err(format!("{other:?}")),
    }
}

/// The supervisor has no ear for the guest's connections, and so not for the machine's end either, at first.
fn unheard() -> Result<(), String> {
    let machine = started(&Wanted {
        narrow: true,
        ..Wanted::case("connects_then_ends")
    })?;
    waits_for_supervisor(machine.pid())?;
    let socket = machine.socket.as_ref().ok_or("no socket")?;
    loop {
        match socket.receive::<FromMachine>() {
            Ok((
                FromMachine::Ended {
                    reason: EndReason::TripleFault,
                    ..
                },
                _,
            )) => break machine.has_ended(),
            Ok((FromMachine::Ended { reason, .. }, _)) => break Err(format!("{reason:?}")),
            Ok(_) => {}
            Err(error) => break Err(format!("{error}: {:?}", machine.ended())),
        }
    }
}

/// Waits until the process has computed for a while: its guest, which spins, goes on.
fn computes(pid: u32) -> Result<(), String> {
    const WHILE: Duration = Duration::from_millis(30);
    let until = measure::processor_time(pid)? + WHILE;
    let deadline = Instant::now() + SOON;
    while measure::processor_time(pid)? < until {
        if Instant::now() > deadline {
            return Err("its guest stands still".to_owned());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Waits until the event loop has a last message for which the socket has no room.
fn waits_for_supervisor(pid: u32) -> Result<(), String> {
    let path = format!("/proc/{pid}/syscall");
    let waits = format!("{} ", libc::SYS_ppoll);
    let deadline = Instant::now() + SOON;
    loop {
        let call = fs::read_to_string(&path).map_err(|error| error.to_string())?;
        if call.starts_with(&waits) {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(format!("it is in call {call}"));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until the machine's first processor runs.
pub(crate) fn running(machine: &Machine) -> Result<(), String> {
    let socket = machine.socket.as_ref().ok_or("no socket")?;
    match socket.receive::<FromMachine>() {
        Ok((FromMachine::Running { .. }, _)) => Ok(()),
        Ok((other, _)) => Err(format!("{other:?}")),
        Err(error) => Err(error.to_string()),
    }
}
