//! The kept figures are the goals' or less: who keeps worse ones fails here.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use serde_json::Value;

/// Thousands of instructions at most from the phase before: those of Firecracker's start with the same memory and processors.
const BOOT: [(&str, u64); 3] = [
    ("vCPU running", 20_000),
    ("guest init", 45_000),
    ("all gone", 46_000),
];

/// Thousands of instructions that the whole cell may take until the first processor runs.
const CELL: i64 = 3_000;

fn kept(name: &str) -> Value {
    let file = format!("{}/../benches/results/{name}", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap()
}

#[test]
fn a_boot_takes_no_more_than_it_may() {
    let boot = kept("boot.json");
    for (name, most) in BOOT {
        let phases = boot["report"]["phases"].as_array().unwrap();
        let phase = phases.iter().find(|phase| phase["name"] == name).unwrap();
        let took = phase["took_us"]["p50"].as_u64().unwrap();
        assert!(took > 0 && took <= most, "{name}: {took}");
    }
}

#[test]
fn the_cell_costs_no_more_than_it_may() {
    let boot = kept("boot.json");
    let variants = boot["cell"].as_array().unwrap();
    let without = variants.last().unwrap();
    assert_eq!(without["left_out"], "namespaces,cgroup,landlock,seccomp");

    let cost = without["vcpu_running_less_min"].as_i64().unwrap();

    assert!(cost > 0 && cost <= CELL, "{cost}");
}
