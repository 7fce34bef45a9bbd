//! What may be said of templates.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::{parse_copy, parse_secret};
use crate::args::{EgressArgs, MachineArgs, parse_name};

/// What to do with templates.
#[derive(Debug, Subcommand)]
pub(crate) enum TemplateTask {
    /// Boot a machine, prepare it, and save it
    Build(Box<TemplateBuildArgs>),
    /// Print the names of all templates, with memory, processors and the digest of what each was built from
    List(TemplateListArgs),
    /// Print what a template was built from, as one JSON object
    Inspect(TemplateArgs),
    /// Read all files of a template, and what was copied into it where that was copied from, and compare them with what is on record
    Verify(TemplateArgs),
    /// Remove templates
    Rm(TemplatesArgs),
}

/// `sandvmm template build`.
#[derive(Debug, Args)]
pub(crate) struct TemplateBuildArgs {
    /// The template's name
    #[arg(value_parser = parse_name)]
    pub(crate) name: String,
    /// Copy a file or folder of the host into the guest; may be repeated
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
    /// Replace a template of the same name, once the new one is built
    #[arg(long)]
    pub(crate) force: bool,
    /// Print what it was built from, as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// What leaves while it is built; nothing of it holds for its forks.
    #[command(flatten)]
    pub(crate) egress: EgressArgs,
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
    #[arg(value_parser = parse_name)]
    pub(crate) name: String,
}

/// Templates.
#[derive(Debug, Args)]
pub(crate) struct TemplatesArgs {
    /// The templates' names
    #[arg(value_name = "NAME", required = true, value_parser = parse_name)]
    pub(crate) names: Vec<String>,
}
