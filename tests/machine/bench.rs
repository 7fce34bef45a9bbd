//! `sandvmm bench` measures each phase.

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
    let phases = json["phases"].as_array().unwrap();
    let medians: Vec<u64> = phases
        .iter()
        .map(|phase| phase["reached_us"]["p50"].as_u64().unwrap())
        .collect();
    assert!(medians.len() >= 6, "{json}");
    assert!(
        medians.iter().is_sorted() && medians.last() > Some(&0),
        "{json}"
    );
    for phase in phases {
        let reached = &phase["reached_us"];
        assert!(reached["p95"].as_u64() >= reached["p50"].as_u64(), "{json}");
        // Of so few runs there is no such percentile.
        assert!(reached["p99"].is_null(), "{json}");
    }
    for word in ["p50", "vCPU", "init", "agent", "output", "exit", "gone"] {
        assert!(text.text().contains(word), "{word}: {}", text.text());
    }
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_fork_is_measured_phase_by_phase_also_from_a_pool() {
    let fork = |options: &[&str]| {
        sandvmm(["bench", "fork", "-n", "2", "--memory", "128M"])
            .args(options)
            .done()
            .expect(0)
    };
    let json = fork(&["--json"]).json();
    let pool = fork(&["--json", "--pool", "1"]).json();
    let text = fork(&[]);

    assert_eq!(json["runs"], 2, "{json}");
    let names: Vec<_> = json["phases"]
        .as_array()
        .unwrap()
        .iter()
        .map(|phase| phase["name"].as_str().unwrap())
        .collect();
    for clock in ["vCPU running", "agent ready", "first output", "all gone"] {
        assert!(names.contains(&clock), "{names:?}");
        assert!(text.text().contains(clock), "{}", text.text());
    }
    for report in [&json, &pool] {
        for phase in report["phases"].as_array().unwrap() {
            assert!(phase["reached_us"]["p50"].is_u64(), "{report}");
        }
    }
    assert_eq!(pool["phases"][1]["reached_us"]["max"], 0, "{pool}");
    // The template that was built for it is gone.
    let list = sandvmm(["template", "list"]).done().expect(0);
    assert!(!list.text().contains("bench-"), "{}", list.text());
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn streams_are_measured_both_ways_and_to_and_fro() {
    let json = sandvmm(["bench", "streams", "-n", "2", "--json"])
        .done()
        .expect(0)
        .json();
    let text = sandvmm(["bench", "streams", "-n", "2"]).done().expect(0);

    for (phase, name) in ["1 MiB out", "1 MiB in", "round trip"].iter().enumerate() {
        let phase = &json["phases"][phase];
        assert_eq!(phase["name"], *name, "{json}");
        assert!(phase["took_us"]["p50"].as_u64().unwrap() > 0, "{json}");
        assert!(text.text().contains(name), "{}", text.text());
    }
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn machines_that_live_at_once_are_measured_with_their_memory() {
    let density = |options: &[&str]| {
        sandvmm(["bench", "density", "-n", "3", "--memory", "128M"])
            .args(options)
            .done()
            .expect(0)
    };
    let json = density(&["--json"]).json();
    let text = density(&[]);

    let levels = json["levels"].as_array().unwrap();
    let alive: Vec<_> = levels.iter().map(|level| &level["alive"]).collect();
    assert_eq!(alive, [1, 2, 3], "{json}");
    assert!(json["ended_by"].is_null(), "{json}");
    for level in levels {
        assert!(level["ready_us"]["p50"].as_u64().unwrap() > 0, "{json}");
        let guest_kib = level["guest_kib"]["max"].as_u64().unwrap();
        assert!((4 << 10..128 << 10).contains(&guest_kib), "{json}");
        // What a machine's process has beside its guest's pages.
        assert!(
            level["own_kib"]["max"].as_u64().unwrap() <= 1 << 10,
            "{json}"
        );
    }
    assert!(text.text().contains("starts/s"), "{}", text.text());
}
