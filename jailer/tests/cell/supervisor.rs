//! Supervisors that end badly, and one without privileges: this program again.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, setrlimit};
use rustix::thread::CapabilitySet;
use sandvmm_jailer::{Ids, start};

use crate::inmate::Order;
use crate::skip;
use crate::walls::{SOON, jailed, options};

/// The argument with which this program is a supervisor.
pub(crate) const WORD: &str = "supervise";

/// The argument after that with which it comes before other processes; and with which it gives way to them.
const FAVOURED: &str = "favoured";
const GIVING_WAY: &str = "giving-way";

/// The ones with which its user may have no other process, or fewer than a machine needs, or with which it is of a kind of real-time that makes
/// no others: it says why none was started.
const ALONE: &str = "alone";
const FEW: &str = "few";
const DEADLINE: &str = "deadline";

/// The one with which it may have less memory than a guest.
const NARROW: &str = "narrow";

/// The one with which it says why none was started, as it is; and with which its user has no room for one more key.
const CROWDED: &str = "crowded";
const HOARDING: &str = "hoarding";

/// How a supervisor says whose ids its machine has.
const NOBODYS: &str = "nobodys";
const SUPERVISORS: &str = "supervisors";

/// A user and group that own nothing; and some that run nothing either.
const NOBODY: u32 = 65534;
const ALONE_ID: u32 = 65533;
const HOARDERS_ID: u32 = 65532;

/// Starts a process, says which, and how its cell is, and goes on until it is killed. The word after its own says what it does to itself before.
pub(crate) fn serve() {
    match std::env::args().nth(2).as_deref() {
        Some(FAVOURED) => favour_this_process(),
        Some(GIVING_WAY) => have_this_process_give_way(),
        Some(ALONE) => return say_why_it_is_alone(|| limit(Resource::Nproc, 1, 100)),
        Some(NARROW) => return say_why_it_is_alone(|| limit(Resource::Data, 32 << 20, 32 << 20)),
        Some(FEW) => return say_why_it_is_alone(|| limit(Resource::Nproc, 1, 1)),
        Some(CROWDED) => return say_why_it_is_alone(|| {}),
        Some(HOARDING) => hoard_keys(),
        Some(DEADLINE) => match have_a_deadline() {
            Ok(()) => return say_why_it_is_alone(|| {}),
            Err(error) => return println!("unset {error}"),
        },
        _ => {}
    }
    let jailed = jailed(options(&[]), Order::Wait);
    let cell = &jailed.cell;
    let cgroup = jailed.process.cgroup().unwrap_or_else(|| Path::new("-"));
    let missing: Vec<String> = cell.missing.iter().map(ToString::to_string).collect();
    println!(
        "{} {} {} {} {} {}",
        jailed.process.id(),
        cgroup.display(),
        cell.namespaces.iter().count(),
        cell.empty_root,
        match cell.ids {
            Ids::Own(_) => "own",
            Ids::Nobodys => NOBODYS,
            _ => SUPERVISORS,
        },
        missing.join("; ")
    );
    std::io::stdout().flush().unwrap();
    std::thread::sleep(SOON);
    drop(jailed.socket);
}

/// The words of a supervisor that was started with `command`.
fn started(command: &mut Command) -> (Child, Vec<String>) {
    started_as(command, "")
}

/// The same, of one that does this to itself before.
fn started_as(command: &mut Command, what: &str) -> (Child, Vec<String>) {
    let words = [WORD, what];
    let mut child = command.args(words).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    (child, line.split_whitespace().map(str::to_owned).collect())
}

/// Whether this process may have others run as any user: it is root, of no user namespace that has a few ids alone, and may change ids.
fn may_give_ids() -> bool {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap();
    let has_all = map.split_whitespace().eq(["0", "0", "4294967295"]);
    let may_change = rustix::thread::capabilities(None)
        .unwrap()
        .effective
        .contains(CapabilitySet::SETUID | CapabilitySet::SETGID);
    rustix::process::geteuid().is_root() && has_all && may_change
}

