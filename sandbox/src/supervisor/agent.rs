//! The supervisor's talk with the agent. All that comes is checked against what was asked for: an agent that
//! says something out of turn has been taken over, and its machine is ended.

use std::sync::Arc;
use std::time::Duration;

use jailer::Throttled;
use protocol::message::{Configure, FromAgent, Hello, Restored, Resume, ToAgent};

use super::start::system;
use super::{Reason, Supervisor};
use crate::builder::DEFAULT_HOSTNAME;
use crate::clock::{guest_init_ns, nanos, now_ns, realtime_ns};
use crate::control_stream::Received;
use crate::crash::{Crash, CrashKind};
use crate::error::StartError;
use crate::event::EventKind;
use crate::randomness::random_bytes;
use crate::shared::frame_of;
use crate::state::{Phase, State};
use crate::text::one_line;

/// How long after the agent closed its stream the machine may take to say why: its kernel panics then.
const AGENT_END_GRACE: Duration = Duration::from_secs(1);

/// Random bytes in a fork's host name: two of a thousand forks are alike once in 10^13 times.
const HOSTNAME_SUFFIX_BYTES: usize = 8;

/// The agent, or what has taken its place, did something that it may not.
pub(super) fn misbehaved(what: &str) -> Reason {
    Reason::Crashed(Crash::new(
        CrashKind::AgentMisbehaved,
        format!("The agent broke the protocol: {what}"),
    ))
}

impl Supervisor {
    pub(super) fn send_to_agent(&mut self) {
        if let Some(agent) = &mut self.agent {
            let sent = agent.flush();
            if sent > 0 {
                self.shared.lock().taken_by_agent(sent);
            }
        }
    }

    pub(super) fn take_from_agent(&mut self) -> Result<(), Reason> {
        loop {
            let Some(agent) = &mut self.agent else {
                return Ok(());
            };
            match agent.receive() {
                // After a lie, or its last word, nothing that it says counts.
                Received::Message(message) => self.agent_says(message).inspect_err(|_| {
                    self.agent_has_ended = true;
                })?,
                Received::Nothing => return Ok(()),
                // Linux gives a dial up after two seconds, which the host may have needed to answer it; the agent dials again.
                Received::Ended if !self.was_greeted() => {
                    self.agent = None;
                    return Ok(());
                }
                Received::Ended => {
                    self.agent_has_ended = true;
                    let grace_end_ns = now_ns().saturating_add(nanos(AGENT_END_GRACE));
                    self.agent_end_deadline_ns.get_or_insert(grace_end_ns);
                    return Ok(());
                }
                Received::Garbage(error) => {
                    self.agent_has_ended = true;
                    return Err(misbehaved(&error.to_string()));
                }
            }
        }
    }

    /// Whether the agent has said a first word on this stream.
    pub(super) fn was_greeted(&self) -> bool {
        let state = self.shared.lock();
        self.resuming || state.awaits_gate || !matches!(state.phase, Phase::Booting)
    }

    /// Hands on what users have asked before, once the guest takes it, and says whether it does: when it was greeted, and where
    /// there is a way out, when that is there.
    pub(super) fn pass_on_early(&mut self) -> bool {
        let has_way_out =
            self.shared.egress.is_none() || !matches!(self.shared.lock().phase, Phase::Booting);
        let takes_requests = has_way_out && self.was_greeted();
        if takes_requests {
            for request in std::mem::take(&mut self.early) {
                self.pass_on(request);
            }
        }
        takes_requests
    }

    fn agent_says(&mut self, message: FromAgent) -> Result<(), Reason> {
        let now_ns = now_ns();
        let shared = Arc::clone(&self.shared);
        let mut state = shared.lock();
        let taken = match message {
            FromAgent::Hello(hello)
                if matches!(state.phase, Phase::Booting)
                    && !self.resuming
                    && !state.awaits_gate =>
            {
                self.greeted(&mut state, &hello, now_ns)?;
                true
            }
            FromAgent::Restored(restored)
                if matches!(state.phase, Phase::Booting) && !state.awaits_gate =>
            {
                self.restored(&mut state, &restored, now_ns)?
            }
            FromAgent::Resumed if self.resuming => {
                self.resuming = false;
                if !self.ask_for_gate(&mut state) {
                    shared.is_ready(&mut state, now_ns);
                }
                true
            }
            FromAgent::Fatal { message } => {
                let sentence = one_line(message.as_bytes());
                return Err(match state.phase {
                    Phase::Booting => Reason::NotStarted(StartError::Guest { sentence }),
                    _ => Reason::Crashed(Crash::new(CrashKind::AgentGone, sentence)),
                });
            }
            FromAgent::Spawned { command_id, warm } => {
                let throttled = self.throttled();
                let taken = state.command_runs(command_id, warm, now_ns, throttled);
                if let (true, Some(entry)) = (taken, state.commands.get(&command_id)) {
                    shared.events.emit(EventKind::CommandStarted {
                        command: command_id,
                        program: entry.program.clone(),
                        warm,
                    });
                    if entry.forgotten {
                        // Its handle went while it was starting, when there was nothing yet to be killed.
                        self.queue_to_agent(&mut state, &ToAgent::Kill { command_id });
                    }
                }
                taken
            }
            FromAgent::SpawnFailed {
                command_id,
                kind,
                message,
            } => {
                let message = one_line(message.as_bytes());
                let program = state.program(command_id);
                let taken = state.command_failed(command_id, kind, message.clone());
                if taken {
                    shared.events.emit(EventKind::CommandFailed {
                        command: command_id,
                        program,
                        message,
                    });
                }
                taken
            }
            FromAgent::Exited(exited) => {
                match state.command_exited(&exited, now_ns, self.throttled()) {
                    Some(events) => {
                        for event in events {
                            shared.events.emit(event);
                        }
                        true
                    }
                    None => false,
                }
            }
            FromAgent::Frozen => state.stands_still(),
            FromAgent::FreezeFailed { message } => {
                state.freeze_failed(one_line(message.as_bytes()))
            }
            FromAgent::Thawed => state.goes_on(),
            _ => false,
        };
        drop(state);
        if !taken {
            return Err(misbehaved("it said something out of turn"));
        }
        self.pass_on_early();
        shared.notify();
        self.send_to_agent();
        Ok(())
    }

