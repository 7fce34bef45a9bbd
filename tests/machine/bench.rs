//! `sandvmm bench boot` measures each phase.

use sandvmm_tests::sandvmm;

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_boot_is_measured_phase_by_phase() {
    let json = sandvmm(["bench", "boot", "-n", "2", "--json"])
        .done()
        .expect(0)
        .json();
    let text = sandvmm(["bench", "boot", "-n", "2"]).done().expect(0);

    assert_eq!(json["runs"], 2, "{json}");
    for word in ["p50", "vCPU", "init", "agent", "output", "exit", "gone"] {
        assert!(text.text().contains(word), "{word}: {}", text.text());
    }
}
