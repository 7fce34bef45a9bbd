//! Target `supervisor`: the library's side of a machine — what its process says on the control socket, and what the agent says on its
//! stream — with users who start and forget commands meanwhile.
//!
//! Checked: the supervisor goes on or says in one bounded sentence, fit for a terminal, why not; it remembers no more commands than it
//! may; and every descriptor that it was sent and does not need is closed.

use std::cell::RefCell;
use std::os::fd::AsFd;

use protocol::message::FromAgent;
use protocol::port;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sandvmm::fuzzing::{Idle, Scripted};
use vmm::control::{EndReason, FromMachine};

use crate::agent::{frames, from_agent};
use crate::input::Input;

/// The most steps of one input.
const STEPS_MAX: usize = 64;

thread_local! {
    /// The process in the machine's place: making one takes longer than all else.
    static IDLE: RefCell<Option<Idle>> = const { RefCell::new(None) };
}

/// Runs the target.
pub fn run(data: &[u8]) {
    crate::outlive_closed_sockets();
    let idle = IDLE.with_borrow_mut(Option::take);
    let idle = idle.unwrap_or_else(|| Idle::start().expect("a process"));
    let mut supervisor = Scripted::new(idle).expect("descriptors");
    // Whoever holds no copy of the write end any more is seen at the read end.
    let (read_end, write_end) = rustix::pipe::pipe().expect("descriptors");
    let mut input = Input::new(data);
    let mut commands = Vec::new();
    for _ in 0..STEPS_MAX {
        if input.is_empty() {
            break;
        }
        match input.below(12) {
            0..=2 => {
                let length = usize::from(input.u16()) % 4096;
                supervisor.agent_says(input.bytes(length));
            }
            3 | 4 => {
                let message = usize::from(input.u8());
                let all = from_agent();
                let message = of_command(&all[message % all.len()], input.u8().into());
                supervisor.agent_says(&frames(&[message]));
            }
            5 => {
                let (count, length) = (input.u8(), usize::from(input.u16()) % 4096);
                let packet = input.bytes(length);
                supervisor.machine_says(packet, write_end.as_fd(), usize::from(count) % 17);
            }
            6 => {
                let ports = [port::CONTROL, port::STREAMS, input.u32()];
                let (host, guest) = (input.pick(&ports), input.pick(&ports));
                supervisor.guest_dials(host, guest).expect("descriptors");
            }
            7 => commands.extend(supervisor.user_starts()),
            8 => {
                let which = usize::from(input.u8());
                if let Some(command) = commands.get(which % commands.len().max(1)) {
                    supervisor.user_forgets(*command);
                }
            }
            9 if input.below(8) == 0 => supervisor.time_is_over(),
            9 if input.below(8) == 1 => supervisor.agent_closes(),
            9 if input.below(8) == 2 => supervisor.user_ends(),
            _ => {}
        }
        if !supervisor.turn() {
            break;
        }
    }
    IDLE.with_borrow_mut(|idle| *idle = Some(supervisor.end()));
    drop(write_end);
    let mut polled = [PollFd::new(&read_end, PollFlags::empty())];
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    poll(&mut polled, Some(&now)).expect("a pipe");
    assert!(
        polled[0].revents().contains(PollFlags::HUP),
        "a descriptor leaks"
    );
}

/// The same message about another command.
fn of_command(message: &FromAgent, id: u32) -> FromAgent {
    let mut message = message.clone();
    match &mut message {
        FromAgent::Spawned { command_id, .. } | FromAgent::SpawnFailed { command_id, .. } => {
            *command_id = id;
        }
        FromAgent::Exited(exited) => exited.command_id = id,
        _ => {}
    }
    message
}

/// Inputs to begin with.
#[must_use]
pub fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    // The agent dials from its port; which of its messages it says, and about which command.
    let dial = [6, 0, 0, 0, 0, 0, 0];
    let [hello, spawned, exited, failed, fatal, restored, resumed] =
        [0, 1, 2, 3, 4, 5, 6].map(|message| move |command| [3, message, command]);
    let start = [7];
    let forget = [8, 0];
    let machine = |count: u8, message: &FromMachine| {
        let bytes = postcard::to_stdvec(message).expect("short");
        let length = u16::try_from(bytes.len()).expect("short").to_le_bytes();
        [&[5, count], length.as_slice(), &bytes].concat()
    };
    let running = machine(
        0,
        &FromMachine::Running {
            process_started_ns: 1,
            vcpu_running_ns: 2,
        },
    );
    let connected = machine(
        1,
        &FromMachine::GuestConnected {
            host_port: 1,
            guest_port: 1,
        },
    );
    let panicked = machine(
        0,
        &FromMachine::Ended {
            reason: EndReason::Reset,
            console_tail: b"Kernel panic - not syncing: x ]---\n".to_vec(),
        },
    );
    let failed_start = machine(
        0,
        &FromMachine::Ended {
            reason: EndReason::StartFailed("no".into()),
            console_tail: Vec::new(),
        },
    );
    let raw = [&[0, 13, 0], frames(&from_agent()[..1]).as_slice()].concat();
    let all = |steps: &[&[u8]]| steps.concat();
    vec![
        (
            "a_command",
            all(&[&running, &dial, &hello(0), &start, &spawned(1), &exited(1)]),
        ),
        (
            "a_command_that_fails",
            all(&[&dial, &hello(0), &start, &failed(1), &start, &forget]),
        ),
        (
            "time_is_over",
            all(&[&dial, &hello(0), &start, &spawned(1), &[9, 0], &exited(1)]),
        ),
        (
            "a_restored_guest",
            all(&[
                &running,
                &dial,
                &restored(0),
                &start,
                &resumed(0),
                &spawned(1),
                &exited(1),
            ]),
        ),
        ("agent_gone", all(&[&dial, &hello(0), &start, &fatal(0)])),
        ("agent_out_of_turn", all(&[&dial, &hello(0), &exited(9)])),
        ("raw_words", all(&[&dial, &raw, &raw])),
        ("foreign_stream", all(&[&connected, &connected, &start])),
        ("panic", all(&[&running, &dial, &hello(0), &panicked])),
        ("no_start", failed_start),
    ]
}
