//! What may be said of sessions, and its help.

use std::ffi::OsString;

use clap::Args;

use crate::args::{ProgramArgs, SandboxArgs, parse_name, parse_user};
use crate::quantity::{Timeout, number};

pub(crate) const START_EXAMPLES: &str = "\
Examples:
  sandvmm start --name dev --idle 30m      A sandbox that stays until nothing ran in it for 30 minutes
  sandvmm exec dev -- python3 -V           A command in it
  sandvmm shell dev                        A shell in it
  sandvmm cp data.csv dev:data.csv         A file for it
  sandvmm exec -d dev -- python3 -m http.server
  sandvmm logs dev                         What that one prints
  sandvmm pause dev                        It is on disk, and `resume dev` goes on with it
  sandvmm stop dev                         All of it is gone, also where it is paused";

pub(crate) const STOP_USAGE: &str = "sandvmm stop NAME...
       sandvmm stop --all";

/// `sandvmm start`.
#[derive(Debug, Args)]
pub(crate) struct StartArgs {
    /// How it is found again: letters, digits, `.`, `_` and `-`; not the name of one that runs or is paused
    #[arg(long, value_name = "NAME", value_parser = parse_name)]
    pub(crate) name: String,
    /// End it when no command has run in it for so long, for example 30m; 0 for never
    #[arg(long, value_name = "DURATION", default_value = "0", allow_hyphen_values = true, value_parser = Timeout::parse)]
    pub(crate) idle: Timeout,
    /// End it after so long, whatever runs; 0 for never
    #[arg(long, value_name = "DURATION", default_value = "0", allow_hyphen_values = true, value_parser = Timeout::parse)]
    pub(crate) timeout: Timeout,
    /// Keep sandvmm's own messages to itself
    #[arg(short = 'q', long)]
    pub(crate) quiet: bool,
    /// This process is the one that stays.
    #[arg(long, hide = true)]
    pub(crate) supervise: bool,
    /// The sandbox.
    #[command(flatten)]
    pub(crate) sandbox: SandboxArgs,
}

/// `sandvmm resume`.
#[derive(Debug, Args)]
pub(crate) struct ResumeArgs {
    /// Its name
    #[arg(value_parser = parse_name)]
    pub(crate) name: String,
    /// End it when no command has run in it for so long; 0 for never
    #[arg(long, value_name = "DURATION", default_value = "0", allow_hyphen_values = true, value_parser = Timeout::parse)]
    pub(crate) idle: Timeout,
    /// This process is the one that stays.
    #[arg(long, hide = true)]
    pub(crate) supervise: bool,
}

/// `sandvmm exec`.
#[derive(Debug, Args)]
pub(crate) struct ExecArgs {
    /// The sandbox's name
    #[arg(value_parser = parse_name)]
    pub(crate) name: String,
    /// The command and its arguments
    #[arg(value_name = "COMMAND", last = true, required = true)]
    pub(crate) words: Vec<OsString>,
    /// Give it standard input; it is empty otherwise
    #[arg(short = 'i', long = "interactive")]
    pub(crate) interactive: bool,
    /// Give it a terminal of the size of this one, and the keys typed here
    #[arg(short = 't', long = "tty")]
    pub(crate) tty: bool,
    /// Print its number and let it go on; what it prints goes to the sandbox's log (`logs`)
    #[arg(short = 'd', long, conflicts_with_all = ["interactive", "tty"])]
    pub(crate) detach: bool,
    /// Keep sandvmm's own messages to itself
    #[arg(short = 'q', long)]
    pub(crate) quiet: bool,
    /// What the command finds around it.
    #[command(flatten)]
    pub(crate) program: ProgramArgs,
}

/// `sandvmm shell`.
#[derive(Debug, Args)]
pub(crate) struct ShellArgs {
    /// The sandbox's name
    #[arg(value_parser = parse_name)]
    pub(crate) name: String,
    /// What the shell finds around it.
    #[command(flatten)]
    pub(crate) program: ProgramArgs,
}

/// `sandvmm cp`.
#[derive(Debug, Args)]
pub(crate) struct CpArgs {
    /// What is copied: PATH, or NAME:PATH
    pub(crate) from: OsString,
    /// The copy's own path: NAME:PATH, or PATH
    pub(crate) to: OsString,
    /// As whom, in the guest [default: an unprivileged user]
    #[arg(short = 'u', long = "user", value_name = "USER[:GROUP]", value_parser = parse_user)]
    pub(crate) user: Option<String>,
    /// Do not say what was left out
    #[arg(short = 'q', long)]
    pub(crate) quiet: bool,
}

