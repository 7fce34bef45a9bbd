//! The hostile guest suite: a guest does to its devices and its processor what no guest should, and the machine's process takes it as
//! the table says ([`table`]).
//!
//! It runs wherever `/dev/kvm` opens, with hardware virtualization or without. Each case is a test by its name, in a machine of its own,
//! whose process is this program again, in its cell as in production ([`machine`]). For every case, whatever it does: the process
//! writes nothing to standard error (no panic), makes no system call that it may not make, its memory stays below a bound, its
//! descriptors are as many as before, it does not spin when the guest is idle, and it ends at once when it is told to.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "an expectation that is not met is a failed test"
)]

mod machine;
mod measure;
mod readme;
mod streams;
mod supervisor;
mod table;

use std::fs::OpenOptions;
use std::process::ExitCode;

use libtest_mimic::{Arguments, Failed, Trial};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Set by `cargo xtask test` in the KVM host, which may be an emulated one.
pub(crate) const IN_KVM_HOST: &str = "SANDVMM_KVM_HOST";

fn main() -> ExitCode {
    // A machine's process closes its cell, serves, and does not come back.
    sandvmm::init();
    // A thousand connections are as many descriptors, here and in the machine's process.
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    setrlimit(Resource::Nofile, raised).expect("the soft limit may be raised to the hard one");

    let mut arguments = Arguments::from_args();
    if std::env::var_os(IN_KVM_HOST).is_some() {
        // One machine at a time: on QEMU's emulated SVM, a guest that leaves without pause (`every_port`) ends now and then in a triple
        // fault while another machine runs beside it, and never alone.
        arguments.test_threads.get_or_insert(1);
    }
    let has_kvm = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .is_ok();
    let mut trials = vec![
        Trial::test("the_readme_names_every_case", readme::is_current),
        Trial::test("the_guest_knows_every_case", guest_knows_every_case)
            .with_ignored_flag(!has_kvm),
        Trial::test("stopped_readers_hold_up_no_other_machine", || {
            let case = table::CASES
                .iter()
                .find(|case| case.name == "reset_with_streams_open")
                .ok_or("the case is gone")?;
            supervisor::run_beside_stopped_readers(case).map_err(Failed::from)
        })
        .with_ignored_flag(!has_kvm),
    ];
    trials.extend(table::CASES.iter().map(|case| {
        Trial::test(case.name, || supervisor::run(case).map_err(Failed::from))
            .with_ignored_flag(!has_kvm)
    }));
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// Without a case, the guest prints the names of all that it knows.
fn guest_knows_every_case() -> Result<(), Failed> {
    let printed = supervisor::list()?;
    let names: Vec<&str> = table::CASES.iter().map(|case| case.name).collect();
    if printed == names {
        return Ok(());
    }
    Err(format!("the guest's cases are {printed:?}, the table's {names:?}").into())
}
