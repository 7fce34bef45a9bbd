//! The whole-machine tests in portions, each of which is one run of a program of tests on a KVM host.

use std::cmp::Reverse;
use std::collections::{BTreeSet, VecDeque};
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;

use super::machine::MachineTestsError;
use super::verdict::{self, Verdict, Verdicts};
use crate::host::{self, HostCommand, HostError, Showing};
use crate::progress::Progress;
use crate::tool::{self, ToolError};
use crate::workspace::Workspace;

/// How long one batch may take, in seconds; it is ended then.
pub(super) const MAX_S: u32 = 30 * 60;
/// Tests of one batch in an emulated host: so few that hosts beside each other end at nearly the same time, so many that the boot of
/// a host for each costs little.
const TESTS_MAX: usize = 20;
/// How often a batch goes on in a new emulated host when the one before died: where its QEMU could not be mended
/// ([`crate::host`]), the host's kernel may die. What is run again is named in the output; a test that failed is not.
const HOST_DEATHS_MAX: u32 = 1;
/// Exit code of timeout(1) for a command that it ended.
const EXIT_TIMED_OUT: u8 = 124;

/// A program of tests.
#[derive(Debug)]
pub(super) struct TestProgram {
    path: PathBuf,
    /// All that it has.
    names: BTreeSet<String>,
    /// Those to run.
    wanted: BTreeSet<String>,
}

impl TestProgram {
    /// Asks the program at `path` for its tests; those are wanted that have one of the words `filters` in their names, all where there
    /// are no words.
    pub(super) fn list(path: PathBuf, filters: &[OsString]) -> Result<Self, ToolError> {
        let mut list = Command::new(&path);
        list.args(["--list", "--format", "terse", "--include-ignored"]);
        let output = tool::run(&mut list)?;
        let names: BTreeSet<String> = String::from_utf8_lossy(&output)
            .lines()
            .filter_map(|line| line.strip_suffix(": test"))
            .map(String::from)
            .collect();
        let has_word = |name: &str| {
            filters
                .iter()
                .any(|word| name.contains(&*word.to_string_lossy()))
        };
        let wanted = names
            .iter()
            .filter(|name| filters.is_empty() || has_word(name))
            .cloned()
            .collect();
        Ok(Self {
            path,
            names,
            wanted,
        })
    }
}

/// Tests that one run of their program runs.
#[derive(Debug)]
pub(super) struct Batch<'a> {
    program: &'a TestProgram,
    names: BTreeSet<String>,
    environment: &'a [(OsString, OsString)],
}

/// The wanted tests of all `programs`, those of the program with the most first. A host that is this machine itself takes a program's
/// all at once.
pub(super) fn of<'a>(
    programs: &'a [TestProgram],
    environment: &'a [(OsString, OsString)],
) -> VecDeque<Batch<'a>> {
    let tests_max = if host::is_here() {
        usize::MAX
    } else {
        TESTS_MAX
    };
    let mut programs: Vec<&TestProgram> = programs.iter().collect();
    programs.sort_by_key(|program| Reverse(program.wanted.len()));
    programs
        .into_iter()
        .flat_map(|program| {
            let portions = portions(&program.wanted, tests_max).into_iter();
            portions.map(move |names| Batch {
                program,
                names,
                environment,
            })
        })
        .collect()
}

/// `names` in their order, at most `tests_max` at a time, and all portions nearly as large.
fn portions(names: &BTreeSet<String>, tests_max: usize) -> Vec<BTreeSet<String>> {
    let count = names.len().div_ceil(tests_max).max(1);
    let size = names.len().div_ceil(count).max(1);
    let names: Vec<&String> = names.iter().collect();
    names
        .chunks(size)
        .map(|portion| portion.iter().copied().cloned().collect())
        .collect()
}

impl Batch<'_> {
    /// Runs them until each has a verdict.
    pub(super) fn run(
        &self,
        showing: Showing,
        workspace: &Workspace,
        progress: &Progress,
    ) -> Result<(), MachineTestsError> {
        let mut verdicts = Verdicts::new();
        let mut host_deaths = 0;
        let code = loop {
            let (result, output) = self.command(&verdicts).watch(showing, workspace, progress);
            verdicts.extend(verdict::in_output(&String::from_utf8_lossy(&output)));
            match result {
                Err(error @ HostError::Died { .. }) if host_deaths < HOST_DEATHS_MAX => {
                    host_deaths += 1;
                    progress.say(&error.to_string());
                    progress.say(&format!(
                        "What had not ended by then runs on a new emulated host: {}",
                        self.left(&verdicts).join(", ")
                    ));
                }
                other => break other?,
            }
        };
        if code == EXIT_TIMED_OUT {
            let left = self.left(&verdicts).join(", ");
            return Err(MachineTestsError::TimedOut(left));
        }
        judge(code, &self.names, &verdicts)
    }

    /// The names of the tests without a verdict.
    fn left(&self, verdicts: &Verdicts) -> Vec<&str> {
        self.names
            .iter()
            .filter(|name| !verdicts.contains_key(*name))
            .map(String::as_str)
            .collect()
    }

    /// Runs those without a verdict.
    fn command(&self, verdicts: &Verdicts) -> HostCommand {
        let mut command = ["timeout", "--kill-after=10"].map(OsString::from).to_vec();
        command.push(MAX_S.to_string().into());
        command.push(self.program.path.clone().into());
        command.extend(["--include-ignored", "--exact"].map(OsString::from));
        // One of the harnesses takes one name at most, and both any number to skip.
        for name in &self.program.names {
            if !self.names.contains(name) || verdicts.contains_key(name) {
                command.extend(["--skip".into(), name.into()]);
            }
        }
        HostCommand {
            command,
            environment: self.environment.to_vec(),
            count_instructions: false,
            resident: Vec::new(),
        }
    }
}

