//! The command line: what may be said, and its help.

mod machine;
mod name;
mod network;
mod program;
mod sandbox;

use std::ffi::OsString;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};
use sandvmm::cell::Part;

use crate::bench::args::Bench;
use crate::doctor::{DOCTOR_CODES, DoctorArgs};
use crate::repl::args::ReplArgs;
use crate::run::args::{RUN_EXAMPLES, RUN_USAGE, RunArgs};
use crate::session::args::{
    CpArgs, ExecArgs, KillArgs, LogsArgs, LsArgs, PsArgs, ResumeArgs, START_EXAMPLES, STOP_USAGE,
    SessionArgs, ShellArgs, StartArgs, StopArgs,
};
use crate::template::args::TemplateTask;
use crate::workspace::WorkspaceTask;
pub(crate) use machine::MachineArgs;
pub(crate) use name::parse_name;
pub(crate) use network::{EgressArgs, NetworkArgs};
pub(crate) use program::{ProgramArgs, parse_user};
pub(crate) use sandbox::{SandboxArgs, copy_parser};

/// Runs code that nobody has read inside its own virtual machine.
#[derive(Debug, Parser)]
#[command(name = "sandvmm", version, propagate_version = false)]
pub(crate) struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub(crate) task: Task,
}

impl Cli {
    /// Reads the command line.
    ///
    /// # Errors
    /// What is to be printed, help included, and what is no option or none together with another.
    pub(crate) fn read(line: &[OsString]) -> Result<Self, clap::Error> {
        let cli = Self::try_parse_from(line)?;
        match cli.task.objection() {
            Some((kind, sentence)) => Err(command_of(line).error(kind, sentence)),
            None => Ok(cli),
        }
    }
}

