//! The cell around a real machine, from inside and outside: each call that it allows is needed, what is not allowed is stopped, and nothing
//! is left behind.
//!
//! This program is the tests, the machines' process ([`machine`]), and what drives machines to be watched ([`used`]). It runs wherever
//! `/dev/kvm` opens for root, with hardware virtualization or without: the guest is the hostile one.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "an expectation that is not met is a failed test"
)]

mod attack;
mod attacked;
mod command;
mod footprint;
mod groups;
mod left;
mod machine;
mod order;
mod trace;
mod used;

// The suite of the hostile guest, with machines in their cell.
#[path = "../hostile/measure.rs"]
mod measure;
#[path = "../hostile/streams.rs"]
mod streams;
#[path = "../hostile/supervisor.rs"]
#[expect(dead_code, reason = "the list of cases is for the suite itself")]
mod supervisor;
#[path = "../hostile/table.rs"]
#[expect(dead_code, reason = "what is said of the cases is for their README")]
mod table;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Failed, Trial};

/// Set by `cargo xtask test` in the KVM host, where the release build of the command is on `PATH`.
const IN_KVM_HOST: &str = "SANDVMM_KVM_HOST";

fn main() -> ExitCode {
    let mut words = std::env::args();
    if words.next().as_deref() == Some(jailer::PROCESS_NAME) {
        machine::serve();
    }
    let succeeded = |has_succeeded| {
        if has_succeeded {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        }
    };
    let mut name = || words.next().unwrap_or_default();
    match name().as_str() {
        used::WORD => return succeeded(used::drive(&name())),
        left::WORD => return succeeded(left::live(&name())),
        left::DOOMED => {
            left::be_killed();
            return ExitCode::SUCCESS;
        }
        _ => {}
    }
    // What is looked at of processes in their cell, and what is set up around them, is root's.
    let can_run = machine::kvm().is_ok() && rustix::process::geteuid().is_root();
    let in_kvm_host = std::env::var_os(IN_KVM_HOST).is_some();
    let test = |name: &'static str, can_run: bool, test: fn()| {
        let run = move || {
            test();
            Ok::<(), Failed>(())
        };
        Trial::test(name, run).with_ignored_flag(!can_run)
    };
    let mut trials = vec![
        test("each_rule_is_used", can_run, used::each_rule_is_used),
        test(
            "an_attack_from_inside_gets_nothing",
            can_run,
            attacked::nothing_goes_through,
        ),
        test(
            "an_attack_from_inside_meets_more_than_filters",
            can_run,
            attacked::without_filters_the_layers_beneath_stop_it,
        ),
        test(
            "what_is_asked_of_a_disks_device_is_bounded",
            in_kvm_host,
            groups::what_is_asked_of_a_disks_device_is_bounded,
        ),
        test(
            "a_forbidden_call_is_told_as_policy",
            in_kvm_host,
            command::a_forbidden_call_is_told_as_policy,
        ),
        test(
            "the_released_command_has_no_trace_of_the_attack",
            in_kvm_host,
            command::the_released_command_has_no_trace_of_the_attack,
        ),
    ];
    trials.extend(left::LIVES.map(|(name, _)| {
        let run = move || {
            left::nothing_is_left(name);
            Ok(())
        };
        Trial::test(format!("nothing_is_left_where_{name}"), run).with_ignored_flag(!can_run)
    }));
    let mut arguments = Arguments::from_args();
    if in_kvm_host {
        // As in the suite of the hostile guest, for QEMU's sake.
        arguments.test_threads.get_or_insert(1);
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}