/// `sandvmm ps`.
#[derive(Debug, Args)]
pub(crate) struct PsArgs {
    /// The sandbox's name
    #[arg(value_parser = parse_name)]
    pub(crate) name: String,
    /// Print one JSON object a line
    #[arg(long)]
    pub(crate) json: bool,
}

/// `sandvmm kill`.
#[derive(Debug, Args)]
pub(crate) struct KillArgs {
    /// The sandbox's name
    #[arg(value_parser = parse_name)]
    pub(crate) name: String,
    /// The command's number, as `ps` and `exec -d` print it
    #[arg(allow_negative_numbers = true, value_parser = number::<u32>(1..=u32::MAX))]
    pub(crate) id: u32,
    /// Send this signal to the command's process group instead, by its Linux number, and wait for nothing
    #[arg(short = 's', long, value_name = "NUMBER", allow_negative_numbers = true, value_parser = number::<i32>(1..=64))]
    pub(crate) signal: Option<i32>,
}

/// A sandbox that was started.
#[derive(Debug, Args)]
pub(crate) struct SessionArgs {
    /// Its name
    #[arg(value_parser = parse_name)]
    pub(crate) name: String,
}

/// `sandvmm logs`.
#[derive(Debug, Args)]
pub(crate) struct LogsArgs {
    /// The sandbox's name
    #[arg(value_parser = parse_name)]
    pub(crate) name: String,
    /// Go on with what is printed from now on, a line when it has its end, until the sandbox ends
    #[arg(short = 'f', long)]
    pub(crate) follow: bool,
}

/// `sandvmm stop`.
#[derive(Debug, Args)]
pub(crate) struct StopArgs {
    /// Their names: those that run are ended, those that are paused are removed
    #[arg(value_name = "NAME", value_parser = parse_name)]
    pub(crate) names: Vec<String>,
    /// All of this user that run; those that are paused stay
    #[arg(long, conflicts_with = "names")]
    pub(crate) all: bool,
}

/// `sandvmm ls`.
#[derive(Debug, Args)]
pub(crate) struct LsArgs {
    /// Print one JSON object a line
    #[arg(long)]
    pub(crate) json: bool,
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use clap::error::ErrorKind;

    use crate::args::{Cli, Task};

    fn parse(line: &str) -> Result<Task, ErrorKind> {
        let words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        Cli::read(&words)
            .map(|cli| cli.task)
            .map_err(|error| error.kind())
    }

    #[test]
    fn a_start_has_the_options_of_a_sandbox_and_no_bound_of_its_own() {
        let Ok(Task::Start(args)) =
            parse("sandvmm start --name dev --memory 1G --disk 2G --allow-host a.b --idle 1m")
        else {
            panic!("it is a start");
        };

        assert_eq!((args.name.as_str(), args.timeout.0), ("dev", None));
        assert_eq!(args.idle.0.map(|idle| idle.as_secs()), Some(60));
        assert_eq!(args.sandbox.machine.memory, 1024);
        assert_eq!(args.sandbox.disk, Some(2048));
        assert!(!args.supervise);
        assert_eq!(
            parse("sandvmm start").unwrap_err(),
            ErrorKind::MissingRequiredArgument
        );
    }

    #[test]
    fn a_command_comes_after_two_hyphens_with_all_of_its_words() {
        let Ok(Task::Exec(args)) = parse("sandvmm exec -it -u root dev -- ls -l -- x") else {
            panic!("it is an exec");
        };

        assert_eq!(args.words, ["ls", "-l", "--", "x"]);
        assert!(args.interactive && args.tty && !args.detach);
        for line in [
            "sandvmm exec dev ls",
            "sandvmm exec dev",
            "sandvmm exec -d -i dev -- ls",
            "sandvmm exec -d -t dev -- ls",
        ] {
            parse(line).unwrap_err();
        }
    }

    #[test]
    fn names_or_all_are_stopped_and_not_both() {
        assert!(matches!(parse("sandvmm stop a b"), Ok(Task::Stop(args)) if args.names.len() == 2));
        assert!(matches!(parse("sandvmm stop --all"), Ok(Task::Stop(args)) if args.all));
        parse("sandvmm stop").unwrap_err();
        parse("sandvmm stop --all a").unwrap_err();
    }
}
