//! The command line: what may be said, and its help.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, Parser, Subcommand};
use sandvmm::cell::Part;

use crate::quantity::{QuantityError, parse_memory_mib, parse_timeout};
use crate::run::{Copy, HostFunction, Publish, parse_publish, parse_rule};
use crate::session::args::{
    CpArgs, ExecArgs, KillArgs, LsArgs, PsArgs, ResumeArgs, START_EXAMPLES, SessionArgs, ShellArgs,
    StartArgs, StopArgs,
};
use crate::template::{parse_copy, parse_secret};

/// Runs that `bench` makes unless told otherwise.
const DEFAULT_BENCH_RUNS: u32 = 20;

/// Most runs of one `bench`: their samples are kept until the end, 64 bytes each.
const MAX_BENCH_RUNS: u32 = 1_000_000;

const RUN_USAGE: &str = "sandvmm run [OPTIONS] SCRIPT [ARGS...]
       sandvmm run [OPTIONS] -- COMMAND [ARGS...]
       sandvmm run [OPTIONS] -c CODE [ARGS...]
       sandvmm run [OPTIONS] - [ARGS...]";

const RUN_EXAMPLES: &str = "\
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
  The program's own; 128+N after signal N; 124 time-out; 125 sandvmm's own failure; 126 not executable;
  127 not found; 2 usage.";

/// Runs code that nobody has read inside its own virtual machine.
#[derive(Debug, Parser)]
#[command(name = "sandvmm", version, propagate_version = false)]
pub(crate) struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub(crate) task: Task,
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
    /// End a command of a sandbox, with all that it started
    Kill(KillArgs),
    /// Show what detached commands (`exec -d`) have printed: its last MiBs
    Logs(SessionArgs),
    /// End sandboxes that were started; nothing of them is left
    Stop(StopArgs),
    /// Show the sandboxes that were started: name, state, processors, memory, age
    Ls(LsArgs),
    /// Put a sandbox on disk, files and memory, under its name, and end it; `resume` goes on with it
    Pause(SessionArgs),
    /// Go on with a sandbox that was paused
    Resume(ResumeArgs),
    /// Machines that were booted and warmed once, to be forked by `run`
    #[command(subcommand)]
    Template(TemplateTask),
    /// Say whether this machine can run virtual machines, what is missing, and what to do
    Doctor(DoctorArgs),
    /// Show and remove the disks that outlive a run (`run --workspace NAME`)
    #[command(subcommand)]
    Workspace(WorkspaceTask),
    /// Measure
    #[command(subcommand)]
    Bench(Bench),
}

/// What to do with workspaces.
#[derive(Debug, Subcommand)]
pub(crate) enum WorkspaceTask {
    /// Show all: name, bytes on this disk, most bytes, and whether a run has it
    List,
    /// Remove one with all that is in it
    Rm {
        /// Its name
        name: String,
    },
}

/// What to do with templates.
#[derive(Debug, Subcommand)]
pub(crate) enum TemplateTask {
    /// Boot a machine, prepare it, and save it
    Build(Box<TemplateBuildArgs>),
    /// Print the names of all templates, with memory, processors and the digest of what each was built from
    List(TemplateListArgs),
    /// Print what a template was built from, as one JSON object
    Inspect(TemplateArgs),
    /// Read all files of a template and compare them with what is on record
    Verify(TemplateArgs),
    /// Remove templates
    Rm(TemplatesArgs),
}

/// `sandvmm template build`.
#[derive(Debug, Args)]
pub(crate) struct TemplateBuildArgs {
    /// The template's name
    pub(crate) name: String,
    /// Copy a file of the host into the guest; may be repeated
    #[arg(long, value_name = "HOST:GUEST", value_parser = parse_copy)]
    pub(crate) copy: Vec<(PathBuf, PathBuf)>,
    /// Run a shell command as root, after all copies; may be repeated
    #[arg(long, value_name = "COMMAND")]
    pub(crate) run: Vec<String>,
    /// Give the commands a variable of this environment that is a secret; the template says that there was one
    #[arg(long, value_name = "KEY", value_parser = parse_secret)]
    pub(crate) secret: Vec<(String, String)>,
    /// Start a Python interpreter that runs this code and stays, to be forked by runs
    #[arg(long, value_name = "CODE")]
    pub(crate) warm: Option<String>,
    /// Replace a template of the same name
    #[arg(long)]
    pub(crate) force: bool,
    /// Print what it was built from, as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// The machine.
    #[command(flatten)]
    pub(crate) machine: MachineArgs,
}

