//! `sandvmm doctor`: whether this machine can run virtual machines.

use std::fmt::Write;

use clap::Args;
use sandvmm::host::{Check, HostReport, Status};
use serde::Serialize;

use crate::cell::CellReport;
use crate::escape::escape;
use crate::output;

/// Exit code when this machine can't.
const UNFIT: u8 = 1;

pub(crate) const DOCTOR_CODES: &str = "\
Exit codes:
  0 this machine can run virtual machines; 1 it can't; 2 usage; 125 what was found can't be printed.";

/// `sandvmm doctor`.
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// The object of `doctor --json`.
#[derive(Debug, Serialize)]
struct DoctorReport<'a> {
    can_run: bool,
    message: Option<String>,
    checks: Vec<CheckReport<'a>>,
    cell: Option<CellReport>,
}

#[derive(Debug, Serialize)]
struct CheckReport<'a> {
    name: &'a str,
    status: &'static str,
    detail: &'a str,
    advice: Option<&'a str>,
}

/// Looks, prints, and gives the exit code.
pub(crate) fn doctor(args: &DoctorArgs) -> u8 {
    let report = HostReport::inspect();
    let can_run = report.can_run();
    let text = if args.json {
        json(&report, &can_run)
    } else {
        words(&report, &can_run)
    };
    output::print(&text, if can_run.is_ok() { 0 } else { UNFIT })
}

fn json(report: &HostReport, can_run: &Result<(), String>) -> String {
    let shape = DoctorReport {
        can_run: can_run.is_ok(),
        message: can_run.as_ref().err().cloned(),
        checks: report.checks.iter().map(CheckReport::from).collect(),
        cell: report.cell.as_ref().map(CellReport::from),
    };
    // Strings alone can't fail to be JSON.
    let mut line = serde_json::to_string(&shape).unwrap_or_default();
    line.push('\n');
    line
}

fn words(report: &HostReport, can_run: &Result<(), String>) -> String {
    let width = report
        .checks
        .iter()
        .map(|check| check.name.chars().count())
        .max()
        .unwrap_or_default();
    let mut text = String::new();
    // Writing to a String does not fail.
    for check in &report.checks {
        let _ = writeln!(
            text,
            "{:<7}  {:<width$}  {}",
            status(check.status),
            check.name,
            escape(&check.detail)
        );
        if let Some(advice) = &check.advice {
            let _ = writeln!(text, "{:<7}  {:<width$}  → {}", "", "", escape(advice));
        }
    }
    text.push('\n');
    match can_run {
        Ok(()) => text.push_str("This machine can run sandboxes.\n"),
        Err(sentence) => {
            let _ = writeln!(text, "{}", escape(sentence));
        }
    }
    text
}

impl<'a> From<&'a Check> for CheckReport<'a> {
    fn from(check: &'a Check) -> Self {
        Self {
            name: check.name,
            status: status(check.status),
            detail: &check.detail,
            advice: check.advice.as_deref(),
        }
    }
}

fn status(status: Status) -> &'static str {
    match status {
        Status::Ok => "ok",
        Status::Warning => "warning",
        _ => "missing",
    }
}
