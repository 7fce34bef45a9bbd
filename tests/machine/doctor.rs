//! `sandvmm doctor` on a host that can, and on one that can't.

use std::process::{Command, Output};

use sandvmm_tests::{program, sandvmm};

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_kvm_host_is_found_fit_in_words_and_as_json() {
    let text = sandvmm(["doctor"]).done().expect(0);
    let json = sandvmm(["doctor", "--json"]).done().expect(0).json();

    for word in ["KVM", "cgroup", "Landlock", "kernel"] {
        assert!(
            text.text().to_lowercase().contains(&word.to_lowercase()),
            "{word}: {text:?}"
        );
    }
    assert_eq!(json["can_run"], true, "{json}");
}

/// What the command does for the root of a user namespace that has no ids but that one.
fn as_lesser_root(args: &[&str]) -> Output {
    Command::new("unshare")
        .arg("-Ur")
        .arg(program())
        .args(args)
        .output()
        .unwrap()
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_root_that_may_give_no_ids_has_a_machine_and_is_told_what_it_lacks() {
    let doctor = as_lesser_root(&["doctor", "--json"]);
    let run = as_lesser_root(&["run", "--", "echo", "here"]);

    let report: serde_json::Value = serde_json::from_slice(&doctor.stdout).unwrap();
    let missing = report["cell"]["missing"].to_string();
    assert_eq!(report["can_run"], true, "{report}");
    assert!(missing.contains("it keeps: user, group"), "{report}");
    assert_eq!(run.stdout, b"here\n", "{run:?}");
    let said = String::from_utf8(run.stderr).unwrap();
    assert!(said.contains("it keeps: user, group"), "{said}");
    assert!(run.status.success(), "{said}");
}
