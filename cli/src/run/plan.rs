//! All of a run that can be settled, and refused, before a machine is made.

use std::ffi::{OsStr, OsString};

use sandvmm::script::{Script, ScriptError};

use crate::environment::{self, EnvironmentError, Variable};
use crate::terminal;

use super::args::{Program, RunArgs};
use super::copies::{self, CopyError};
use super::functions::{FunctionError, Programs};
use super::network::{Network, NetworkError};

/// Python's name in the guest.
pub(super) const PYTHON: &str = "python3";

/// Why a run is refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PlanError {
    /// No script, no code, no command.
    #[error("Nothing is named that could be run")]
    Nothing,
    /// The script can't be run.
    #[error(transparent)]
    Script(#[from] ScriptError),
    /// What is to be copied into the guest is not there.
    #[error(transparent)]
    Copy(#[from] CopyError),
    /// A function of the host can't be called so.
    #[error(transparent)]
    HostFunction(#[from] FunctionError),
    /// The variables are wrong.
    #[error(transparent)]
    Environment(#[from] EnvironmentError),
    /// The options of the network are wrong.
    #[error(transparent)]
    Network(#[from] NetworkError),
    /// A variable that is to hold a placeholder and something else.
    #[error("{}", environment::given_away(.0))]
    SecretVariable(String),
    /// `-t` without a terminal.
    #[error("Standard input is not a terminal: leave out -t, or say -i for plain standard input")]
    NoTerminal,
}

/// A run that is settled.
#[derive(Debug)]
pub(crate) struct Plan {
    /// What is run.
    pub(crate) target: Target,
    /// Its variables.
    pub(crate) variables: Vec<Variable>,
    /// Whether it gets standard input, unless the script takes all of it.
    pub(crate) has_input: bool,
    /// What leaves and enters.
    pub(crate) network: Network,
}

/// What is run.
#[derive(Debug)]
pub(crate) enum Target {
    /// A script that goes into the guest first, and its arguments.
    Script(Script, Vec<OsString>),
    /// The script on standard input, and its arguments.
    Input(Vec<OsString>),
    /// A command of the guest, its name first.
    Words(Vec<OsString>),
}

impl Plan {
    /// Settles a run. Opens the script and the files of variables, and never waits on them.
    ///
    /// # Errors
    /// See [`PlanError`].
    pub(crate) fn new(args: &RunArgs, line: &[OsString]) -> Result<Self, PlanError> {
        let program = args.program(line).ok_or(PlanError::Nothing)?;
        let target = match program {
            Program::Script(path, rest) => Target::Script(Script::open(&path)?, rest),
            Program::Input(rest) => Target::Input(rest),
            Program::Code(code, rest) => {
                Target::Words(words([OsStr::new(PYTHON), OsStr::new("-c"), &code], rest))
            }
            Program::Command(name, rest) => Target::Words(words([name.as_os_str()], rest)),
        };
        copies::check(&args.sandbox.upload)?;
        Programs::check(&args.sandbox.host_function)?;
        let variables = environment::collect(&args.program.env_file, &args.program.env, &|name| {
            std::env::var_os(name)
        })?;
        if args.tty && !terminal::is_input_terminal() {
            return Err(PlanError::NoTerminal);
        }
        let network = Network::new(&args.sandbox.network)?;
        let is_set = |name: &&str| variables.iter().any(|(known, _)| known == *name);
        if let Some(name) = network.secret_names().find(is_set) {
            return Err(PlanError::SecretVariable(name.to_owned()));
        }
        Ok(Self {
            target,
            variables,
            has_input: args.interactive,
            network,
        })
    }
}

fn words<const N: usize>(first: [&OsStr; N], rest: Vec<OsString>) -> Vec<OsString> {
    first.map(OsStr::to_owned).into_iter().chain(rest).collect()
}
