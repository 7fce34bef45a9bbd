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

fn main() -> ExitCode {
    let mut words = std::env::args();
    if words.next().as_deref() == Some(jailer::PROCESS_NAME) {
        machine::serve();
    }
    if words.next().as_deref() == Some(used::WORD) {
        let life = words.next().unwrap_or_default();
        return if used::drive(&life) {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        };
    }
    // What is looked at of processes in their cell, and what is set up around them, is root's.
    let can_run = machine::kvm().is_ok() && rustix::process::geteuid().is_root();
    let tests: [(&str, fn()); 3] = [
        ("each_rule_is_used", used::each_rule_is_used),
        (
            "an_attack_from_inside_gets_nothing",
            attacked::nothing_goes_through,
        ),
        (
            "an_attack_from_inside_meets_more_than_filters",
            attacked::without_filters_the_layers_beneath_stop_it,
        ),
    ];
    let trials = tests
        .into_iter()
        .map(|(name, test)| {
            let run = move || {
                test();
                Ok::<(), Failed>(())
            };
            Trial::test(name, run).with_ignored_flag(!can_run)
        })
        .collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}
