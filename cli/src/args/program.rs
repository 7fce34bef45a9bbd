//! The options of what a program finds around it.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;

/// What a program finds around it.
#[derive(Debug, Clone, Args)]
pub(crate) struct ProgramArgs {
    /// Set a variable, or hand on the host's when only KEY is given, if it has one; may be repeated
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
