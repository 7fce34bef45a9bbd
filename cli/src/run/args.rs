//! What may be said of a run, and its help.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use clap::Args;

use super::Copy;
use crate::args::{ProgramArgs, SandboxArgs, copy_parser};
use crate::quantity::{Timeout, parse_bytes};

pub(crate) const RUN_USAGE: &str = "sandvmm run [OPTIONS] SCRIPT [ARGS...]
       sandvmm run [OPTIONS] -- COMMAND [ARGS...]
       sandvmm run [OPTIONS] -c CODE [ARGS...]
       sandvmm run [OPTIONS] - [ARGS...]";

pub(crate) const RUN_EXAMPLES: &str = "\
Examples:
  sandvmm run hello.py                     A script of the host; what follows it is its own
  sandvmm run -c 'print(6 * 7)'            Python code
  sandvmm run -- uname -a                  A command of the guest's image
  sandvmm run -i wordcount.py < book.txt   With standard input
  sandvmm run -t -- bash                   At a terminal
  sandvmm run --json --timeout 5s job.py   One JSON object with output, reason, clocks and usage
  sandvmm run --allow-host pypi.org --allow-host files.pythonhosted.org -- pip install six
                                           With a network of these two hosts

Exit codes:
  The program's own; 128+N after signal N; 124 time-out; 125 sandvmm's own failure, a crash of the machine,
  or a ceiling that was met (--cpu-time, --max-output); 126 not executable; 127 not found; 2 usage.";

/// `sandvmm run`.
#[derive(Debug, Clone, Args)]
pub(crate) struct RunArgs {
    /// A script of the host, or `-` for one from standard input; after `--`, a command of the guest
    #[arg(value_name = "SCRIPT", trailing_var_arg = true, hide = true)]
    pub(crate) words: Vec<OsString>,
    /// Python code to run; the words after it are its arguments, after -- those that look like options
    #[arg(short = 'c', value_name = "CODE")]
    pub(crate) code: Option<OsString>,

    /// Longest time for all of it, for example 30s, 1m30s or 500ms; 0 for none
    #[arg(long, value_name = "DURATION", default_value = "30s", allow_hyphen_values = true, value_parser = Timeout::parse)]
    pub(crate) timeout: Timeout,
    /// End the program when it has written more than this, for example 64M or 1K
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, value_parser = parse_bytes)]
    pub(crate) max_output: Option<u64>,
    /// What the program finds around it.
    #[command(flatten)]
    pub(crate) program: ProgramArgs,
    /// Copy a file or folder out of the guest when the program has ended: the copy gets HOST as its path. Links,
    /// devices, pipes and sockets stay there; may be repeated
    #[arg(long, value_name = "GUEST:HOST", value_parser = copy_parser())]
    pub(crate) download: Vec<Copy>,
    /// Give it standard input; it is empty otherwise
    #[arg(short = 'i', long = "interactive")]
    pub(crate) interactive: bool,
    /// Give it a terminal of the size of this one, and the keys typed here
    #[arg(short = 't', long = "tty", conflicts_with = "json")]
    pub(crate) tty: bool,
    /// Print one JSON object with output, reason, clocks and usage, and nothing else
    #[arg(long)]
    pub(crate) json: bool,
    /// Keep sandvmm's own messages to itself; the program's output still shows
    #[arg(short = 'q', long, conflicts_with = "verbose")]
    pub(crate) quiet: bool,
    /// Show the guest kernel's messages and when each phase was reached, on standard error
    #[arg(short = 'v', long)]
    pub(crate) verbose: bool,
    /// The sandbox.
    #[command(flatten)]
    pub(crate) sandbox: SandboxArgs,
}

/// What `run` is to run.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Program {
    /// A script of the host and its arguments.
    Script(PathBuf, Vec<OsString>),
    /// A Python script from standard input, and its arguments.
    Input(Vec<OsString>),
    /// Python code and its arguments.
    Code(OsString, Vec<OsString>),
    /// A command of the guest and its arguments.
    Command(OsString, Vec<OsString>),
}

