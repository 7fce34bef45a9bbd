//! The library, as an application uses it, with whole machines in a KVM host.

#![allow(
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "an expectation that is not met is a failed test"
)]

mod alike;
mod asynchronous;
mod calls;
mod commands;
mod egress;
mod examples;
mod heavy;
mod load;
mod python;
mod reports;
mod template;
mod trees;
mod watch;

use std::process::ExitCode;
use std::time::Duration;

use sandvmm::{Output, Sandbox};
use sandvmm_tests::{HUNG_AFTER, NamedTest as Test, run_on_kvm};

fn main() -> ExitCode {
    sandvmm::init();
    run_on_kvm(
        [
            alike::TESTS,
            asynchronous::TESTS,
            calls::TESTS,
            commands::TESTS,
            egress::TESTS,
            examples::TESTS,
            heavy::TESTS,
            load::TESTS,
            python::TESTS,
            reports::TESTS,
            trees::TESTS,
            watch::TESTS,
        ]
        .concat(),
    )
}

fn machine() -> Sandbox {
    machine_with(256)
}

fn machine_with(memory_mib: u32) -> Sandbox {
    machine_within(memory_mib, HUNG_AFTER)
}

fn machine_within(memory_mib: u32, limit: Duration) -> Sandbox {
    let builder = Sandbox::builder().memory_mib(memory_mib);
    builder.timeout(Some(limit)).start().unwrap()
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
