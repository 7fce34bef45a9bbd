//! Developer tasks: set-up, kernel, image, KVM host, tests, benchmarks.
#![forbid(unsafe_code)]

mod bench;
mod cache;
mod cli;
mod cpio;
mod fuzz;
mod host;
mod image;
mod initramfs;
mod kernel;
mod packages;
mod progress;
mod reproducible;
mod setup;
mod test;
mod tool;
mod workspace;

use std::error::Error;
use std::ffi::OsString;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use clap::Parser;

use cache::{Cache, CacheError};
use cli::{Arguments, Task};
use host::{EXIT_HOST_FAILED, HostCommand, HostError};
use image::Variant;
use progress::Progress;
use workspace::Workspace;

/// `--timeout` of a run in an emulated host: the default of 30 s, twenty times.
const EMULATED_TIMEOUT: &str = "10m";

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
        Task::Setup => {
            let workspace = Workspace::find()?;
            let data = setup::setup(&workspace, &Cache::open()?, &progress)?;
            setup::default_template(&workspace, &data, &progress)?;
            print_line(format_args!("{}", data.path().display()));
            Ok(0)
        }
        Task::Kernel { verify } => {
            let cache = Cache::open()?;
            let kernel = kernel::build(&cache, &progress)?;
            if verify {
                kernel::verify(&kernel, &cache, &progress)?;
            }
            print_built(&kernel)?;
            Ok(0)
        }
        Task::Image { verify } => {
            let cache = Cache::open()?;
            let image = image::build(Variant::Standard, &cache, &progress)?;
            if verify {
                image::verify(&image, &cache, &progress)?;
            }
            print_built(&image)?;
            Ok(0)
        }
        Task::Run { arguments } => run(arguments, &progress),
        Task::Test { only, filters } => test::test(&Workspace::find()?, &only, &filters, &progress),
        Task::Bench { runs, only, check } => {
            bench::bench(&Workspace::find()?, runs, only, check, &progress)?;
            Ok(0)
        }
        Task::Fuzz { seconds, targets } => {
            fuzz::fuzz(&Workspace::find()?, seconds, &targets, &progress)?;
            Ok(0)
        }
        Task::Host {
            count_instructions,
            command,
        } => {
            let command = HostCommand {
                command,
                environment: Vec::new(),
                count_instructions,
                resident: Vec::new(),
            };
            Ok(command.run(&Workspace::find()?, &progress)?)
        }
        Task::HostAgent => {
            host::agent::serve()?;
            Ok(0)
        }
    }
}

/// Sets everything up and runs `sandvmm run` with these arguments on a KVM host.
fn run(arguments: Vec<OsString>, progress: &Progress) -> Result<u8, Box<dyn Error>> {
    let workspace = Workspace::find()?;
    setup::setup(&workspace, &Cache::open()?, progress)?;
    setup::build_command(&workspace, progress)?;
    let mut command: Vec<OsString> = vec!["sandvmm".into(), "run".into()];
    if !host::is_here() {
        progress.say(
            "No hardware virtualization here: booting an emulated KVM host, where a run takes seconds",
        );
        command.extend(emulated_timeout(&arguments));
    }
    command.extend(arguments);
    let command = HostCommand {
        command,
        environment: Vec::new(),
        count_instructions: false,
        resident: Vec::new(),
    };
    Ok(command.run(&workspace, progress)?)
}

/// The options that give a run in an emulated host its time, unless `arguments` have a time-out of their own: the default of `sandvmm
/// run` is for hardware, and of the run alone a busy machine's emulation may need more.
fn emulated_timeout(arguments: &[OsString]) -> Vec<OsString> {
    let is_timeout = |argument: &OsString| {
        let bytes = argument.as_encoded_bytes();
        bytes == b"--timeout" || bytes.starts_with(b"--timeout=")
    };
    let mut options = arguments.iter().take_while(|argument| *argument != "--");
    if options.any(is_timeout) {
        return Vec::new();
    }
    vec!["--timeout".into(), EMULATED_TIMEOUT.into()]
}

/// The SHA-256 and the path of what was built.
fn print_built(file: &Path) -> Result<(), CacheError> {
    let hash = reproducible::sha256(file)?;
    print_line(format_args!("{hash}  {}", file.display()));
    Ok(())
}

/// A result on standard output. What was done is done, also where nobody reads of it.
fn print_line(what: std::fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stdout(), "{what}");
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

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(words: &[&str]) -> Vec<OsString> {
        words.iter().map(OsString::from).collect()
    }

    #[test]
    fn an_emulated_run_has_more_time_unless_it_names_its_own() {
        let given = ["--timeout", EMULATED_TIMEOUT].map(OsString::from);

        assert_eq!(emulated_timeout(&arguments(&["-q", "x.py"])), given);
        assert_eq!(
            emulated_timeout(&arguments(&["--", "x", "--timeout"])),
            given
        );
        assert!(emulated_timeout(&arguments(&["--timeout", "5s", "x.py"])).is_empty());
        assert!(emulated_timeout(&arguments(&["--timeout=0", "x.py"])).is_empty());
    }
}