/// `sandvmm template list`.
#[derive(Debug, Args)]
pub(crate) struct TemplateListArgs {
    /// Print one JSON object a line
    #[arg(long)]
    pub(crate) json: bool,
}

/// A template.
#[derive(Debug, Args)]
pub(crate) struct TemplateArgs {
    /// The template's name
    pub(crate) name: String,
}

/// Templates.
#[derive(Debug, Args)]
pub(crate) struct TemplatesArgs {
    /// The templates' names
    #[arg(required = true)]
    pub(crate) names: Vec<String>,
}

/// What to measure.
#[derive(Debug, Subcommand)]
pub(crate) enum Bench {
    /// Boot fresh machines one after another and print when each phase was reached
    Boot(BenchBootArgs),
    /// Fork a template one after another, have each fork's warm interpreter print, and print when each phase was reached
    Fork(BenchForkArgs),
}

/// `sandvmm doctor`.
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// `sandvmm bench boot`.
#[derive(Debug, Args)]
pub(crate) struct BenchBootArgs {
    /// How many machines to boot
    #[arg(short = 'n', long = "runs", value_name = "N", default_value_t = DEFAULT_BENCH_RUNS,
          value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_BENCH_RUNS)))]
    pub(crate) runs: u32,
    /// Print one JSON object with every sample
    #[arg(long)]
    pub(crate) json: bool,
    /// The machine.
    #[command(flatten)]
    pub(crate) machine: MachineArgs,
}

/// `sandvmm bench fork`.
#[derive(Debug, Args)]
pub(crate) struct BenchForkArgs {
    /// How many forks to make
    #[arg(short = 'n', long = "runs", value_name = "N", default_value_t = DEFAULT_BENCH_RUNS,
          value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_BENCH_RUNS)))]
    pub(crate) runs: u32,
    /// Print one JSON object with every sample
    #[arg(long)]
    pub(crate) json: bool,
    /// Fork this template, built with --warm [default: one of the machine below, built for the measurement and removed]
    #[arg(long, value_name = "NAME", conflicts_with_all = ["kernel", "initrd", "rootfs", "cpus", "memory"])]
    pub(crate) template: Option<String>,
    /// Take each fork from a pool of so many that wait; clocks begin with the taking
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) pool: Option<u16>,
    /// The machine.
    #[command(flatten)]
    pub(crate) machine: MachineArgs,
}

/// The machine that `run` and `bench` make.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Machine")]
pub(crate) struct MachineArgs {
    /// Guest kernel, a vmlinux or bzImage [default: that of the data folder]
    #[arg(long, value_name = "FILE")]
    pub(crate) kernel: Option<PathBuf>,
    /// Initramfs with the guest agent [default: that of the data folder]
    #[arg(long, value_name = "FILE")]
    pub(crate) initrd: Option<PathBuf>,
    /// Raw image of the root file system: erofs, squashfs or ext4 [default: that of the data folder]
    #[arg(long, value_name = "FILE")]
    pub(crate) rootfs: Option<PathBuf>,
    /// Virtual processors
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u8).range(1..=32))]
    pub(crate) cpus: u8,
    /// Memory, for example 256M or 2G
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = parse_memory_mib)]
    pub(crate) memory: u32,
    /// Refuse to run without a control group that bounds the machine's processor time and memory
    #[arg(long)]
    pub(crate) require_cgroup: bool,
    /// Leave parts out of the cell around the machine's process: a guest that breaks out of its virtual machine then
    /// meets one wall less for each. namespaces: it sees the host's processes, network and files as their user does;
    /// cgroup: it can use up the host's memory, processors and disks; landlock: one wall less before files, sockets and
    /// signals; seccomp: it can make every system call
    #[arg(long, value_name = "PART,...", value_delimiter = ',', value_parser = parse_part)]
    pub(crate) dangerously_leave_out: Vec<Part>,
}

fn parse_part(name: &str) -> Result<Part, String> {
    Part::ALL
        .into_iter()
        .find(|part| part.name() == name)
        .ok_or_else(|| {
            let names: Vec<&str> = Part::ALL.into_iter().map(Part::name).collect();
            format!("the cell's parts are {}", names.join(", "))
        })
}

