//! Whatever way a machine or its supervisor ends, nothing is left: no process, no control group, no mount, no file, no descriptor.
//!
//! Each life is led by a supervisor of its own, this program again, so that what it holds can be counted.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use jailer::{Bounds, Options, ProcessEnd, StartError, Thread};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, setrlimit};
use vmm::control::{ControlSocket, EndReason, FromMachine};

use crate::IN_KVM_HOST;
use crate::attack::Target;
use crate::footprint::{Footprint, resident_kib};
use crate::machine::{Machine, SOON, Wanted};
use crate::order::Order;
use crate::used::running;

/// The argument with which this program leads a life; its name follows.
pub(crate) const WORD: &str = "live";

/// The argument with which it is a supervisor that is to be killed.
pub(crate) const DOOMED: &str = "be-killed";

/// How many cycles there are here, and in a KVM host that may be an emulated one, unless [`CYCLES_VARIABLE`] says.
const CYCLES: u32 = 100;
const CYCLES_IN_KVM_HOST: u32 = 40;
const CYCLES_VARIABLE: &str = "SANDVMM_CYCLES";

/// Cycles before memory is looked at first: the allocator has what it needs then.
const WARM_UP_CYCLES: u32 = 20;

/// How much more memory a supervisor may have at the end, in KiB, however many cycles there were.
const GROWTH_MAX_KIB: u64 = 256;

type Life = fn() -> Result<(), String>;

/// All lives, by name.
pub(crate) const LIVES: [(&str, Life); 15] = [
    ("the_guest_ends", guest_ends),
    ("the_supervisor_wants_no_more", supervisor_closes),
    ("the_time_is_over", time_is_over),
    ("the_guest_crashes", guest_crashes),
    ("the_process_panics", process_panics),
    ("the_process_is_taken_over", process_is_taken_over),
    ("the_machine_is_killed", machine_is_killed),
    ("the_machine_is_stopped", machine_is_stopped),
    ("the_supervisor_is_killed", supervisor_is_killed),
    ("the_disk_is_full", disk_is_full),
    ("kvm_is_not_permitted", kvm_is_not_permitted),
    ("the_program_is_none", program_is_none),
    ("the_program_enters_no_cell", program_enters_no_cell),
    ("descriptors_run_out", descriptors_run_out),
    ("many_cycles", many_cycles),
];

