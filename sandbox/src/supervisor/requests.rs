//! What users' threads ask of the supervisor.

use std::os::fd::OwnedFd;

use protocol::port;
use rustix::io::Errno;
use vmm::control::ToMachine;

use super::agent::misbehaved;
use super::{Reason, Supervisor};
use crate::error::StartError;
use crate::shared::ANSWER_LIMIT;
use crate::state::{Phase, Request};

/// Bytes read at one time of a stream that nobody wants.
const DISCARD_CHUNK_BYTES: usize = 64 << 10;

impl Supervisor {
    pub(super) fn take_requests(&mut self) -> Result<(), Reason> {
        let mut counter = [0; 8];
        // The counter alone: what is asked for is in the queue.
        let _ = rustix::io::read(&self.shared.wake, &mut counter);
        let requests = std::mem::take(&mut self.shared.lock().requests);
        let takes_requests = self.pass_on_early();
        for request in requests {
            match request {
                // A restored guest ends all its connections before it greets: a stream would be lost.
                Request::ToAgent(_) | Request::Connect(_) | Request::ConnectGate(_)
                    if !takes_requests =>
                {
                    self.early.push(request);
                }
                Request::End => return Err(Reason::Asked),
                Request::EndAt(at_ns, limit) => self.deadline = Some((at_ns, limit)),
                Request::Unanswered => {
                    return Err(misbehaved(&format!(
                        "it did not say within {} s whether a command runs",
                        ANSWER_LIMIT.as_secs()
                    )));
                }
                Request::GateFailed(sentence) => {
                    // Later it is one program's lie, or the loss of the way out alone.
                    if matches!(self.shared.lock().phase, Phase::Booting) {
                        return Err(Reason::NotStarted(StartError::Guest { sentence }));
                    }
                }
                Request::ToAgent(_) | Request::Connect(_) | Request::ConnectGate(_) => {
                    self.pass_on(request);
                }
                Request::Save(then, files) => {
                    self.to_machine
                        .push_back((ToMachine::Snapshot { then }, files));
                }
                Request::Discard(end) => self.discarded.push(end),
            }
        }
        self.send_to_machine()?;
        self.send_to_agent();
        Ok(())
    }

    /// Hands on what the guest is asked, in the order in which it was.
    pub(super) fn pass_on(&mut self, request: Request) {
        match request {
            Request::ToAgent(frame) => match &mut self.agent {
                Some(agent) => agent.queue(&frame),
                None => self.shared.lock().taken_by_agent(frame.len()),
            },
            Request::Connect(end) => self.connect(port::STREAMS, end),
            Request::ConnectGate(end) => self.connect(port::GATE, end),
            _ => {}
        }
    }

    /// Has the machine open a stream to a port in the guest.
    pub(super) fn connect(&mut self, port: u32, end: OwnedFd) {
        self.to_machine
            .push_back((ToMachine::Connect { port }, vec![end]));
    }

    /// Reads one piece of each stream that nobody wants and that has one; those at their end are closed.
    pub(super) fn discard(&mut self, ready: &[bool]) {
        let mut ready = ready.iter().copied();
        self.discarded.retain(|end| {
            if !ready.next().unwrap_or(false) {
                return true;
            }
            let mut chunk = [0; DISCARD_CHUNK_BYTES];
            match rustix::io::read(end, &mut chunk) {
                Ok(count) => count > 0,
                Err(errno) => matches!(errno, Errno::INTR | Errno::AGAIN),
            }
        });
    }
}