fn wait_until_gone(pid: &str) {
    let deadline = Instant::now() + SOON;
    while fs::exists(format!("/proc/{pid}")).unwrap() {
        assert!(Instant::now() < deadline, "{pid} lives on");
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub(crate) fn it_dies_with_its_supervisor() {
    let (mut supervisor, words) = started(&mut Command::new("/proc/self/exe"));
    let (pid, cgroup) = (&words[0], Path::new(&words[1]));
    assert!(fs::exists(format!("/proc/{pid}")).unwrap());

    supervisor.kill().unwrap();
    supervisor.wait().unwrap();

    wait_until_gone(pid);
    // Whoever starts the next machine removes the group.
    drop(jailed(options(&[]), Order::Wait));
    assert!(!cgroup.exists(), "{}", cgroup.display());
}

/// A copy of this program that other users may execute, and the folder that it goes with: this program's own may be closed to others.
fn program_for_others() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let program = folder.path().join("program");
    // By a program of its own: a file that this one had open for writing can't be executed as long as a process has a copy of the descriptor that
    // another test's thread has just made.
    let copied = Command::new("install")
        .args(["-m", "755"])
        .args([&std::env::current_exe().unwrap(), &program])
        .status()
        .unwrap();
    assert!(copied.success());
    (folder, program)
}

pub(crate) fn a_user_without_privileges_has_a_cell() {
    if !may_give_ids() {
        // All the other tests have shown it.
        return;
    }
    let (_folder, program) = program_for_others();

    let (mut supervisor, words) = started(Command::new(&program).uid(NOBODY).gid(NOBODY));

    let status = fs::read_to_string(format!("/proc/{}/status", words[0])).unwrap();
    let has = |line: &str| status.lines().any(|found| found == line);
    assert!(
        has("CapEff:\t0000000000000000") && has("NoNewPrivs:\t1"),
        "{status}"
    );
    assert!(
        has(&format!("Uid:\t{NOBODY}\t{NOBODY}\t{NOBODY}\t{NOBODY}")),
        "{status}"
    );
    if words[2] == "0" {
        skip(
            "a_user_without_privileges_has_a_cell, in part",
            "the host refuses user namespaces",
        );
    } else {
        assert_eq!(words[2..5], ["7", "true", SUPERVISORS]);
        assert!(!words[5..].join(" ").contains("namespaces"), "{words:?}");
        assert!(has("CapBnd:\t0000000000000000"), "{status}");
    }
    supervisor.kill().unwrap();
    supervisor.wait().unwrap();
    wait_until_gone(&words[0]);
}

/// A root that may not give its machines ids of their own.
struct LesserRoot {
    /// What it lacks.
    lacks: &'static str,
    /// The shell's command that makes it so.
    command: &'static str,
    /// Whether that needs no other root.
    can_be_made_by_a_user: bool,
    /// How many kinds of namespaces its machines have, and whose ids.
    namespaces: &'static str,
    ids: &'static str,
    /// What its machines keep of its ids.
    keeps: Option<&'static str>,
}

/// Lets the machines of the program after it have no user namespace.
const NO_USER_NAMESPACES: &str =
    r#"sh -c 'echo 0 >/proc/sys/user/max_user_namespaces && exec "$@"' sh "$@""#;

/// Waits for its ids, of which there are as many as in most containers.
const CONTAINER: &str = r#"
    (for try in $(seq 500); do echo 0 0 65536 >/proc/$$/uid_map && break; sleep 0.02; done 2>/dev/null
    echo 0 0 65536 >/proc/$$/gid_map) &
    exec unshare -U sh -c 'for try in $(seq 500); do [ "$(id -u) $(id -g)" = "0 0" ] && exec "$@"; sleep 0.02; done' sh "#;

const LESSER_ROOTS: [LesserRoot; 7] = [
    LesserRoot {
        lacks: "other ids",
        command: r#"exec unshare -Ur "$@""#,
        can_be_made_by_a_user: true,
        namespaces: "7",
        ids: SUPERVISORS,
        keeps: Some("user, group"),
    },
    LesserRoot {
        lacks: "other ids, with process numbers of its own",
        command: r#"exec unshare -Urpf --kill-child --mount-proc "$@""#,
        can_be_made_by_a_user: true,
        namespaces: "7",
        ids: SUPERVISORS,
        keeps: Some("user, group"),
    },
    LesserRoot {
        lacks: "other ids and user namespaces",
        command: "exec unshare -Ur ",
        can_be_made_by_a_user: true,
        namespaces: "6",
        ids: SUPERVISORS,
        keeps: Some("user, group"),
    },
    LesserRoot {
        lacks: "ids for machines",
        command: CONTAINER,
        can_be_made_by_a_user: false,
        namespaces: "7",
        ids: NOBODYS,
        keeps: None,
    },
    LesserRoot {
        lacks: "ids for machines, and user namespaces",
        command: CONTAINER,
        can_be_made_by_a_user: false,
        namespaces: "6",
        ids: NOBODYS,
        keeps: None,
    },
    LesserRoot {
        lacks: "the capabilities to change user and group",
        command: r#"exec setpriv --bounding-set=-setuid,-setgid "$@""#,
        can_be_made_by_a_user: false,
        namespaces: "7",
        ids: SUPERVISORS,
        keeps: Some("user, group"),
    },
    LesserRoot {
        lacks: "the capability to change the group",
        command: r#"exec setpriv --bounding-set=-setgid "$@""#,
        can_be_made_by_a_user: false,
        namespaces: "7",
        ids: SUPERVISORS,
        keeps: Some("group"),
    },
];

pub(crate) fn a_root_that_may_give_no_ids_has_machines_without() {
    if !may_give_ids() {
        skip(
            "a_root_that_may_give_no_ids_has_machines_without",
            "it needs root to make others of it",
        );
        return;
    }
    let (_folder, program) = program_for_others();
    for root in LESSER_ROOTS {
        let users: &[u32] = if root.can_be_made_by_a_user {
            &[0, NOBODY]
        } else {
            &[0]
        };
        // What is done with the program is not said yet where the command ends without it.
        let end = match (root.command.ends_with(' '), root.namespaces) {
            (true, "6") => NO_USER_NAMESPACES,
            (true, _) => r#""$@""#,
            (false, _) => "",
        };
        for user in users {
            let mut shell = Command::new("sh");
            shell
                .args(["-c", &format!("{}{end}", root.command), "sh"])
                .arg(&program);

            let (mut supervisor, words) = started(shell.uid(*user).gid(*user));

            let case = format!("user {user} as a root without {}: {words:?}", root.lacks);
            assert!(words.len() >= 5, "{case}");
            assert_eq!(words[2..5], [root.namespaces, "true", root.ids], "{case}");
            let missing = words[5..].join(" ");
            match root.keeps {
                Some(keeps) => assert!(missing.contains(&format!("keeps: {keeps}")), "{case}"),
                None => assert!(!missing.contains("keeps"), "{case}"),
            }
            supervisor.kill().unwrap();
            supervisor.wait().unwrap();
        }
    }
}

/// The personality of a process that has not chosen any, as its file has it.
const USUAL_PERSONALITY: &str = "00000000";

/// The slack of one that has not chosen any, and which of a process's flags says that it is an I/O flusher (`PF_MEMALLOC_NOIO`,
/// `include/linux/sched.h`).
const USUAL_TIMER_SLACK_NS: u64 = 50_000;
const MEMALLOC_NOIO: i64 = 0x8_0000;

/// More slack than usual.
const MUCH_TIMER_SLACK_NS: u64 = 1_000_000;

/// `PR_SET_IO_FLUSHER` (`include/uapi/linux/prctl.h`).
const SET_IO_FLUSHER: libc::c_int = 57;

/// What a process is to the host's schedulers and its OOM killer.
#[derive(Debug, PartialEq, Eq)]
struct Standing {
    nice: i64,
    real_time_priority: i64,
    policy: i64,
    /// The class of its priority for disks.
    io_class: i64,
    oom_score_adj: i64,
    personality: String,
    /// `None` where it may not be asked for.
    timer_slack_ns: Option<u64>,
    is_io_flusher: bool,
}

impl Standing {
    fn of(pid: u32) -> Self {
        let read = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap();
        let stat = read("stat");
        let (_, fields) = stat.rsplit_once(") ").unwrap();
        // Counted as in proc_pid_stat(5); the name, of which this is the rest, is the second.
        let field = |number: usize| fields.split(' ').nth(number - 3).unwrap().parse().unwrap();
        Self {
            nice: field(19),
            real_time_priority: field(40),
            policy: field(41),
            io_class: io_priority(pid) >> IO_CLASS_SHIFT,
            oom_score_adj: read("oom_score_adj").trim().parse().unwrap(),
            timer_slack_ns: fs::read_to_string(format!("/proc/{pid}/timerslack_ns"))
                .ok()
                .map(|text| text.trim().parse().unwrap()),
            is_io_flusher: field(9) & MEMALLOC_NOIO != 0,
            // Nobody may ask where `kernel.yama.ptrace_scope` is 3.
            personality: fs::read_to_string(format!("/proc/{pid}/personality")).map_or_else(
                |_| USUAL_PERSONALITY.to_owned(),
                |text| text.trim().to_owned(),
            ),
        }
    }
}

#[expect(unsafe_code, reason = "the C library has no call for it")]
fn io_priority(pid: u32) -> i64 {
    // SAFETY: the call takes numbers alone.
    unsafe { libc::syscall(libc::SYS_ioprio_get, 1, pid) }
}

/// The classes of priorities for disks, and at which bit of a priority its class begins.
const IO_NONE: i64 = 0;
const IO_REAL_TIME: i64 = 1;
const IO_IDLE: i64 = 3;
const IO_CLASS_SHIFT: u32 = 13;

#[expect(unsafe_code, reason = "the C library has no call for it")]
fn set_io_class(class: i64) {
    let priority = class << IO_CLASS_SHIFT;
    // SAFETY: the call takes numbers alone.
    let set = unsafe { libc::syscall(libc::SYS_ioprio_set, 1, 0, priority) };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
}

#[expect(unsafe_code, reason = "no crate of ours has priorities")]
fn favour_this_process() {
    if fs::write("/proc/self/oom_score_adj", "-500").is_err() {
        skip(
            "a_favoured_supervisor_favours_no_machine, in part",
            "root may not spare a process from the OOM killer here",
        );
    }
    set_io_class(IO_REAL_TIME);
    let priority = libc::sched_param { sched_priority: 7 };
    // SAFETY: numbers, and a pointer to a structure that lives here.
    unsafe {
        assert_eq!(libc::setpriority(libc::PRIO_PROCESS, 0, -5), 0);
        assert_eq!(libc::prctl(libc::PR_SET_TIMERSLACK, 1, 0, 0, 0), 0);
        if libc::prctl(SET_IO_FLUSHER, 1, 0, 0, 0) != 0 {
            skip(
                "a_favoured_supervisor_favours_no_machine, in part",
                "root may make no process an I/O flusher here",
            );
        }
        libc::personality(libc::ADDR_NO_RANDOMIZE.cast_unsigned().into());
        if libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const priority) != 0 {
            // The group of cgroup v1 that the host has it in has no share of real-time.
            skip(
                "a_favoured_supervisor_favours_no_machine, in part",
                "the host lets root run nothing as real-time",
            );
        }
    }
}