/// Judges one batch's tests.
fn judge(
    code: u8,
    wanted: &BTreeSet<String>,
    verdicts: &Verdicts,
) -> Result<(), MachineTestsError> {
    let failed = verdict::failed(verdicts);
    if !failed.is_empty() {
        let reason = format!("{} failed: {}", failed.len(), failed.join(", "));
        return Err(MachineTestsError::Failed(reason));
    }
    if code != 0 {
        let reason = format!("The tests ended with exit code {code}, though none of them failed");
        return Err(MachineTestsError::Failed(reason));
    }
    let passed = |name: &String| verdicts.get(name) == Some(&Verdict::Passed);
    let silent: Vec<&str> = wanted
        .iter()
        .filter(|name| !passed(name))
        .map(String::as_str)
        .collect();
    if !silent.is_empty() {
        return Err(MachineTestsError::Skipped(silent.join(", ")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(names: &[&str]) -> BTreeSet<String> {
        names.iter().copied().map(String::from).collect()
    }

    #[test]
    fn all_tests_that_passed_are_a_success() {
        let verdicts = verdict::in_output("test a::b ... ok\ntest c ... ok\n");

        judge(0, &wanted(&["a::b", "c"]), &verdicts).unwrap();
    }

    #[test]
    fn a_test_without_a_word_or_ignored_is_no_success() {
        let verdicts = verdict::in_output("test a ... ok\ntest b ... ignored, no KVM host\n");

        let missing = judge(0, &wanted(&["a", "c"]), &verdicts);
        let ignored = judge(0, &wanted(&["a", "b"]), &verdicts);

        assert!(matches!(missing, Err(MachineTestsError::Skipped(names)) if names == "c"));
        assert!(matches!(ignored, Err(MachineTestsError::Skipped(names)) if names == "b"));
    }

    #[test]
    fn a_failure_is_one_whatever_came_after_it() {
        let verdicts = verdict::in_output("test a ... FAILED\ntest b ... ok\n");

        let judged = judge(0, &wanted(&["a", "b"]), &verdicts);

        assert!(matches!(judged, Err(MachineTestsError::Failed(reason)) if reason.contains('a')));
    }

    #[test]
    fn a_program_that_fails_without_a_test_that_does_is_no_success() {
        let verdicts = verdict::in_output("test a ... ok\n");

        assert!(matches!(
            judge(101, &wanted(&["a"]), &verdicts),
            Err(MachineTestsError::Failed(_))
        ));
    }

    #[test]
    fn portions_are_nearly_as_large_and_have_each_name_once() {
        let names: BTreeSet<String> = (0..41).map(|number| format!("test_{number:02}")).collect();

        let portions = portions(&names, 20);

        let sizes: Vec<usize> = portions.iter().map(BTreeSet::len).collect();
        assert_eq!(sizes, [14, 14, 13]);
        let all: Vec<String> = portions.into_iter().flatten().collect();
        assert_eq!(all, names.into_iter().collect::<Vec<_>>());
        assert_eq!(super::portions(&BTreeSet::new(), 20).len(), 0);
    }

    #[test]
    fn a_batch_skips_what_is_not_its_own_or_has_ended() {
        let program = TestProgram {
            path: PathBuf::from("tests"),
            names: wanted(&["a", "b", "c", "d"]),
            wanted: wanted(&["a", "b", "c"]),
        };
        let batch = Batch {
            program: &program,
            names: wanted(&["a", "b"]),
            environment: &[],
        };

        let command = batch
            .command(&verdict::in_output("test a ... ok\n"))
            .command;

        let words: Vec<_> = command.iter().skip(4).collect();
        let expected = "--include-ignored --exact --skip a --skip c --skip d";
        assert_eq!(words, expected.split(' ').collect::<Vec<_>>());
    }
}
