//! The command `sandvmm`: parses, prints, exits. What it does is done by the library of the same name.
#![forbid(unsafe_code)]

mod args;
mod bench;
mod cell;
mod doctor;
mod environment;
mod escape;
mod machine;
mod notice;
mod open;
mod output;
mod quantity;
mod refusal;
mod repl;
mod run;
mod session;
mod template;
mod terminal;
mod workspace;

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Instant;

use crate::args::{Cli, Task};
use crate::bench::args::Bench;

fn main() -> ExitCode {
    let called_at = Instant::now();
    sandvmm::init();
    run::signals::outlive_large_files();
    let line: Vec<OsString> = std::env::args_os().collect();
    let task = match Cli::read(&line) {
        Ok(cli) => cli.task,
        Err(error) => return refusal::refuse(&line, &error),
    };
    let code = match task {
        Task::Run(args) => run::run(&args, &line, called_at),
        Task::Start(args) => session::start(&args, &line, called_at),
        Task::Resume(args) => session::resume(&args, &line),
        Task::Exec(args) => session::exec(&args),
        Task::Shell(args) => session::shell(args),
        Task::Cp(args) => session::cp(&args),
        Task::Ps(args) => session::ps(&args),
        Task::Kill(args) => session::kill(&args),
        Task::Logs(args) => session::logs(&args),
        Task::Stop(args) => session::stop(&args),
        Task::Ls(args) => session::ls(&args),
        Task::Pause(args) => session::pause(&args),
        Task::Repl(args) => repl::repl(&args, called_at),
        Task::Workspace(task) => workspace::workspace(&task),
        Task::Doctor(args) => doctor::doctor(&args),
        Task::Template(task) => template::template(&task),
        Task::Bench(Bench::Boot(args)) => bench::boot(&args),
        Task::Bench(Bench::Fork(args)) => bench::fork(&args),
        Task::Bench(Bench::Density(args)) => bench::density(&args),
        Task::Bench(Bench::Streams(args)) => bench::streams(&args),
    };
    ExitCode::from(code)
}