#[expect(unsafe_code, reason = "no crate of ours has priorities")]
fn have_this_process_give_way() {
    fs::write("/proc/self/oom_score_adj", "300").unwrap();
    set_io_class(IO_IDLE);
    let priority = libc::sched_param { sched_priority: 0 };
    // SAFETY: numbers, and a pointer to a structure that lives here.
    unsafe {
        assert_eq!(libc::setpriority(libc::PRIO_PROCESS, 0, 10), 0);
        assert_eq!(
            libc::prctl(libc::PR_SET_TIMERSLACK, MUCH_TIMER_SLACK_NS, 0, 0, 0),
            0
        );
        assert_eq!(
            libc::sched_setscheduler(0, libc::SCHED_BATCH, &raw const priority),
            0
        );
    }
}

pub(crate) fn a_favoured_supervisor_favours_no_machine() {
    if !may_give_ids() {
        skip(
            "a_favoured_supervisor_favours_no_machine",
            "it needs root to favour a process",
        );
        return;
    }

    let (mut supervisor, words) = started_as(&mut Command::new("/proc/self/exe"), FAVOURED);

    let favoured = Standing::of(supervisor.id());
    assert_eq!((favoured.nice, favoured.io_class), (-5, IO_REAL_TIME));
    assert_eq!(
        Standing::of(words[0].parse().unwrap()),
        Standing {
            nice: 0,
            real_time_priority: 0,
            policy: libc::SCHED_OTHER.into(),
            io_class: IO_NONE,
            oom_score_adj: 0,
            personality: USUAL_PERSONALITY.to_owned(),
            timer_slack_ns: Some(USUAL_TIMER_SLACK_NS),
            is_io_flusher: false,
        }
    );
    supervisor.kill().unwrap();
    supervisor.wait().unwrap();
}

