//! The library, as an application uses it, with whole machines in a KVM host.

#![allow(
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "an expectation that is not met is a failed test"
)]

mod asynchronous;
mod calls;
mod commands;
mod egress;
mod examples;
mod python;

use std::fs::OpenOptions;
use std::process::ExitCode;
use std::time::Duration;

use libtest_mimic::{Arguments, Failed, Trial};
use sandvmm::{Output, Sandbox};

/// After this a machine counts as hung.
const HUNG_AFTER: Duration = Duration::from_secs(240);

/// A test and its name.
type Test = (&'static str, fn());

fn main() -> ExitCode {
    sandvmm::init();
    let has_kvm = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .is_ok();
    let mut arguments = Arguments::from_args();
    arguments.test_threads.get_or_insert(1);
    let trials = [
        asynchronous::TESTS,
        calls::TESTS,
        commands::TESTS,
        egress::TESTS,
        examples::TESTS,
        python::TESTS,
    ]
    .concat()
    .into_iter()
    .map(|(name, test)| {
        Trial::test(name, move || {
            test();
            Ok::<(), Failed>(())
        })
        .with_ignored_flag(!has_kvm)
    });
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}

fn machine() -> Sandbox {
    machine_with(256)
}

fn machine_with(memory_mib: u32) -> Sandbox {
    let builder = Sandbox::builder().memory_mib(memory_mib);
    builder.timeout(Some(HUNG_AFTER)).start().unwrap()
}

/// Runs it in the sandbox's shell, or Python, and gives what it prints; fails where it does.
fn printed(sandbox: &Sandbox, program: &str, code: &str) -> String {
    let output = sandbox
        .command(program)
        .arg("-c")
        .arg(code)
        .output()
        .unwrap();
    assert!(output.completion.outcome.success(), "{output:?}");
    text(&output)
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}
