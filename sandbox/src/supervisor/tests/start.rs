//! A guest becomes ready, or its start fails and says why.

use super::*;

#[test]
fn a_greeting_makes_the_sandbox_ready_and_its_clocks_are_in_order() {
    let (sandbox, peer) = sandbox(None);
    let started_ns = now_ns();
    let running = FromMachine::Running {
        process_started_ns: started_ns,
        vcpu_running_ns: started_ns + 1,
    };
    peer.machine.send(&running, &[]).unwrap();
    let mut agent = peer.dial(port::CONTROL, port::CONTROL);
    say(&mut agent, &hello(protocol::VERSION));

    peer.shared.wait_ready().unwrap();
    let configure = hear(&mut agent);

    let ToAgent::Configure(configure) = configure else {
        panic!("{configure:?}");
    };
    assert_eq!(configure.hostname, "scripted");
    assert_eq!(configure.max_processes, Some(64));
    assert_ne!(configure.entropy, [0; 32]);
    assert!(configure.realtime_ns.abs_diff(realtime_ns()) < nanos(SOON));
    let clocks = sandbox.clocks();
    let phases = [
        clocks.process_started,
        clocks.vcpu_running,
        clocks.guest_init,
        clocks.agent_ready,
        sandbox.end().clocks.all_gone,
    ];
    assert!(phases.iter().all(Option::is_some), "{phases:?}");
    assert!(phases.is_sorted(), "{phases:?}");
}

#[test]
fn only_the_agents_own_dial_is_taken_and_only_once() {
    let (_sandbox, peer) = sandbox(None);
    let mut byte = [0];
    for (host_port, guest_port) in [(port::CONTROL, 1024), (port::STREAMS, port::CONTROL)] {
        let mut other = peer.dial(host_port, guest_port);
        assert_eq!(other.read(&mut byte).unwrap(), 0);
    }
    let mut agent = peer.dial(port::CONTROL, port::CONTROL);
    say(&mut agent, &hello(protocol::VERSION));
    peer.shared.wait_ready().unwrap();

    let mut second = peer.dial(port::CONTROL, port::CONTROL);

    assert_eq!(second.read(&mut byte).unwrap(), 0);
    assert!(matches!(hear(&mut agent), ToAgent::Configure(_)));
}

#[test]
fn a_dial_that_was_given_up_is_not_the_agents_last() {
    let (sandbox, peer) = sandbox(None);
    for _ in 0..3 {
        drop(peer.dial(port::CONTROL, port::CONTROL));
    }
    let mut agent = peer.dial(port::CONTROL, port::CONTROL);
    say(&mut agent, &hello(protocol::VERSION));

    peer.shared.wait_ready().unwrap();
    assert!(matches!(hear(&mut agent), ToAgent::Configure(_)));
    // From the greeting on there is one control stream, and its end is the agent's.
    drop(agent);
    let mut second = peer.dial(port::CONTROL, port::CONTROL);
    assert_eq!(second.read(&mut [0]).unwrap(), 0);
    sandbox.command("x").spawn().unwrap_err();
}

#[test]
fn a_flood_of_the_guests_dials_is_closed_and_keeps_no_command_waiting() {
    let (sandbox, peer, mut agent) = ready_sandbox(None);
    let (mut flood, theirs) = UnixStream::pair().unwrap();
    flood.set_read_timeout(Some(SOON)).unwrap();
    for port in 0..4096 {
        let message = FromMachine::GuestConnected {
            host_port: port,
            guest_port: port,
        };
        peer.machine.send(&message, &[theirs.as_fd()]).unwrap();
    }
    drop(theirs);

    let (child, _stdout, _stderr) = running(&sandbox, &peer, &mut agent);

    // The end of file: nobody holds one of the 4096 copies.
    assert_eq!(flood.read(&mut [0]).unwrap(), 0);
    drop(child);
}

