//! How a machine's process is started, and what keeps it from that.

use std::error::Error;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use vmm::control::{ControlSocket, ToMachine};

use super::Supervisor;
use super::cpu_time::CpuTime;
use crate::clock::now_ns;
use crate::error::StartError;
use crate::event::EventKind;
use crate::shared::Shared;

/// How long a machine's process may take until it is in its cell: some milliseconds on metal.
const ENTRY_LIMIT: Duration = Duration::from_secs(60);

/// All that a machine is started from.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) program: PathBuf,
    pub(crate) cell: jailer::Options,
    /// The first message: a start or a restore.
    pub(crate) order: ToMachine,
    /// What belongs to it, in its order.
    pub(crate) descriptors: Vec<OwnedFd>,
    pub(crate) guest: GuestOptions,
    /// End of the sandbox's time on `CLOCK_MONOTONIC`, and how long that time was.
    pub(crate) deadline: Option<(u64, Duration)>,
    /// The most processor time of its process, and how many of its threads can use that at one time.
    pub(crate) cpu_time: Option<(Duration, u32)>,
}

/// What the guest is told of what was chosen.
#[derive(Debug, Default)]
pub(crate) struct GuestOptions {
    pub(crate) hostname: Option<String>,
    pub(crate) max_processes: Option<u32>,
}

impl Supervisor {
    pub(super) fn start(shared: &Arc<Shared>, plan: Plan) -> Result<Self, StartError> {
        let (ours, theirs) = ControlSocket::pair().map_err(system("Making a control socket"))?;
        let failed = |source| StartError::Process {
            program: plan.program.clone(),
            source,
        };
        let has_cpu_quota = plan.cell.cpu_quota_percent.is_some();
        let process = jailer::start(&plan.program, theirs.into(), plan.cell)
            .map_err(|error| not_started(error, failed))?;
        let mut supervisor = Self::new(shared, ours, process, plan.guest, plan.deadline)
            .with_order(plan.order, plan.descriptors);
        supervisor.has_cpu_quota = has_cpu_quota;
        supervisor.cpu_time = plan
            .cpu_time
            .map(|(limit, threads)| CpuTime::new(supervisor.process.id(), limit, threads));
        shared.events.emit(EventKind::Started);
        // It finds its orders when it has entered its cell.
        if supervisor.send_to_machine().is_ok() {
            supervisor.wait_for_entry(failed)?;
        }
        Ok(supervisor)
    }

    /// Waits until the process is in its cell. That it has ended, or that the time is over, is seen by whoever looks next.
    fn wait_for_entry(
        &mut self,
        failed: impl FnOnce(io::Error) -> StartError,
    ) -> Result<(), StartError> {
        let limit = self.deadline.map_or(ENTRY_LIMIT, |(at_ns, _)| {
            ENTRY_LIMIT.min(Duration::from_nanos(at_ns.saturating_sub(now_ns())))
        });
        match self.process.entered(limit) {
            Ok(cell) => self.shared.lock().cell = cell,
            Err(jailer::StartError::Silent { .. }) if limit < ENTRY_LIMIT => {}
            Err(error) => return Err(not_started(error, failed)),
        }
        Ok(())
    }

    pub(super) fn with_order(mut self, order: ToMachine, descriptors: Vec<OwnedFd>) -> Self {
        self.to_machine.push_back((order, descriptors));
        self
    }
}

/// Why there is no process, in the words of a start.
fn not_started(
    error: jailer::StartError,
    failed: impl FnOnce(io::Error) -> StartError,
) -> StartError {
    match error {
        jailer::StartError::Program(source) => failed(source),
        jailer::StartError::Cgroup { why } => StartError::NoCgroup { why },
        jailer::StartError::Silent { .. } => {
            failed(io::Error::new(io::ErrorKind::TimedOut, error.to_string()))
        }
        error => {
            let source = error
                .source()
                .map_or_else(String::new, |source| format!(": {source}"));
            failed(io::Error::other(format!("{error}{source}")))
        }
    }
}

pub(super) fn system(action: &'static str) -> impl FnOnce(io::Error) -> StartError {
    move |source| StartError::System {
        action,
        source: jailer::name_limit(source),
    }
}
