//! An attacker in the machine's process, after the cell has closed: nothing that is tried goes through, and with the filters left out
//! the layers beneath stop it.

use std::fmt::Write as _;
use std::fs;
use std::net::{TcpListener, UdpSocket};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::sync::{Mutex, MutexGuard, PoisonError};

use jailer::{Cell, Part, ProcessEnd, Thread};

use crate::attack::{self, Attempt, Target};
use crate::machine::{Machine, Wanted};
use crate::order::Order;

/// What the supervisor has that is aimed at, for as long as this lives.
struct Supervisor {
    target: Target,
    _tcp: TcpListener,
    _udp: UdpSocket,
    _abstract: UnixListener,
    _by_path: UnixListener,
    /// Its names are this process's: one at a time. Given back last.
    _alone: MutexGuard<'static, ()>,
}

impl Supervisor {
    fn new() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let pid = std::process::id().cast_signed();
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
        let name = SocketAddr::from_abstract_name(attack::abstract_name(pid)).unwrap();
        let path = attack::socket_path(pid);
        let _ = fs::remove_file(&path);
        let target = Target {
            pid,
            tcp_port: tcp.local_addr().unwrap().port(),
            udp_port: udp.local_addr().unwrap().port(),
            key: attack::make_key(),
            segment: attack::make_segment(),
            is_direct: false,
        };
        Self {
            _alone: alone,
            target,
            _tcp: tcp,
            _udp: udp,
            _abstract: UnixListener::bind_addr(&name).unwrap(),
            _by_path: UnixListener::bind(&path).unwrap(),
        }
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        let _ = fs::remove_file(attack::socket_path(self.target.pid));
        attack::remove_segment(self.target.segment);
    }
}

/// Has it made; the cell, how the process ended, the forbidden call that ended it, and the results.
fn attacked(order: Order, leave_out: &[Part]) -> (Cell, Option<String>, Vec<(usize, i64)>) {
    let machine = Machine::wanted(&Wanted {
        order,
        leave_out,
        ..Wanted::case("halts_for_ever")
    })
    .unwrap();
    let cell = machine.cell.clone();
    let (end, forbidden, said) = machine.ended();
    let results: Vec<_> = attack::results(&said).collect();
    assert!(
        end == ProcessEnd::Exited(0) || forbidden.is_some(),
        "{end:?}: {said}"
    );
    (cell, forbidden, results)
}

/// Everything is on: each attempt, from each kind of thread, in a process of its own.
pub(crate) fn nothing_goes_through() {
    let supervisor = Supervisor::new();
    let target = Target {
        is_direct: true,
        ..supervisor.target
    };
    let attempts = attack::all();
    let mut table = String::new();
    let mut failures = Vec::new();
    for (number, attempt) in attempts.iter().enumerate() {
        let _ = write!(table, "{:<46}", attempt.name);
        for thread in [Thread::Main, Thread::Vcpu] {
            let (_, forbidden, results) =
                attacked(Order::Attack(thread, Some(number), target), &[]);
            let stopped = match (forbidden, results.as_slice()) {
                (Some(call), []) => format!("seccomp: {call}"),
                (None, [(_, result)]) if *result < 0 => {
                    let always = attempt.always.unwrap_or("?");
                    format!("{always}: {}", attack::error_name(-result))
                }
                (forbidden, results) => {
                    failures.push(format!(
                        "{} from {thread:?}: {forbidden:?} {results:?}",
                        attempt.name
                    ));
                    "WENT THROUGH".to_owned()
                }
            };
            let _ = write!(table, " | {stopped:<42}");
        }
        table.push('\n');
    }
    eprintln!(
        "\n{:<46} | {:<42} | from a processor's thread\n{table}",
        "tried, with everything on", "from the event loop"
    );
    assert!(failures.is_empty(), "{failures:#?}");
}

/// What comes of the attempts with some parts left out.
struct Layers {
    /// Without the filters; also without Landlock, without namespaces, without both. The control group, which is not
    /// everywhere, is left out with each.
    without_filters: Vec<i64>,
    without_landlock: Vec<i64>,
    without_namespaces: Vec<i64>,
    without_both: Vec<i64>,
    cell: Cell,
}