/// Has a life led, with a folder and mounts of its own: what others mount meanwhile is not counted.
pub(crate) fn nothing_is_left(name: &'static str) {
    let folder = tempfile::tempdir().unwrap();
    let status = Command::new("unshare")
        .args(["--mount", "--propagation", "private"])
        .arg(std::env::current_exe().unwrap())
        .args([WORD, name])
        .env("TMPDIR", folder.path())
        .current_dir(folder.path())
        .stdin(Stdio::null())
        .status()
        .unwrap();
    assert!(status.success(), "{status}, as said above");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

/// Leads a life; whether it went as it should, and left nothing.
pub(crate) fn live(name: &str) -> bool {
    let result = LIVES
        .iter()
        .find(|(known, _)| *known == name)
        .ok_or_else(|| "no such life".to_owned())
        .and_then(|(_, life)| {
            // What others may have left in the place of the control groups goes with the first start.
            supervisor_closes()?;
            let before = Footprint::now();
            life()?;
            before.is_again()
        });
    if let Err(reason) = &result {
        eprintln!("{name}: {reason}");
    }
    result.is_ok()
}

fn started(wanted: &Wanted<'_>) -> Result<Machine, String> {
    Machine::wanted(wanted).map_err(|error| error.to_string())
}

fn halted() -> Result<Machine, String> {
    let machine = started(&Wanted::case("halts_for_ever"))?;
    running(&machine)?;
    Ok(machine)
}

/// Waits for the machine's own end.
fn end_of(machine: &Machine) -> Result<EndReason, String> {
    let socket = machine.socket.as_ref().ok_or("no socket")?;
    loop {
        match socket.receive::<FromMachine>() {
            Ok((FromMachine::Ended { reason, .. }, _)) => return Ok(reason),
            Ok(_) => {}
            Err(error) => return Err(error.to_string()),
        }
    }
}

fn expect<T: PartialEq + std::fmt::Debug>(got: &T, wanted: &T) -> Result<(), String> {
    if got == wanted {
        return Ok(());
    }
    Err(format!("{got:?}, not {wanted:?}"))
}

fn signal(machine: &Machine, signal: Signal) -> Result<(), String> {
    let pid = Pid::from_raw(machine.pid().cast_signed()).ok_or("no process")?;
    kill_process(pid, signal).map_err(|error| error.to_string())
}

fn guest_ends() -> Result<(), String> {
    let machine = started(&Wanted::case("reset_port"))?;
    expect(&end_of(&machine)?, &EndReason::Reset)?;
    machine.has_ended()
}

fn supervisor_closes() -> Result<(), String> {
    halted()?.close()
}

/// What a supervisor does with a machine whose time is over.
fn time_is_over() -> Result<(), String> {
    drop(started(&Wanted::case("spins_for_ever"))?);
    drop(halted()?);
    Ok(())
}

fn guest_crashes() -> Result<(), String> {
    let machine = started(&Wanted::case("triple_fault"))?;
    expect(&end_of(&machine)?, &EndReason::TripleFault)?;
    machine.has_ended()
}

fn process_panics() -> Result<(), String> {
    for thread in [Thread::Main, Thread::Vcpu] {
        let machine = started(&Wanted {
            order: Order::Panic(thread),
            ..Wanted::case("halts_for_ever")
        })?;
        expect(&machine.ended().0, &ProcessEnd::Exited(101))?;
    }
    Ok(())
}

fn process_is_taken_over() -> Result<(), String> {
    let machine = started(&Wanted {
        order: Order::Attack(Thread::Main, Some(0), Target::default()),
        ..Wanted::case("halts_for_ever")
    })?;
    expect(&machine.ended().1.as_deref(), &Some("open"))
}

fn machine_is_killed() -> Result<(), String> {
    let machine = halted()?;
    signal(&machine, Signal::KILL)?;
    expect(&machine.ended().0, &ProcessEnd::Signaled(9))
}

fn machine_is_stopped() -> Result<(), String> {
    let machine = halted()?;
    signal(&machine, Signal::STOP)?;
    drop(machine);
    Ok(())
}

/// What a supervisor does that is to be killed: says which process its machine is, and waits.
pub(crate) fn be_killed() {
    let machine = halted().unwrap();
    println!("{}", machine.pid());
    std::io::stdout().flush().unwrap();
    std::thread::sleep(SOON);
    drop(machine);
}

fn supervisor_is_killed() -> Result<(), String> {
    let mut doomed = Command::new("/proc/self/exe")
        .arg(DOOMED)
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| error.to_string())?;
    let mut pid = String::new();
    let stdout = doomed.stdout.take().ok_or("no output")?;
    BufReader::new(stdout)
        .read_line(&mut pid)
        .and_then(|_| doomed.kill())
        .and_then(|()| doomed.wait())
        .map_err(|error| error.to_string())?;
    let machine = format!("/proc/{}", pid.trim());
    let deadline = Instant::now() + SOON;
    while Path::new(&machine).exists() {
        if pid.trim().is_empty() || Instant::now() > deadline {
            return Err(format!("{machine} lives on"));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    // Whoever starts the next machine removes its control group.
    supervisor_closes()
}

/// The guest's disk lies in a file system that has no room: the guest is told, and the machine goes on.
fn disk_is_full() -> Result<(), String> {
    let folder = std::env::temp_dir().join("full");
    let failed = |error: std::io::Error| error.to_string();
    fs::create_dir(&folder).map_err(failed)?;
    mount("none", &folder, "tmpfs", MountFlags::empty(), c"size=64k")
        .map_err(|error| error.to_string())?;
    let disk = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(folder.join("disk"));
    let result = disk
        .and_then(|disk| disk.set_len(1 << 20).map(|()| disk))
        .map_err(failed)
        .and_then(|disk| {
            // Ends where there is no room.
            let _ = fs::write(folder.join("filler"), vec![1; 1 << 20]);
            let mut machine = started(&Wanted {
                disk: Some(OwnedFd::from(disk)),
                ..Wanted::case("a_disk_is_used_for_all_that_it_can")
            })?;
            machine.console_says("FAIL status of a write: 1, not 0\n")?;
            machine.close()
        });
    unmount(&folder, UnmountFlags::empty()).map_err(|error| error.to_string())?;
    fs::remove_dir(&folder).map_err(failed)?;
    result
}

/// What was opened is not KVM, as where opening it is not permitted and something else is handed over.
fn kvm_is_not_permitted() -> Result<(), String> {
    let null = File::open("/dev/null").map_err(|error| error.to_string())?;
    let machine = started(&Wanted {
        kvm: Some(null.into()),
        ..Wanted::case("halts_for_ever")
    })?;
    let reason = end_of(&machine)?;
    if !matches!(&reason, EndReason::StartFailed(_)) {
        return Err(format!("{reason:?}"));
    }
    machine.has_ended()
}

/// Starts a process without a machine in it.
fn process(program: &str, limit: Duration) -> Result<(), StartError> {
    let bounds = Bounds {
        memory_mib: 32,
        vcpus: 1,
        max_file_bytes: 0,
    };
    let (_ours, theirs) = ControlSocket::pair().unwrap();
    let theirs = theirs.as_fd().try_clone_to_owned().unwrap();
    let mut process = jailer::start(Path::new(program), theirs, Options::new(bounds))?;
    process.entered(limit).map(drop)
}

fn program_is_none() -> Result<(), String> {
    let absent = process("/nonexistent", SOON);
    let no_program = process("/proc/self/status", SOON);
    match (absent, no_program) {
        (Err(StartError::Program(_)), Err(StartError::Begin { .. })) => Ok(()),
        other => Err(format!("{other:?}")),
    }
}

fn program_enters_no_cell() -> Result<(), String> {
    match process("/bin/cat", Duration::from_millis(200)) {
        Err(StartError::Silent { .. }) => Ok(()),
        other => Err(format!("{other:?}")),
    }
}

/// From the first descriptor that is needed to the last: whichever there is none for, none is left.
fn descriptors_run_out() -> Result<(), String> {
    let limit = getrlimit(Resource::Nofile);
    let before = Footprint::now();
    let open = fs::read_dir("/proc/self/fd").unwrap().count() as u64;
    let (mut failures, mut successes) = (0, 0);
    for more in 0..48 {
        let low = Rlimit {
            current: Some(open + more),
            ..limit
        };
        setrlimit(Resource::Nofile, low).map_err(|error| error.to_string())?;
        let result = started(&Wanted::case("halts_for_ever")).map(drop);
        setrlimit(Resource::Nofile, limit).map_err(|error| error.to_string())?;
        match result {
            Ok(()) => successes += 1,
            Err(_) => failures += 1,
        }
        before
            .is_again()
            .map_err(|what| format!("with {more} more descriptors: {what}"))?;
    }
    if failures < 10 || successes < 10 {
        return Err(format!("{failures} failures, {successes} successes"));
    }
    Ok(())
}

/// A machine after another: what a supervisor holds stays the same.
fn many_cycles() -> Result<(), String> {
    let usual = if std::env::var_os(IN_KVM_HOST).is_some() {
        CYCLES_IN_KVM_HOST
    } else {
        CYCLES
    };
    let cycles = std::env::var(CYCLES_VARIABLE)
        .ok()
        .and_then(|number| number.parse().ok())
        .unwrap_or(usual)
        .max(WARM_UP_CYCLES);
    let before = Footprint::now();
    let began = Instant::now();
    let mut kib = 0;
    for cycle in 0..cycles {
        if cycle == WARM_UP_CYCLES {
            kib = resident_kib();
        }
        guest_crashes()?;
        if cycle % 10 == 0 {
            before
                .is_again()
                .map_err(|what| format!("cycle {cycle}: {what}"))?;
        }
    }
    before.is_again()?;
    let after = resident_kib();
    eprintln!(
        "{cycles} machines in {:.1} s: before and after {before:?}; {kib} KiB after {WARM_UP_CYCLES}, {after} KiB in the end",
        began.elapsed().as_secs_f32()
    );
    if after > kib + GROWTH_MAX_KIB {
        return Err(format!("memory grew from {kib} KiB to {after} KiB"));
    }
    Ok(())
}