impl RunArgs {
    /// What is to be run; `line` is the whole command line, since only it tells whether `--` came first.
    /// `None` when nothing is named.
    pub(crate) fn program(&self, line: &[OsString]) -> Option<Program> {
        if let Some(code) = &self.code {
            return Some(Program::Code(code.clone(), self.words.clone()));
        }
        let (first, rest) = self.words.split_first()?;
        // From the first of them on all words are taken as they stand: they are the line's last.
        let before = line.len().checked_sub(self.words.len() + 1);
        if before
            .and_then(|at| line.get(at))
            .is_some_and(|word| word == OsStr::new("--"))
        {
            Some(Program::Command(first.clone(), rest.to_vec()))
        } else if first == OsStr::new("-") {
            Some(Program::Input(rest.to_vec()))
        } else {
            Some(Program::Script(PathBuf::from(first), rest.to_vec()))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use clap::error::ErrorKind;
    use sandvmm::cell::Part;

    use super::*;
    use crate::args::{Cli, Task};

    fn parse(line: &[&str]) -> Result<(RunArgs, Option<Program>), ErrorKind> {
        let line: Vec<OsString> = ["sandvmm", "run"]
            .iter()
            .chain(line)
            .map(OsString::from)
            .collect();
        match Cli::read(&line).map_err(|error| error.kind())?.task {
            Task::Run(args) => {
                let program = args.program(&line);
                Ok((*args, program))
            }
            other => panic!("{other:?}"),
        }
    }

    fn program(line: &[&str]) -> Program {
        parse(line).unwrap().1.unwrap()
    }

    fn script(path: &str, args: &[&str]) -> Program {
        Program::Script(path.into(), args.iter().map(OsString::from).collect())
    }

    fn command(name: &str, args: &[&str]) -> Program {
        Program::Command(name.into(), args.iter().map(OsString::from).collect())
    }

    #[test]
    fn what_follows_a_script_is_its_own() {
        assert_eq!(program(&["a.py"]), script("a.py", &[]));
        assert_eq!(
            program(&["--json", "a.py", "--json", "-c", "--", "-x"]),
            script("a.py", &["--json", "-c", "--", "-x"])
        );
        assert!(!parse(&["a.py", "--json"]).unwrap().0.json);
    }

    #[test]
    fn two_hyphens_begin_a_command() {
        assert_eq!(program(&["--", "ls", "-l"]), command("ls", &["-l"]));
        assert_eq!(
            program(&["-e", "A=1", "--", "a.py", "--", "x"]),
            command("a.py", &["--", "x"])
        );
        assert_eq!(program(&["--", "--", "x"]), command("--", &["x"]));
        assert_eq!(program(&["--", "-"]), command("-", &[]));
    }

    #[test]
    fn code_takes_the_words_after_it() {
        let (args, found) = parse(&["-c", "code", "--json", "a", "-x", "--"]).unwrap();

        assert!(args.json);
        assert_eq!(
            found,
            Some(Program::Code(
                "code".into(),
                vec!["a".into(), "-x".into(), "--".into()]
            ))
        );
        assert_eq!(
            program(&["-c", "code", "--", "-x"]),
            Program::Code("code".into(), vec!["-x".into()])
        );
        assert_eq!(program(&["-c", ""]), Program::Code("".into(), vec![]));
    }

    #[test]
    fn a_hyphen_is_standard_input() {
        assert_eq!(
            program(&["-", "-x", "y"]),
            Program::Input(vec!["-x".into(), "y".into()])
        );
    }

    #[test]
    fn the_defaults_are_the_documented_ones() {
        let (args, _) = parse(&["a.py"]).unwrap();

        assert_eq!(
            (args.sandbox.machine.cpus, args.sandbox.machine.memory),
            (1, 256)
        );
        assert_eq!(args.timeout, Timeout(Some(Duration::from_secs(30))));
        assert!(!args.interactive && !args.tty && !args.json && !args.quiet && !args.verbose);
    }

    #[test]
    fn options_are_read() {
        let (args, _) = parse(&[
            "--cpus",
            "4",
            "--memory",
            "2G",
            "--timeout",
            "0",
            "-e",
            "A=1",
            "-eB",
            "--env-file",
            "f",
            "-w",
            "/tmp",
            "-u",
            "root:root",
            "-it",
            "-v",
            "--kernel",
            "k",
            "--initrd",
            "i",
            "--rootfs",
            "r",
            "a.py",
        ])
        .unwrap();

        assert_eq!(
            (args.sandbox.machine.cpus, args.sandbox.machine.memory),
            (4, 2048)
        );
        assert_eq!(args.timeout, Timeout(None));
        assert_eq!(
            args.program.env,
            [OsString::from("A=1"), OsString::from("B")]
        );
        assert!(args.interactive && args.tty && args.verbose);
        assert_eq!(args.program.user.as_deref(), Some("root:root"));
    }

    #[test]
    fn parts_of_the_cell_are_left_out_by_name() {
        let (args, _) = parse(&["--dangerously-leave-out", "seccomp,cgroup", "a.py"]).unwrap();
        let (whole, _) = parse(&["--require-cgroup", "a.py"]).unwrap();

        assert_eq!(
            args.sandbox.machine.dangerously_leave_out,
            [Part::Seccomp, Part::Cgroup]
        );
        assert!(
            whole.sandbox.machine.require_cgroup
                && whole.sandbox.machine.dangerously_leave_out.is_empty()
        );
        assert_eq!(
            parse(&["--dangerously-leave-out", "walls", "a.py"]).unwrap_err(),
            ErrorKind::ValueValidation
        );
    }

    #[test]
    fn usage_errors_are_told_apart() {
        for (line, kind) in [
            (&[][..], ErrorKind::MissingRequiredArgument),
            (&["--bogus", "a.py"], ErrorKind::UnknownArgument),
            (&["-t", "--json", "a.py"], ErrorKind::ArgumentConflict),
            (&["-q", "-v", "a.py"], ErrorKind::ArgumentConflict),
            (&["--cpus", "0", "a.py"], ErrorKind::ValueValidation),
            (&["--cpus", "33", "a.py"], ErrorKind::ValueValidation),
            (&["--memory", "lots", "a.py"], ErrorKind::ValueValidation),
            (&["--timeout", "soon", "a.py"], ErrorKind::ValueValidation),
            (&["--timeout", "-1s", "a.py"], ErrorKind::ValueValidation),
            (&["--memory", "-1G", "a.py"], ErrorKind::ValueValidation),
            (
                &["--timeout", "1s", "--timeout", "2s", "a.py"],
                ErrorKind::ArgumentConflict,
            ),
        ] {
            assert_eq!(parse(line).unwrap_err(), kind, "{line:?}");
        }
    }
}