pub(crate) fn a_supervisor_that_gives_way_has_machines_that_do() {
    let (mut supervisor, words) = started_as(&mut Command::new("/proc/self/exe"), GIVING_WAY);

    let its = Standing::of(words[0].parse().unwrap());
    assert_eq!(
        its,
        Standing {
            nice: 10,
            real_time_priority: 0,
            policy: libc::SCHED_BATCH.into(),
            io_class: IO_IDLE,
            oom_score_adj: 300,
            personality: USUAL_PERSONALITY.to_owned(),
            timer_slack_ns: its.timer_slack_ns.map(|_| MUCH_TIMER_SLACK_NS),
            is_io_flusher: false,
        }
    );
    supervisor.kill().unwrap();
    supervisor.wait().unwrap();
}

fn limit(resource: Resource, current: u64, maximum: u64) {
    let most = Rlimit {
        current: Some(current),
        maximum: Some(maximum),
    };
    setrlimit(resource, most).unwrap();
}

/// `struct sched_attr` of `sched_setattr(2)`, and its policy.
#[expect(unsafe_code, reason = "the C library has no call for it")]
fn have_a_deadline() -> std::io::Result<()> {
    let size = 48_u32;
    let policy = libc::SCHED_DEADLINE.cast_unsigned();
    let (runtime_ns, period_ns) = (1_000_000_u64, 100_000_000_u64);
    let words: [u64; 6] = [
        u64::from(size) | u64::from(policy) << 32,
        0,
        0,
        runtime_ns,
        period_ns,
        period_ns,
    ];
    // SAFETY: the structure lives here, and is as long as it says.
    let set = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, words.as_ptr(), 0) };
    if set == 0 {
        return Ok(());
    }
    Err(std::io::Error::last_os_error())
}