#[test]
fn a_guest_that_cannot_be_used_fails_the_start_with_its_own_words() {
    let (_sandbox, peer) = sandbox(None);
    let mut agent = peer.dial(port::CONTROL, port::CONTROL);
    let message = "No root file system\x1b[2J".to_owned();
    say(&mut agent, &FromAgent::Fatal { message });

    let error = peer.shared.wait_ready().unwrap_err();

    assert!(
        matches!(error, StartError::Guest { sentence } if sentence == "No root file system [2J")
    );
}

#[test]
fn an_agent_of_another_version_fails_the_start() {
    let (_sandbox, peer) = sandbox(None);
    let mut agent = peer.dial(port::CONTROL, port::CONTROL);
    say(&mut agent, &hello(protocol::VERSION + 1));

    let error = peer.shared.wait_ready().unwrap_err();

    assert!(matches!(error, StartError::Version { .. }), "{error:?}");
}

#[test]
fn a_machine_that_cannot_be_built_fails_the_start() {
    let (_sandbox, peer) = sandbox(None);
    peer.end(EndReason::StartFailed("The kernel is none".to_owned()), b"");

    let error = peer.shared.wait_ready().unwrap_err();

    assert_eq!(error.to_string(), "The kernel is none");
    assert!(matches!(error, StartError::Machine { .. }));
}

#[test]
fn a_kernel_that_panics_while_booting_fails_the_start_with_its_reason() {
    let (_sandbox, peer) = sandbox(None);
    peer.end(
        EndReason::Reset,
        b"Kernel panic - not syncing: No working init found.\n",
    );

    let error = peer.shared.wait_ready().unwrap_err();

    assert!(matches!(&error, StartError::Crashed(crash) if crash.kind() == CrashKind::KernelPanic));
    assert!(error.to_string().contains("No working init"), "{error}");
}

#[test]
fn a_guest_that_never_gets_ready_is_given_up_at_the_end_of_its_time() {
    let (_sandbox, peer) = sandbox(Some(Duration::from_millis(50)));

    let error = peer.shared.wait_ready().unwrap_err();

    assert!(matches!(error, StartError::TimedOut { .. }), "{error:?}");
}

#[test]
fn a_program_that_serves_no_machine_fails_the_start_with_its_words() {
    let (_sandbox, mut peer) = sandbox(None);
    peer.process
        .write_all(b"echo not a machine >&2; exit 2\n")
        .unwrap();

    let error = peer.shared.wait_ready().unwrap_err().to_string();

    assert!(error.contains("status 2"), "{error}");
    assert!(error.ends_with("not a machine"), "{error}");
}

#[test]
fn a_boot_has_its_own_limit_and_less_where_the_sandboxs_time_is_over_before() {
    let shared = Arc::new(Shared::new(now_ns(), Events::default()).unwrap());
    let booting = |timeout: Option<Duration>| {
        let (ours, _machine) = ControlSocket::pair().unwrap();
        let (stdin, _process) = UnixStream::pair().unwrap();
        let options = jailer::Options {
            leave_out: jailer::Part::ALL.into_iter().collect(),
            ..jailer::Options::new(BOUNDS)
        };
        let process = jailer::start(Path::new("/bin/cat"), stdin.into(), options).unwrap();
        let deadline = timeout.map(|timeout| (now_ns() + nanos(timeout), timeout));
        Supervisor::new(&shared, ours, process, GuestOptions::default(), deadline)
    };
    let hours = Duration::from_secs(8 * 3600);
    for (timeout, limit) in [
        (None, BOOT_LIMIT),
        (Some(hours), BOOT_LIMIT),
        (Some(SOON), SOON),
    ] {
        let begun_ns = now_ns();
        let mut supervisor = booting(timeout);
        let over_ns = now_ns() + nanos(limit);

        let woken_ns = supervisor.next_deadline_ns().unwrap();
        let ended = supervisor.keep_deadlines(over_ns);

        assert!((begun_ns + nanos(limit)..=over_ns).contains(&woken_ns));
        assert!(
            matches!(ended, Err(Reason::TimeIsOver(told)) if told == limit),
            "{timeout:?}: {ended:?}"
        );
        supervisor.keep_deadlines(begun_ns).unwrap();
    }
}
