//! What a machine's process is in, and what it can't do there.

use std::collections::BTreeSet;
use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use sandvmm_jailer::{
    Bounds, Cell, FIRST_MACHINE_ID, Ids, MachineProcess, Namespace, Options, Part, ProcessEnd,
    StartError, Thread, landlock_abi, start,
};

use crate::inmate::{Fault, NOWHERE, Order, PATH};
use crate::skip;

/// A limit for what must happen soon, on the slowest machine.
pub(crate) const SOON: Duration = Duration::from_secs(30);

pub(crate) const BOUNDS: Bounds = Bounds {
    memory_mib: 64,
    vcpus: 2,
    max_file_bytes: 4096,
};

/// A process in its cell, and the supervisor's end of its socket.
pub(crate) struct Jailed {
    pub(crate) process: MachineProcess,
    pub(crate) socket: OwnedFd,
    pub(crate) cell: Cell,
}

pub(crate) fn options(leave_out: &[Part]) -> Options {
    Options {
        leave_out: leave_out.iter().copied().collect(),
        ..Options::new(BOUNDS)
    }
}

pub(crate) fn jailed(options: Options, order: Order) -> Jailed {
    let (socket, theirs) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    rustix::io::write(&socket, order.to_words().as_bytes()).unwrap();
    let mut process = start(Path::new("/proc/self/exe"), theirs, options).unwrap();
    let cell = process.entered(SOON).unwrap();
    let cell = cell.unwrap_or_else(|| {
        process.end();
        process.read_stderr();
        panic!("{}", String::from_utf8_lossy(&process.stderr_tail()));
    });
    Jailed {
        process,
        socket,
        cell,
    }
}

impl Jailed {
    fn file(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{name}", self.process.id()))
    }

    fn status(&self, field: &str) -> String {
        let status = fs::read_to_string(self.file("status")).unwrap();
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        line.unwrap_or_else(|| panic!("no {field}"))
            .trim()
            .to_owned()
    }