fn say_why_it_is_alone(prepare: fn()) {
    prepare();
    let (input, _kept) = rustix::pipe::pipe().unwrap();

    let error = start(Path::new("/proc/self/exe"), input, options(&[])).unwrap_err();

    println!("{error}: {}", std::error::Error::source(&error).unwrap());
}

pub(crate) fn a_limit_that_is_met_is_named() {
    if !may_give_ids() {
        skip(
            "a_limit_that_is_met_is_named",
            "this user may have other processes than this test's",
        );
        return;
    }
    let (_folder, program) = program_for_others();
    let mut command = Command::new(&program);
    command.uid(ALONE_ID).gid(ALONE_ID);

    let (mut supervisor, words) = started_as(&mut command, ALONE);

    assert!(supervisor.wait().unwrap().success());
    let said = words.join(" ");
    for part in [
        "made no process",
        "`ulimit -u`, RLIMIT_NPROC, is 1 here",
        "pids.max",
    ] {
        assert!(said.contains(part), "{said}");
    }
}

pub(crate) fn a_limit_that_a_machine_needs_more_than_is_named() {
    let (mut supervisor, words) = started_as(&mut Command::new("/proc/self/exe"), FEW);

    assert!(supervisor.wait().unwrap().success());
    let said = words.join(" ");
    for part in [
        "needs 4 processes and threads",
        "1 at most (`ulimit -u`, RLIMIT_NPROC)",
    ] {
        assert!(said.contains(part), "{said}");
    }

    let (mut supervisor, words) = started_as(&mut Command::new("/proc/self/exe"), NARROW);

    assert!(supervisor.wait().unwrap().success());
    let said = words.join(" ");
    for part in [
        "needs its 64 MiB",
        "32768 KiB at most (`ulimit -d`, RLIMIT_DATA)",
    ] {
        assert!(said.contains(part), "{said}");
    }
}