    /// How the machine was held to its share of the processors so far, where one was chosen.
    pub(super) fn throttled(&self) -> Throttled {
        match self.throttled_at_end {
            Some(throttled) => throttled,
            None if self.has_cpu_quota => self.process.throttled(),
            None => Throttled::default(),
        }
    }

    /// The guest stands: it is told its clock, its randomness and its name before anything else.
    fn greeted(&mut self, state: &mut State, hello: &Hello, now_ns: u64) -> Result<(), Reason> {
        check_version(hello.version)?;
        let entropy = fresh_bytes()?;
        let hostname = self.guest.hostname.clone();
        let hostname = hostname.unwrap_or_else(|| DEFAULT_HOSTNAME.to_owned());
        state.hostname = Some(hostname.clone());
        let configure = ToAgent::Configure(Configure {
            realtime_ns: realtime_ns(),
            entropy,
            hostname,
            max_processes: self.guest.max_processes,
        });
        self.queue_to_agent(state, &configure);
        let awaits_gate = self.ask_for_gate(state);
        let vcpu_running_ns = state
            .clocks
            .vcpu_running
            .unwrap_or_else(|| self.shared.called_ns());
        state.clocks.guest_init = Some(guest_init_ns(now_ns, vcpu_running_ns, hello));
        if !awaits_gate {
            self.shared.is_ready(state, now_ns);
        }
        Ok(())
    }

    /// Has the agent start the gate, where connections may leave or enter. Programs wait for it: the first that runs finds
    /// its way out.
    fn ask_for_gate(&mut self, state: &mut State) -> bool {
        if self.shared.egress.is_none() {
            return false;
        }
        state.awaits_gate = true;
        self.queue_to_agent(state, &ToAgent::Gate);
        true
    }

    /// A restored guest greets: it is told what must be new in it, and is ready once it has applied that. False if it has
    /// greeted before.
    fn restored(
        &mut self,
        state: &mut State,
        restored: &Restored,
        now_ns: u64,
    ) -> Result<bool, Reason> {
        if self.resuming {
            return Ok(false);
        }
        check_version(restored.version)?;
        let (entropy, names) = (fresh_bytes()?, fresh_bytes()?);
        let ([machine_id, boot_id], _) = names.as_chunks::<16>() else {
            return Ok(false);
        };
        let hostname = self.hostname_of_fork(&fresh_bytes()?);
        state.hostname = Some(hostname.clone());
        let resume = ToAgent::Resume(Resume {
            entropy,
            hostname,
            machine_id: *machine_id,
            boot_id: *boot_id,
            max_processes: self.guest.max_processes,
            // The last thing that is found out, so that it is as late as can be.
            realtime_ns: realtime_ns(),
        });
        self.queue_to_agent(state, &resume);
        self.resuming = true;
        state.clocks.guest_init = Some(now_ns);
        Ok(true)
    }

    /// A name that was chosen is the fork's; the default one gets a suffix, since no two machines of one snapshot
    /// are to be alike.
    fn hostname_of_fork(&self, random: &[u8]) -> String {
        if let Some(chosen) = &self.guest.hostname {
            return chosen.clone();
        }
        let mut name = format!("{DEFAULT_HOSTNAME}-");
        for byte in random.iter().take(HOSTNAME_SUFFIX_BYTES) {
            name.push_str(&format!("{byte:02x}"));
        }
        name
    }

    fn queue_to_agent(&mut self, state: &mut State, message: &ToAgent) {
        if let (Some(agent), Some(frame)) = (&mut self.agent, frame_of(message)) {
            state.queued_to_agent_bytes += frame.len();
            agent.queue(&frame);
        }
    }
}

fn check_version(agent: u32) -> Result<(), Reason> {
    if agent == protocol::VERSION {
        return Ok(());
    }
    Err(Reason::NotStarted(StartError::Version {
        agent,
        library: protocol::VERSION,
    }))
}

fn fresh_bytes() -> Result<[u8; 32], Reason> {
    random_bytes()
        .map_err(|source| Reason::NotStarted(system("Reading the system's randomness")(source)))
}