    /// Waits until its thread has closed its cell.
    fn wait_until_closed(&self) {
        let deadline = Instant::now() + SOON;
        while self.status("Seccomp") != "2" {
            assert!(Instant::now() < deadline, "it never closed its cell");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn ended(mut self) -> (ProcessEnd, Option<String>, String) {
        let end = self.process.wait_timeout(SOON).expect("it ends");
        while self.process.read_stderr() {}
        let words = String::from_utf8(self.process.stderr_tail()).unwrap();
        (end, self.process.forbidden_call(), words)
    }
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

pub(crate) fn it_has_every_part() {
    let jailed = jailed(options(&[]), Order::Wait);
    jailed.wait_until_closed();

    let cell = &jailed.cell;
    assert_eq!(cell.landlock_abi, landlock_abi());
    assert!(cell.seccomp);
    for field in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(jailed.status(field).trim_start_matches('0'), "", "{field}");
    }
    assert_eq!(jailed.status("NoNewPrivs"), "1");
    for kind in cell.namespaces.iter() {
        let name = match kind {
            Namespace::Mount => "mnt",
            other => other.name(),
        };
        let link = |who: &str| fs::read_link(format!("/proc/{who}/ns/{name}")).unwrap();
        assert_ne!(
            link(&jailed.process.id().to_string()),
            link("self"),
            "{name}"
        );
    }
    if cell
        .missing
        .iter()
        .any(|missing| missing.part == Part::Namespaces)
    {
        skip("it_has_every_part, in part", &format!("{:?}", cell.missing));
        return;
    }
    assert_eq!(cell.namespaces.iter().count(), Namespace::ALL.len());
    assert!(cell.empty_root);
    assert_eq!(fs::read_dir(jailed.file("root")).unwrap().count(), 0);
    let refused = fs::write(jailed.file("root").join("file"), b"x").unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    if is_root() {
        let Ids::Own(id) = cell.ids else {
            panic!("{:?}", cell.ids)
        };
        assert!(id >= FIRST_MACHINE_ID);
        assert_eq!(
            jailed.status("Uid"),
            [id; 4].map(|id| id.to_string()).join("\t")
        );
        assert_eq!(
            jailed.status("Gid"),
            [id; 4].map(|id| id.to_string()).join("\t")
        );
        assert_eq!(jailed.status("Groups"), "");
    }
    assert_eq!(jailed.status("NSpid").split('\t').next_back(), Some("1"));
}

pub(crate) fn it_holds_nothing_of_its_supervisors() {
    let leaked = rustix::io::dup(std::io::stdin()).unwrap();
    rustix::io::fcntl_setfd(&leaked, rustix::io::FdFlags::empty()).unwrap();
    let jailed = jailed(options(&[]), Order::Wait);
    jailed.wait_until_closed();

    let open: BTreeSet<String> = fs::read_dir(jailed.file("fd"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    let words = fs::read_to_string(jailed.file("cmdline")).unwrap();

    assert_eq!(open, ["0", "1", "2"].map(str::to_owned).into());
    assert_eq!(
        fs::read_link(jailed.file("fd/1")).unwrap(),
        Path::new("/dev/null")
    );
    assert!(fs::read(jailed.file("environ")).unwrap().is_empty());
    assert_eq!(words, "sandvmm-machine\0");
    assert_eq!(jailed.status("Name"), "sandvmm-machine");
    assert_eq!(jailed.status("SigBlk").trim_start_matches('0'), "");
    // Not dumpable: its folder is root's, of the user namespace that it is in.
    let owner = std::os::unix::fs::MetadataExt::uid(&fs::metadata(jailed.file("mem")).unwrap());
    if is_root() {
        let mode = fs::read_to_string(jailed.file("stat")).unwrap();
        assert!(mode.contains("sandvmm-machine"));
    } else {
        let root = if jailed.cell.namespaces.contains(Namespace::User) {
            rustix::process::geteuid().as_raw()
        } else {
            0
        };
        assert_eq!(owner, root);
    }
}

pub(crate) fn its_limits_are_set() {
    let jailed = jailed(options(&[]), Order::Wait);

    let text = fs::read_to_string(jailed.file("limits")).unwrap();
    let limit = |name: &str| -> Vec<String> {
        let line = text.lines().find(|line| line.starts_with(name)).unwrap();
        let mut numbers = line[name.len()..].split_whitespace().map(str::to_owned);
        vec![numbers.next().unwrap(), numbers.next().unwrap()]
    };

    for (name, value) in [
        ("Max core file size", 0),
        ("Max file size", 4096),
        ("Max locked memory", 0),
        ("Max msgqueue size", 0),
        ("Max address space", (64_u64 + 768 + 2 * 144) << 20),
    ] {
        assert_eq!(
            limit(name),
            [value.to_string(), value.to_string()],
            "{name}"
        );
    }
    let descriptors: u64 = limit("Max open files")[1].parse().unwrap();
    assert!((256..=1280).contains(&descriptors), "{descriptors}");
    if matches!(jailed.cell.ids, Ids::Own(_)) {
        assert_eq!(limit("Max processes"), ["7", "7"]);
    }
}

pub(crate) fn a_part_that_is_left_out_is_off() {
    for part in Part::ALL {
        let jailed = jailed(options(&[part]), Order::Wait);
        let cell = &jailed.cell;

        assert!(
            cell.missing.iter().all(|missing| missing.part != part),
            "{cell:?}"
        );
        assert_eq!(cell.seccomp, part != Part::Seccomp);
        assert_eq!(
            cell.landlock_abi,
            landlock_abi().filter(|_| part != Part::Landlock)
        );
        if part == Part::Namespaces {
            assert!(cell.namespaces.is_empty() && !cell.empty_root);
            assert_eq!(cell.ids, Ids::Supervisors);
        }
        if part == Part::Cgroup {
            assert_eq!(cell.cgroup, None);
        }
        assert_eq!(jailed.status("CapEff").trim_start_matches('0'), "");
        assert_eq!(jailed.status("NoNewPrivs"), "1");
    }
}

pub(crate) fn a_forbidden_call_ends_it_and_is_named() {
    let calls = [
        (libc::SYS_openat, "openat"),
        (libc::SYS_socket, "socket"),
        (libc::SYS_connect, "connect"),
        (libc::SYS_execve, "execve"),
        (libc::SYS_clone, "clone"),
        (libc::SYS_clone3, "clone3"),
        (libc::SYS_fork, "fork"),
        (libc::SYS_kill, "kill"),
        (libc::SYS_ptrace, "ptrace"),
        (libc::SYS_process_vm_readv, "process_vm_readv"),
        (libc::SYS_mount, "mount"),
        (libc::SYS_keyctl, "keyctl"),
        (libc::SYS_bpf, "bpf"),
        (libc::SYS_io_uring_setup, "io_uring_setup"),
        (libc::SYS_userfaultfd, "userfaultfd"),
        (libc::SYS_unshare, "unshare"),
        (libc::SYS_rt_sigaction, "rt_sigaction"),
        (libc::SYS_seccomp, "seccomp"),
        (libc::SYS_prctl, "prctl"),
        (libc::SYS_mmap, "mmap"),
        (libc::SYS_mprotect, "mprotect"),
        (libc::SYS_munmap, "munmap"),
    ];
    for thread in [Thread::Main, Thread::Vcpu] {
        for (number, name) in calls {
            let jailed = jailed(options(&[]), Order::Call(thread, number, [0; 4]));

            let (end, forbidden, words) = jailed.ended();

            assert_eq!(
                forbidden.as_deref(),
                Some(name),
                "{thread:?} {end:?} {words}"
            );
            assert_eq!(end, ProcessEnd::Exited(159));
        }
    }
}

pub(crate) fn arguments_are_forbidden_too() {
    let cases = [
        // AF_INET, and a kind of AF_UNIX that nobody needs.
        (Thread::Main, libc::SYS_socketpair, [2, 0x8_0001, 0, 0]),
        (Thread::Main, libc::SYS_socketpair, [1, 2, 0, 0]),
        // KVM_CREATE_VM, TIOCSTI, KVM_RUN by the wrong thread.
        (Thread::Main, libc::SYS_ioctl, [0, 0xae01, 0, 0]),
        (Thread::Main, libc::SYS_ioctl, [0, 0x5412, 0, 0]),
        (Thread::Main, libc::SYS_ioctl, [0, 0xae80, 0, 0]),
        (Thread::Vcpu, libc::SYS_ioctl, [0, 0xae01, 0, 0]),
        // F_DUPFD.
        (Thread::Main, libc::SYS_fcntl, [0, 0, 0, 0]),
        (Thread::Vcpu, libc::SYS_fcntl, [0, 0, 0, 0]),
    ];
    for (thread, number, arguments) in cases {
        let jailed = jailed(options(&[]), Order::Call(thread, number, arguments));

        let (end, forbidden, words) = jailed.ended();

        assert!(
            forbidden.is_some(),
            "{number} {arguments:?}: {end:?} {words}"
        );
    }
    // The same calls as they are meant to be.
    for (thread, number, arguments) in [
        (Thread::Main, libc::SYS_fcntl, [0, 1, 0, 0]),
        (Thread::Vcpu, libc::SYS_brk, [0, 0, 0, 0]),
    ] {
        let (end, ..) = jailed(options(&[]), Order::Call(thread, number, arguments)).ended();
        assert_eq!(end, ProcessEnd::Exited(0), "{number} {arguments:?}");
    }
}

pub(crate) fn without_a_filter_the_other_walls_hold() {
    let attempts = [
        (
            "opening a file",
            libc::SYS_open,
            [PATH, 0, 0, 0],
            vec![libc::ENOENT, libc::EACCES],
        ),
        (
            "mounting",
            libc::SYS_mount,
            [PATH, PATH, PATH, 0],
            vec![libc::EPERM, libc::ENOENT, libc::EACCES],
        ),
        (
            "a namespace",
            libc::SYS_unshare,
            [0x2000_0000, 0, 0, 0],
            vec![libc::EPERM],
        ),
        (
            "another root",
            libc::SYS_chroot,
            [PATH, 0, 0, 0],
            vec![libc::EPERM, libc::ENOENT],
        ),
        (
            "its host's name",
            libc::SYS_sethostname,
            [PATH, 3, 0, 0],
            vec![libc::EPERM],
        ),
        // Process 2 does not exist in there; the tests' own is none of its.
        (
            "a signal",
            libc::SYS_kill,
            [std::process::id().into(), 9, 0, 0],
            vec![libc::ESRCH, libc::EPERM],
        ),
        (
            "another user",
            libc::SYS_setresuid,
            [0, 0, 1, 0],
            vec![libc::EPERM, libc::EINVAL],
        ),
    ];
    for (what, number, arguments, expected) in attempts {
        let jailed = jailed(
            options(&[Part::Seccomp]),
            Order::Call(Thread::Main, number, arguments),
        );
        if jailed.cell.namespaces.is_empty() {
            skip(
                "without_a_filter_the_other_walls_hold",
                "the host refuses namespaces",
            );
            return;
        }

        let (end, ..) = jailed.ended();

        let ProcessEnd::Exited(errno) = end else {
            panic!("{what}: {end:?}")
        };
        assert!(expected.contains(&errno), "{what}: {errno}");
    }
}

pub(crate) fn a_panic_is_told_with_its_place() {
    let (end, forbidden, words) = jailed(options(&[]), Order::Panic).ended();

    assert_eq!((end, forbidden), (ProcessEnd::Exited(101), None));
    assert!(words.contains("of all things"), "{words}");
    assert!(words.contains("inmate.rs"), "{words}");
    assert!(words.contains("backtrace: 0x"), "{words}");
}

pub(crate) fn a_fault_is_told_as_one() {
    let nowhere = format!("SIGSEGV at address {NOWHERE:#x} in instruction 0x");
    for thread in [Thread::Main, Thread::Vcpu] {
        for fault in Fault::ALL {
            let (signal, says) = match fault {
                Fault::Write => (libc::SIGSEGV, nowhere.as_str()),
                Fault::Stack => (libc::SIGSEGV, "SIGSEGV at address 0x7f"),
                Fault::Instruction => (libc::SIGILL, "SIGILL at address 0x"),
            };

            let (end, forbidden, words) = jailed(options(&[]), Order::Fault(thread, fault)).ended();

            assert_eq!(forbidden, None, "{fault:?}: {words}");
            assert_eq!(end, ProcessEnd::Exited(128 + signal), "{fault:?}: {words}");
            assert!(
                words.starts_with("Fault: ") && words.contains(says),
                "{fault:?}: {words}"
            );
        }
    }
}

pub(crate) fn a_fault_that_somebody_sends_is_told_as_that() {
    let jailed = jailed(options(&[]), Order::Wait);
    jailed.wait_until_closed();
    let pid = rustix::process::Pid::from_raw(jailed.process.id().cast_signed()).unwrap();

    rustix::process::kill_process(pid, rustix::process::Signal::SEGV).unwrap();

    let (end, forbidden, words) = jailed.ended();
    assert_eq!((end, forbidden), (ProcessEnd::Exited(139), None));
    assert!(words.contains("SIGSEGV, which was sent to it"), "{words}");
}

pub(crate) fn it_can_be_asked_to_end() {
    let jailed = jailed(options(&[]), Order::Wait);
    jailed.wait_until_closed();
    let pid = rustix::process::Pid::from_raw(jailed.process.id().cast_signed()).unwrap();

    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();

    assert_eq!(jailed.ended().0, ProcessEnd::Exited(143));
}

pub(crate) fn it_is_bounded_by_a_cgroup() {
    let jailed = jailed(options(&[]), Order::Wait);
    let Some(folder) = jailed.process.cgroup().map(Path::to_owned) else {
        let why = format!("{:?}", jailed.cell.missing);
        skip("it_is_bounded_by_a_cgroup_that_goes_with_it", &why);
        assert_eq!(jailed.cell.cgroup, None);
        assert!(
            jailed
                .cell
                .missing
                .iter()
                .any(|missing| missing.part == Part::Cgroup)
        );
        return;
    };
    let read = |file: &str| {
        fs::read_to_string(folder.join(file))
            .unwrap()
            .trim()
            .to_owned()
    };

    assert_eq!(read("cgroup.procs"), jailed.process.id().to_string());
    assert_eq!(read("cpu.max"), "300000 100000");
    assert_eq!(
        read("memory.max"),
        ((64 + 96) * (1 << 20) + (64 << 20) / 128).to_string()
    );
    assert_eq!(read("pids.max"), "7");
    let files = jailed.cell.cgroup.as_ref().map(|bounds| &bounds.files);
    let swap = "memory.swap.max";
    let bounds_swap = files.is_some_and(|files| files.contains(&swap));
    assert_eq!(bounds_swap, folder.join(swap).exists());
    if bounds_swap {
        assert_eq!(read(swap), "0");
    }
    drop(jailed);
    assert!(!folder.exists());
}

pub(crate) fn a_stranger_is_told() {
    let (_socket, theirs) = rustix::pipe::pipe().unwrap();
    let (input, _kept) = rustix::pipe::pipe().unwrap();
    drop(theirs);
    let mut process = start(Path::new("/bin/sh"), input, options(&[])).unwrap();

    let error = process.entered(Duration::from_millis(200)).unwrap_err();

    assert!(matches!(error, StartError::Silent { .. }), "{error}");
}