pub(crate) fn a_supervisor_of_real_time_is_told_why_it_has_no_machine() {
    let (mut supervisor, words) = started_as(&mut Command::new("/proc/self/exe"), DEADLINE);

    assert!(supervisor.wait().unwrap().success());
    let said = words.join(" ");
    if said.starts_with("unset") {
        skip(
            "a_supervisor_of_real_time_is_told_why_it_has_no_machine",
            &said,
        );
        return;
    }
    assert!(said.contains("SCHED_DEADLINE makes no others"), "{said}");
    assert!(!said.contains("pids.max"), "{said}");
}

pub(crate) fn a_user_without_user_namespaces_is_told_what_stays() {
    if !may_give_ids() {
        skip(
            "a_user_without_user_namespaces_is_told_what_stays",
            "it needs root to forbid them",
        );
        return;
    }
    let (_folder, program) = program_for_others();
    // In a user namespace whose limit is 0, a user that is not its root.
    let mut shell = Command::new("sh");
    let become_another = format!(
        "{CONTAINER} sh -c 'echo 0 >/proc/sys/user/max_user_namespaces && exec setpriv --reuid 7 --regid 7 --clear-groups \"$@\"' sh \"$@\""
    );
    shell.args(["-c", &become_another, "sh"]).arg(&program);

    let (mut supervisor, words) = started(&mut shell);

    assert_eq!(words[2..5], ["0", "false", SUPERVISORS], "{words:?}");
    let missing = words[5..].join(" ");
    for part in ["cgroup", "bounding set", "no_new_privs"] {
        assert!(missing.contains(part), "{missing}");
    }
    let status = fs::read_to_string(format!("/proc/{}/status", words[0])).unwrap();
    let has = |line: &str| status.lines().any(|found| found == line);
    for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
        assert!(has(&format!("{set}:\t0000000000000000")), "{status}");
    }
    assert!(has("NoNewPrivs:\t1"), "{status}");
    supervisor.kill().unwrap();
    supervisor.wait().unwrap();
}

/// A root whose namespaces this makes of `what` it does first.
fn lesser_root(what: &str) -> Command {
    let mut shell = Command::new("unshare");
    shell
        .args(["-Ur", "sh", "-c", &format!("{what} && exec \"$@\""), "sh"])
        .arg(std::env::current_exe().unwrap());
    shell
}

pub(crate) fn a_kind_of_namespace_that_is_forbidden_is_the_only_one_that_lacks() {
    for (kind, has_root) in [("net", "true"), ("mnt", "false")] {
        let forbid = format!("echo 0 >/proc/sys/user/max_{kind}_namespaces");

        let (mut supervisor, words) = started(&mut lesser_root(&forbid));

        assert_eq!(words[2..4], ["6", has_root], "{words:?}");
        let missing = words[5..].join(" ");
        let shown = kind.replace("mnt", "mount");
        assert!(
            missing.contains(&format!("namespaces of these kinds: {shown} (")),
            "{missing}"
        );
        supervisor.kill().unwrap();
        supervisor.wait().unwrap();
        wait_until_gone(&words[0]);
    }
}

