//! `sandvmm doctor` on a host that can, and on one that can't.

use sandvmm_tests::sandvmm;

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
