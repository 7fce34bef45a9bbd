//! The supervisor's talk with the machine's process.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use protocol::port;
use vmm::control::{ControlError, FromMachine, Taken};

use super::start::system;
use super::{MAX_LAST_PIECES, Reason, Supervisor};
use crate::clock::now_ns;
use crate::control_stream::ControlStream;
use crate::crash::{Crash, CrashKind};
use crate::error::StartError;
use crate::event::EventKind;
use crate::text::one_line;

/// How long a machine's process that closed its socket may take to end.
const PROCESS_END_GRACE: Duration = Duration::from_secs(1);

/// Most messages of the machine's process taken between two looks at the deadlines. A guest can make it send
/// one for each of its connections.
const MAX_MESSAGES_A_TURN: usize = 64;

impl Supervisor {
    pub(super) fn send_to_machine(&mut self) -> Result<(), Reason> {
        while let Some((message, descriptors)) = self.to_machine.front() {
            let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
            match self.socket.try_send(message, &borrowed) {
                Ok(()) => {}
                // The second: its last message, or its process's end, tells why.
                Err(ControlError::Full | ControlError::Closed) => return Ok(()),
                Err(error) => return Err(socket_failed(&error)),
            }
            self.to_machine.pop_front();
        }
        Ok(())
    }

    pub(super) fn take_from_machine(&mut self) -> Result<(), Reason> {
        for _ in 0..MAX_MESSAGES_A_TURN {
            let (message, descriptors) = match self.socket.try_receive::<FromMachine>() {
                Ok(Some(received)) => received,
                Ok(None) => return Ok(()),
                Err(ControlError::Closed) => return Err(self.process_is_gone()),
                Err(error) => return Err(socket_failed(&error)),
            };
            match message {
                FromMachine::Running {
                    process_started_ns,
                    vcpu_running_ns,
                } => self.machine_runs(process_started_ns, vcpu_running_ns),
                FromMachine::GuestConnected {
                    host_port,
                    guest_port,
                } => self.guest_connected(host_port, guest_port, descriptors)?,
                FromMachine::SnapshotTaken(taken) => self.machine_saved(Ok(taken))?,
                FromMachine::SnapshotFailed(sentence) => {
                    self.machine_saved(Err(one_line(sentence.as_bytes())))?;
                }
                FromMachine::Ended {
                    reason,
                    console_tail,
                } => {
                    return Err(match Crash::from_end(reason, console_tail) {
                        Ok(crash) => Reason::Crashed(crash),
                        Err(sentence) => Reason::NotStarted(StartError::Machine { sentence }),
                    });
                }
                _ => {
                    return Err(socket_failed(&ControlError::Malformed));
                }
            }
        }
        Ok(())
    }

    /// The answer to a request to save itself; unasked, it is none.
    fn machine_saved(&self, answer: Result<Taken, String>) -> Result<(), Reason> {
        if !self.shared.lock().saved(answer) {
            return Err(socket_failed(&ControlError::Malformed));
        }
        self.shared.notify();
        Ok(())
    }

    /// Its clocks are those of a process that a guest may have taken over: kept in order, and not in the future.
    fn machine_runs(&self, process_started_ns: u64, vcpu_running_ns: u64) {
        let now_ns = now_ns();
        let mut state = self.shared.lock();
        let process_started_ns =
            process_started_ns.clamp(self.shared.called_ns(), now_ns.max(self.shared.called_ns()));
        let vcpu_running_ns =
            vcpu_running_ns.clamp(process_started_ns, now_ns.max(process_started_ns));
        state
            .clocks
            .process_started
            .get_or_insert(process_started_ns);
        state.clocks.vcpu_running.get_or_insert(vcpu_running_ns);
    }

    /// Only the agent's control stream is taken, and the gate's streams where there is a way out: they come from ports that the
    /// guest's kernel gives to a privileged process alone. Until the agent has greeted, its last dial counts: it dials again when it has given
    /// one up. Anything else is closed by being dropped.
    fn guest_connected(
        &mut self,
        host_port: u32,
        guest_port: u32,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(), Reason> {
        let Some(stream) = descriptors.into_iter().next() else {
            return Ok(());
        };
        if let Some(egress) = &self.shared.egress {
            match (host_port, guest_port) {
                (port::GATE, from) if port::GATE_SOURCES.contains(&from) => egress.take(stream),
                (port::GATE_CONTROL, port::GATE_CONTROL) => {
                    egress.take_control(stream, &self.shared);
                }
                _ => return self.agent_connected(host_port, guest_port, stream),
            }
            return Ok(());
        }
        self.agent_connected(host_port, guest_port, stream)
    }

    fn agent_connected(
        &mut self,
        host_port: u32,
        guest_port: u32,
        stream: OwnedFd,
    ) -> Result<(), Reason> {
        let is_control = host_port == port::CONTROL && guest_port == port::CONTROL;
        if !is_control {
            self.shared
                .events
                .emit(EventKind::Denied { port: host_port });
        }
        if is_control && (self.agent.is_none() || !self.was_greeted()) {
            self.agent = Some(ControlStream::new(stream).map_err(|source| {
                Reason::NotStarted(system("Taking the agent's control stream")(source))
            })?);
        }
        Ok(())
    }

    /// The process has ended or closed its socket without a word.
    pub(super) fn process_is_gone(&mut self) -> Reason {
        let end = self.process.wait_timeout(PROCESS_END_GRACE);
        for _ in 0..MAX_LAST_PIECES {
            if !self.process.read_stderr() {
                break;
            }
        }
        Reason::Crashed(match self.process.forbidden_call() {
            Some(name) => Crash::from_forbidden_call(&name),
            None => Crash::from_process(end, &self.process.stderr_tail()),
        })
    }
}

fn socket_failed(error: &ControlError) -> Reason {
    Reason::Crashed(Crash::new(
        CrashKind::HostFailed,
        format!("The machine's process cannot be spoken with: {error}"),
    ))
}