pub(crate) fn a_kind_of_namespace_that_there_are_enough_of_is_told_and_none_is_left_out() {
    let mut crowded = lesser_root(
        "echo 1 >/proc/sys/user/max_net_namespaces && { unshare -n sleep 30 & sleep 0.5; }",
    );

    let (mut supervisor, words) = started_as(&mut crowded, CROWDED);

    assert!(supervisor.wait().unwrap().success());
    let said = words.join(" ");
    assert!(said.contains("raise `user.max_user_namespaces`"), "{said}");
}

pub(crate) fn a_limit_of_an_outer_namespace_leaves_the_others() {
    // What is in the inner one has no limit of its own, and can't know whether the outer one's is met for ever.
    let script = "echo 1 >/proc/sys/user/max_user_namespaces && exec unshare -Ur \"$@\"";
    let mut inner = Command::new("unshare");
    inner
        .args(["-Ur", "sh", "-c", script, "sh"])
        .arg(std::env::current_exe().unwrap());

    let (mut supervisor, words) = started(&mut inner);

    assert_eq!(words[2..4], ["6", "true"], "{words:?}");
    let missing = words[5..].join(" ");
    assert!(missing.contains("of these kinds: user ("), "{missing}");
    supervisor.kill().unwrap();
    supervisor.wait().unwrap();
}

pub(crate) fn secure_bits_that_are_locked_are_told() {
    let mut locked = lesser_root("echo 0 >/proc/sys/user/max_user_namespaces");
    let program = locked.get_args().last().unwrap().to_owned();
    let mut shell = Command::new(locked.get_program());
    shell
        .args(locked.get_args().take(locked.get_args().count() - 1))
        .args(["setpriv", "--securebits", "+noroot_locked"])
        .arg(program);
    locked = shell;

    let (mut supervisor, words) = started(&mut locked);

    let missing = words[5..].join(" ");
    assert!(missing.contains("secure bits are locked"), "{words:?}");
    let status = fs::read_to_string(format!("/proc/{}/status", words[0])).unwrap();
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        let none = format!("{set}:\t0000000000000000");
        assert!(status.lines().any(|line| line == none), "{status}");
    }
    supervisor.kill().unwrap();
    supervisor.wait().unwrap();
}

/// Fills the user's quota with keys that go with this process.
#[expect(unsafe_code, reason = "no crate of ours has keys")]
fn hoard_keys() {
    // Who has none is given one whatever the quota is.
    // SAFETY: with a null name the call reads no memory.
    let session = unsafe {
        libc::syscall(
            libc::SYS_keyctl,
            libc::KEYCTL_JOIN_SESSION_KEYRING,
            std::ptr::null::<libc::c_char>(),
        )
    };
    assert!(session > 0, "{}", std::io::Error::last_os_error());
    for number in 0_u32..100_000 {
        let name = std::ffi::CString::new(format!("of-a-test-{number}")).unwrap();
        // SAFETY: two strings and a byte that live here.
        let added = unsafe {
            libc::syscall(
                libc::SYS_add_key,
                c"user".as_ptr(),
                name.as_ptr(),
                c"x".as_ptr(),
                1_usize,
                libc::KEY_SPEC_PROCESS_KEYRING,
            )
        };
        if added < 0 {
            let error = std::io::Error::last_os_error();
            assert_eq!(error.raw_os_error(), Some(libc::EDQUOT), "{error}");
            return;
        }
    }
    panic!("there is no quota");
}

pub(crate) fn a_session_keyring_that_is_kept_is_told() {
    if !may_give_ids() {
        skip(
            "a_session_keyring_that_is_kept_is_told",
            "it needs another user, whose quota is smaller",
        );
        return;
    }
    let (_folder, program) = program_for_others();

    let (mut supervisor, words) = started_as(
        Command::new(&program).uid(HOARDERS_ID).gid(HOARDERS_ID),
        HOARDING,
    );

    let missing = words[5..].join(" ");
    assert!(missing.contains("session keyring"), "{words:?}");
    supervisor.kill().unwrap();
    supervisor.wait().unwrap();
}