/// `sandvmm run`.
#[derive(Debug, Clone, Args)]
pub(crate) struct RunArgs {
    /// A script of the host, or `-` for one from standard input; after `--`, a command of the guest
    #[arg(
        value_name = "SCRIPT",
        trailing_var_arg = true,
        required_unless_present = "code",
        hide = true
    )]
    pub(crate) words: Vec<OsString>,
    /// Python code to run; the words after it are its arguments, after -- those that look like options
    #[arg(short = 'c', value_name = "CODE")]
    pub(crate) code: Option<OsString>,

    /// Longest time for all of it, for example 30s, 1m30s or 500ms; 0 for none
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = Timeout::parse)]
    pub(crate) timeout: Timeout,
    /// End the program when it has written more than this, for example 64M
    #[arg(long, value_name = "SIZE", value_parser = parse_memory_mib)]
    pub(crate) max_output: Option<u32>,
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

/// The sandbox that `run` and `start` make.
#[derive(Debug, Clone, Args)]
pub(crate) struct SandboxArgs {
    /// Most processor time of the machine's process, boot included, for example 10s; 0 for no bound
    #[arg(long, value_name = "DURATION", default_value = "0", value_parser = Timeout::parse)]
    pub(crate) cpu_time: Timeout,
    /// Write what happens in the sandbox to FILE as it happens, one JSON object a line
    #[arg(long, value_name = "FILE")]
    pub(crate) events: Option<PathBuf>,
    /// Copy a file or folder into the guest before the program starts: the copy gets GUEST as its path; may be repeated
    #[arg(long, value_name = "HOST:GUEST", value_parser = copy_parser())]
    pub(crate) upload: Vec<Copy>,
    /// Let the guest call PROGRAM as `host.NAME(...)` of Python's module `sandvmm`, or as `sandvmm-call NAME JSON`: it is started
    /// here for each call, gets the arguments as JSON on its standard input, and prints the result as JSON; may be
    /// repeated
    #[arg(long, value_name = "NAME=PROGRAM", value_parser = host_function_parser())]
    pub(crate) host_function: Vec<HostFunction>,
    /// Keep all that is written in the workspace NAME, which is made if there is none; the next run with it finds
    /// everything again
    #[arg(long, value_name = "NAME")]
    pub(crate) workspace: Option<String>,
    /// Keep what is written on a disk of the host of this size, for example 1G, instead of in the guest's memory; it is gone at the
    /// end
    #[arg(long, value_name = "SIZE", value_parser = parse_memory_mib, conflicts_with = "workspace")]
    pub(crate) disk: Option<u32>,
    /// How much a workspace that is made can hold
    #[arg(long, value_name = "SIZE", default_value = "8G", value_parser = parse_memory_mib, requires = "workspace")]
    pub(crate) workspace_size: u32,
    /// Fork this template [default: `default`, where it exists and has the processors, memory and images that are asked for]
    #[arg(long, value_name = "NAME",
          conflicts_with_all = ["cold", "kernel", "initrd", "rootfs", "cpus", "memory", "workspace", "disk"])]
    pub(crate) template: Option<String>,
    /// Boot a machine, and fork no template
    #[arg(long)]
    pub(crate) cold: bool,
    /// Let the run have the secrets that its template was built with
    #[arg(long)]
    pub(crate) share_secrets: bool,
    /// What leaves and enters.
    #[command(flatten)]
    pub(crate) network: NetworkArgs,
    /// The machine.
    #[command(flatten)]
    pub(crate) machine: MachineArgs,
}

/// What a program finds around it.
#[derive(Debug, Clone, Args)]
pub(crate) struct ProgramArgs {
    /// Set a variable, or hand on the host's when only KEY is given; may be repeated
    #[arg(short = 'e', long = "env", value_name = "KEY[=VALUE]")]
    pub(crate) env: Vec<OsString>,
    /// Set the variables of a file, one KEY=VALUE a line; may be repeated
    #[arg(long, value_name = "FILE")]
    pub(crate) env_file: Vec<PathBuf>,
    /// Working folder in the guest [default: the user's home]
    #[arg(short = 'w', long = "workdir", value_name = "DIR")]
    pub(crate) workdir: Option<PathBuf>,
    /// Who runs it, by name or number [default: an unprivileged user]
    #[arg(short = 'u', long = "user", value_name = "USER[:GROUP]")]
    pub(crate) user: Option<String>,
}

