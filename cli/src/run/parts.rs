//! From the options of a sandbox to the library's builder and what goes with it.

use std::time::{Duration, Instant};

use sandvmm::{SandboxBuilder, Workspace};

use super::events::Writer;
use super::network::Network;
use super::verdict::{FAILED, Failure, Verdict};
use crate::args::SandboxArgs;
use crate::{notice, template};

/// What a sandbox comes from.
#[derive(Debug)]
pub(crate) struct Parts {
    /// The builder with all options.
    pub(crate) builder: SandboxBuilder,
    /// How the machine comes to be.
    pub(crate) path: template::Path,
    /// What writes the events down.
    pub(crate) events: Option<Writer>,
}

/// Opens what the options name.
///
/// # Errors
/// A verdict, where something can't be had.
pub(crate) fn parts(
    args: &SandboxArgs,
    timeout: Option<Duration>,
    network: &Network,
    is_silent: bool,
    called_at: Instant,
) -> Result<Parts, Verdict> {
    let (builder, path) = template::choose(args, is_silent, called_at)
        .map_err(|error| Verdict::failed(FAILED, Failure::Start, notice::sentence(&error)))?;
    let mut builder = builder
        .timeout(timeout)
        .cpu_time(args.cpu_time.0)
        .cpu_quota_percent(args.cpu_quota)
        .max_processes(args.max_processes);
    let mut events = None;
    if let Some(path) = &args.events {
        let (sender, writer) = Writer::start(path).map_err(|error| {
            let path = path.display();
            let sentence = format!("The events can't be written to '{path}': {error}");
            Verdict::failed(FAILED, Failure::Output, sentence)
        })?;
        builder = builder.events(sender);
        events = Some(writer);
    }
    if let Some(name) = &args.workspace {
        let workspace = Workspace::open_or_create(name, args.workspace_size)
            .map_err(|error| Verdict::workspace(&error))?;
        builder = builder.workspace(workspace);
    }
    if let Some(size_mib) = args.disk {
        builder = builder.scratch_disk_mib(size_mib);
    }
    let builder = network
        .apply(builder, is_silent)
        .map_err(|error| Verdict::system(&error))?;
    Ok(Parts {
        builder,
        path,
        events,
    })
}