impl Layers {
    fn find(target: Target) -> Self {
        let make = |parts: &[Part]| {
            let leave_out = [&[Part::Seccomp, Part::Cgroup], parts].concat();
            let order = Order::Attack(Thread::Main, None, target);
            let (cell, forbidden, results) = attacked(order, &leave_out);
            assert_eq!(forbidden, None);
            let results: Vec<i64> = results.into_iter().map(|(_, result)| result).collect();
            assert_eq!(results.len(), attack::all().len(), "{parts:?}");
            (cell, results)
        };
        let (cell, without_filters) = make(&[]);
        Self {
            without_filters,
            without_landlock: make(&[Part::Landlock]).1,
            without_namespaces: make(&[Part::Namespaces]).1,
            without_both: make(&[Part::Landlock, Part::Namespaces]).1,
            cell,
        }
    }

    /// What stops an attempt, each by itself; and what is wrong with that.
    fn of(&self, number: usize, attempt: &Attempt) -> (Vec<String>, Option<String>) {
        let [all, no_landlock, no_namespaces, neither] = [
            &self.without_filters,
            &self.without_landlock,
            &self.without_namespaces,
            &self.without_both,
        ]
        .map(|results| results[number]);
        let error = |result: i64| attack::error_name(-result);
        if neither == -i64::from(libc::ENOSYS) {
            return (vec!["this kernel has no such call".to_owned()], None);
        }
        let has_namespaces = self.cell.namespaces.iter().count() == 7 && self.cell.empty_root;
        let has_landlock = |from| self.cell.landlock_abi.is_some_and(|abi| abi >= from);
        let mut by = Vec::new();
        let mut wrong = None;
        let mut expect = |holds: bool, what: &str| {
            if !holds && wrong.is_none() {
                wrong = Some(format!(
                    "{}: {what}: {all} {no_landlock} {no_namespaces} {neither}",
                    attempt.name
                ));
            }
        };
        if let Some(what) = attempt.namespaces.filter(|_| has_namespaces) {
            expect(no_landlock < 0, "namespaces do not stop it");
            by.push(format!("{what} ({})", error(no_landlock)));
        }
        if attempt.landlock.is_some_and(has_landlock) {
            expect(no_namespaces < 0, "Landlock does not stop it");
            by.push(format!("Landlock ({})", error(no_namespaces)));
        }
        match attempt.always {
            Some(what) => {
                expect(neither < 0, "what is always on does not stop it");
                by.push(format!("{what} ({})", error(neither)));
            }
            // Else it would not be known that it is the cell that stops it.
            None if attempt.gain.is_none() => {
                expect(neither >= 0, "something else stops it");
            }
            None => {}
        }
        match attempt.gain {
            None => expect(all < 0, "nothing stops it"),
            Some(gain) if all >= 0 => by.push(format!("the filters alone: else it gains {gain}")),
            Some(_) => by.push(format!("here the host or a limit ({})", error(all))),
        }
        (by, wrong)
    }
}

/// The filters are left out: what stops each attempt is found by leaving out more.
pub(crate) fn without_filters_the_layers_beneath_stop_it() {
    let supervisor = Supervisor::new();
    let layers = Layers::find(supervisor.target);
    let mut table = String::new();
    let mut failures = Vec::new();
    for (number, attempt) in attack::all().iter().enumerate() {
        let (by, wrong) = layers.of(number, attempt);
        let _ = writeln!(table, "{:<46} | {}", attempt.name, by.join("; "));
        failures.extend(wrong);
    }
    eprintln!(
        "\n{:<46} | stopped by, each by itself\n{table}",
        "tried, without seccomp"
    );
    if !layers.cell.missing.is_empty() {
        eprintln!("this host lacks: {:?}", layers.cell.missing);
    }
    assert!(failures.is_empty(), "{failures:#?}");
}
