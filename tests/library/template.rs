//! Templates of the real data folder that go with their test.

use sandvmm::{Command, Sandbox, Template};

use crate::machine_with;

/// A template, until it is dropped.
pub(crate) struct Named {
    name: String,
    pub(crate) template: Template,
}

impl Named {
    /// Saves the machine, and ends it.
    pub(crate) fn of(parent: &Sandbox, name: &str) -> Self {
        let name = format!("test-{name}-{}", std::process::id());
        let template = parent.snapshot(&name).unwrap();
        parent.end();
        Self { name, template }
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        let _ = Template::remove(&self.name);
    }
}

/// A machine with little memory whose interpreter has run this.
pub(crate) fn warmed(code: &str) -> Sandbox {
    let sandbox = machine_with(128);
    let output = sandbox.warm_up(code).output().unwrap();
    assert!(output.completion.outcome.success(), "{output:?}");
    sandbox
}

pub(crate) fn python(sandbox: &Sandbox, code: &str) -> Command {
    let mut command = sandbox.command("python3");
    command.args(["-c", code]);
    command
}

/// The most of it, in KiB, when a program has run in the fork: it has some 9 MiB then.
pub(crate) const PRIVATE_KIB_MAX: u64 = 16 << 10;

/// Memory of a fork's process that is its own, in KiB: what it has written to. Pages of its template's file are not, though they count as
/// private and dirty where that file is in memory and no other fork has read them.
pub(crate) fn private_kib(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let line = text.lines().find(|line| line.starts_with("Anonymous:"));
    let number = line.unwrap().split_whitespace().nth(1).unwrap();
    number.parse().unwrap()
}
