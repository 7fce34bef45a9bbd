//! The cell from both sides: this program is the tests, their machine's process, and supervisors that end badly.
//!
//! A machine's process here enters its cell and then does one thing that its first message names. What can't be shown on a
//! host is said aloud as skipped.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test fails by panicking"
)]

mod inmate;
mod limits;
mod precedence;
mod refusals;
mod supervisor;
mod walls;

use libtest_mimic::{Arguments, Failed, Trial};

fn main() {
    let mut words = std::env::args();
    if words.next().as_deref() == Some(sandvmm_jailer::PROCESS_NAME) {
        inmate::serve();
    }
    if words.next().as_deref() == Some(supervisor::WORD) {
        supervisor::serve();
        return;
    }
    let tests: [(&str, fn()); 27] = [
        ("it_has_every_part", walls::it_has_every_part),
        (
            "it_holds_nothing_of_its_supervisors",
            walls::it_holds_nothing_of_its_supervisors,
        ),
        ("its_limits_are_set", walls::its_limits_are_set),
        (
            "a_part_that_is_left_out_is_off_and_the_others_are_on",
            walls::a_part_that_is_left_out_is_off,
        ),
        (
            "a_forbidden_call_ends_it_and_is_named",
            walls::a_forbidden_call_ends_it_and_is_named,
        ),
        (
            "arguments_are_forbidden_too",
            walls::arguments_are_forbidden_too,
        ),
        (
            "without_a_filter_the_other_walls_hold",
            walls::without_a_filter_the_other_walls_hold,
        ),
        (
            "a_panic_is_told_with_its_place",
            walls::a_panic_is_told_with_its_place,
        ),
        ("a_fault_is_told_as_one", walls::a_fault_is_told_as_one),
        (
            "a_fault_that_somebody_sends_is_told_as_that",
            walls::a_fault_that_somebody_sends_is_told_as_that,
        ),
        ("it_can_be_asked_to_end", walls::it_can_be_asked_to_end),
        (
            "it_is_bounded_by_a_cgroup_that_goes_with_it",
            walls::it_is_bounded_by_a_cgroup,
        ),
        (
            "a_program_that_enters_no_cell_is_told",
            walls::a_stranger_is_told,
        ),
        (
            "it_dies_with_its_supervisor",
            supervisor::it_dies_with_its_supervisor,
        ),
        (
            "a_user_without_privileges_has_a_cell",
            supervisor::a_user_without_privileges_has_a_cell,
        ),
        (
            "a_root_that_may_give_no_ids_has_machines_without",
            refusals::a_root_that_may_give_no_ids_has_machines_without,
        ),
        (
            "a_limit_that_is_met_is_named",
            limits::a_limit_that_is_met_is_named,
        ),
        (
            "a_kind_of_namespace_that_is_forbidden_is_the_only_one_that_lacks",
            refusals::a_kind_of_namespace_that_is_forbidden_is_the_only_one_that_lacks,
        ),
        (
            "a_kind_of_namespace_that_there_are_enough_of_is_told_and_none_is_left_out",
            refusals::a_kind_of_namespace_that_there_are_enough_of_is_told_and_none_is_left_out,
        ),
        (
            "a_limit_of_an_outer_namespace_leaves_the_others",
            refusals::a_limit_of_an_outer_namespace_leaves_the_others,
        ),
        (
            "secure_bits_that_are_locked_are_told",
            refusals::secure_bits_that_are_locked_are_told,
        ),
        (
            "a_session_keyring_that_is_kept_is_told",
            refusals::a_session_keyring_that_is_kept_is_told,
        ),
        (
            "a_user_without_user_namespaces_is_told_what_stays",
            refusals::a_user_without_user_namespaces_is_told_what_stays,
        ),
        (
            "a_limit_that_a_machine_needs_more_than_is_named",
            limits::a_limit_that_a_machine_needs_more_than_is_named,
        ),
        (
            "a_supervisor_of_real_time_is_told_why_it_has_no_machine",
            limits::a_supervisor_of_real_time_is_told_why_it_has_no_machine,
        ),
        (
            "a_favoured_supervisor_favours_no_machine",
            precedence::a_favoured_supervisor_favours_no_machine,
        ),
        (
            "a_supervisor_that_gives_way_has_machines_that_do",
            precedence::a_supervisor_that_gives_way_has_machines_that_do,
        ),
    ];
    let trials = tests
        .into_iter()
        .map(|(name, test)| {
            Trial::test(name, move || {
                test();
                Ok::<(), Failed>(())
            })
        })
        .collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

/// Says that a test, or a part of one, is skipped.
fn skip(what: &str, why: &str) {
    use std::io::Write as _;
    assert!(
        std::env::var_os("SANDVMM_KVM_HOST").is_none(),
        "A KVM host has all that {what} needs: {why}"
    );
    // Past any capture: a skipped test is not to look like one that passed.
    let _ = writeln!(std::io::stderr().lock(), "SKIPPED {what}: {why}");
}