/// `sandvmm repl`.
#[derive(Debug, Clone, Args)]
pub(crate) struct ReplArgs {
    /// Longest time for all of it, for example 10m; 0 for none
    #[arg(long, value_name = "DURATION", default_value = "0", value_parser = Timeout::parse)]
    pub(crate) timeout: Timeout,
    /// Longest time for each input; it is interrupted then. 0 for none
    #[arg(long, value_name = "DURATION", default_value = "0", value_parser = Timeout::parse)]
    pub(crate) deadline: Timeout,
    /// Keep figures of matplotlib, and other images, as files of this folder
    #[arg(long, value_name = "FOLDER")]
    pub(crate) figures: Option<PathBuf>,
    /// What the program finds around it.
    #[command(flatten)]
    pub(crate) program: ProgramArgs,
    /// Fork this template [default: boot]
    #[arg(long, value_name = "NAME", conflicts_with_all = ["kernel", "initrd", "rootfs", "cpus", "memory"])]
    pub(crate) template: Option<String>,
    /// The machine.
    #[command(flatten)]
    pub(crate) machine: MachineArgs,
}

/// What leaves.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Network")]
pub(crate) struct EgressArgs {
    /// Let connections to this host leave, and to no other: a name, *.DOMAIN for all names below it, an address or a range of
    /// addresses; ports 443 and 80 unless named; may be repeated. Without, nothing leaves
    #[arg(long, value_name = "HOST[:PORT,...]", value_parser = parse_rule)]
    pub(crate) allow_host: Vec<String>,
    /// Let connections to the hosts in this file leave, one a line; may be repeated
    #[arg(long, value_name = "FILE")]
    pub(crate) allow_file: Vec<PathBuf>,
    /// What passes on this port is neither TLS nor HTTP and is not looked into; may be repeated
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) raw_port: Vec<u16>,
    /// Append a line of JSON to this file for each connection that was tried
    #[arg(long, value_name = "FILE")]
    pub(crate) egress_log: Option<PathBuf>,
}

/// What leaves a run and what enters it.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Network")]
pub(crate) struct NetworkArgs {
    /// What leaves.
    #[command(flatten)]
    pub(crate) egress: EgressArgs,
    /// Let the program use a secret that it never has: it finds a placeholder in the variable NAME, and in header fields of
    /// HTTPS requests to these hosts, which are allowed thereby, sandvmm puts the value in. The value is that of the variable NAME here, unless a
    /// SOURCE is named: env:VARIABLE, file:PATH or command:COMMAND, which prints it; may be repeated
    #[arg(long, value_name = "NAME@HOST[:PORT][,HOST...][=SOURCE]")]
    pub(crate) secret: Vec<String>,
    /// Know the servers of these hosts also by the certificates in this file (PEM), beside those that this host trusts
    #[arg(long, value_name = "FILE", requires = "secret")]
    pub(crate) egress_ca: Option<PathBuf>,
    /// Forward a port of this host, on its loopback unless an address is named, to one of the guest; may be repeated
    #[arg(long, value_name = "[ADDRESS:]PORT:GUESTPORT", value_parser = parse_publish)]
    pub(crate) publish: Vec<Publish>,
}

fn copy_parser() -> impl TypedValueParser<Value = Copy> {
    OsStringValueParser::new().try_map(|word| Copy::parse(&word))
}

fn host_function_parser() -> impl TypedValueParser<Value = HostFunction> {
    OsStringValueParser::new().try_map(|word| HostFunction::parse(&word))
}

/// A time-out; `None` is none at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Timeout(pub(crate) Option<Duration>);

impl Timeout {
    pub(crate) fn parse(text: &str) -> Result<Self, QuantityError> {
        parse_timeout(text).map(Self)
    }
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
    use clap::CommandFactory;
    use clap::error::ErrorKind;

    use super::*;

    fn parse(line: &[&str]) -> Result<(RunArgs, Option<Program>), ErrorKind> {
        let line: Vec<OsString> = ["sandvmm", "run"]
            .iter()
            .chain(line)
            .map(OsString::from)
            .collect();
        match Cli::try_parse_from(&line)
            .map_err(|error| error.kind())?
            .task
        {
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
    fn the_description_holds_together() {
        Cli::command().debug_assert();
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
            (
                &["--timeout", "1s", "--timeout", "2s", "a.py"],
                ErrorKind::ArgumentConflict,
            ),
        ] {
            assert_eq!(parse(line).unwrap_err(), kind, "{line:?}");
        }
    }
}