/// The task of this line, which clap prints the usage of.
fn command_of(line: &[OsString]) -> clap::Command {
    let mut command = Cli::command();
    command.build();
    for word in line.iter().skip(1) {
        match command.find_subcommand(word) {
            Some(task) => command = task.clone(),
            None => break,
        }
    }
    command
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Task {
    /// Boot a fresh virtual machine, run a script or command in it, and end with its status
    #[command(override_usage = RUN_USAGE, after_help = RUN_EXAMPLES)]
    Run(Box<RunArgs>),
    /// A prompt of Python in a fresh virtual machine; Ctrl-C interrupts, Ctrl-D ends
    Repl(Box<ReplArgs>),
    /// Start a sandbox that stays, under a name: the other tasks below find it by that
    #[command(after_help = START_EXAMPLES)]
    Start(Box<StartArgs>),
    /// Run a command in a sandbox that was started, and end with its status; `run` lists the exit codes
    Exec(Box<ExecArgs>),
    /// A shell, at a terminal, in a sandbox that was started
    Shell(ShellArgs),
    /// Copy a file or folder into a sandbox that was started, or out of it: one of both is NAME:PATH
    Cp(CpArgs),
    /// Show the commands that run in a sandbox: number, age, words
    Ps(PsArgs),
    /// End a command of a sandbox, with all that it started, and wait for its end
    Kill(KillArgs),
    /// Show what detached commands (`exec -d`) have printed: its last MiBs, an unfinished line last; with -f also what they print
    Logs(LogsArgs),
    /// End sandboxes that were started, and remove those that are paused; nothing of them is left
    #[command(override_usage = STOP_USAGE)]
    Stop(StopArgs),
    /// Show the sandboxes that were started: name, state (starting, ready, paused), processors, memory, age, published ports
    Ls(LsArgs),
    /// Put a sandbox on disk, files and memory, under its name, and end it; `resume` goes on with it, `stop` removes it
    Pause(SessionArgs),
    /// Go on with a sandbox that was paused
    Resume(ResumeArgs),
    /// Machines that were booted and warmed once, to be forked by `run`
    #[command(subcommand)]
    Template(TemplateTask),
    /// Say whether this machine can run virtual machines, what is missing, and what to do
    #[command(after_help = DOCTOR_CODES)]
    Doctor(DoctorArgs),
    /// Show and remove the disks that outlive a run (`run --workspace NAME`)
    #[command(subcommand)]
    Workspace(WorkspaceTask),
    /// Measure
    #[command(subcommand)]
    Bench(Bench),
}

impl Task {
    /// What is wrong with it that clap can't be told, or would say without what helps.
    fn objection(&self) -> Option<(ErrorKind, &'static str)> {
        if self.machine().is_some_and(|machine| {
            machine.require_cgroup && machine.dangerously_leave_out.contains(&Part::Cgroup)
        }) {
            return Some((
                ErrorKind::ArgumentConflict,
                "the argument '--require-cgroup' cannot be used with '--dangerously-leave-out cgroup'",
            ));
        }
        if self.sandbox().is_some_and(|sandbox| {
            let left_out = &sandbox.machine.dangerously_leave_out;
            sandbox.cpu_quota.is_some() && left_out.contains(&Part::Cgroup)
        }) {
            return Some((
                ErrorKind::ArgumentConflict,
                "the argument '--cpu-quota' cannot be used with '--dangerously-leave-out cgroup'",
            ));
        }
        match self {
            Self::Run(args) if args.words.is_empty() && args.code.is_none() => Some((
                ErrorKind::MissingRequiredArgument,
                "nothing is named that could be run: say SCRIPT, - for one on standard input, -c CODE, or -- COMMAND",
            )),
            Self::Stop(args) if args.names.is_empty() && !args.all => Some((
                ErrorKind::MissingRequiredArgument,
                "no sandbox is named: say NAME, or --all for all of them",
            )),
            _ => None,
        }
    }

    /// The options of the sandbox that it makes, if it makes one by these.
    fn sandbox(&self) -> Option<&SandboxArgs> {
        match self {
            Self::Run(args) => Some(&args.sandbox),
            Self::Start(args) => Some(&args.sandbox),
            _ => None,
        }
    }

    /// The options of the machine that it makes, if it makes one by any.
    fn machine(&self) -> Option<&MachineArgs> {
        match self {
            Self::Run(_) | Self::Start(_) => self.sandbox().map(|sandbox| &sandbox.machine),
            Self::Repl(args) => Some(&args.machine),
            Self::Template(TemplateTask::Build(args)) => Some(&args.machine),
            Self::Bench(Bench::Boot(args)) => Some(&args.machine),
            Self::Bench(Bench::Fork(args)) => Some(&args.machine),
            Self::Bench(Bench::Streams(args)) => Some(&args.machine),
            Self::Bench(Bench::Density(args)) => Some(&args.machine),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Result<Cli, ErrorKind> {
        let words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        Cli::read(&words).map_err(|error| error.kind())
    }

    #[test]
    fn a_control_group_is_not_required_and_left_out() {
        for task in [
            "run -c 1",
            "start --name a",
            "repl",
            "template build a",
            "bench boot",
            "bench fork",
            "bench streams",
            "bench density",
        ] {
            let both = "--require-cgroup --dangerously-leave-out seccomp,cgroup";
            let (name, rest) = task.split_once(' ').unwrap_or((task, ""));
            // Options come before what is run, and after the name of a task in a task.
            let line = |options: &str| match name {
                "run" => format!("sandvmm run {options} {rest}"),
                _ => format!("sandvmm {task} {options}"),
            };

            assert_eq!(
                read(&line(both)).unwrap_err(),
                ErrorKind::ArgumentConflict,
                "{task}"
            );
            read(&line("--require-cgroup --dangerously-leave-out seccomp")).unwrap();
            read(&line("--dangerously-leave-out cgroup")).unwrap();
        }
    }

    #[test]
    fn a_share_of_the_processors_needs_a_control_group() {
        for line in [
            "sandvmm run --cpu-quota 50% --dangerously-leave-out cgroup -c 1",
            "sandvmm start --name a --cpu-quota 50% --dangerously-leave-out cgroup",
        ] {
            assert_eq!(read(line).unwrap_err(), ErrorKind::ArgumentConflict);
        }
        read("sandvmm run --cpu-quota 50% --dangerously-leave-out seccomp -c 1").unwrap();
    }

    #[test]
    fn what_is_objected_to_comes_with_the_usage_of_its_task() {
        for (line, usage) in [
            ("run --json", "Usage: sandvmm run [OPTIONS] SCRIPT"),
            ("stop", "Usage: sandvmm stop NAME"),
            (
                "template build a --require-cgroup --dangerously-leave-out cgroup",
                "Usage: sandvmm template build",
            ),
            (
                "bench boot --require-cgroup --dangerously-leave-out cgroup",
                "Usage: sandvmm bench boot",
            ),
        ] {
            let words = ["sandvmm"].into_iter().chain(line.split(' '));
            let words: Vec<OsString> = words.map(OsString::from).collect();

            let text = Cli::read(&words).unwrap_err().to_string();

            assert!(text.contains(usage), "{line}: {text}");
        }
    }

    #[test]
    fn the_description_holds_together() {
        Cli::command().debug_assert();
    }
}
