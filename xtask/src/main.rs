//! Developer tasks: set-up, kernel, image, KVM host, tests, benchmarks.
#![forbid(unsafe_code)]

mod cache;
mod cli;
mod cpio;
mod host;
mod packages;
mod progress;
mod tool;
mod workspace;

use std::error::Error;
use std::process::ExitCode;

use clap::Parser;

use cli::{Arguments, Task};
use host::{EXIT_HOST_FAILED, HostCommand, HostError};
use progress::Progress;
use workspace::Workspace;

fn main() -> ExitCode {
    match perform(Arguments::parse().task) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            report(error.as_ref());
            ExitCode::from(exit_code(error.as_ref()))
        }
    }
}

/// Performs a task and returns the exit code.
fn perform(task: Task) -> Result<u8, Box<dyn Error>> {
    let progress = Progress::new();
    match task {
        Task::Host {
            count_instructions,
            command,
        } => {
            let command = HostCommand {
                command,
                environment: Vec::new(),
                count_instructions,
            };
            Ok(command.run(&Workspace::find()?, &progress)?)
        }
        Task::HostAgent => {
            host::agent::serve()?;
            Ok(0)
        }
    }
}

/// Says what went wrong, and why, on one line a cause.
fn report(error: &dyn Error) {
    eprintln!("xtask: {error}");
    let mut source = error.source();
    while let Some(cause) = source {
        eprintln!("  because: {cause}");
        source = cause.source();
    }
}

fn exit_code(error: &(dyn Error + 'static)) -> u8 {
    match error.downcast_ref::<HostError>() {
        Some(HostError::NotRun { code, .. }) => *code,
        Some(_) => EXIT_HOST_FAILED,
        None => 1,
    }
}
