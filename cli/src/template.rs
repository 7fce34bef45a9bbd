//! `sandvmm template`: builds, lists, shows, checks and removes templates; and which of them a run forks.

pub(crate) mod args;

use std::path::PathBuf;
use std::time::Instant;

use sandvmm::template::Manifest;
use sandvmm::{SandboxBuilder, Template, TemplateError};
use serde::Serialize;

use crate::args::{MachineArgs, SandboxArgs};
use crate::run::copies::{self, CopyError};
use crate::run::{Network, NetworkError};
use crate::{machine, notice, output};
use args::{TemplateBuildArgs, TemplateTask};

/// Exit code where a template can't be built or used.
const FAILED: u8 = 125;

/// Exit code where a file that an option names is none, as of `run`.
const USAGE: u8 = 2;

/// The template that a run forks without being told to, where it exists and fits.
const DEFAULT_TEMPLATE: &str = "default";

/// Why a template was not built, or something else not done.
#[derive(Debug, thiserror::Error)]
enum BuildError {
    /// The template's own reason.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The options of the network are wrong.
    #[error(transparent)]
    Network(#[from] NetworkError),
    /// What is to be copied into it is not there, or is no file.
    #[error(transparent)]
    Copy(#[from] CopyError),
    /// The record of connections can't be kept.
    #[error("The record of connections can't be written")]
    Log(#[source] std::io::Error),
}

/// A template in `list --json` and `inspect`.
#[derive(Debug, Serialize)]
struct Shown<'a> {
    name: &'a str,
    #[serde(flatten)]
    manifest: &'a Manifest,
}

/// Does it, and gives the exit code.
pub(crate) fn template(task: &TemplateTask) -> u8 {
    let done = match task {
        TemplateTask::Build(args) => build(args),
        TemplateTask::List(args) => list(args.json).map_err(BuildError::from),
        TemplateTask::Inspect(args) => {
            let inspected = Template::inspect(&args.name);
            inspected
                .map(|manifest| json(&args.name, &manifest))
                .map_err(BuildError::from)
        }
        TemplateTask::Verify(args) => Template::verify(&args.name)
            .map(|_| format!("{} is whole\n", args.name))
            .map_err(BuildError::from),
        TemplateTask::Rm(args) => args
            .names
            .iter()
            .try_for_each(|name| Template::remove(name))
            .map(|()| String::new())
            .map_err(BuildError::from),
    };
    match done {
        Ok(text) => output::print(&text, 0),
        Err(error) => {
            notice::say(&notice::sentence(&error));
            match error {
                BuildError::Network(_) | BuildError::Copy(_) => USAGE,
                BuildError::Template(_) | BuildError::Log(_) => FAILED,
            }
        }
    }
}

/// Builds a template; what it may reach meanwhile, and what of that was refused, is said as for a run.
fn build(args: &TemplateBuildArgs) -> Result<String, BuildError> {
    for (host, _) in &args.copy {
        copies::check_source(host)?;
    }
    let network = Network::outwards(&args.egress)?;
    let sandbox = machine::builder(&args.machine, Instant::now());
    let sandbox = network.apply(sandbox, false).map_err(BuildError::Log)?;
    let mut builder = Template::builder(&args.name).sandbox(sandbox);
    for (host, guest) in &args.copy {
        builder = builder.copy(host, guest);
    }
    for command in &args.run {
        builder = builder.run(command);
    }
    for (key, value) in &args.secret {
        builder = builder.secret(key, value);
    }
    if let Some(code) = &args.warm {
        builder = builder.warm(code);
    }
    if args.force {
        builder = builder.replace();
    }
    let template = builder.build()?;
    let manifest = template.manifest();
    if args.json {
        return Ok(json(&args.name, manifest));
    }
    Ok(format!(
        "{}: {} MiB of {} MiB in use, inputs {}\n",
        args.name,
        manifest.memory_used_bytes >> 20,
        manifest.inputs.memory_mib,
        manifest.inputs_digest
    ))
}

fn json(name: &str, manifest: &Manifest) -> String {
    // Paths of a manifest were text when they were read or written.
    let mut line = serde_json::to_string(&Shown { name, manifest }).unwrap_or_default();
    line.push('\n');
    line
}

fn list(as_json: bool) -> Result<String, TemplateError> {
    let mut text = String::new();
    for name in Template::list()? {
        match Template::inspect(&name) {
            Ok(manifest) if as_json => text.push_str(&json(&name, &manifest)),
            Ok(manifest) => text.push_str(&format!(
                "{name}\t{} MiB\t{}\t{}\n",
                manifest.inputs.memory_mib,
                notice::count(u64::from(manifest.inputs.cpus), "CPU"),
                manifest.inputs_digest
            )),
            Err(error) => notice::say(&format!("{name}: {}", notice::sentence(&error))),
        }
    }
    Ok(text)
}

/// `KEY=VALUE`, or `KEY` for the host's variable.
pub(crate) fn parse_secret(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some(_) => Err(
            "name a variable of this command's environment: a value here could be read by others"
                .into(),
        ),
        None => std::env::var(text)
            .map(|value| (text.to_owned(), value))
            .map_err(|error| error.to_string()),
    }
}

/// `HOST:GUEST`.
pub(crate) fn parse_copy(text: &str) -> Result<(PathBuf, PathBuf), String> {
    match text.split_once(':') {
        Some((host, guest)) if !host.is_empty() && !guest.is_empty() => {
            Ok((host.into(), guest.into()))
        }
        _ => Err("HOST:GUEST is a file or folder of the host and a path in the guest".into()),
    }
}

/// How a run's machine comes to be, and why so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Path {
    /// The template that is forked; none for a machine that boots.
    pub(crate) template: Option<String>,
    /// One sentence.
    pub(crate) why: String,
    /// The machine's memory.
    pub(crate) memory_mib: u32,
}

