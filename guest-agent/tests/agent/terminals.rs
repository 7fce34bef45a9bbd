//! A program at a terminal.

use std::io::Read;

use protocol::message::{ExitStatus, Stdio, TerminalSize, ToAgent};

use crate::host::host;

#[test]
fn a_terminal_has_its_size_from_the_start_and_hears_of_a_new_one() {
    let mut host = host();
    let mut spawn = host.spawn(
        "sh",
        &["-c", "stty size; tty; trap 'stty size; exit 5' WINCH; echo ready; while :; do sleep 0.05; done"],
    );
    spawn.stdio = Stdio::Terminal(TerminalSize {
        columns: 101,
        rows: 33,
    });
    let mut running = host.start(&spawn);
    host.next();
    let mut terminal = running.terminal.take().unwrap();
    let mut shown = String::new();
    while !shown.contains("ready") {
        let mut bytes = [0; 256];
        let count = terminal.read(&mut bytes).unwrap();
        assert!(count > 0, "{shown}");
        shown.push_str(std::str::from_utf8(&bytes[..count]).unwrap());
    }
    assert!(shown.starts_with("33 101\r\n/dev/"), "{shown}");

    host.send(&ToAgent::Resize {
        command_id: running.id,
        size: TerminalSize {
            columns: 40,
            rows: 10,
        },
    });

    let status = host.exited(running.id);
    let mut rest = String::new();
    terminal.read_to_string(&mut rest).unwrap();
    assert!(rest.ends_with("10 40\r\n"), "{rest:?}");
    assert_eq!(status, ExitStatus::Code(5));
}

#[test]
fn a_host_that_closes_the_terminal_hangs_up() {
    let mut host = host();
    let mut spawn = host.spawn("sleep", &["100"]);
    spawn.stdio = Stdio::Terminal(TerminalSize {
        columns: 80,
        rows: 24,
    });
    let mut running = host.start(&spawn);
    host.next();

    drop(running.terminal.take());

    assert_eq!(host.exited(running.id), ExitStatus::Signal(1));
}
