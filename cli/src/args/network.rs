//! The options of what leaves a machine and what enters it.

use std::path::PathBuf;

use clap::Args;

use crate::quantity::number;
use crate::run::{Publish, parse_publish, parse_rule};

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
    #[arg(long, value_name = "PORT", allow_negative_numbers = true, value_parser = number::<u16>(1..=65_535))]
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
    /// Forward a port of this host, on its loopback unless an address is named, to one of the guest; for PORT 0 the system
    /// chooses one, which is said; may be repeated
    #[arg(long, value_name = "[ADDRESS:]PORT:GUESTPORT", value_parser = parse_publish)]
    pub(crate) publish: Vec<Publish>,
}