/// The builder of a run's machine.
///
/// # Errors
/// When the template that was asked for can't be used.
pub(crate) fn choose(
    args: &SandboxArgs,
    is_silent: bool,
    called_at: Instant,
) -> Result<(SandboxBuilder, Path), TemplateError> {
    let boots = |why: &str| {
        let path = Path {
            template: None,
            why: why.to_owned(),
            memory_mib: args.machine.memory,
        };
        (machine::builder(&args.machine, called_at), path)
    };
    let forks = |template: Template, name: &str, why: &str| {
        let template = if args.share_secrets {
            template.share_secrets()
        } else {
            template
        };
        let path = Path {
            template: Some(name.to_owned()),
            why: why.to_owned(),
            memory_mib: template.manifest().inputs.memory_mib,
        };
        (
            machine::with_cell(template.sandbox(), &args.machine, called_at),
            path,
        )
    };
    if let Some(name) = &args.template {
        return Template::open(name).map(|template| forks(template, name, "It was asked for"));
    }
    if args.workspace.is_some() {
        return Ok(boots("A workspace was named"));
    }
    if args.disk.is_some() {
        return Ok(boots("A scratch disk was asked for"));
    }
    if args.cold {
        return Ok(boots("A boot was asked for"));
    }
    match Template::open(DEFAULT_TEMPLATE) {
        Ok(template) => Ok(match misfit(&args.machine, template.manifest()) {
            Some(why) => boots(why),
            None if template.manifest().built_with_secrets => {
                boots("The default template was built with secrets")
            }
            None => forks(template, DEFAULT_TEMPLATE, "The default template fits"),
        }),
        Err(TemplateError::Missing { .. } | TemplateError::Images(_)) => {
            Ok(boots("There is no default template"))
        }
        Err(error) => {
            let why = format!(
                "The default template is not used: {}",
                notice::sentence(&error)
            );
            if !is_silent {
                notice::say(&why);
            }
            Ok(boots(&why))
        }
    }
}

/// Why a template does not do what the options ask for.
fn misfit(args: &MachineArgs, manifest: &Manifest) -> Option<&'static str> {
    let inputs = &manifest.inputs;
    if args.kernel.is_some() || args.initrd.is_some() || args.rootfs.is_some() {
        Some("An image was named")
    } else if args.cpus != inputs.cpus {
        Some("The default template has another number of processors")
    } else if args.memory != inputs.memory_mib {
        Some("The default template has another size of memory")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_two_paths() {
        assert_eq!(parse_copy("a/b:/c").unwrap(), ("a/b".into(), "/c".into()));
        for text in ["", "a", ":b", "a:"] {
            parse_copy(text).unwrap_err();
        }
    }

    #[test]
    fn a_secret_is_never_on_the_command_line() {
        parse_secret("A=b").unwrap_err();
        assert_eq!(parse_secret("PATH").unwrap().0, "PATH");
    }
}
